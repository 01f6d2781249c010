"""How fast an endpoint may be called: limits over any 60 seconds, and pauses that the endpoint asks for.

A limit decides when a call may start and waits for nothing; `Pace` puts the limits together and does the waiting. Both
take the clock as an argument, so that tests need not wait.
"""

import collections
import threading
import time

WINDOW_SECONDS = 60.0


class RateLimit:
    """At most `limit` units in any window of 60 seconds; 0 is no limit. Not thread-safe by itself."""

    def __init__(self, limit):
        self.limit = limit
        self._entries = collections.deque()  # [start, units], by start

    def earliest(self, now, units):
        """When a call of so many units may start. One that is larger than the limit may have a window to itself."""
        if not self.limit:
            return now
        units = min(units, self.limit)
        while self._entries and self._entries[0][0] <= now - WINDOW_SECONDS:
            self._entries.popleft()
        # Starts are in order, so that a small call does not overtake a large one for ever.
        start = max(now, self._entries[-1][0]) if self._entries else now
        counting = [entry for entry in self._entries if entry[0] > start - WINDOW_SECONDS]
        used = sum(spent for _, spent in counting)
        for begun, spent in counting:
            if used + units <= self.limit:
                break
            start, used = max(start, begun + WINDOW_SECONDS), used - spent
        return start

    def reserve(self, start, units):
        """Note a call; returns what `settle` takes."""
        entry = [start, min(units, self.limit) if self.limit else 0]
        if self.limit:
            self._entries.append(entry)
        return entry

    def settle(self, entry, units):
        """What a call took in truth, once that is known."""
        if self.limit:
            entry[1] = min(units, self.limit)


class Pace:
    """Says when the next call may start; threads share one."""

    def __init__(self, requests_per_minute, tokens_per_minute, clock=time.monotonic):
        self._requests, self._tokens = RateLimit(requests_per_minute), RateLimit(tokens_per_minute)
        self._clock = clock
        self._lock = threading.Lock()
        self._not_before = 0.0

    def reserve(self, tokens):
        """Reserve a call of at most so many tokens: `(seconds to wait, reservation)`."""
        with self._lock:
            now = self._clock()
            start = max(now, self._not_before)
            start = max(start, self._requests.earliest(start, 1), self._tokens.earliest(start, tokens))
            self._requests.reserve(start, 1)
            return start - now, self._tokens.reserve(start, tokens)

    def settle(self, reservation, tokens):
        with self._lock:
            self._tokens.settle(reservation, tokens)

    def hold(self, seconds):
        """Start no call for so long: the endpoint has said that it is busy."""
        with self._lock:
            self._not_before = max(self._not_before, self._clock() + seconds)
