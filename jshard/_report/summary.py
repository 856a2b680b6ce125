"""The numbers of a plan, computed once for every form in which it is shown.

Text, Markdown, HTML and traces all read these functions, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._report.units import seconds, share, size


if TYPE_CHECKING:
    from jshard._plan.plan import Plan


OWN = "the user's own"
"""What reports say of a collective in the user's own `shard_map`."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes: how many, bytes received by a device, seconds, in all.

    Those in the user's own `shard_map` are a kind of their own, "all_reduce (own)".
    """

    kind: str
    axes: str
    count: float
    bytes: float
    seconds: float


def traffic(plan: Plan) -> list[Traffic]:
    """Traffic by kind and axes, sorted."""
    by: dict[tuple[str, str], list[float]] = {}
    for c in plan.collectives:
        kind = f"{c.kind} (own)" if c.own else c.kind
        row = by.setdefault((kind, "*".join(c.axes)), [0.0, 0.0, 0.0])
        row[0] += c.count
        row[1] += c.total
        row[2] += c.seconds * c.count
    return [Traffic(kind, axes, *row) for (kind, axes), row in sorted(by.items())]


def step_seconds(plan: Plan) -> float:
    """Predicted seconds of one call: compute and communication, one after the other."""
    return plan.cost.compute + plan.cost.communication


def moved_bytes(plan: Plan) -> float:
    """Bytes received by a device in one call."""
    return sum(c.total for c in plan.collectives)


def goal(plan: Plan) -> str:
    """What the level minimises."""
    return ("communication and redundant compute", "peak memory", "step time")[plan.level]


def proof(plan: Plan) -> str:
    """One sentence on how good the plan is; "optimal" only where cost equals the proved bound."""
    c = plan.cost
    shown = seconds(c.objective)
    if c.unit == "B":  # what the search counts at level 1; the peak of the schedule has moved copies too
        shown = f"{size(c.objective)} (tensors without moved copies)"
    if plan.search == "propagation":
        return f"cost {shown}, nothing proved"
    if c.optimal:
        return f"optimal: cost {shown} equals the proved bound"
    bound = size(c.bound) if c.unit == "B" else seconds(c.bound)
    return f"gap {100 * c.gap:.2g}%: cost {shown}, proved bound {bound}"


def physics(plan: Plan) -> str:
    """One sentence on how far the plan is from what nothing placed so could beat."""
    least, step = plan.physics, step_seconds(plan)
    return (
        f"space gap {share(least.space_gap(step))}: a step {seconds(step)}, physics {seconds(least.seconds)} "
        f"(its products must receive {size(least.bytes)})"
    )


def figures(plan: Plan) -> dict[str, str]:
    """The totals of a plan as shown in every form, by name."""
    c = plan.cost
    budget = "none" if plan.memory_budget is None else size(plan.memory_budget)
    return {
        "compute": seconds(c.compute),
        "redundant": seconds(c.redundant),
        "communication": seconds(c.communication),
        "step": seconds(step_seconds(plan)),
        "moved": f"{moved_bytes(plan):,.0f} B",
        "peak": size(c.peak_bytes),
        "budget": budget,
    }
