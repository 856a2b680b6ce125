"""Communication that hides under products: of each collective of a schedule the seconds for which nothing waits.

The compute stream runs the operators one after the other and waits for every collective that its backend runs
synchronously (`Chip.async_kinds` names the others; of an all-to-all that is sent as permutes, the transfer is one). One that
is asynchronous runs beside the products between the one that its operand waits for and the one that waits for its result
(`_schedule/overlap_windows.py`), each second of a product used once (`_schedule/hidden_seconds.py`); what does not fit is
waited for. So the step is between the longer of compute and communication, and their sum. A result that arrives early is in
memory for longer: a collective starts no earlier than the budget has room for it.

Collectives that the compiler combines start when the last of their operands is ready, and end for the first reader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jshard._cost.all_to_all_kind import asynchronous_seconds
from jshard._plan.rows import CollectiveRow
from jshard._schedule.hidden_seconds import Transfer, hide
from jshard._schedule.overlap_windows import Move, overlap_windows
from jshard._schedule.peak_profile import PeakProfile
from jshard._schedule.schedule import Schedule


Rows = Sequence[tuple[CollectiveRow, int]]


def with_hidden_seconds(
    rows: Rows, made: Schedule, seconds: Mapping[int, float], profile: PeakProfile, limit: float | None
) -> tuple[tuple[CollectiveRow, int], ...]:
    """The collectives of a schedule with the seconds of each execution that hide.

    Arguments:

    - `seconds`: of each operator in all its runs.
    - `profile`, `limit`: the memory of the schedule, and the bytes that a device may hold; None for any.
    """
    topology = made.assignment.topology
    may_hide = {
        row.id: asynchronous_seconds(row.kind, row.axes, row.bytes, row.seconds, topology) for row, _ in rows
    }
    if not any(may_hide.values()):
        return tuple(rows)
    windows = overlap_windows(made)
    groups = _combined(windows.moves, {row.id: row for row, _ in rows}, may_hide, made)
    room = None
    if limit is not None:
        held = [max([profile.curve.get(op, 0.0) for op in s], default=0.0) for s in windows.segments]
        room = [max(0.0, limit - h) for h in held]
    products = [seconds.get(op, 0.0) if op >= 0 else 0.0 for op in windows.products]
    found = hide(products, [g.transfer for g in groups], room)
    share = {
        number: part / g.transfer.seconds
        for g, part in zip(groups, found, strict=True)
        for number in g.numbers
    }
    return tuple(
        (dataclasses.replace(row, hidden=may_hide[row.id] * share.get(row.id, 0.0)), op) for row, op in rows
    )


@dataclasses.dataclass(frozen=True)
class _Group:
    """Collectives that are sent as one: their numbers, and the transfer."""

    numbers: tuple[int, ...]
    transfer: Transfer


def _combined(
    moves: Sequence[Move], rows: Mapping[int, CollectiveRow], may_hide: Mapping[int, float], made: Schedule
) -> list[_Group]:
    """The asynchronous collectives, with those that the compiler combines as one: equal in kind and axes, up to a size."""
    out: list[_Group] = []
    most = made.assignment.topology.chip.combine_bytes
    last: dict[tuple[str, tuple[str, ...]], int] = {}  # the group that is being filled
    for move in moves:
        nbytes = _result_bytes(move, made)
        for number in move.reshard.collective_ids:
            row = rows.get(number)
            if row is None or not may_hide[number]:
                continue
            alone = _Group((number,), Transfer(may_hide[number], move.begin, move.end, nbytes))
            key = (row.kind, tuple(sorted(row.axes)))
            both = _together(out[last[key]], alone, most) if key in last else None
            if both is not None:
                out[last[key]] = both
            else:
                last[key] = len(out)
                out.append(alone)
    return out


def _together(a: _Group, b: _Group, most: float) -> _Group | None:
    """Two groups as one; None if that is too large, or if one is needed before the other is ready."""
    nbytes = a.transfer.nbytes + b.transfer.nbytes
    begin = max(a.transfer.begin, b.transfer.begin)
    end = min(a.transfer.end, b.transfer.end)
    if nbytes > most or begin > end:
        return None
    return _Group(
        a.numbers + b.numbers, Transfer(a.transfer.seconds + b.transfer.seconds, begin, end, nbytes)
    )


def _result_bytes(move: Move, made: Schedule) -> float:
    """Bytes of what a reshard leaves on a device."""
    tensor, mesh = made.assignment.program.tensors[move.reshard.tensor], made.assignment.topology.mesh
    return float(tensor.itemsize * math.prod(move.reshard.target.local_shape(tensor.shape, mesh)))
