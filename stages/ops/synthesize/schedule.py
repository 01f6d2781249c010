"""Which category each task index has: decided by the shares alone, so that a longer run only adds to a shorter one.

The first indices hold one task of each category, so no count that reaches them leaves a category empty. From there on
each index goes to the category that is furthest behind its share.
"""

TORCH = [f"torch#{number}" for number in range(1, 6)]
CATEGORIES = [*TORCH, "transformers"]
# The released set's table, in percent.
PAPER_SHARES = {
    "torch#1": 3.40,
    "torch#2": 83.77,
    "torch#3": 7.62,
    "torch#4": 2.80,
    "torch#5": 1.23,
    "transformers": 1.18,
}


def usable_shares(shares: dict[str, float], max_ops: int, has_transformers: bool) -> dict[str, float]:
    """The categories that can be made, with shares that add up to one."""
    usable = {
        name: float(shares.get(name, 0.0))
        for name in CATEGORIES
        if (has_transformers if name == "transformers" else int(name[-1]) <= max_ops)
    }
    usable = {name: share for name, share in usable.items() if share > 0}
    total = sum(usable.values())
    return {name: share / total for name, share in usable.items()}


def schedule(shares: dict[str, float], count: int) -> list[tuple[str, int]]:
    """`(category, ordinal in the category)` of each index below `count`."""
    done = dict.fromkeys(shares, 0)
    first = list(shares)
    plan = []
    for index in range(count):
        if index < len(first):
            category = first[index]
        else:
            category = max(shares, key=lambda name: shares[name] * (index + 1) - done[name])
        plan.append((category, done[category]))
        done[category] += 1
    return plan
