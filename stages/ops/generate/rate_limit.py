"""How fast an endpoint may be called: limits over any 60 seconds, and pauses that the endpoint asks for.

A limit decides when a call may start and waits for nothing; `Pace` puts the limits together and does the waiting. Both
take the clock as an argument, so that tests need not wait.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

WINDOW_SECONDS = 60.0


@dataclasses.dataclass
class Call:
    """When a call starts, and what it takes of the limit."""

    start: float
    units: float


class RateLimit:
    """At most `limit` units in any window of 60 seconds; 0 is no limit. Not thread-safe by itself."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls = collections.deque()  # by start

    def earliest(self, now: float, units: int) -> float:
        """When a call of so many units may start. One that is larger than the limit may have a window to itself."""
        if not self.limit:
            return now
        units = min(units, self.limit)
        while self._calls and self._calls[0].start <= now - WINDOW_SECONDS:
            self._calls.popleft()
        # Starts are in order, so that a small call does not overtake a large one for ever.
        start = max(now, self._calls[-1].start) if self._calls else now
        counting = [call for call in self._calls if call.start > start - WINDOW_SECONDS]
        used = sum(call.units for call in counting)
        for call in counting:
            if used + units <= self.limit:
                break
            start, used = max(start, call.start + WINDOW_SECONDS), used - call.units
        return start

    def reserve(self, start: float, units: int) -> Call:
        """Note a call; returns what `settle` takes."""
        call = Call(start, min(units, self.limit) if self.limit else 0)
        if self.limit:
            self._calls.append(call)
        return call

    def settle(self, call: Call, units: int) -> None:
        """What a call took in truth, once that is known."""
        if self.limit:
            call.units = min(units, self.limit)


class Pace:
    """Says when the next call may start; threads share one."""

    def __init__(
        self, requests_per_minute: int, tokens_per_minute: int, clock: Callable[..., Any] = time.monotonic
    ) -> None:
        self._requests, self._tokens = RateLimit(requests_per_minute), RateLimit(tokens_per_minute)
        self._clock = clock
        self._lock = threading.Lock()
        self._not_before = 0.0

    def reserve(self, tokens: int) -> tuple[float, Call]:
        """Reserve a call of at most so many tokens: `(seconds to wait, reservation)`."""
        with self._lock:
            now = self._clock()
            start = max(now, self._not_before)
            start = max(start, self._requests.earliest(start, 1), self._tokens.earliest(start, tokens))
            self._requests.reserve(start, 1)
            return start - now, self._tokens.reserve(start, tokens)

    def settle(self, reservation: Call, tokens: int) -> None:
        with self._lock:
            self._tokens.settle(reservation, tokens)

    def hold(self, seconds: float) -> None:
        """Start no call for so long: the endpoint has said that it is busy."""
        with self._lock:
            self._not_before = max(self._not_before, self._clock() + seconds)
