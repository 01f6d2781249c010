"""Which operators each task is asked to have: spread evenly, by declared weights, as a function of the task's place.

Drawing at random and drawing again where something does not fit favours what fits easily: operators that take one rank,
or that may only come first, would hardly occur, and families would be far from their weights. So the operators of some
hundred tasks of a category, a block, are dealt out together. Families come in proportion to their weights and operators
in proportion within their family, both from a stratified sequence. Then operators are exchanged between the block's
tasks until the operators of each can follow one another in some order. An exchange changes no count.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK = 240
EXCHANGES = 80

# Weights of families, also in stage.yaml. An operator of a family with few gets at most about 1 % of all operators.
FAMILY_WEIGHTS = {
    "elementwise": 15,
    "activation": 12,
    "convolution": 11,
    "normalization": 9,
    "pooling": 7,
    "matmul": 7,
    "reduction": 6,
    "loss": 5,
    "special": 5,
    "linear": 4,
    "softmax": 4,
    "resampling": 3.5,
    "padding": 3.5,
    "arrangement": 3.5,
    "scan": 3,
    "masking": 2.5,
    "ordering": 2.5,
    "spectral": 2,
    "indexing": 2,
    "attention": 1,
    "similarity": 1,
    "recurrent": 1.5,
    "embedding": 1.5,
    "bilinear": 0.4,
}
# Two of one of these in a row, or a norm after a softmax, is redundant or washes the signal out.
NO_NEIGHBOURS = [
    {"activation"},
    {"softmax", "normalization"},
    {"padding"},
    {"pooling", "reduction"},
    {"scan"},
    {"arrangement"},
    {"ordering"},
    {"resampling"},
    {"loss"},
    {"linear", "bilinear"},
    {"masking"},
    {"indexing"},
    {"spectral"},
]


@dataclass(frozen=True)
class Member:
    """An operator as planning sees it."""

    operator: str
    family: str
    ranks: dict  # rank of the stream -> ranks that come out
    first_only: bool
    indices: bool  # takes indices, so it can only come first

    @property
    def last_only(self) -> bool:
        return self.family == "loss"


def stratified(weights: dict[str, float], seed: int | str) -> Iterator[str]:
    """An endless sequence of names in which each occurs in proportion to its weight, in every stretch of it.

    The n-th occurrence of a name falls somewhere into the n-th of the intervals of its own length.
    """

    def due(name: str, round_number: int):
        draw = random.Random(f"{seed}/{name}/{round_number}").random()
        return (round_number + draw) / weights[name]

    waiting = [(due(name, 0), name, 0) for name in sorted(weights) if weights[name] > 0]
    heapq.heapify(waiting)
    while waiting:
        _, name, round_number = waiting[0]
        heapq.heapreplace(waiting, (due(name, round_number + 1), name, round_number + 1))
        yield name


class Planner:
    """The operators of each task of the torch categories, in the order of the task's place in its category."""

    def __init__(self, members: Any, families: dict[str, float], seed: int) -> None:
        self.seed = seed
        self.members = {member.operator: member for member in members}
        self.by_family = {}
        for member in sorted(members, key=lambda member: member.operator):
            self.by_family.setdefault(member.family, []).append(member)
        self.weights = {name: weight for name, weight in families.items() if weight > 0 and name in self.by_family}
        self._streams, self._blocks = {}, {}

    def operators(self, length: int, ordinal: int) -> list[str]:
        """The names of a task's operators, in an order in which they can follow one another where there is one."""
        blocks = self._blocks.setdefault(length, [])
        while len(blocks) <= ordinal // BLOCK:
            blocks.append(self._block(length, len(blocks)))
        return blocks[ordinal // BLOCK][ordinal % BLOCK]

    def _block(self, length: int, number: int) -> list[list[str]]:
        if length not in self._streams:
            self._streams[length] = self._stream(length)
        rng = random.Random(f"{self.seed}/{length}/block {number}")
        dealt = list(itertools.islice(self._streams[length], BLOCK * length))
        rng.shuffle(dealt)
        tasks = [dealt[place * length : (place + 1) * length] for place in range(BLOCK)]
        arrange(rng, tasks)
        return [[member.operator for member in (first_order(task) or task)] for task in tasks]

    def _stream(self, length: int) -> Iterator[Any]:
        """The members in an even sequence: a family at a time, and the next operator of it."""
        operators = {
            family: stratified({m.operator: 1.0 for m in members}, f"{self.seed}/{length}/{family}")
            for family, members in self.by_family.items()
        }
        for family in stratified(self.weights, f"{self.seed}/{length}/families"):
            yield self.members[next(operators[family])]


def arrange(rng: random.Random, tasks: list[list[Member]]) -> None:
    """Exchange operators between tasks until as many as can be have an order that works."""
    good = [first_order(task) is not None for task in tasks]
    for place, task in enumerate(tasks):
        for _ in range(EXCHANGES):
            if good[place]:
                break
            other = rng.randrange(len(tasks))
            if other == place:
                continue
            mine, theirs = rng.randrange(len(task)), rng.randrange(len(task))
            task[mine], tasks[other][theirs] = tasks[other][theirs], task[mine]
            works = first_order(task) is not None
            theirs_works = works and first_order(tasks[other]) is not None
            if works and (theirs_works or not good[other]):
                good[place], good[other] = True, theirs_works
            else:
                task[mine], tasks[other][theirs] = tasks[other][theirs], task[mine]


def first_order(task: list[Member]) -> list[Member] | None:
    """An order of a task's operators that works, or None."""
    return next(orders(task), None)


def orders(task: list[Member]) -> Iterator[list[Member]]:
    """The orders of a task's operators in which each can follow the one before, as far as ranks and families tell."""
    if len({member.operator for member in task}) == len(task):
        for member in task:
            yield from extended([member], [other for other in task if other is not member], set(member.ranks))


def extended(order: list[Member], rest: list[Member], ranks: set[int]) -> Iterator[list[Member]]:
    """The orders that begin with `order`; `ranks` are those that its last operator may be given."""
    if not rest:
        yield order
        return
    last = order[-1]
    if last.last_only:
        return
    out = {rank for before in ranks for rank in last.ranks[before]}
    for member in rest:
        if member.first_only or member.indices or any({last.family, member.family} <= group for group in NO_NEIGHBOURS):
            continue
        reached = out & set(member.ranks)
        if reached:
            yield from extended([*order, member], [other for other in rest if other is not member], reached)


def start_ranks(order: list[Member]) -> list[int]:
    """The ranks that a stream may begin with so that every operator of the order can be reached."""
    reach = set(order[-1].ranks)
    for member in reversed(order[:-1]):
        reach = {rank for rank, out in member.ranks.items() if any(after in reach for after in out)}
    return sorted(reach)
