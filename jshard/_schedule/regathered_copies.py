"""Copies that a list of actions makes again for later readers: from when each is in memory, and what came before it.

Compilers begin the collective of such a copy beside the product before, but not before what it awaits is there
(`awaited_values.py`), nor what the assignment says (`Assignment.regather_after`), nor beside a loop or branch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jshard._program.graph import Literal
from jshard._program.memory.liveness import Liveness
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.awaited_values import awaited_values
from jshard._schedule.last_uses import EndOfValue
from jshard._schedule.writer import Action, Reshard, RunCall, RunOperator


class RegatheredCopy(NamedTuple):
    """A copy made again, by indices of actions: made at, in memory from; and the end of the copy before.

    `product`: the result of the last unfusible operator before, which it may await; -1 where that is neither in memory nor
    resharded, or where there is none since the last loop or branch.
    """

    reshard: Reshard
    made_at: int
    early_at: int
    before: EndOfValue
    product: int

    @property
    def value(self) -> Value:
        """What it is a copy of, and its layout."""
        return self.reshard.tensor, self.reshard.target


def regathered_copies(
    actions: Sequence[Action],
    ends: Sequence[EndOfValue],
    liveness: Liveness,
    assignment: Assignment,
    unfusible: Collection[int],
) -> list[RegatheredCopy]:
    """The copies of a list of actions that are made again, in order.

    Arguments:

    - `ends`: of the list's values.
    - `unfusible`: the program's operators that are kernels of their own.
    """
    regathered = [(i, a) for i, a in enumerate(actions) if isinstance(a, Reshard) and a.regathered]
    if not regathered:
        return []
    starts = _starts(actions, liveness, assignment, unfusible)
    ends_of: dict[Value, list[EndOfValue]] = {}
    for end in sorted(ends, key=lambda end: end.regathered_at):
        ends_of.setdefault(end.value, []).append(end)
    out = []
    for i, a in regathered:
        value, (early_at, product) = (a.tensor, a.target), starts[i]
        before = [end for end in ends_of[value] if end.regathered_at < i]
        # What a call was handed may not have been read before.
        end = before[-1] if before else EndOfValue(value, max(i - 1, 0))
        out.append(RegatheredCopy(a, i, early_at, end, product))
    return out


def _starts(
    actions: Sequence[Action], liveness: Liveness, assignment: Assignment, unfusible: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Index of the reshard of a copy that is made again -> index from when it is in memory, and the product before."""
    after = {(t, op): awaited for t, op, awaited in assignment.regather_after}
    made_at: dict[int, int] = {}  # tensor -> index of what makes it
    moved_at: dict[int, int] = {}  # tensor -> index of its last reshard
    start, product, out = 0, -1, {}
    for i, a in enumerate(actions):
        if isinstance(a, RunOperator):
            made = assignment.program.operators[a.op].results
            if a.op in unfusible:
                start, product = i, made[0] if made else -1
        elif isinstance(a, RunCall):
            start, product = i + 1, -1
            made = [
                *a.call.results,
                *(v[0] for body in a.returns for v in body if not isinstance(v, Literal)),
            ]
        else:
            if a.regathered:
                awaited = awaited_values(assignment.program, liveness.materialized, a.reader, a.tensor)
                there = [made_at.get(t, -1) for t in awaited]
                named = after.get((a.tensor, a.reader), -1)
                there += [made_at.get(named, -1), moved_at.get(named, -1)]
                is_slice = all(s.kind == "slice" for s in a.steps)
                in_memory = product >= 0 and (liveness.materialized[product] or product in moved_at)
                out[i] = (i if is_slice else max(start, 1 + max(there))), product if in_memory else -1
            moved_at[a.tensor] = i
            continue
        made_at |= dict.fromkeys(made, i)
    return out
