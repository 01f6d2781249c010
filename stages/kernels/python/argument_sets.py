"""Sets of arguments in the arena: filling them, and checking what a candidate did to them.

A set keeps a private image of everything that a candidate may only read, red zones included, laid out as in the arena.
Filling a set is then one copy and one fill, and checking it one comparison, whatever the number of tensors; only if
that one finds a difference are the tensors and gaps looked at one by one. The task's own forwards run on the image, so
nothing that a candidate writes can reach them. Expected outputs are never in the arena.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import chunk_numbers
import glance
import judge
import quick_look
from arena import Layout
from element_types import PATTERNS, as_words
from refusal import Refusal

if TYPE_CHECKING:
    from arena import Arena, Gap
    from task import Task


RUNNER_BYTES = 1 << 30
"""Left to the process that runs the candidate: its context, its code, and what it writes to empty the caches."""

LARGE_BYTES = 1 << 22
"""Of what may only be read: copying less costs no more than filling the gaps."""

KEPT_BYTES = 1 << 28
"""Results that are no larger are kept until the run with the other pattern has been judged."""


class ArgumentSet:
    def __init__(self, layout: Layout, base: int, memory: torch.Tensor, task: "Task") -> None:
        self.layout = layout
        self.base = base
        self.memory = memory
        self.image = torch.zeros(layout.tail, dtype=torch.uint8, device=self.memory.device)
        views = [slot.view(self.image) for slot in layout.read]
        inputs_end = len(task.input_names)
        self._inputs, self._state = views[:inputs_end], views[inputs_end:]
        self._gaps = layout.gaps()
        self._gap_byte = 0
        self._is_clean = False
        self._pattern: Any = None
        self.trial = None
        self.weights = None
        self.values: Any = None
        self.expectations: Any = None
        self._quick = None
        self._task = None
        self._held = {}
        self._kept = None

    def describe(self) -> dict[str, list[int | list[int]]]:
        slots = [*self.layout.read, *self.layout.written]
        return {
            "arguments": [[self.base + slot.offset, slot.size] for slot in slots],
            "scratch": [self.base + self.layout.scratch.offset, self.layout.scratch.size],
        }

    def take_inputs(
        self,
        task: "Task",
        values: Any,
        trial: int,
        weights: int,
        quick: bool = False,
        is_probe: bool = False,
    ) -> None:
        """New inputs and weights (by their seed), and what they should give.

        `quick` asks eager only, for results of a program that is judged a second time; `is_probe` says that the values
        are those of the task's probe.
        """
        self.trial = None
        self._is_clean = False
        self.weights = weights
        task.weights.become(weights)
        for view, (_, tensor) in zip(self._state, task.state, strict=True):
            view.copy_(tensor)
        private = iter(self._inputs)
        self.values = [next(private).copy_(value) if isinstance(value, torch.Tensor) else value for value in values]
        self.expectations, self._quick = None, None
        if quick and task.limits is not None:
            self._quick = quick_look.Expected(task.limits, task.forward(self.values))
        else:
            self.expectations = task.expect(self.values, is_probe)
        self._task = task
        self._held, self._kept = {}, None
        self.trial = trial

    def use_weights(self) -> None:
        """Gives the model the weights of this draw."""
        self._task.weights.recall(self.weights, self._state)

    def poison_image(self, pattern: int) -> None:
        """What `fill` would do first."""
        self._poison_gaps(PATTERNS[pattern], (self.image,))

    def _poison_gaps(self, byte: int, places: Sequence[torch.Tensor]) -> None:
        """The red zones of what may only be read."""
        if self._gap_byte == byte:
            return
        for gap in self._gaps:
            for memory in places:
                memory[gap.start : min(gap.end, self.layout.tail)].fill_(byte)
        self._gap_byte = byte

    def fill(self, pattern: int) -> None:
        """Inputs and weights as they should be, poison everywhere else."""
        byte, tail = PATTERNS[pattern], self.layout.tail
        # Found unchanged: all but the gaps is there. Whatever writes to it meanwhile is found out as ever.
        is_there = self._is_clean and tail >= LARGE_BYTES
        self._poison_gaps(byte, (self.image, self.memory) if is_there else (self.image,))
        if not is_there:
            self.memory[:tail].copy_(self.image)
        self.memory[tail:].fill_(byte)
        self._pattern, self._is_clean = pattern, False

    def judge(self, quick_numbers: list[list[float]] | None = None) -> dict[str, Any]:
        """The facts on what lies there now; `quick_numbers` are those of `quick_rows`, where they were fetched
        already."""
        if self._pattern is None or self.trial is None:
            raise Refusal("internal", "nothing was drawn for this set")
        if self._quick is not None:
            facts = self._quick.conclude(quick_numbers or chunk_numbers.fetch(self.quick_rows()))
            if facts is not None:
                return facts
            self._expect_all()
        return self._judge_as_a_whole()

    def quick_rows(self) -> list[torch.Tensor]:
        """What the quick look wants as numbers; nothing where the next judgement is no quick one."""
        if self._quick is None:
            return []
        return self._quick.rows([slot.view(self.memory) for slot in self.layout.written], self._damage())

    def _expect_all(self) -> None:
        """Something is wrong, or near it: the whole judgement tells what."""
        self.use_weights()
        self._quick, self.expectations = None, self._task.expect(self.values)

    def _judge_as_a_whole(self) -> dict[str, list[dict[str, Any] | str]]:
        results = [slot.view(self.memory) for slot in self.layout.written]
        known = self._known(results)
        if known is not None:
            return known
        damaged, verdicts = self._verdicts(results)
        self._is_clean = not damaged[0]
        facts = {
            "outputs": [verdict.facts() for verdict in verdicts],
            "inputs_changed": self._changed_tensors() if damaged[0] else [],
            "red_zones": self._changed_gaps() if any(damaged) else [],
        }
        if sum(result.nbytes for result in results) <= KEPT_BYTES:
            self._kept = self._pattern, [result.clone() for result in results], facts["outputs"]
        return facts

    def _known(self, results: list[torch.Tensor]) -> dict[str, Any] | None:
        """The facts, if nothing was damaged and the run with the other pattern gave the same bits: an element that was
        not written would hold another pattern. Most programs give the same, and are not compared a second time."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] == self._pattern:
            return None
        differs = [(as_words(one) != as_words(other)).any() for one, other in zip(results, kept[1], strict=True)]
        if any(chunk_numbers.fetch([torch.cat([self._damage(), chunk_numbers.row(*differs)])])[0]):
            return None
        self._is_clean = True
        return {"outputs": [output | {"unwritten": 0} for output in kept[2]], "inputs_changed": [], "red_zones": []}

    def _earlier_masks(self) -> list[list[torch.Tensor] | None]:
        """Which elements held the other pattern after its run; `None` where none did, or there was no such run."""
        return self._held.get(1 - self._pattern, [None] * len(self.expectations))

    # Quoted: in the class, judge is its method.
    def _verdicts(self, results: list[torch.Tensor]) -> "tuple[list[float], list[judge.Verdict]]":
        """What a glance finds right, and what the others are by measurement; and before them what was damaged."""
        byte, triples = (
            PATTERNS[self._pattern],
            list(zip(self.expectations, results, self._earlier_masks(), strict=True)),
        )
        comparisons = [
            glance.at(expectation, result, byte) or judge.Measurement(expectation, result, byte, earlier)
            for expectation, result, earlier in triples
        ]
        damaged, *numbers = chunk_numbers.fetch([self._damage(), *[row for each in comparisons for row in each.rows]])
        rows = [
            each.conclude(numbers) for each, numbers in zip(comparisons, _by_output(comparisons, numbers), strict=True)
        ]
        unclear = [place for place, each in enumerate(rows) if each is None]
        for place in unclear:
            comparisons[place] = judge.Measurement(*triples[place][:2], byte, triples[place][2])
        measured = [comparisons[place] for place in unclear]
        numbers = chunk_numbers.fetch([row for each in measured for row in each.rows])
        for place, each in zip(unclear, _by_output(measured, numbers), strict=True):
            rows[place] = each
        return damaged, self._concluded(comparisons, rows)

    def _concluded(self, comparisons: list[Any], rows: list[Any]) -> "list[judge.Verdict]":
        both_ran = 1 - self._pattern in self._held
        verdicts = [judge.Verdict(each.expectation, row, both_ran) for each, row in zip(comparisons, rows, strict=True)]
        self._held[self._pattern] = [
            each.held if verdict.held else None for each, verdict in zip(comparisons, verdicts, strict=True)
        ]
        return verdicts

    def _written_gaps(self) -> "list[Gap]":
        return [gap for gap in self._gaps if gap.end > self.layout.tail]

    def _damage(self) -> torch.Tensor:
        """Whether anything before the outputs changed, and whether any red zone after them did."""
        words = as_words(self.memory[: self.layout.tail]) != as_words(self.image)
        gaps = torch.cat([self.memory[gap.start : gap.end] for gap in self._written_gaps()])
        return chunk_numbers.row(words.any(), (gaps != PATTERNS[self._pattern]).any())

    def _changed_tensors(self) -> list[str]:
        return [
            slot.name
            for slot in self.layout.read
            if not torch.equal(self.memory[slot.offset : slot.end], self.image[slot.offset : slot.end])
        ]

    def _changed_gaps(self) -> list[dict[str, Any]]:
        byte = PATTERNS[self._pattern]
        found = []
        for gap in self._gaps:
            where = (self.memory[gap.start : gap.end] != byte).nonzero()
            if len(where):
                found += gap.damage(int(where[0]), int(where[-1]))
        return found


def _by_output(comparisons: list[Any], numbers: list[list[float]]) -> list[list[list[float]]]:
    """The rows of each."""
    result = []
    for each in comparisons:
        result.append(numbers[: len(each.rows)])
        numbers = numbers[len(each.rows) :]
    return result


def private_bytes(
    layout: Layout, spec_outputs: list[tuple[str, tuple[int, ...], torch.dtype]], needs_float64: bool
) -> int:
    """What a set takes outside the arena."""
    outputs = 0
    for _, shape, dtype in spec_outputs:
        elements = 1
        for extent in shape:
            elements *= extent
        outputs += elements * (dtype.itemsize + (8 if needs_float64 and dtype.is_floating_point else 0))
    return layout.tail + outputs


class ArgumentSets:
    """The sets of the task that was begun last."""

    def __init__(self, task: "Task", arena: "Arena", scratch_bytes: int, wanted: int, available_memory: int) -> None:
        layout = Layout(task.read_tensors(), task.written_tensors(), scratch_bytes, arena.red_zone)
        private = private_bytes(layout, task.written_tensors(), task.policy.needs_float64)
        count = min(wanted, self._room(layout, private, arena, task, available_memory))
        self.task = task
        self.layout = layout
        arena.reserve(layout.size * count)
        bases = range(0, layout.size * count, layout.size)
        self.sets = [ArgumentSet(layout, base, arena.memory(base, layout.size), task) for base in bases]

    @staticmethod
    def _room(layout: Layout, private: int, arena: "Arena", task: "Task", available_memory: int) -> int:
        """How many sets fit, beside what a forward needs for itself."""
        if not arena.fits(layout.size):
            raise Refusal(
                "memory",
                f"one set takes {layout.size} bytes, more than the arena's limit of {arena.limit}",
                "ask for less scratch memory, or use smaller sizes (`set`)",
            )
        free = max(0, available_memory - task.forward_bytes - RUNNER_BYTES)
        # A larger block is made before the one in hand can be freed.
        in_hand = min(arena.capacity // layout.size, free // private)
        return max(1, in_hand, min(arena.limit // layout.size, free // (layout.size + private)))

    def __getitem__(self, position: int) -> ArgumentSet:
        if not (isinstance(position, int) and 0 <= position < len(self.sets)):
            raise Refusal("internal", f"there is no set {position!r}: there are {len(self.sets)}")
        return self.sets[position]
