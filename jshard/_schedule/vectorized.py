"""The schedule of a program without loops and branches as arrays, by numpy: the vectorised twin of `writer.py`.

Problem.  Fifty thousand operators make a hundred thousand objects of a schedule. Lowering needs them; a plan needs the
few that communicate, and what is in memory when.

Idea.  In a program without loops and branches the writer's rules are simple. A tensor is resharded to its stored layout just
before the first reader that does not take it as it is made, and from there to any other layout just before the first
reader that needs that one. So reshards are the first of equal (tensor, layout) pairs among the reads, and numpy finds
them all at once. `tests/schedule/test_vectorized.py` compares the two.

Copies that are made in a call that is recomputed (`inlined_calls.py`) serve that call alone: the pairs are triples with its
scope. Such a call takes tensors as they are stored, and gives those that it makes as they are stored.

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
from jshard._schedule.inlined_calls import InlinedCalls, inlined_calls


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
    regathered: Bools  # (reshards,) whether an earlier copy in the same scope and layout died before
    path: Ints  # (reshards,) number of its path
    paths: tuple[tuple[ReshardStep, ...], ...]
    read_value: Ints  # (reads,) the value that is read
    reshard_at: Ints  # (reshards,) its position among the actions
    run_at: Ints  # (operators,) the same; -1 for arguments and results, which are no actions
    first_collective: Ints  # (actions,) number of the first collective, -1 for none
    num_actions: int  # reshards, operators, and one for the end of each call
    held_value: Ints  # (n,) what calls take and give
    held_until: Ints  # (n,) the action until which it is in memory: the end of the call

    @functools.cached_property
    def only_slices(self) -> Bools:
        """(reshards,) whether all steps of the path are local slices."""
        return np.array([all(s.kind == "slice" for s in p) for p in self.paths], dtype=bool)[self.path]


def schedule_arrays(assignment: Assignment) -> ScheduleArrays | None:
    """The schedule of an assignment as arrays; None for a program with loops or branches."""
    program = assignment.program
    calls = inlined_calls(program)
    if calls is None:
        return None
    a, by = program.use_def, _layouts(assignment)
    keys = _Keys.of(calls, len(a.use_op))
    to_readers, copy = _to_readers(assignment, by, keys)
    unordered = _concatenate(_to_stored_layouts(program, by, calls, keys), to_readers)
    order, reshard_at, run_at, end_at = _order_actions(program, calls, unordered, keys)
    reshards = _Reshards(*(getattr(unordered, f.name)[order] for f in dataclasses.fields(unordered)))

    path, paths, path_collectives = _paths(assignment, list(by.layouts), reshards)
    num_actions = len(reshard_at) + len(calls.runs) + len(calls.first) - 1
    collectives = np.zeros(num_actions, dtype=np.int64)
    collectives[reshard_at] = path_collectives[path]
    collectives[run_at[calls.runs]] = _internal_collective_counts(assignment)[calls.runs]
    mesh = assignment.topology.mesh
    values = _Values(program, by, reshards)
    zeros = np.zeros_like(reshards.tensor)
    held_scope, held_tensor, held_layout = _held_by_calls(program, by, calls)
    return ScheduleArrays(
        assignment=assignment,
        layouts=tuple(by.layouts),
        num_shards=np.array([layout.pieces(mesh) for layout in by.layouts], dtype=np.float64),
        result_layout=by.result,
        tensor=reshards.tensor,
        source=reshards.source,
        target=reshards.target,
        source_value=values.of(reshards.tensor, reshards.source, reshards.scope, zeros),
        reader=reshards.reader,
        regathered=reshards.copy > 0,
        path=path,
        paths=paths,
        read_value=values.of(a.use_tensor, by.read, program.scopes.use_scope, copy),
        reshard_at=reshard_at,
        run_at=run_at,
        first_collective=np.where(collectives > 0, np.cumsum(collectives) - collectives, -1),
        num_actions=num_actions,
        held_value=values.of(held_tensor, held_layout, held_scope, np.zeros_like(held_tensor)),
        held_until=end_at[held_scope],
    )


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
    """Reshards, (reshards,) each.

    `copy`: how many copies in the same scope and layout died before. `key`: its place in the program, as `_Keys` has it.
    """

    tensor: Ints
    source: Ints
    target: Ints
    reader: Ints
    copy: Ints
    scope: Ints
    key: Ints


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Numbers that order what happens at one operator: calls begin, its operands are resharded, it runs, calls end.

    `width`: numbers for each of the four. A call around another begins before it and ends after it.
    """

    width: int
    depths: int
    each: int  # numbers for each depth

    @staticmethod
    def of(calls: InlinedCalls, uses: int) -> _Keys:
        each = 1 + int(max(calls.enters[:, 2].max(initial=0), calls.leaves[:, 2].max(initial=0)) + 1)
        depths = 1 + int(calls.depth.max(initial=0))
        return _Keys(max(2 * uses + 2, depths * each), depths, each)

    def begin(self, first: Ints, depth: Ints, number: Ints) -> Ints:
        """The operand of a call is stored before it begins."""
        return self._at(first, 0, depth * self.each + number)

    def read(self, op: Ints, use: Ints, for_reader: Ints | int) -> Ints:
        """A use is stored, then resharded for its reader."""
        return self._at(op, 1, 2 * use + for_reader)

    def run(self, op: Ints) -> Ints:
        """An operator runs."""
        return self._at(op, 2, np.zeros_like(op))

    def end(self, last: Ints, depth: Ints, number: Ints | int) -> Ints:
        """The result of a call is stored as it ends; number -1: it ends."""
        return self._at(
            last, 3, (self.depths - 1 - depth) * self.each + np.where(number < 0, self.each - 1, number)
        )

    def _at(self, op: Ints, phase: int, number: Ints) -> Ints:
        return (4 * op + phase) * self.width + number


def _concatenate(*parts: _Reshards) -> _Reshards:
    names = [f.name for f in dataclasses.fields(_Reshards)]
    return _Reshards(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _to_stored_layouts(program: Program, by: _Layouts, calls: InlinedCalls, keys: _Keys) -> _Reshards:
    """Step 2: one reshard for each tensor that some reader does not take as it is made, to its stored layout.

    Captured constants are stored before anything runs. Any other tensor in the scope where it is made: before the first
    such read, before a call begins whose operators read it, or at the end of a call that gives it.
    """
    a, scopes = program.use_def, program.scopes
    moves = by.stored != by.result
    constants = np.flatnonzero(scopes.is_captured & moves)
    moves = moves & ~scopes.is_captured
    reads = np.flatnonzero(
        moves[a.use_tensor]
        & (by.read != by.result[a.use_tensor])
        & (scopes.use_scope == scopes.def_scope[a.use_tensor])
    )
    scope, tensor, number = calls.enters.T
    enters = moves[tensor] & calls.is_read & (scopes.def_scope[tensor] == calls.enters_from)
    of_entry = keys.begin(calls.first[scope], calls.depth[scope], number)[enters]
    inner, given, place = calls.leaves.T
    leaves = moves[given] & (scopes.def_scope[given] == inner)
    of_result = keys.end(calls.last[inner], calls.depth[inner], place)[leaves]
    events = np.concatenate([a.use_tensor[reads], tensor[enters], given[leaves]])
    key = np.concatenate([keys.read(a.use_op[reads], reads, 0), of_entry, of_result])
    order = np.argsort(key, kind="stable")
    others, first = np.unique(events[order], return_index=True)
    stored = np.concatenate([constants, others])
    before_all = np.arange(len(constants)) - len(constants)
    several, never = np.full(len(stored), -1), np.zeros(len(stored), dtype=np.int64)
    return _Reshards(
        stored, by.result[stored], by.stored[stored], several, never, scopes.def_scope[stored],
        np.concatenate([before_all, key[order][first]]),
    )  # fmt: skip


def _to_readers(assignment: Assignment, by: _Layouts, keys: _Keys) -> tuple[_Reshards, Ints]:
    """Step 3: one reshard from the stored layout for each scope and layout in which a tensor is read otherwise.

    Also (reads,) which copy of those in its scope and layout the read takes: 0, and one more from each reader on that has
    the tensor resharded again.
    """
    a, scopes = assignment.program.use_def, assignment.program.scopes
    result, stored = by.result[a.use_tensor], by.stored[a.use_tensor]
    as_made = (by.read == result) & _sees_result(assignment.program, a.use_tensor, scopes.use_scope)
    reads = np.flatnonzero(~as_made & (by.read != stored))
    pair = _codes(by, a.use_tensor[reads], by.read[reads], scopes.use_scope[reads])
    copy = np.zeros(len(a.use_tensor), dtype=np.int64)
    if assignment.regather:
        pairs, operators = (
            np.array(sorted(assignment.regather), dtype=np.int64),
            len(assignment.program.operators),
        )
        reader = a.use_tensor[reads] * operators + a.use_op[reads]
        again = np.isin(reader, pairs[:, 0] * operators + pairs[:, 1]) & (by.read[reads] != result[reads])
        copy[reads] = _copy_in_group(pair, again, a.use_op[reads])
    most = 1 + int(copy.max(initial=0))
    reads = reads[np.sort(np.unique(most * pair + copy[reads], return_index=True)[1])]
    tensor = a.use_tensor[reads]
    made = _Reshards(
        tensor, by.stored[tensor], by.read[reads], a.use_op[reads], copy[reads], scopes.use_scope[reads],
        keys.read(a.use_op[reads], reads, 1),
    )  # fmt: skip
    return made, copy


def _sees_result(program: Program, tensor: Ints, scope: Ints) -> Bools:
    """Whether tensors are seen in some scopes as they are made: captured ones everywhere, others where they are made."""
    scopes = program.scopes
    return scopes.is_captured[tensor] | (scopes.def_scope[tensor] == scope)


def _codes(by: _Layouts, tensor: Ints, layout: Ints, scope: Ints) -> Ints:
    return (scope * len(by.result) + tensor) * len(by.layouts) + layout


def _copy_in_group(group: Ints, flag: Bools, reader: Ints) -> Ints:
    """For each row how many copies were made before in its group: one more at each flag, once a reader, but the first.

    >>> flags = np.array([False, True, True, False, True])
    >>> _copy_in_group(np.array([7, 3, 7, 3, 7]), flags, np.array([0, 0, 1, 2, 4])).tolist()
    [0, 0, 1, 0, 2]
    """
    by_group = np.argsort(group, kind="stable")
    begins = np.diff(group[by_group], prepend=-1) != 0
    again = flag[by_group] & ~begins & (np.diff(reader[by_group], prepend=-1) != 0)
    made = np.cumsum(again)
    out = np.zeros(len(group), dtype=np.int64)
    out[by_group] = made - made[begins][np.cumsum(begins) - 1]
    return out


def _order_actions(
    program: Program, calls: InlinedCalls, reshards: _Reshards, keys: _Keys
) -> tuple[Ints, Ints, Ints, Ints]:
    """Step 4: the reshards in order, (reshards in order,) their positions, (operators,) those of the operators, and
    (scopes,) those of the ends of calls."""
    m, n = len(reshards.tensor), len(calls.runs)
    ends = keys.end(calls.last, calls.depth, -1)[1:]
    order = np.argsort(np.concatenate([reshards.key, keys.run(calls.runs), ends]), kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    reshard_order = np.argsort(position[:m])
    run_at = np.full(len(program.operators), -1)
    run_at[calls.runs] = position[m : m + n]
    end_at = np.concatenate([[len(order)], position[m + n :]])
    return reshard_order, position[:m][reshard_order], run_at, end_at


def _held_by_calls(program: Program, by: _Layouts, calls: InlinedCalls) -> tuple[Ints, Ints, Ints]:
    """(n,) scopes of calls, tensors that they take and give, and the layouts of those there."""
    scope, tensor = np.concatenate([calls.enters[:, :2], calls.leaves[:, :2]]).T
    around = np.concatenate([calls.enters_from, calls.leaves[:, 0]])
    unread = np.concatenate([~calls.is_read, np.zeros(len(calls.leaves), dtype=bool)])
    as_made = unread & _sees_result(program, tensor, around)
    return scope, tensor, np.where(as_made, by.result[tensor], by.stored[tensor])


class _Values:
    """Step 5: the values of tensors in layouts: as they are made, or as the reshard that makes them."""

    def __init__(self, program: Program, by: _Layouts, reshards: _Reshards) -> None:
        self.program, self.by = program, by
        self.copies = 1 + int(reshards.copy.max(initial=0))
        codes = _codes(by, reshards.tensor, reshards.target, reshards.scope)
        self.codes = self.copies * codes + reshards.copy
        self.by_code = np.argsort(self.codes)

    def of(self, tensor: Ints, layout: Ints, scope: Ints, copy: Ints) -> Ints:
        """The values of tensors in layouts, as scopes see them; `copy`: which of equal ones."""
        by, def_scope = self.by, self.program.scopes.def_scope
        value = tensor.copy()
        stored = layout == by.stored[tensor]
        as_made = (layout == by.result[tensor]) & (stored | _sees_result(self.program, tensor, scope))
        copies = np.flatnonzero(~as_made)
        made_in = np.where(stored, def_scope[tensor], scope)[copies]
        wanted = self.copies * _codes(by, tensor[copies], layout[copies], made_in) + copy[copies]
        at = np.minimum(np.searchsorted(self.codes[self.by_code], wanted), max(len(self.codes) - 1, 0))
        reshard = self.by_code[at] if len(copies) else copies
        assert np.array_equal(self.codes[reshard], wanted), "a value is read that no reshard makes"
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
