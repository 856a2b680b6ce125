"""The schedule of a program without loops and calls, as arrays: which moves there are, and when.

Problem.  Fifty thousand operators make a hundred thousand objects of a schedule. Lowering needs them; a plan
needs the few that communicate, and what is in memory when.

Idea.  In a program without inner blocks the writer's rules (`schedule.py`) are simple. A tensor is moved to the
layout in which it is kept just before the first reader that does not take it as it is made, and from there to
any other layout just before the first reader that wants that one. So moves are the first of equal (tensor, layout)
pairs among the reads, and numpy finds them all at once. Both say the same: `tests/schedule/test_vectorized.py`.

A *value* is a tensor in a layout: tensor t as it is made is value t, what the m-th move makes is value tensors + m.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from jshard._core.layout import Layout
from jshard._core.row_codes import row_codes
from jshard._cost.resharding import ReshardStep
from jshard._program.use_def import Bools, Floats, Ints


if TYPE_CHECKING:
    from jshard._schedule.schedule import Assignment


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleArrays:
    """All moves in order, and the place of every move and operator among all actions.

    Actions are numbered from 0; `move_at` are the numbers of the moves, `run_at` those of the operators (-1: an
    argument or result, which is none). `number` gives an action's first number among the collectives, -1 for none.
    """

    assignment: Assignment
    layouts: tuple[Layout, ...]
    num_shards: Floats  # of each layout
    result_layout: Ints  # (tensors,) the layout in which each is made
    tensor: Ints  # (moves,)
    source: Ints  # (moves,) layouts
    target: Ints
    source_value: Ints  # (moves,) the value that is moved
    reader: Ints  # (moves,) the operator a move is for, -1 for several
    regathered: Bools  # (moves,) whether the backward pass moves for itself
    path: Ints  # (moves,) which of the paths
    paths: tuple[tuple[ReshardStep, ...], ...]
    read_value: Ints  # (reads,) the value that is read
    move_at: Ints
    run_at: Ints  # (operators,)
    first_collective: Ints  # (actions,)
    num_actions: int  # actions

    @functools.cached_property
    def only_slices(self) -> Bools:
        """(moves,) whether all that happens is cutting."""
        return np.array([all(s.kind == "slice" for s in p) for p in self.paths], dtype=bool)[self.path]


def schedule_arrays(assignment: Assignment) -> ScheduleArrays | None:
    """The flat schedule of a choice; None for a program with inner blocks."""
    program = assignment.program
    steps, ends = program.body.steps, program.outputs
    if not all([type(s) is int for s in steps]):
        return None
    runs = np.array(steps, dtype=np.int64)
    outputs = np.array(ends, dtype=np.int64)
    # Also when something is not in the order of its numbers: then order is not what numbers say.
    if (np.diff(np.concatenate([runs, outputs])) <= 0).any():
        return None
    a = program.use_def
    layouts, needed, made = _layouts(assignment)
    kept = made.copy()
    if assignment.relay:
        relays = [layouts.setdefault(lay, len(layouts)) for lay in assignment.relay.values()]
        kept[np.fromiter(assignment.relay, np.int64, len(relays))] = relays
    n_layouts, reads = len(layouts), len(a.use_tensor)
    # Constants are brought into place before anything runs; for the others the first reader decides.
    constants = np.flatnonzero(a.has_kind("const")[a.def_op] & (kept != made))
    other = np.flatnonzero(needed != made[a.use_tensor])
    late = other[kept[a.use_tensor[other]] != made[a.use_tensor[other]]]
    tensors, first = np.unique(a.use_tensor[late], return_index=True)
    new = ~np.isin(tensors, constants)
    keep_tensor = np.concatenate([constants, tensors[new]])
    keep_slot = np.concatenate([np.full(len(constants), -1), late[first[new]]])
    onward = other[needed[other] != kept[a.use_tensor[other]]]
    # From the first reader of the backward pass on, a copy may be one of its own.
    pair = a.use_tensor[onward] * n_layouts + needed[onward]
    by_pair = np.argsort(pair, kind="stable")
    group = np.cumsum(np.diff(pair[by_pair], prepend=-1) != 0)
    phase = np.zeros(reads, dtype=np.int64)
    phase[onward[by_pair]] = (
        np.maximum.accumulate(2 * group + assignment.reshards_again[a.use_op[onward[by_pair]]]) - 2 * group
    )
    first = np.sort(np.unique(2 * pair + phase[onward], return_index=True)[1])
    onward = onward[first]
    n_keep = len(keep_tensor)
    tensor = np.concatenate([keep_tensor, a.use_tensor[onward]])
    source = np.concatenate([made[keep_tensor], kept[a.use_tensor[onward]]])
    target = np.concatenate([kept[keep_tensor], needed[onward]])
    reader = np.concatenate([np.full(n_keep, -1), a.use_op[onward]])
    again = np.concatenate([np.zeros(n_keep, dtype=np.int64), phase[onward]])
    # In order: by read, first what is kept, then what goes on from there; an operator runs after its last read.
    slot = np.concatenate([keep_slot, onward])
    key = np.concatenate([3 * slot + 1 + (np.arange(len(slot)) >= n_keep), 3 * a.use_begin[runs + 1]])
    order = np.argsort(key, kind="stable")
    at = np.empty(len(order), dtype=np.int64)
    at[order] = np.arange(len(order))
    moved = np.argsort(at[: len(slot)])
    tensor, source, target, reader = tensor[moved], source[moved], target[moved], reader[moved]
    again = again[moved]
    move_at, run_at = at[: len(slot)][moved], np.full(len(program.operators), -1)
    run_at[runs] = at[len(slot) :]
    # The value of each read and of each move's source.
    pair = 2 * (tensor * n_layouts + target) + again
    by_pair = np.argsort(pair)

    def value_of(tensors: Ints, wanted: Ints, phase: Ints) -> Ints:
        out = tensors.copy()
        away = np.flatnonzero(wanted != made[tensors])
        found = np.searchsorted(pair[by_pair], 2 * (tensors[away] * n_layouts + wanted[away]) + phase[away])
        out[away] = len(a.def_op) + by_pair[found]
        return out

    path, paths, numbers = _paths(assignment, layouts, tensor, source, target)
    taken = np.zeros(len(order), dtype=np.int64)
    taken[move_at] = numbers[path]
    taken[run_at[runs]] = _internal_collective_counts(assignment)[runs]
    number = np.where(taken > 0, np.cumsum(taken) - taken, -1)
    mesh = assignment.topology.mesh
    pieces = np.array([lay.pieces(mesh) for lay in layouts], dtype=np.float64)
    assert reads == len(needed)
    return ScheduleArrays(
        assignment, tuple(layouts), pieces, made, tensor, source, target,
        value_of(tensor, source, np.zeros_like(tensor)), reader, again > 0,
        path, paths, value_of(a.use_tensor, needed, phase), move_at, run_at, number, len(order),
    )  # fmt: skip


def _layouts(assignment: Assignment) -> tuple[dict[Layout, int], Ints, Ints]:
    """Numbers for layouts; the layout of every read and of every tensor as it is made."""
    a = assignment.program.use_def
    form, some = assignment.alike
    numbers: dict[Layout, int] = {}
    ends: list[list[int]] = [[], []]
    begins: list[list[int]] = [[], []]
    for op in some:
        s, k = assignment.states[op], assignment.state[op]
        for begin, end, choices in zip(begins, ends, (s.operands, s.results), strict=True):
            begin.append(len(end))
            end += [numbers.setdefault(c.layout(k), len(numbers)) for c in choices]
    operands, results = (np.array(e, dtype=np.int64) for e in ends)
    first, second = (np.array(b, dtype=np.int64) for b in begins)
    return (
        numbers,
        operands[first[form[a.use_op]] + a.use_operand],
        results[second[form[a.def_op]] + a.def_result],
    )


def _paths(
    assignment: Assignment, layouts: dict[Layout, int], tensor: Ints, source: Ints, target: Ints
) -> tuple[Ints, tuple[tuple[ReshardStep, ...], ...], Ints]:
    """Which path each move takes, the paths, and how many collectives each path has."""
    a, listed = assignment.program.use_def, list(layouts)
    sums = np.ones(len(a.def_op), dtype=np.int64)
    sums[np.fromiter(assignment.combined_sums, np.int64, len(assignment.combined_sums))] = list(
        assignment.combined_sums.values()
    )
    key = row_codes(a.aval_id[tensor], source, target, sums[tensor])
    _, first, path = np.unique(key, return_index=True, return_inverse=True)
    paths = tuple(
        assignment.reshard_steps(int(tensor[m]), listed[source[m]], listed[target[m]]) for m in first.tolist()
    )
    return path, paths, np.array([sum(s.kind != "slice" for s in p) for p in paths], dtype=np.int64)


def _internal_collective_counts(assignment: Assignment) -> Ints:
    """(operators,) how many collectives an operator writes itself."""
    form, some = assignment.alike
    return np.array([len(assignment.internal_collectives(op)) for op in some], dtype=np.int64)[form]
