"""A benchmark in sections: each is announced and timed, one that breaks does not take the others along, and a table of
what was reported comes last."""

import time
from typing import Any

TABLE = []


def report(name: str, value: Any, bar: str = "") -> None:
    TABLE.append((name, value, bar))
    print(f"-- {name}: {value} {bar}", flush=True)


def run(sections: Any, names: Any, *arguments: Any) -> None:
    """The functions of these names, in order, with these arguments."""
    for name in names:
        started = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            sections[name](*arguments)
        except (Exception, SystemExit) as error:
            report(name, f"broke: {type(error).__name__}: {str(error)[:500]}")
        print(f"== {name} took {time.perf_counter() - started:.0f} s", flush=True)
    print()
    for name, value, bar in TABLE:
        print(f"| {name} | {value} | {bar} |")
