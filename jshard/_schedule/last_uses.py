"""The last action of a list that needs each value, where fused operators need their operands as long as their readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jshard._program.graph import Literal
from jshard._program.memory.fusion_traits import fuses_operands, is_duplicable
from jshard._program.memory.liveness import Liveness
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.writer import Action, Reshard, RunOperator


def last_uses(actions: Sequence[Action], liveness: Liveness, assignment: Assignment) -> dict[Value, int]:
    """Index of the last action that needs each value; the vectorised twin is `propagate_last_use` of `_program/memory`."""
    return {end.value: end.until for end in ends_of_values(actions, liveness, assignment)}


class EndOfValue(NamedTuple):
    """The last action that needs a value, and the one that makes it again, -1 for the first time."""

    value: Value
    until: int
    regathered_at: int = -1


def ends_of_values(actions: Sequence[Action], liveness: Liveness, assignment: Assignment) -> list[EndOfValue]:
    """The ends of all values, in order; of a copy that is made again, once for each time it is made."""
    last_read: dict[Value, int] = {}
    of_later: list[EndOfValue] = []
    last_recomputed: dict[Value, int] = {}  # of duplicated casts, the last reader that recomputes them
    operators, values = assignment.program.operators, assignment.values
    made = {t for a in actions if isinstance(a, RunOperator) for t in operators[a.op].results}
    for i in range(len(actions) - 1, -1, -1):
        a = actions[i]
        until, recomputes = i, False
        if isinstance(a, RunOperator):
            op = operators[a.op]
            results = [values[r] for r in op.results]
            if results and is_duplicable(op) and not any([liveness.materialized[r] for r in op.results]):
                until = max([i] + [last_read.get(v, i) for v in results])
            casts = [v for v in results if liveness.duplicated_cast[v[0]]]
            until = max([until] + [last_recomputed.get(v, i) for v in casts])
            recomputes = fuses_operands(op)
        elif isinstance(a, Reshard) and is_fused_slice(a, liveness):
            until = max(i, last_read.get((a.tensor, a.target), i))
        if isinstance(a, Reshard) and a.regathered:
            made_again = a.tensor, a.target
            of_later.append(EndOfValue(made_again, last_read.pop(made_again, i), i))
        for v in values_read(a):
            # A copy in another layout cannot be recomputed, nor what was made outside of the list.
            is_recomputed = (
                recomputes and liveness.duplicated_cast[v[0]] and v == values[v[0]] and v[0] in made
            )
            times = last_recomputed if is_recomputed else last_read
            if times.get(v, i) <= until:
                times[v] = until
    return sorted([*(EndOfValue(v, i) for v, i in last_read.items()), *of_later], key=lambda end: end.until)


def is_fused_slice(a: Reshard, liveness: Liveness) -> bool:
    """Whether a reshard is a local slice of a fused value: it is computed where it is read, as the value itself is."""
    return liveness.sliced_in_readers[a.tensor] and all(s.kind == "slice" for s in a.steps)


def values_read(a: Action) -> list[Value]:
    """The values that an action reads."""
    if isinstance(a, Reshard):
        return [(a.tensor, a.source)]
    return [v for v in a.reads if not isinstance(v, Literal)]
