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

from jshard._core.arrays import Floats, Ints
from jshard._cost import collectives
from jshard._cost.reshard_steps import apply_step
from jshard._program.memory.liveness import Liveness
from jshard._program.memory.unfusible import unfusible_operators
from jshard._schedule.peak import PeakProfile, peak_profile
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

    Else, and with a limit of 0, that of nearly least peak. None where no copy is shared. The program is one without loops
    and branches.
    """
    arrays = made.arrays
    assert arrays is not None and not made.assignment.regather
    everywhere = _splits(arrays, live_ranges(arrays, liveness, frozenset(donated)))
    if not everywhere:
        return None
    split = _with_splits(made, everywhere, liveness, donated)
    split = _after_products(split, liveness, donated, limit)
    after = split.schedule.assignment.regather_after
    made = dataclasses.replace(made, assignment=dataclasses.replace(made.assignment, regather_after=after))
    gaps = _gaps(split.schedule, liveness, donated)
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
    arrays = split.schedule.arrays
    assert arrays is not None
    for _ in range(_ROUNDS_AFTER_PRODUCTS):
        assignment = dataclasses.replace(arrays.assignment, regather_after=after)
        arrays = dataclasses.replace(arrays, assignment=assignment)
        ranges = live_ranges(arrays, liveness, frozenset(donated))
        more = _early_above(arrays, liveness, ranges, limit or _NEAR_PEAK * ranges.over_time.max())
        if more <= after:
            break
        after |= more
    if not after:
        return split
    made = schedule(arrays.assignment)
    later = SplitSchedule(made, peak_profile(made, liveness, donated))
    return later if later.profile.peak <= split.profile.peak else split


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
    scopes, found = _scope_of_reader(arrays), set()
    for m in copies.tolist():
        before = np.where(runs < arrays.reshard_at[m], runs, -1)
        product = int(before.argmax())
        if before[product] < 0:
            continue
        result = int(a.result[a.result_begin[product]])
        moved = ((arrays.tensor == result) & (arrays.reshard_at < arrays.reshard_at[m])).any()
        same_scope = program.scopes.def_scope[result] == scopes[m]
        if same_scope and (moved or liveness.materialized[result]):
            found.add((int(arrays.tensor[m]), int(arrays.reader[m]), result))
    return frozenset(found)


def _splits(arrays: ScheduleArrays, ranges: LiveRanges) -> frozenset[tuple[int, int]]:
    """(tensor, operator) for each reader but the first of a copy that holds more than what it is made from.

    What is in memory to the end anyway, as an argument that is not donated, counts as nothing.
    """
    a, n = arrays.assignment.program.use_def, len(arrays.result_layout)
    freed_at = ranges.freed_at[arrays.source_value]
    source_bytes = np.where(freed_at >= arrays.num_actions, 0.0, ranges.size[arrays.source_value])
    larger = ~arrays.only_slices & (arrays.reader >= 0) & (ranges.size[n:] > source_bytes)
    read = np.flatnonzero(arrays.read_value >= n)
    copy = arrays.read_value[read] - n
    later = larger[copy] & (a.use_op[read] != arrays.reader[copy])
    return frozenset(zip(a.use_tensor[read[later]].tolist(), a.use_op[read[later]].tolist(), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class _Gaps:
    """Between readers of equal copies that are all made again, the most seconds for a byte first.

    - `pairs`: (tensor, operator) of the later reader.
    - `freed_at`, `early_at`: the action after which the copy before is gone, and that from which the later one counts.
    - `over_time`: (actions,) bytes without any of them.
    """

    pairs: tuple[tuple[int, int], ...]
    freed_at: Ints
    early_at: Ints
    nbytes: Floats
    over_time: Floats

    def kept_within(self, room: float) -> frozenset[tuple[int, int]]:
        """The gaps over which copies can be kept within so many bytes; those that take none in any case."""
        live, kept = self.over_time.copy(), []
        free = self.early_at <= self.freed_at
        for g in [*np.flatnonzero(free).tolist(), *np.flatnonzero(~free).tolist()]:
            freed, early, nbytes = int(self.freed_at[g]), int(self.early_at[g]), float(self.nbytes[g])
            if free[g]:
                live[early:freed] -= nbytes  # one copy in place of two
            elif live[freed:early].max() + nbytes <= room:
                live[freed:early] += nbytes
            else:
                continue
            kept.append(self.pairs[g])
        return frozenset(kept)


def _gaps(split: Schedule, liveness: Liveness, donated: Collection[int]) -> _Gaps:
    """The gaps of a schedule with all live ranges split."""
    arrays = split.arrays
    assert arrays is not None
    ranges = live_ranges(arrays, liveness, frozenset(donated))
    n = len(arrays.result_layout)
    again = np.flatnonzero(arrays.regathered)
    # The copy before: the one made last of equal tensor, layout and scope.
    key = (_scope_of_reader(arrays) * n + arrays.tensor) * len(arrays.layouts) + arrays.target
    order = np.lexsort((arrays.reshard_at, key))
    before = np.empty(len(order), dtype=np.int64)
    before[order[1:]] = order[:-1]
    freed_at = ranges.freed_at[n + before[again]] + 1
    early_at, nbytes = ranges.early_at[again], ranges.size[n + again]
    saved = _seconds(arrays, again) / np.maximum(nbytes, 1.0)
    rank = np.lexsort((early_at - freed_at, -saved))
    pairs = tuple([(int(arrays.tensor[m]), int(arrays.reader[m])) for m in again[rank].tolist()])
    return _Gaps(pairs, freed_at[rank], early_at[rank], nbytes[rank], ranges.over_time[1:])


def _scope_of_reader(arrays: ScheduleArrays) -> Ints:
    """(reshards,) the scope in which each is made for its reader."""
    program = arrays.assignment.program
    first_use = program.use_def.use_begin[np.maximum(arrays.reader, 0)]
    return program.scopes.use_scope[np.minimum(first_use, len(program.scopes.use_scope) - 1)]


def _seconds(arrays: ScheduleArrays, reshards: Ints) -> Floats:
    """(reshards,) seconds of the collectives of some reshards."""
    program, topology = arrays.assignment.program, arrays.assignment.topology
    known: dict[tuple[int, int], float] = {}
    out = []
    for m in reshards.tolist():
        key = int(arrays.path[m]), program.tensors[arrays.tensor[m]].nbytes
        if key not in known:
            layout, total = arrays.layouts[arrays.source[m]], 0.0
            for step in arrays.paths[key[0]]:
                if step.kind != "slice":
                    sent = key[1] / layout.pieces(topology.mesh)
                    total += float(collectives.collective(step.kind, step.axes, sent, topology).seconds)
                layout = apply_step(step, layout)
            known[key] = total
        out.append(known[key])
    return np.array(out)
