"""Operators that a rule keeps whole: which, why, and the seconds that it costs.

Problem.  "Optimal" is said of what rules allow. A sort along the only long dimension is gathered to every device, and a
report that lists it among fifty operators hides that the step is this sort.

Idea.  Where a plan runs an operator on fewer pieces than there are devices and its rule has no cut into more, the row
says why (`OperatorRow.limit`). What that costs is its redundant compute and the collectives that bring its operands
together. Above a twentieth of the step the headline says so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._report.format_units import format_percent, format_seconds


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord
    from jshard._plan.rows import OperatorRow


LEAST_SHARE = 0.05
"""Of the step: what costs less is left to the table of operators."""

_GATHERS = ("all_gather", "all_to_all", "broadcast")


@dataclasses.dataclass(frozen=True)
class LeftWhole:
    """Operators of one primitive and reason: an example, their number, and the seconds of all."""

    example: str
    primitive: str
    count: int
    reason: str
    seconds: float


def left_whole(plan: PlanRecord) -> list[LeftWhole]:
    """What rules keep whole at a cost of at least a twentieth of the step, the dearest first."""
    gathered = {c.id: c.seconds * c.count for c in plan.collectives if c.kind in _GATHERS}
    found: dict[tuple[str, str], list[tuple[OperatorRow, float]]] = {}
    for row in plan.operators:
        if row.limit:
            cost = row.redundant + sum(gathered.get(k, 0.0) for k in row.collectives)
            found.setdefault((row.primitive, row.limit), []).append((row, cost))
    out = []
    for (primitive, reason), rows in found.items():
        example, _ = max(rows, key=lambda r: r[1])
        out.append(LeftWhole(example.name, primitive, len(rows), reason, sum(cost for _, cost in rows)))
    least = LEAST_SHARE * plan.step_seconds
    return sorted((x for x in out if x.seconds > 0 and x.seconds >= least), key=lambda x: -x.seconds)


def left_whole_lines(plan: PlanRecord) -> list[str]:
    """A line for each of the dearest three, with the reason and the share of the step."""
    return [
        f"kept whole: {x.example}{f' and {x.count - 1} more' if x.count > 1 else ''} ({x.reason}), "
        f"{format_seconds(x.seconds)} of copies and repeated work, "
        f"{format_percent(x.seconds / plan.step_seconds)} of the step"
        for x in left_whole(plan)[:3]
    ]
