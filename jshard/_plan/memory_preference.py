"""Two goals: the plan of least peak whose cost is at most a share above the least (`shard(config={"prefer": "memory:1%"})`).

The peak is bisected between what every plan holds and that of the fastest: a plan within a budget is searched until one
is cheap enough or none can be, and the next budget is below its peak where it was, else between the two. The bound
stays that on the least cost, so the gap says what the memory costs at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution


_BUDGETS = 5  # that are tried
_NARROW = 0.02  # of the peak: budgets nearer to each other are not told apart


class BudgetSearch(NamedTuple):
    """What the search for each budget may spend.

    - `effort`: times that of the fastest plan, and a second. `rounds`: of the search.
    - `gap`: as a share of the cost that the preference allows.
    """

    effort: float = 1.0
    rounds: int = 3
    gap: float = 0.25


EACH_BUDGET = BudgetSearch()

PlansWithin = Callable[[float, float], Sequence[ScheduledSolution]]
"""`plans_within(budget, most)`: plans that were found for a budget in bytes, some of which may exceed it; a cost above
`most` is of no use."""


def prefer_memory(
    fastest: ScheduledSolution,
    floor: float,
    plans_within: PlansWithin,
    slack: float,
) -> ScheduledSolution:
    """The plan of lowest peak found whose cost is at most `1 + slack` times that of the fastest.

    Arguments:

    - `floor`: bytes that every plan holds.
    - `plans_within`: gives plans for a budget.
    """
    allowed = fastest.cost * (1 + slack) * (1 + ROUNDING)
    best, low = fastest, floor
    for _ in range(_BUDGETS):
        if best.peak - low <= _NARROW * best.peak:
            break
        limit = (low + best.peak) / 2
        plans = plans_within(limit, allowed)
        best = min((p for p in (best, *plans) if p.cost <= allowed), key=lambda p: (p.peak, p.cost))
        if any(p.interrupted for p in plans):
            break
        if best.peak > limit:
            low = limit
    if best is fastest:
        return fastest
    peaks = f"peak {fastest.peak:,.0f} -> {best.peak:,.0f} bytes"
    step = f"memory preferred: {peaks}, cost {fastest.cost:.6g} -> {best.cost:.6g}"
    steps = (*fastest.steps, step)
    return dataclasses.replace(best, network=fastest.network, bound=fastest.bound, steps=steps)
