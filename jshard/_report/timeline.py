"""The timeline of one device: the operators of a plan with the collectives between them.

Operators are in program order. A collective that reshards an operand comes before its consumer; one that completes an
operator's own result (a maximum over a cut dimension) comes after it. A reshard for several consumers, or into or out
of a loop, comes after the producer of the tensor, and one for a result of the program at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jshard._plan.rows import CollectiveRow, OperatorRow


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


def events(plan: PlanRecord, boundaries: bool = False) -> Iterator[OperatorRow | CollectiveRow]:
    """Every operator and every collective of the plan once; with `boundaries`, the boundary operators of loops too."""
    rows = {c.id: c for c in plan.collectives}
    claimed = {i for r in plan.operators for i in r.collectives}
    results = {r.path for r in plan.outputs}
    written = {name for r in plan.operators for name in r.writes}
    after: dict[str, list[CollectiveRow]] = {}
    for c in plan.collectives:
        if c.id not in claimed and c.operator not in results:
            after.setdefault(c.tensor if c.tensor in written else "", []).append(c)
    pending = list(plan.boundaries) if boundaries else []
    at_boundaries = {name for r in pending for name in r.writes}
    first = after.get("", [])
    yield from (c for c in first if c.tensor not in at_boundaries)
    for r in plan.operators:
        while pending and program_index(pending[0]) < program_index(r):
            boundary = pending.pop(0)
            yield boundary
            yield from (c for c in first if c.tensor in boundary.writes)
        own = [i for i in r.collectives if rows[i].own or rows[i].tensor in r.writes]
        yield from (rows[i] for i in r.collectives if i not in own)
        yield r
        yield from (rows[i] for i in own)
        for name in r.writes:
            yield from after.pop(name, ())
    for r in pending:
        yield r
        yield from (c for c in first if c.tensor in r.writes)
    yield from (c for c in plan.collectives if c.id not in claimed and c.operator in results)


def program_index(r: OperatorRow) -> int:
    """The number of an operator in the program, with which its name ends; -1 without one."""
    tail = r.name.rsplit(".", 1)[-1]
    return int(tail) if tail.isdigit() else -1
