"""Attacks on the evaluator and their honest twins, by class. A module is a class; `CASES` of each are put together here."""

from . import clock, constants, device, host, launches, memory, parts, precision, reuse, selection, sources

CLASSES = {
    module.__name__.rpartition(".")[2]: module.CASES
    for module in (reuse, constants, parts, precision, selection, memory, sources, device, clock, host, launches)
}


def entries(only=None):
    """Everything to be judged: its class, and an `Entry`. With `only`, of these classes."""
    for name, cases in CLASSES.items():
        if only is None or name in only:
            for case in cases:
                yield from ((name, entry) for entry in case.entries(name))
