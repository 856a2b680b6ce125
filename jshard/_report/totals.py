"""The totals of a plan and the sentences about it, computed once for all reports, so that they cannot disagree."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._report.format_units import format_bytes, format_percent, format_seconds


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


USER_OWN = "the user's own"
"""Note on a collective inside the user's own `shard_map`."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes: executions, bytes received by a device, and seconds, summed up.

    `is_lower_bound`: some are in a loop of unknown trip count, which is counted as one trip. Collectives in the user's
    own `shard_map` have kinds of their own, such as "all_reduce (own)".
    """

    kind: str
    axes: str
    count: float
    bytes: float
    seconds: float
    is_lower_bound: bool = False


def traffic(plan: PlanRecord) -> list[Traffic]:
    """Traffic by kind and axes, sorted."""
    by: dict[tuple[str, str], list[float]] = {}
    open_ = {(c.kind, "*".join(c.axes)) for c in plan.collectives if c.turn}
    for c in plan.collectives:
        kind = f"{c.kind} (own)" if c.own else c.kind
        row = by.setdefault((kind, "*".join(c.axes)), [0.0, 0.0, 0.0])
        row[0] += c.count
        row[1] += c.total
        row[2] += c.seconds * c.count
    return [
        Traffic(kind, axes, *row, is_lower_bound=(kind, axes) in open_)
        for (kind, axes), row in sorted(by.items())
    ]


def at_least_prefix(plan: PlanRecord) -> str:
    """The prefix of totals that count a loop of unknown trip count as one trip; empty for other programs."""
    return "at least " if any(r.turn for r in plan.boundaries) else ""


def received_bytes(plan: PlanRecord) -> float:
    """Bytes received by a device in one call."""
    return sum(c.total for c in plan.collectives)


def objective_text(plan: PlanRecord) -> str:
    """What the plan's level minimises."""
    return ("communication and redundant compute", "peak memory", "step time")[plan.level]


def optimality_text(plan: PlanRecord) -> str:
    """One sentence on how good the plan is; "optimal" only where cost equals the proved bound."""
    c = plan.cost
    shown = format_bytes(c.objective) if c.unit == "B" else format_seconds(c.objective)
    if at_least_prefix(plan) and c.unit == "s":
        shown += " with one turn of each open loop"
    if c.price and c.unit == "s":
        shown += f" (of it {format_seconds(c.price)} the price of repeated products and scattered results)"
    if plan.search == "propagation":
        return f"cost {shown}, nothing proved"
    among = f" of {c.space}" if c.space else ""
    # Other sets of padded sizes may give a better plan: what bounds the cost are the programs that were planned.
    among += ", for the padded sizes tried" if plan.padding else ""
    if c.optimal:
        return f"optimal: cost {shown} equals the proved bound{among}"
    if c.bound <= 0:
        return f"cost {shown}, nothing proved"
    bound = format_bytes(c.bound) if c.unit == "B" else format_seconds(c.bound)
    return f"{gap_text(plan)}: cost {shown}, proved bound{among} {bound}"


def gap_text(plan: PlanRecord) -> str:
    """How far a plan is from the proved bound, in a word or two."""
    if plan.search == "propagation" or plan.cost.bound <= 0 < plan.cost.objective:
        return "nothing proved"
    return "optimal" if plan.cost.optimal else f"gap {100 * plan.cost.gap:.2g}%"


def summary_line(plan: PlanRecord) -> str:
    """A plan in one line: function, machine, predicted step and proof."""
    proof = gap_text(plan)
    if plan.padding and proof != "nothing proved":
        proof += " for the padded sizes tried"
    return (
        f"Plan of {plan.name} on {plan.mesh} ({plan.chip}), level {plan.level}: "
        f"step {at_least_prefix(plan)}{format_seconds(plan.step_seconds)}, "
        f"peak {format_bytes(plan.cost.peak_bytes)}, {proof}"
    )


def lower_bound_text(plan: PlanRecord) -> str:
    """One sentence on the gap between the step and its lower bound for these placements."""
    bound, step = plan.physics, plan.step_seconds
    gap = format_percent(bound.space_gap(step))
    return (
        f"space gap {gap}: a step {format_seconds(step)}, physics {format_seconds(bound.seconds)} "
        f"by {bound.limit} (its products must receive {format_bytes(bound.bytes)})"
    )


def hidden_text(plan: PlanRecord) -> str:
    """What of the communication hides, in brackets; empty where nothing does."""
    return f" ({format_seconds(plan.cost.hidden)} of it hidden)" if plan.cost.hidden else ""


def formatted_totals(plan: PlanRecord) -> dict[str, str]:
    """The totals of a plan as all reports show them, by name."""
    c = plan.cost
    budget = "none" if plan.memory_budget is None else format_bytes(plan.memory_budget)
    return {
        "compute": format_seconds(c.compute),
        "redundant": format_seconds(c.redundant),
        "communication": format_seconds(c.communication),
        "step": format_seconds(plan.step_seconds),
        "moved": f"{received_bytes(plan):,.0f} B",
        "peak": format_bytes(c.peak_bytes),
        "budget": budget,
    }


def tiled_text(plan: PlanRecord) -> str:
    """What the arrays of convolutions take in a TPU's tiles, where it is more than the plan's peak counts."""
    found = f"{format_bytes(plan.memory.tiled)} or more in tiles of 8 x 128: convolutions of few channels"
    beyond = plan.memory_budget is not None and plan.memory.tiled > plan.memory_budget
    return found + (", more than is allowed: the compiler may refuse the program" if beyond else "")
