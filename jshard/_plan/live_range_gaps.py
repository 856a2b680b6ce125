"""Between two readers of one copy is a gap, over which it is kept or made again: which there are, and what keeping takes.

Of a schedule as arrays, and of one as objects, which may have loops and branches: there the actions of a body come before
their call, and what a body is handed is in memory all the while.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._cost import collectives
from jshard._cost.reshard_steps import ReshardStep, apply_step
from jshard._program.graph import Literal
from jshard._program.memory.liveness import Liveness
from jshard._schedule.assignment import Value
from jshard._schedule.buffers import BufferSizes
from jshard._schedule.peak_reference import finished_walk
from jshard._schedule.peak_vectorized import LiveRanges, live_ranges
from jshard._schedule.schedule import Action, Reshard, RunCall, Schedule
from jshard._schedule.vectorized import ScheduleArrays


@dataclasses.dataclass(frozen=True, eq=False)
class Gaps:
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


def splits(made: Schedule, liveness: Liveness, donated: Collection[int]) -> frozenset[tuple[int, int]]:
    """(tensor, operator) for each reader but the first of a copy that holds more than what it is made from.

    What is in memory to the end anyway, as an argument that is not donated, counts as nothing.
    """
    if made.arrays is not None:
        return splits_of_arrays(made.arrays, live_ranges(made.arrays, liveness, frozenset(donated)))
    program, values = made.assignment.program, made.assignment.values
    kept = [i for k, i in enumerate(program.inputs) if k not in donated]
    held = {values[program.operators[i].results[0]] for i in kept}
    held |= {v for v in made.outputs if not isinstance(v, Literal)}
    return frozenset(_splits_of_actions(made.actions, BufferSizes(made.assignment, liveness, {}), held))


def gaps_of(split: Schedule, liveness: Liveness, donated: Collection[int]) -> Gaps:
    """The gaps of a schedule with all live ranges split."""
    if split.arrays is not None:
        return _gaps_of_arrays(split.arrays, liveness, donated)
    return _gaps_of_actions(split, liveness, donated)


def splits_of_arrays(arrays: ScheduleArrays, ranges: LiveRanges) -> frozenset[tuple[int, int]]:
    """As `splits`."""
    a, n = arrays.assignment.program.use_def, len(arrays.result_layout)
    freed_at = ranges.freed_at[arrays.source_value]
    source_bytes = np.where(freed_at >= arrays.num_actions, 0.0, ranges.size[arrays.source_value])
    larger = ~arrays.only_slices & (arrays.reader >= 0) & (ranges.size[n:] > source_bytes)
    read = np.flatnonzero(arrays.read_value >= n)
    copy = arrays.read_value[read] - n
    later = larger[copy] & (a.use_op[read] != arrays.reader[copy])
    return frozenset(zip(a.use_tensor[read[later]].tolist(), a.use_op[read[later]].tolist(), strict=True))


def _gaps_of_arrays(arrays: ScheduleArrays, liveness: Liveness, donated: Collection[int]) -> Gaps:
    ranges = live_ranges(arrays, liveness, frozenset(donated))
    n = len(arrays.result_layout)
    again = np.flatnonzero(arrays.regathered)
    # The copy before: the one made last of equal tensor, layout and scope.
    key = (scope_of_reader(arrays) * n + arrays.tensor) * len(arrays.layouts) + arrays.target
    order = np.lexsort((arrays.reshard_at, key))
    before = np.empty(len(order), dtype=np.int64)
    before[order[1:]] = order[:-1]
    freed_at = ranges.freed_at[n + before[again]] + 1
    early_at, nbytes = ranges.early_at[again], ranges.size[n + again]
    saved = _seconds(arrays, again) / np.maximum(nbytes, 1.0)
    rank = np.lexsort((early_at - freed_at, -saved))
    pairs = tuple([(int(arrays.tensor[m]), int(arrays.reader[m])) for m in again[rank].tolist()])
    return Gaps(pairs, freed_at[rank], early_at[rank], nbytes[rank], ranges.over_time[1:])


def scope_of_reader(arrays: ScheduleArrays) -> Ints:
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
            source = arrays.layouts[arrays.source[m]]
            known[key] = _seconds_of_steps(arrays.paths[key[0]], source, key[1], topology)
        out.append(known[key])
    return np.array(out)


def _seconds_of_steps(
    steps: Sequence[ReshardStep], source: Layout, nbytes: float, topology: Topology
) -> float:
    layout, total = source, 0.0
    for step in steps:
        if step.kind != "slice":
            sent = nbytes / layout.pieces(topology.mesh)
            total += float(collectives.collective(step.kind, step.axes, sent, topology).seconds)
        layout = apply_step(step, layout)
    return total


# The same of a schedule of objects, with loops and branches.


def _splits_of_actions(
    actions: Sequence[Action], sizes: BufferSizes, held: Collection[Value]
) -> Iterator[tuple[int, int]]:
    """As `splits`, of a list of actions and of those inside.

    `held`: values that are in memory all the while, as what a loop's body is handed.
    """
    copies: dict[Value, Reshard] = {}
    for a in actions:
        if isinstance(a, RunCall):
            for entry, body in zip(a.entry, a.bodies, strict=True):
                yield from _splits_of_actions(body, sizes, entry)
        elif isinstance(a, Reshard):
            value, source = (a.tensor, a.target), (a.tensor, a.source)
            larger = sizes.nbytes(value) > (0.0 if source in held else sizes.result_nbytes(source))
            if a.reader >= 0 and larger and any(step.kind != "slice" for step in a.steps):
                copies[value] = a
        else:
            found = [copies[v] for v in a.reads if not isinstance(v, Literal) and v in copies]
            yield from ((copy.tensor, a.op) for copy in found if copy.reader != a.op)


def _gaps_of_actions(split: Schedule, liveness: Liveness, donated: Collection[int]) -> Gaps:
    walk = finished_walk(split, liveness, donated)
    program, topology = split.assignment.program, split.assignment.topology
    saved = []
    for gap in walk.gaps:
        a, nbytes = gap.reshard, program.tensors[gap.reshard.tensor].nbytes
        seconds = a.repeat * _seconds_of_steps(a.steps, a.source, nbytes, topology)
        saved.append(seconds / max(gap.nbytes, 1.0))
    order = sorted(
        range(len(saved)), key=lambda g: (-saved[g], walk.gaps[g].early_at - walk.gaps[g].freed_at)
    )
    gaps = [walk.gaps[g] for g in order]
    return Gaps(
        tuple([(gap.reshard.tensor, gap.reshard.reader) for gap in gaps]),
        np.array([gap.freed_at for gap in gaps], dtype=np.int64),
        np.array([gap.early_at for gap in gaps], dtype=np.int64),
        np.array([gap.nbytes for gap in gaps]),
        np.array(walk.over_time),
    )
