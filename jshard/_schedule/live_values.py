"""Which values are in memory at which operator: the intervals behind the memory curve, for reports.

The peak needs sums only (`peak.py`); these are its summands. What an operator holds beside values while it runs (the
workspace of a kernel, a transposed copy) is in the curve and belongs to no value.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jshard._program.memory.liveness import Liveness
from jshard._schedule.assignment import Value
from jshard._schedule.peak_reference import PeakWalk
from jshard._schedule.peak_vectorized import classes_of_values, live_ranges, tensor_of
from jshard._schedule.schedule import Schedule


class LiveInterval(NamedTuple):
    """A value in memory: its tensor, bytes on a device, class as in `PeakProfile.by_class`, and its operators.

    `first` and `last` are the positions, among the operators that were asked about, of the first and the last one that
    runs while the value is in memory.
    """

    tensor: int
    nbytes: float
    kind: str
    first: int
    last: int


def live_intervals(
    schedule: Schedule, liveness: Liveness, donated: Collection[int], operators: Sequence[int]
) -> list[LiveInterval]:
    """The values that are in memory while one of `operators` runs; `donated` are flat indices of arguments."""
    if schedule.arrays is not None:
        return _of_arrays(schedule, liveness, donated, operators)
    walk = _RecordingWalk(schedule, liveness)
    walk.profile(frozenset(donated))
    return walk.intervals(operators)


def _of_arrays(
    schedule: Schedule, liveness: Liveness, donated: Collection[int], operators: Sequence[int]
) -> list[LiveInterval]:
    arrays = schedule.arrays
    assert arrays is not None
    ranges = live_ranges(arrays, liveness, frozenset(donated))
    values = np.flatnonzero(ranges.size > 0)
    run_at = arrays.run_at[np.asarray(operators, dtype=np.int64)]
    order = np.argsort(run_at, kind="stable")
    # Positions in the order of execution; both are lists in the order of the program, which is the same.
    first = np.searchsorted(run_at[order], ranges.made_at[values], side="left")
    last = np.searchsorted(run_at[order], ranges.freed_at[values], side="right") - 1
    kind, names = classes_of_values(arrays, values, ranges.outputs)
    tensors = tensor_of(arrays)[values]
    return [
        LiveInterval(int(t), float(b), names[k], int(i), int(j))
        for t, b, k, i, j in zip(tensors, ranges.size[values], kind, first, last, strict=True)
        if i <= j
    ]


class _RecordingWalk(PeakWalk):
    """The walk of `peak_reference.py`, which also notes how many changes of memory came before each operator."""

    def __init__(self, schedule: Schedule, liveness: Liveness):
        super().__init__(schedule, liveness, None)
        self.changes_before: dict[int, int] = {}

    def record_live(self, op: int, live: float) -> None:
        super().record_live(op, live)
        if op >= 0:
            self.changes_before[op] = len(self.changes)

    def intervals(self, operators: Sequence[int]) -> list[LiveInterval]:
        """The intervals of every value that was in memory at some operator; `operators` run in this order."""
        ran = sorted(
            (self.changes_before[op], k) for k, op in enumerate(operators) if op in self.changes_before
        )
        counts, positions = [n for n, _ in ran], [k for _, k in ran]
        begun: dict[Value, list[tuple[int, float, bool]]] = {}
        out: list[LiveInterval] = []

        def end(v: Value, until: int) -> None:
            at, nbytes, by_reshard = begun[v].pop()
            i, j = bisect.bisect_right(counts, at), bisect.bisect_right(counts, until) - 1
            if i <= j:
                inside = positions[i : j + 1]
                out.append(LiveInterval(v[0], nbytes, self.class_of(v, by_reshard), min(inside), max(inside)))

        for number, (v, nbytes, by_reshard) in enumerate(self.changes):
            if nbytes > 0:
                begun.setdefault(v, []).append((number, nbytes, by_reshard))
            elif nbytes < 0:
                end(v, number)
        for v, parts in begun.items():
            for _ in range(len(parts)):
                end(v, len(self.changes))
        return out
