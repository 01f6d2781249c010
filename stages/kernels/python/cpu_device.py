"""The CPU as device, so that everything can be run and tested without a GPU: its times say nothing on speed.

An arena's block is a file without a name (memfd): a runner opens it through this process's descriptor. A name in
/dev/shm would outlive processes that are killed, and would not tell whose it is: each stage has process ids of its own.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from device import Device
from refusal import Refusal, unsupported

if TYPE_CHECKING:
    from timing import Baseline


class CpuBlock:
    """Memory that the kernel frees when nobody has it open any more, however its users ended."""

    def __init__(self, size: int, generation: int) -> None:
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


class CpuClock:
    """Wall time with one thread."""

    def milliseconds(self, forward: Callable[[], Any], _baseline: "Baseline") -> dict[str, Any]:
        started = time.perf_counter()
        forward()
        return {"ms": (time.perf_counter() - started) * 1e3, "hidden": False}


class CpuDevice(Device):
    """The CPU."""

    draws_on = None
    red_zone = 4 << 10
    arena_bytes = 1 << 30
    granularity = 1 << 12
    usual_threads = 1
    has_tf32 = False

    def __init__(self, named: torch.device) -> None:
        self.home = named

    def start(self, sleeps: bool) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def block(self, size: int, generation: int) -> CpuBlock:
        return CpuBlock(size, generation)

    def clock(self) -> CpuClock:
        return CpuClock()

    def kernel_clock(self) -> Callable[[Callable[[], Any]], Sequence[float]]:
        raise unsupported("the time of kernels needs a GPU")

    def release_stock(self) -> None:
        pass

    def trim_stock(self) -> None:
        pass

    def limit_memory(self, wanted: int | None) -> None:
        pass

    def available_memory(self) -> int:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        raise Refusal("internal", "/proc/meminfo names no MemAvailable")

    def ahead_bytes(self) -> int:
        # Nobody waits for the clock here: it is a share only so that all of it can be tested.
        return self.available_memory() // 20

    def peak_bytes(self, run: Callable[[], Any]) -> None:
        run()

    def describe(self) -> dict[str, Any]:
        return {"name": "cpu", "threads": torch.get_num_threads()}

    def facts(self) -> None:
        return None

    def generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]
