"""Runs under the clock whose inputs are drawn before the card is taken, and whose results are judged after it was given
back.

While the clock runs nobody else may use the card, so only what must happen then does: a run's inputs are copied from a
private image into its set just before it, with poison beside them, and what it left there, all but scratch memory, is
copied to private memory just after it. No other run is between, so none can do another's work: what later ones read is
not in the arena yet, and what earlier ones wrote is judged as they left it.

A run is drawn, placed, kept and judged, in this order, each once. Images, copies and expectations take memory, so only
as many runs are drawn ahead as a share of the card's allows; the others are drawn and judged between the runs, in their
sets.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import chunk_numbers
from argument_sets import ArgumentSet
from refusal import Refusal

if TYPE_CHECKING:
    from arena import Layout
    from argument_sets import ArgumentSets
    from task import Task

CARD_SHARE = 1 / 20
"""Of a card's memory, for the runs of one worker; three take times on a card."""

FREE_SHARE = 1 / 4
"""Of what is free of it: others check candidates meanwhile."""


class Run(ArgumentSet):
    """One run, from its draw to its judgement."""

    def __init__(self, layout: "Layout", task: "Task", pattern: int) -> None:
        # Taken now: the driver may take milliseconds to find memory.
        self._copy = torch.empty(layout.size, dtype=torch.uint8, device=task.device.home)
        super().__init__(layout, 0, self._copy, task)
        self._wanted_pattern = pattern
        self.bytes = 0
        self.place = None
        self.is_kept = False

    def prepare(self) -> None:
        """All of the image that can be made before there is a place for it."""
        self.poison_image(self._wanted_pattern)

    def put(self, number: int, memory: torch.Tensor) -> None:
        """Fills a set with it: its run is next there."""
        self.place, self.memory = number, memory
        self.fill(self._wanted_pattern)

    def keep(self) -> None:
        """Copies what the run left in its set."""
        scratch = self.layout.scratch
        for start, end in ((0, scratch.offset), (scratch.end, self.layout.size)):
            self._copy[start:end].copy_(self.memory[start:end])
        self.memory, self.place, self.is_kept = self._copy, None, True


class Ahead:
    """The runs that were drawn ahead, by trial."""

    def __init__(self, sets: "ArgumentSets", budget: int) -> None:
        """`budget` is in bytes."""
        self._sets = sets
        self._left = budget
        self._runs = {}
        self._placed = {}

    def draw(self, trial: int, pattern: int, quick: bool, take: Callable[..., Any]) -> bool:
        """Draws a run by `take`, which is given it; whether there was memory for it."""
        if trial in self._runs:
            raise Refusal("internal", f"trial {trial} is drawn already")
        needed = self._bytes(quick)
        if needed > self._left:
            return False
        run = Run(self._sets.layout, self._sets.task, pattern)
        run.bytes = needed
        take(run)
        run.prepare()
        self._runs[trial] = run
        self._left -= needed
        return True

    def _bytes(self, quick: bool) -> int:
        outputs = self._sets.task.written_tensors()
        eager = sum(slot.size for slot in self._sets.layout.written)
        wide = 8 * sum(slot.size // slot.dtype.itemsize for slot in self._sets.layout.written)
        is_exact = self._sets.task.policy.needs_float64 and any(dtype.is_floating_point for _, _, dtype in outputs)
        exact = wide if is_exact and not quick else 0
        return self._sets.layout.tail + self._sets.layout.size + eager + exact

    def put(self, trial: int, number: int) -> None:
        run = self._run(trial)
        if run.is_kept or run.place is not None:
            raise Refusal("internal", f"trial {trial} was run already")
        self.check_free(number)
        run.put(number, self._sets[number].memory)
        self._placed[number] = run

    def keep(self, trial: int) -> None:
        run = self._run(trial)
        if run.place is None:
            raise Refusal("internal", f"trial {trial} is in no set")
        del self._placed[run.place]
        run.keep()

    def check_free(self, number: int) -> None:
        """A set whose run was not kept must not be filled again, nor judged as another's."""
        if number in self._placed:
            raise Refusal("internal", f"what the last run left in the set {number} was not kept")

    def in_set(self, number: int) -> Any:
        """Whose inputs lie in a set; `None` where they were not drawn ahead."""
        return self._placed.get(number)

    def judge(self, trials: list[int]) -> list[dict[str, list[dict[str, Any] | str]]]:
        """The facts on runs that were kept, in their order, mostly with one wait for the device; they are gone then."""
        runs = [self._run(trial) for trial in trials]
        if len(set(trials)) < len(trials) or not all(run.is_kept for run in runs):
            raise Refusal("internal", "a run is judged once, after it was kept")
        rows = [run.quick_rows() for run in runs]
        numbers = chunk_numbers.fetch([row for each in rows for row in each])
        facts = []
        for run, each in zip(runs, rows, strict=True):
            fetched, numbers = numbers[: len(each)], numbers[len(each) :]
            facts.append(run.judge(fetched or None))
        # Not before all are judged: short of memory, the request is done once more.
        for trial in trials:
            del self._runs[trial]
        return facts

    def drop(self, trials: list[Any]) -> None:
        """Frees runs that were drawn and will not be run."""
        for trial in trials:
            run = self._runs.pop(trial)
            self._left += run.bytes

    def _run(self, trial: int) -> Run:
        if trial not in self._runs:
            raise Refusal("internal", f"trial {trial} was not drawn ahead, or is judged")
        return self._runs[trial]
