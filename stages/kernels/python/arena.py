"""The memory that a reference shares with its runner: one raw block of its device, and where tensors lie in it.

A block never shrinks. One that is too small is replaced; the old one lives until the next `begin` or `end`, since
freeing memory that another process has open is undefined.
"""

from typing import TYPE_CHECKING, Any

import torch

from refusal import Refusal, unsupported

if TYPE_CHECKING:
    from device import Block, Device

ALIGNMENT = 256


def align(offset: int, to: int = ALIGNMENT) -> int:
    return -(-offset // to) * to


class Arena:
    """The current block, replaced by a larger one when needed."""

    def __init__(self, device: "Device", limit: int | None) -> None:
        self._device = device
        self.red_zone = device.red_zone
        self.limit = limit or device.arena_bytes
        self._generation = 0
        self._block = None
        self._retired = []

    def reserve(self, size: int) -> None:
        """Makes the block at least this large."""
        self.release_retired()
        if self._block is not None and self._block.size >= size:
            return
        if self._block is not None:
            self._retired.append(self._block)
        self._generation += 1
        self._block = None
        self._block = self._allocate(size)

    def _allocate(self, size: int) -> "Block":
        """A power of two, so that a task a little larger than the last one does not need a new block; if that is too
        much, what is needed."""
        least = align(size, self._device.granularity)
        try:
            return self._device.block(max(least, self._roomy(size)), self._generation)
        except Refusal as refusal:
            if refusal.kind != "memory":
                raise
        return self._device.block(least, self._generation)

    def _roomy(self, size: int) -> int:
        return align(min(1 << (size - 1).bit_length(), self.limit), self._device.granularity)

    def fits(self, size: int) -> bool:
        return size <= self.limit

    def describe(self) -> dict[str, Any]:
        return {**self._block.address(), "bytes": self._block.size, "generation": self._generation}

    @property
    def capacity(self) -> int:
        return self._block.size if self._block is not None else 0

    def memory(self, offset: int, size: int) -> torch.Tensor:
        return self._block.memory[offset : offset + size]

    def release_retired(self) -> None:
        for block in self._retired:
            block.free()
        self._retired = []

    def close(self) -> None:
        self.release_retired()
        if self._block is not None:
            self._block.free()
            self._block = None


class Slot:
    """A tensor's place in a set; offsets count from the set's start."""

    def __init__(self, name: str, offset: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.offset = offset
        self.size = size
        self.shape = shape
        self.dtype = dtype

    @property
    def end(self) -> int:
        return self.offset + self.size

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a set's memory, or in a copy of it."""
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


class Layout:
    """Where the tensors of a set lie: those that are read, then those that are written, then the scratch buffer.

    `tail` is where the written ones begin: all before it must come back as it was.
    """

    def __init__(
        self,
        read: list[tuple[str, tuple[int, ...], torch.dtype]],
        written: list[tuple[str, tuple[int, ...], torch.dtype]],
        scratch_bytes: int,
        red_zone: int,
    ) -> None:
        self._cursor = red_zone
        self._red_zone = red_zone
        self.read = [self._place(*tensor) for tensor in read]
        self.tail = self._cursor
        self.written = [self._place(*tensor) for tensor in written]
        self.scratch = self._place("scratch", (scratch_bytes,), torch.uint8)
        self.size = align(self.scratch.end + red_zone)

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        slot = Slot(name, self._cursor, size, tuple(shape), dtype)
        self._cursor = align(slot.end + self._red_zone)
        return slot

    def gaps(self) -> "list[Gap]":
        """The red zones in order, each with the slots before and after it (`None` at the ends)."""
        slots = [*self.read, *self.written, self.scratch]
        edges = zip([None, *slots], [*slots, None], strict=True)
        return [Gap(before, after, self.size) for before, after in edges]


class Gap:
    """A red zone. Rounding to the alignment belongs to it."""

    def __init__(self, before: Slot | None, after: Slot | None, size: int) -> None:
        self.before = before
        self.after = after
        self.start = before.end if before is not None else 0
        self.end = after.offset if after is not None else size

    def damage(self, first: int, last: int) -> list[dict[str, Any]]:
        """Bytes `first` to `last` of it were written: which tensors that happened next to."""
        found = []
        middle = (self.end - self.start) // 2
        if self.before is not None and (first < middle or self.after is None):
            found.append({"near": self.before.name, "side": "after", "offset": first})
        if self.after is not None and (last >= middle or self.before is None):
            found.append({"near": self.after.name, "side": "before", "offset": self.end - self.start - last})
        return found


def check_fits(
    arena: Arena,
    read: list[tuple[str, tuple[int, ...], torch.dtype]],
    written: list[tuple[str, tuple[int, ...], torch.dtype]],
) -> None:
    """Refuses a task whose single set, without scratch, is larger than an arena may be."""
    size = Layout(read, written, 0, arena.red_zone).size
    if not arena.fits(size):
        raise unsupported(
            f"one set of its tensors takes {size} bytes, more than the arena's limit of {arena.limit}",
            "use smaller sizes (`set`)",
        )
