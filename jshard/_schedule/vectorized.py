"""The schedule of a program without inner blocks as arrays, computed by numpy: the vectorised twin of `writer.py`.

Problem.  Fifty thousand operators make a hundred thousand objects of a schedule. Lowering needs them; a plan needs the
few that communicate, and what is in memory when.

Idea.  In a program without inner blocks the writer's rules are simple. A tensor is resharded to its stored layout just
before the first reader that does not take it as it is made, and from there to any other layout just before the first
reader that needs that one. So reshards are the first of equal (tensor, layout) pairs among the reads, and numpy finds
them all at once. `tests/schedule/test_vectorized.py` compares the two.

A *value* is a tensor in a layout: value t is tensor t as it is made, value `tensors + m` what the m-th reshard makes.

Worked case.  Tensor 0 is made in layout A, stored in B, and read by operators 1, 2 and 3 in layouts B, C and C: reads
0, 1 and 2.

1. `_layouts`: the reads need B, C, C; the tensor is made in A and stored in B.
2. `_to_stored_layouts`: read 0 is the first that does not take A: reshard A -> B before read 0.
3. `_to_readers`: reads 1 and 2 need C, not B; the first of the pair (0, C) is read 1: reshard B -> C before read 1.
4. `_order_actions`: reshard A -> B, run 1, reshard B -> C, run 2, run 3.
5. `_values`: read 0 reads the value of the first reshard, reads 1 and 2 that of the second.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._core.layout import Layout
from jshard._core.row_codes import row_codes
from jshard._cost.resharding import ReshardStep
from jshard._program.graph import Program
from jshard._schedule.assignment import Assignment


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleArrays:
    """All reshards in order, and the position of every reshard and operator among the actions, numbered from 0.

    Layouts are numbers into `layouts`, values those of the module's docstring.
    """

    assignment: Assignment
    layouts: tuple[Layout, ...]
    num_shards: Floats  # (layouts,)
    result_layout: Ints  # (tensors,) the layout in which each is made
    tensor: Ints  # (reshards,)
    source: Ints  # (reshards,) layouts
    target: Ints  # (reshards,) layouts
    source_value: Ints  # (reshards,) the value that is resharded
    reader: Ints  # (reshards,) the operator that it is for, -1 for several
    regathered: Bools  # (reshards,) whether the backward pass reshards for itself
    path: Ints  # (reshards,) number of its path
    paths: tuple[tuple[ReshardStep, ...], ...]
    read_value: Ints  # (reads,) the value that is read
    reshard_at: Ints  # (reshards,) its position among the actions
    run_at: Ints  # (operators,) the same; -1 for arguments and results, which are no actions
    first_collective: Ints  # (actions,) number of the first collective, -1 for none
    num_actions: int

    @functools.cached_property
    def only_slices(self) -> Bools:
        """(reshards,) whether all steps of the path are local slices."""
        return np.array([all(s.kind == "slice" for s in p) for p in self.paths], dtype=bool)[self.path]


def schedule_arrays(assignment: Assignment) -> ScheduleArrays | None:
    """The schedule of an assignment as arrays; None for a program with inner blocks."""
    program = assignment.program
    runs = _operators_in_order(program)
    if runs is None:
        return None
    a, by = program.use_def, _layouts(assignment)
    to_readers, in_backward = _to_readers(assignment, by)
    unordered = _concatenate(_to_stored_layouts(program, by), to_readers)
    order, reshard_at, run_at = _order_actions(program, runs, unordered)
    reshards = _Reshards(*(getattr(unordered, f.name)[order] for f in dataclasses.fields(unordered)))

    path, paths, path_collectives = _paths(assignment, list(by.layouts), reshards)
    collectives = np.zeros(len(reshard_at) + len(runs), dtype=np.int64)
    collectives[reshard_at] = path_collectives[path]
    collectives[run_at[runs]] = _internal_collective_counts(assignment)[runs]
    mesh = assignment.topology.mesh
    before_backward = np.zeros_like(reshards.tensor)
    return ScheduleArrays(
        assignment=assignment,
        layouts=tuple(by.layouts),
        num_shards=np.array([layout.pieces(mesh) for layout in by.layouts], dtype=np.float64),
        result_layout=by.result,
        tensor=reshards.tensor,
        source=reshards.source,
        target=reshards.target,
        source_value=_values(reshards, by, reshards.tensor, reshards.source, before_backward),
        reader=reshards.reader,
        regathered=reshards.regathered > 0,
        path=path,
        paths=paths,
        read_value=_values(reshards, by, a.use_tensor, by.read, in_backward),
        reshard_at=reshard_at,
        run_at=run_at,
        first_collective=np.where(collectives > 0, np.cumsum(collectives) - collectives, -1),
        num_actions=len(collectives),
    )


def _operators_in_order(program: Program) -> Ints | None:
    """The operators that run, if the program is a straight line and they are numbered in that order; else None."""
    if not all([type(step) is int for step in program.body.steps]):
        return None
    runs = np.array(program.body.steps, dtype=np.int64)
    outputs = np.array(program.outputs, dtype=np.int64)
    return runs if (np.diff(np.concatenate([runs, outputs])) > 0).all() else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Layouts:
    """Layouts of an assignment as numbers: in the order of `layouts`."""

    layouts: dict[Layout, int]
    read: Ints  # (reads,) in which each operand is read
    result: Ints  # (tensors,) in which each is made
    stored: Ints  # (tensors,) in which each is stored for its readers


def _layouts(assignment: Assignment) -> _Layouts:
    """Step 1: the layouts in which tensors are made, stored and read."""
    a = assignment.program.use_def
    state_class, representatives = assignment.state_classes
    layouts: dict[Layout, int] = {}
    # The layouts of all operands of one operator of each class, one after the other; of its results likewise.
    flat: tuple[list[int], list[int]] = ([], [])
    begin: tuple[list[int], list[int]] = ([], [])
    for op in representatives:
        candidates, state = assignment.states[op], assignment.state[op]
        for k, side in enumerate((candidates.operands, candidates.results)):
            begin[k].append(len(flat[k]))
            flat[k].extend([layouts.setdefault(one.layout(state), len(layouts)) for one in side])
    operands, results = (np.array(side, dtype=np.int64) for side in flat)
    operand_begin, result_begin = (np.array(side, dtype=np.int64) for side in begin)
    read = operands[operand_begin[state_class[a.use_op]] + a.use_operand]
    result = results[result_begin[state_class[a.def_op]] + a.def_result]
    stored = result.copy()
    if assignment.relay:
        relays = [layouts.setdefault(layout, len(layouts)) for layout in assignment.relay.values()]
        stored[np.fromiter(assignment.relay, np.int64, len(relays))] = relays
    return _Layouts(layouts, read, result, stored)


@dataclasses.dataclass(frozen=True, eq=False)
class _Reshards:
    """Reshards, (reshards,) each. `read`: the first read that needs it, -1 for before the first operator."""

    tensor: Ints
    source: Ints
    target: Ints
    reader: Ints
    regathered: Ints
    read: Ints


def _concatenate(*parts: _Reshards) -> _Reshards:
    names = [f.name for f in dataclasses.fields(_Reshards)]
    return _Reshards(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _to_stored_layouts(program: Program, by: _Layouts) -> _Reshards:
    """Step 2: one reshard for each tensor that some reader does not take as it is made, to its stored layout.

    Captured constants are stored before anything runs; any other tensor before the first such read.
    """
    a = program.use_def
    constants = np.flatnonzero(a.has_kind("const")[a.def_op] & (by.stored != by.result))
    resharded = np.flatnonzero(by.read != by.result[a.use_tensor])
    stored_elsewhere = resharded[by.stored[a.use_tensor[resharded]] != by.result[a.use_tensor[resharded]]]
    tensors, first = np.unique(a.use_tensor[stored_elsewhere], return_index=True)
    others = ~np.isin(tensors, constants)
    tensor = np.concatenate([constants, tensors[others]])
    read = np.concatenate([np.full(len(constants), -1), stored_elsewhere[first[others]]])
    several, never = np.full(len(tensor), -1), np.zeros(len(tensor), dtype=np.int64)
    return _Reshards(tensor, by.result[tensor], by.stored[tensor], several, never, read)


def _to_readers(assignment: Assignment, by: _Layouts) -> tuple[_Reshards, Ints]:
    """Step 3: one reshard from the stored layout for each layout in which a tensor is read otherwise.

    Also (reads,) 1 where the read takes a copy that the backward pass makes for itself: from its first reader on, in
    each (tensor, layout), if the assignment reshards again.
    """
    a = assignment.program.use_def
    neither = (by.read != by.result[a.use_tensor]) & (by.read != by.stored[a.use_tensor])
    reads = np.flatnonzero(neither)
    pair = a.use_tensor[reads] * len(by.layouts) + by.read[reads]
    in_backward = np.zeros(len(a.use_tensor), dtype=np.int64)
    if assignment.regather:
        in_backward[reads] = _set_from_first(pair, assignment.reshards_again[a.use_op[reads]])
    reads = reads[np.sort(np.unique(2 * pair + in_backward[reads], return_index=True)[1])]
    tensor = a.use_tensor[reads]
    made = _Reshards(
        tensor, by.stored[tensor], by.read[reads], a.use_op[reads], in_backward[reads], reads
    )  # fmt: skip
    return made, in_backward


def _set_from_first(group: Ints, flag: Bools) -> Ints:
    """For each row 1 if its flag, or that of an earlier row of the same group, is set, else 0.

    >>> _set_from_first(np.array([7, 3, 7, 3, 7]), np.array([False, True, True, False, False])).tolist()
    [0, 1, 1, 1, 1]
    """
    by_group = np.argsort(group, kind="stable")
    rank = np.cumsum(np.diff(group[by_group], prepend=-1) != 0)
    out = np.zeros(len(group), dtype=np.int64)
    # A running maximum that starts anew in each group, because the ranks are two apart.
    out[by_group] = np.maximum.accumulate(2 * rank + flag[by_group]) - 2 * rank
    return out


_RUN, _STORE, _RESHARD = 0, 1, 2  # actions at one read: the operator whose reads end before it runs first


def _order_actions(program: Program, runs: Ints, reshards: _Reshards) -> tuple[Ints, Ints, Ints]:
    """Step 4: the reshards in order, (reshards in order,) their positions, and (operators,) the operators' positions."""
    m = len(reshards.tensor)
    at_read = np.concatenate([reshards.read, program.use_def.use_begin[runs + 1]])
    kind = np.concatenate([np.where(reshards.reader < 0, _STORE, _RESHARD), np.full(len(runs), _RUN)])
    order = np.argsort(3 * at_read + kind, kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    reshard_order = np.argsort(position[:m])
    run_at = np.full(len(program.operators), -1)
    run_at[runs] = position[m:]
    return reshard_order, position[:m][reshard_order], run_at


def _values(reshards: _Reshards, by: _Layouts, tensor: Ints, layout: Ints, regathered: Ints) -> Ints:
    """Step 5: the values of tensors in layouts: as they are made, or as the reshard that makes them."""
    codes = 2 * (reshards.tensor * len(by.layouts) + reshards.target) + reshards.regathered
    by_code = np.argsort(codes)
    value = tensor.copy()
    copies = np.flatnonzero(layout != by.result[tensor])
    wanted = 2 * (tensor[copies] * len(by.layouts) + layout[copies]) + regathered[copies]
    reshard = by_code[np.searchsorted(codes[by_code], wanted)]
    assert np.array_equal(codes[reshard], wanted), "a value is read that no reshard makes"
    value[copies] = len(by.result) + reshard
    return value


def _paths(
    assignment: Assignment, layouts: Sequence[Layout], reshards: _Reshards
) -> tuple[Ints, tuple[tuple[ReshardStep, ...], ...], Ints]:
    """(reshards,) the path of each, the distinct paths, and how many collectives each path has."""
    a = assignment.program.use_def
    combined = np.ones(len(a.def_op), dtype=np.int64)
    sums = assignment.combined_sums
    combined[np.fromiter(sums, np.int64, len(sums))] = list(sums.values())
    tensor, source, target = reshards.tensor, reshards.source, reshards.target
    key = row_codes(a.aval_id[tensor], source, target, combined[tensor])
    _, first, path = np.unique(key, return_index=True, return_inverse=True)
    paths = tuple(
        assignment.reshard_steps(int(tensor[m]), layouts[int(source[m])], layouts[int(target[m])])
        for m in first.tolist()
    )
    return path, paths, np.array([sum(s.kind != "slice" for s in p) for p in paths], dtype=np.int64)


def _internal_collective_counts(assignment: Assignment) -> Ints:
    """(operators,) how many collectives each operator emits itself."""
    state_class, representatives = assignment.state_classes
    alone = [len(assignment.internal_collectives(op, {})) for op in representatives]
    counts = np.array(alone, dtype=np.int64)[state_class]
    for op in assignment.received_edges:
        counts[op] = len(assignment.internal_collectives(op))
    return counts
