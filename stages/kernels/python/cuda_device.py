"""A GPU as device. Its times are those of cuda_clock.py, of the GPU alone.

An arena's block is one cudaMalloc allocation that the runner opens by its IPC handle. Never the caching allocator's
memory: an IPC handle opens the whole allocation that an address lies in, and there expected outputs would be next door.
For the same reason an allocation is a multiple of 2 MiB, the driver's granularity: smaller ones share a page with
others.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ahead import CARD_SHARE, FREE_SHARE
from cuda_clock import CudaClock
from device import Device
from gpu_facts import gpu_facts
from refusal import Refusal

if TYPE_CHECKING:
    from timing import Baseline

SCHED_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of cuda.h."""


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

    def __init__(self, size: int, device: torch.device) -> None:
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


class GpuClock:
    """GPU time of a forward."""

    def __init__(self, device: torch.device) -> None:
        self._clock = CudaClock(device, CudaRuntime().reset_persisting_l2)

    def milliseconds(self, forward: Callable[[], Any], baseline: "Baseline") -> dict[str, Any]:
        ms, hidden = self._clock.milliseconds(forward, baseline.launches)
        return {"ms": ms, "hidden": hidden}


class CudaDevice(Device):
    """A GPU, by its number."""

    red_zone = 64 << 10
    arena_bytes = 40 << 30
    granularity = 1 << 21
    # A few, for tasks that draw their inputs on the CPU.
    usual_threads = min(8, os.cpu_count() or 1)
    has_tf32 = True

    def __init__(self, named: torch.device) -> None:
        self.home = self.draws_on = named
        self._number = named.index or 0

    def start(self, sleeps: bool) -> None:
        """Makes the context, which takes a while."""
        if sleeps:
            self._sleep_while_waiting()
        torch.cuda.set_device(self.home)
        torch.cuda.synchronize()

    def _sleep_while_waiting(self) -> None:
        """Waiting for the GPU, which by itself takes a core, leaves that core to others: compilers have too few. It is
        for workers that check; one that takes times holds the card, and should go on at once."""
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), self._number) == 0:
            driver.cuDevicePrimaryCtxSetFlags_v2(device, SCHED_BLOCKING_SYNC)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.home)

    def block(self, size: int, generation: int) -> CudaBlock:
        return CudaBlock(size, self.home)

    def clock(self) -> GpuClock:
        return GpuClock(self.home)

    def kernel_clock(self) -> Callable[[Callable[[], Any]], Sequence[float]]:
        return self._kernel_times

    def _kernel_times(self, run: Callable[[], Any]) -> Sequence[float]:
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            self.synchronize()
        return [
            event.time_range.elapsed_us()
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage] (it is documented)
        ]

    def release_stock(self) -> None:
        torch.cuda.empty_cache()

    def trim_stock(self) -> None:
        """Runs of tasks of many sizes leave torch with blocks that fit no other; beside others that is memory lost."""
        stock = torch.cuda.memory_reserved(self.home) - torch.cuda.memory_allocated(self.home)
        if stock > 2 * CARD_SHARE * self._memory():
            torch.cuda.empty_cache()

    def limit_memory(self, wanted: int | None) -> None:
        share = 1.0 if wanted is None else min(1.0, wanted / self._memory())
        torch.cuda.set_per_process_memory_fraction(share, self.home)

    def available_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.home)
        return free + torch.cuda.memory_reserved(self.home) - torch.cuda.memory_allocated(self.home)

    def ahead_bytes(self) -> int:
        return int(min(self._memory() * CARD_SHARE, self.available_memory() * FREE_SHARE))

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats(self.home)
        before = torch.cuda.memory_allocated(self.home)
        run()
        return torch.cuda.max_memory_allocated(self.home) - before

    def _memory(self) -> int:
        return torch.cuda.get_device_properties(self.home).total_memory

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.home)
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": [properties.major, properties.minor],
        }

    def facts(self) -> dict[str, Any]:
        return gpu_facts(self._number)

    def generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), torch.cuda.get_rng_state(self.home)]
