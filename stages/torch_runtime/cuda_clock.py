"""How long the GPU works for a call: the one clock of this project's times.

One timed call is: a write of four times the L2 cache and a reset of what persists in it; a spin long enough that every
launch of the call is queued before the first one runs; an event, the call, an event. Whether the spin was long enough
is checked each time, and a timing whose launches showed is repeated with a longer one. So the figure is that of the GPU
alone: a busy CPU does not change it. The next spin is as long as the launches of this call took: the first call after
torch gave its memory back waits for the driver for many milliseconds, which the ones after it need not wait for.

Some calls wait for the GPU themselves (they read a size back, say): however long the spin, it is over before their last
launch. That shows when two longer spins change nothing, and then no more are tried: one task in forty did that, and
kept the GPU from everybody else for as long as all others together.

Other work on the GPU does, by up to a factor of two: whoever uses this clock has the GPU to itself (gate.rs for the
evaluator, gpu_gate.py for ops/measure; both lock the same file, so that they exclude each other too).
"""

import dataclasses
import time
from collections.abc import Callable

import torch

SHORTEST_SPIN, LONGEST_SPIN = 100e-6, 0.5
TRIES = 3


@dataclasses.dataclass
class Launches:
    """What is known of a call's launches: kept by the caller from one timing of it to the next."""

    seconds: float
    """How long the CPU is busy with them."""
    show: bool = False
    """Whether no spin hides them, since the call waits for the GPU."""


class CudaClock:
    """GPU time between two events around a call, with launches hidden."""

    def __init__(
        self, device: torch.device | str | int, reset_persisting_l2: Callable[[], object] = lambda: None
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._reset_persisting_l2 = reset_persisting_l2
        self._flush = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device=device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._cycles_per_second = self._measure_spin()

    def _measure_spin(self) -> float:
        """Cycles of `_sleep` a second: the clock's rate is not reported reliably, and changes."""
        cycles = 10_000_000
        for _ in range(2):
            self._events[0].record()
            torch.cuda._sleep(cycles)
            self._events[1].record()
            self._events[1].synchronize()
        return cycles / (self._events[0].elapsed_time(self._events[1]) / 1e3)

    def milliseconds(self, call: Callable[[], object], launches: Launches) -> tuple[float, bool]:
        """`(ms, hidden)` of a call without arguments: milliseconds, and whether all launches were hidden."""
        seconds, tries = launches.seconds, 1 if launches.show else TRIES
        for left in reversed(range(tries)):
            spin = min(LONGEST_SPIN, SHORTEST_SPIN + 1.5 * seconds)
            ms, hidden, launched = self._once(call, spin)
            if hidden:
                launches.seconds, launches.show = min(launched, seconds), False
                break
            # Longer than the launches took this time: if that hides nothing either, it is the GPU that they wait for.
            seconds = max(seconds, launched)
            if left == 0 or spin == LONGEST_SPIN:
                launches.show = True
                break
        return ms, hidden

    def _once(self, call: Callable[[], object], spin: float) -> tuple[float, bool, float]:
        start, end = self._events
        self._flush.fill_(1)
        self._reset_persisting_l2()
        torch.cuda._sleep(int(spin * self._cycles_per_second))
        start.record()
        began = time.perf_counter()
        call()
        launched = time.perf_counter() - began
        end.record()
        # Still spinning when the last launch is queued: then none of them was waited for.
        hidden = not start.query()
        end.synchronize()
        return start.elapsed_time(end), hidden, launched
