"""The memory that a reference shares with its runner: one raw block, and where tensors lie in it.

On the CPU device the block is a file without a name (memfd): a runner opens it through this process's descriptor. A
name in /dev/shm would outlive processes that are killed, and would not tell whose it is: each stage has process ids of
its own. On a GPU the block is one cudaMalloc allocation that the runner opens by its IPC handle. Never the caching
allocator's memory: an IPC handle opens the whole allocation that an address lies in, and there expected outputs would
be next door. For the same reason an allocation on the GPU is a multiple of 2 MiB, the driver's granularity: smaller
ones share a page with others.

A block never shrinks. One that is too small is replaced; the old one lives until the next `begin` or `end`, since
freeing memory that another process has open is undefined.
"""

import ctypes
import mmap
import os
from typing import Any

import torch

from refusal import Refusal, unsupported

ALIGNMENT = 256
GIB = 1 << 30


def align(offset: int, to: int = ALIGNMENT) -> int:
    return -(-offset // to) * to


class CpuBlock:
    """Memory that the kernel frees when nobody has it open any more, however its users ended."""

    granularity = 1 << 12

    def __init__(self, size: int, generation: int, _device: torch.device) -> None:
        self.size = size
        self._descriptor = os.memfd_create(f"cuda-agent-arena-{generation}", os.MFD_CLOEXEC)
        try:
            # Reserved now: memory that can't be had later would end this process by a signal.
            os.posix_fallocate(self._descriptor, 0, size)
            self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        except OSError as error:
            os.close(self._descriptor)
            raise Refusal("memory", f"no {size} bytes of shared memory are left: {error.strerror}") from error

    def address(self) -> dict[str, str]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def free(self) -> None:
        os.close(self._descriptor)
        self.memory = None


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class CudaRuntime:
    """The few calls that torch does not offer, in the very libcudart that torch has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(self._loaded_path())
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    @staticmethod
    def _loaded_path() -> Any:
        with open("/proc/self/maps", encoding="utf-8") as file:
            for line in file:
                path = line.rstrip("\n").split(maxsplit=5)[-1]
                if os.path.basename(path).startswith("libcudart"):
                    return path
        raise Refusal("internal", "torch has loaded no libcudart: this build of torch has no CUDA")

    def _check(self, status: Any, what: Any) -> None:
        if status != 0:
            # Else the next launch of torch would report this error as its own.
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(status).decode()
            raise Refusal("memory" if status == 2 else "internal", f"{what}: {text}")

    def allocate(self, size: int) -> int | None:
        pointer = ctypes.c_void_p()
        self._check(self._library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)), f"cudaMalloc of {size}")
        return pointer.value

    def free(self, address: Any) -> None:
        self._check(self._library.cudaFree(ctypes.c_void_p(address)), "cudaFree")

    def ipc_handle(self, address: Any) -> str:
        handle = _IpcHandle()
        status = self._library.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        self._check(status, "cudaIpcGetMemHandle")
        return bytes(handle.reserved).hex()

    def reset_persisting_l2(self) -> None:
        self._check(self._library.cudaCtxResetPersistingL2Cache(), "cudaCtxResetPersistingL2Cache")


class _RawMemory:
    """What torch.as_tensor needs to wrap an address without a copy."""

    def __init__(self, address: Any, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaBlock:
    """One allocation on a GPU."""

    granularity = 1 << 21

    def __init__(self, size: int, _generation: Any, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.init()
        self.size = size
        self._runtime = CudaRuntime()
        # Memory that torch's allocator merely keeps in stock is given back first.
        torch.cuda.empty_cache()
        self._pointer = self._runtime.allocate(size)
        self._handle = self._runtime.ipc_handle(self._pointer)
        self.memory = torch.as_tensor(_RawMemory(self._pointer, size), device=device)

    def address(self) -> Any:
        return {"ipc_handle": self._handle}

    def free(self) -> None:
        torch.cuda.synchronize()
        self.memory = None
        self._runtime.free(self._pointer)


class Arena:
    """The current block, replaced by a larger one when needed."""

    def __init__(self, device: torch.device, limit: Any) -> None:
        self._device = device
        self._block_type = CudaBlock if device.type == "cuda" else CpuBlock
        self.red_zone = 64 << 10 if device.type == "cuda" else 4 << 10
        self.limit = limit or (40 * GIB if device.type == "cuda" else GIB)
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

    def _allocate(self, size: int) -> CpuBlock | CudaBlock:
        """A power of two, so that a task a little larger than the last one does not need a new block; if that is too
        much, what is needed."""
        least = align(size, self._block_type.granularity)
        try:
            return self._block_type(max(least, self._roomy(size)), self._generation, self._device)
        except Refusal as refusal:
            if refusal.kind != "memory":
                raise
        return self._block_type(least, self._generation, self._device)

    def _roomy(self, size: int) -> int:
        return align(min(1 << (size - 1).bit_length(), self.limit), self._block_type.granularity)

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
