"""Two goals: the plan of least peak whose cost is at most a share above the least (`shard(config={"prefer": "memory:1%"})`).

The peak is bisected: a plan of least cost is searched within a budget, and the next budget is below its peak where it was
cheap enough, else between the two. The bound stays that on the least cost, so the gap says what the memory costs at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution


_BUDGETS = 5  # that are tried
_NARROW = 0.02  # of the peak: budgets nearer to each other are not told apart


def prefer_memory(
    fastest: ScheduledSolution, plan_within: Callable[[float], ScheduledSolution], slack: float
) -> ScheduledSolution:
    """The plan of lowest peak found whose cost is at most `1 + slack` times that of the fastest.

    `plan_within` gives the cheapest plan found within a budget in bytes; one that exceeds the budget where none was.
    """
    allowed = fastest.cost * (1 + slack) * (1 + ROUNDING)
    best, low = fastest, 0.0
    for _ in range(_BUDGETS):
        if best.peak - low <= _NARROW * best.peak:
            break
        limit = (low + best.peak) / 2
        other = plan_within(limit)
        if other.interrupted:
            break
        if other.cost <= allowed and other.peak < best.peak:
            best = other
        if best.peak > limit:
            low = max(limit, min(other.peak_bound, best.peak))
    if best is fastest:
        return fastest
    peaks = f"peak {fastest.peak:,.0f} -> {best.peak:,.0f} bytes"
    step = f"memory preferred: {peaks}, cost {fastest.cost:.6g} -> {best.cost:.6g}"
    steps = (*fastest.steps, step)
    return dataclasses.replace(best, network=fastest.network, bound=fastest.bound, steps=steps)
