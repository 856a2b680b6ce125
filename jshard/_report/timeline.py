"""What happens on a device, in order: the operators of a plan with the collectives between them.

Operators are in program order. A collective that brings an operand into place comes before its reader; one
that finishes an operator's own result (a maximum over a cut dimension) comes after it. What is moved for
several readers, or into and out of a loop, comes after its maker, and what is moved for a result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jshard._plan.records import CollectiveRow, OperatorRow


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


def events(plan: PlanRecord, boundaries: bool = False) -> Iterator[OperatorRow | CollectiveRow]:
    """Every operator and every collective of the plan, each once; with `boundaries`, those of loops too."""
    rows = {c.id: c for c in plan.collectives}
    claimed = {i for r in plan.operators for i in r.collectives}
    results = {r.path for r in plan.outputs}
    made = {name for r in plan.operators for name in r.writes}
    after: dict[str, list[CollectiveRow]] = {}
    for c in plan.collectives:
        if c.id not in claimed and c.operator not in results:
            after.setdefault(c.tensor if c.tensor in made else "", []).append(c)
    edges = list(plan.boundaries) if boundaries else []
    at_edges = {name for r in edges for name in r.writes}
    first = after.get("", [])
    yield from (c for c in first if c.tensor not in at_edges)
    for r in plan.operators:
        while edges and program_index(edges[0]) < program_index(r):
            yield edges[0]
            yield from (c for c in first if c.tensor in edges[0].writes)
            edges.pop(0)
        own = [i for i in r.collectives if rows[i].own or rows[i].tensor in r.writes]
        yield from (rows[i] for i in r.collectives if i not in own)
        yield r
        yield from (rows[i] for i in own)
        for name in r.writes:
            yield from after.pop(name, ())
    for r in edges:
        yield r
        yield from (c for c in first if c.tensor in r.writes)
    yield from (c for c in plan.collectives if c.id not in claimed and c.operator in results)


def program_index(r: OperatorRow) -> int:
    """The place of an operator in the program, which its name ends in."""
    tail = r.name.rsplit(".", 1)[-1]
    return int(tail) if tail.isdigit() else -1
