"""Live-range splitting: which shared copies are made again for a later reader instead of being kept since an earlier one.

Problem.  Readers of a tensor in one layout share a copy, which is in memory from the first of them to the last. The network
charges each reader for a copy of its own and counts the bytes of that alone, unless the tensor is stored in that layout
(`_network/reshard_edges.py`). So the schedule of what a search found within a budget may be cheaper than the budget needs,
and hold more. Made again for each reader (Fully Sharded Data Parallel: reshard after forward), the copies cost and hold what
the network counted.

Idea.  Between two readers of a copy is a *gap*. First every gap splits the live range of its copy; then, those first that
save the most seconds for a byte, the copy is kept over each gap where the memory of the schedule has room for it. What
comes out costs no more than the network says, and holds at most the limit.

Worked case.  The weights of a model's last product, a quarter of a GiB gathered, are read for its result and, after the
loss, for its derivative; at the peak in between 0.1 GiB are free. They are gathered twice. Those of a layer that is computed
again right before its derivative are kept from the one to the other: there is room.

Compilers begin the collective of a copy that is made again beside the product before. Where that product leaves a large
partial sum (the derivative of the same weights), both are in memory at the peak; the copy then waits for its result
(`Assignment.regather_after`), and for nothing else that it did not wait for before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from jshard._core.arrays import Ints
from jshard._plan.live_range_gaps import gaps_of, scope_of_reader, splits
from jshard._program.memory.liveness import Liveness
from jshard._program.memory.unfusible import unfusible_operators
from jshard._schedule.peak import PeakProfile, peak_profile
from jshard._schedule.peak_reference import finished_walk
from jshard._schedule.peak_vectorized import LiveRanges, live_ranges
from jshard._schedule.schedule import Schedule, schedule
from jshard._schedule.vectorized import ScheduleArrays


_ROUNDS_AFTER_PRODUCTS = 6  # of looking for copies that are in memory early above the limit
_NEAR_PEAK = 0.98  # of the peak: without a limit, where copies are looked for that are in memory early
_ROUNDS = 3  # of keeping copies, each under a limit lowered by what the schedule of the round before exceeded


@dataclasses.dataclass(frozen=True, eq=False)
class SplitSchedule:
    """A schedule with some live ranges split, and its memory."""

    schedule: Schedule
    profile: PeakProfile


def split_live_ranges(
    made: Schedule, liveness: Liveness, donated: Collection[int], limit: float
) -> SplitSchedule | None:
    """The schedule with live ranges of copies split so that its peak keeps a limit in bytes, where that can be.

    Else, and with a limit of 0, that of nearly least peak. None where no copy is shared.
    """
    assert not made.assignment.regather
    everywhere = splits(made, liveness, donated)
    if not everywhere:
        return None
    split = _with_splits(made, everywhere, liveness, donated)
    split = _after_products(split, liveness, donated, limit)
    after = split.schedule.assignment.regather_after
    made = dataclasses.replace(made, assignment=dataclasses.replace(made.assignment, regather_after=after))
    gaps = gaps_of(split.schedule, liveness, donated)
    free = gaps.kept_within(0.0)
    least = _with_splits(made, everywhere - free, liveness, donated) if free else split
    # What is kept within that peak may end others' copies, or what they are made from, earlier, and so hold even less.
    kept = gaps.kept_within(least.profile.peak)
    cheaper = least if kept == free else _with_splits(made, everywhere - kept, liveness, donated)
    if cheaper.profile.peak <= least.profile.peak:
        least = cheaper
    if limit <= least.profile.peak:
        return least
    room = limit
    for _ in range(_ROUNDS):
        kept = gaps.kept_within(room)
        if kept == free:
            break
        found = _with_splits(made, everywhere - kept, liveness, donated)
        if found.profile.peak <= limit:
            return found
        room -= found.profile.peak - limit
    return least


def _with_splits(
    made: Schedule, pairs: frozenset[tuple[int, int]], liveness: Liveness, donated: Collection[int]
) -> SplitSchedule:
    again = schedule(dataclasses.replace(made.assignment, regather=pairs))
    return SplitSchedule(again, peak_profile(again, liveness, donated))


def _after_products(
    split: SplitSchedule, liveness: Liveness, donated: Collection[int], limit: float
) -> SplitSchedule:
    """The schedule with copies that are in memory early while it is above the limit made after the product before them."""
    if split.profile.peak <= limit:
        return split
    after = frozenset[tuple[int, int, int]]()
    assignment, arrays = split.schedule.assignment, split.schedule.arrays
    for _ in range(_ROUNDS_AFTER_PRODUCTS):
        assignment = dataclasses.replace(assignment, regather_after=after)
        if arrays is None:
            more = _early_above_in_actions(schedule(assignment), liveness, donated, limit)
        else:
            arrays = dataclasses.replace(arrays, assignment=assignment)
            ranges = live_ranges(arrays, liveness, frozenset(donated))
            more = _early_above(arrays, liveness, ranges, limit or _NEAR_PEAK * ranges.over_time.max())
        if more <= after:
            break
        after |= more
    if not after:
        return split
    made = schedule(assignment)
    later = SplitSchedule(made, peak_profile(made, liveness, donated))
    return later if later.profile.peak <= split.profile.peak else split


def _early_above_in_actions(
    made: Schedule, liveness: Liveness, donated: Collection[int], limit: float
) -> frozenset[tuple[int, int, int]]:
    """As `_early_above`, of a schedule of objects."""
    walk = finished_walk(made, liveness, donated)
    limit = limit or _NEAR_PEAK * walk.peak
    return frozenset(
        (gap.reshard.tensor, gap.reshard.reader, gap.product)
        for gap in walk.gaps
        if gap.product >= 0 and max(walk.over_time[gap.early_at : gap.made_at], default=0.0) > limit
    )


def _early_above(
    arrays: ScheduleArrays, liveness: Liveness, ranges: LiveRanges, limit: float
) -> frozenset[tuple[int, int, int]]:
    """As `after_products`, for the copies that are in memory ahead of their readers while it is above a limit."""
    above = np.concatenate([[0], np.cumsum(ranges.over_time[1:] > limit)])  # actions above it before each
    early = np.flatnonzero(above[np.maximum(arrays.reshard_at, ranges.early_at)] > above[ranges.early_at])
    return after_products(arrays, liveness, early)


def after_products(
    arrays: ScheduleArrays, liveness: Liveness, copies: Ints
) -> frozenset[tuple[int, int, int]]:
    """(tensor, reader, result of the product before) of reshards, for `Assignment.regather_after`.

    Not where awaiting the result would have it written to memory, which it is not otherwise, or brought out of a call.
    """
    if not len(copies):
        return frozenset()
    program = arrays.assignment.program
    a, runs = program.use_def, np.where(unfusible_operators(program), arrays.run_at, -1)
    scopes, found = scope_of_reader(arrays), set()
    for m in copies.tolist():
        before = np.where(runs < arrays.reshard_at[m], runs, -1)
        product = int(before.argmax())
        if before[product] < 0 or a.result_begin[product] == a.result_begin[product + 1]:
            continue
        result = int(a.result[a.result_begin[product]])
        moved = ((arrays.tensor == result) & (arrays.reshard_at < arrays.reshard_at[m])).any()
        same_scope = program.scopes.def_scope[result] == scopes[m]
        if same_scope and (moved or liveness.materialized[result]):
            found.add((int(arrays.tensor[m]), int(arrays.reader[m]), result))
    return frozenset(found)
