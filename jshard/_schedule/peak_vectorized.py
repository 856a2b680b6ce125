"""Peak memory of a schedule without loops and branches, as running sums: the vectorised twin of `peak_reference.py`.

Each value is live from the action that makes it to the last one that needs it, so the bytes that are live at an action
are those allocated up to it less those freed before. Only uses through fused readers take a walk, backwards over those
readers (`_program/memory/liveness.propagate_last_use`). `tests/schedule/test_vectorized.py` compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._program.memory.liveness import DirectUses, Liveness, propagate_last_use
from jshard._program.memory.memory_layout import memory_layout
from jshard._program.memory.unfusible import unfusible_operators
from jshard._schedule.awaited_values import awaited_values
from jshard._schedule.donated_results import results_over_arguments
from jshard._schedule.peak_profile import INTERMEDIATE, HeldValue, PeakProfile
from jshard._schedule.vectorized import ScheduleArrays


@dataclasses.dataclass(frozen=True, eq=False)
class LiveRanges:
    """When each value is in memory, and the bytes of all over time. Actions are numbered from 0; -1 is before the first.

    - `size`: (values,) bytes on a device. `made_at`, `freed_at`: (values,) the first and the last action with the value.
    - `outputs`: the values that the program returns.
    - `over_time`: (actions + 1,) bytes of all, entry 0 before the first action.
    - `early_at`: (reshards,) from when each copy counts: those made again from one product before.
    """

    size: Floats
    made_at: Ints
    freed_at: Ints
    outputs: Ints
    over_time: Floats
    early_at: Ints

    @property
    def at_peak(self) -> Ints:
        """The values in memory at the peak, in the order in which they are made."""
        peak_at = int(self.over_time.argmax()) - 1
        from_when = self.made_at.copy()
        from_when[len(self.size) - len(self.early_at) :] = self.early_at
        held = np.flatnonzero((from_when <= peak_at) & (self.freed_at >= peak_at) & (self.size > 0))
        return held[np.argsort(self.made_at[held], kind="stable")]


def peak_of_arrays(arrays: ScheduleArrays, liveness: Liveness, donated: frozenset[int]) -> PeakProfile:
    """The peak of a schedule, its curve, and the peak by class; `donated` are flat indices of arguments."""
    ranges = live_ranges(arrays, liveness, donated)
    ops = np.flatnonzero(arrays.run_at >= 0)
    at_run = np.maximum(0.0, ranges.over_time[arrays.run_at[ops] + 1])
    at_peak = ranges.at_peak
    kind, names = classes_of_values(arrays, at_peak, ranges.outputs)
    total = np.bincount(kind, ranges.size[at_peak], len(names))
    kinds, first = np.unique(kind, return_index=True)
    columns = zip(
        tensor_of(arrays)[at_peak].tolist(), ranges.size[at_peak].tolist(), kind.tolist(), strict=True
    )
    return PeakProfile.of(
        float(ranges.over_time.max()),
        dict(zip(ops.tolist(), at_run.tolist(), strict=True)),
        {names[k]: float(total[k]) for k in kinds[np.argsort(first)].tolist()},
        tuple([HeldValue(t, nbytes, names[k]) for t, nbytes, k in columns]),
    )


def live_ranges(arrays: ScheduleArrays, liveness: Liveness, donated: frozenset[int]) -> LiveRanges:
    """When each value of a schedule is in memory; `donated` are flat indices of arguments."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    materialized = np.array(liveness.materialized, dtype=bool)
    fused_slice = np.array(liveness.sliced_in_readers, dtype=bool)[arrays.tensor] & arrays.only_slices
    inputs = a.result[a.result_begin[np.array(program.inputs, dtype=np.int64)]]
    outputs = arrays.read_value[a.has_kind("output")[a.use_op]]
    size = _value_bytes(arrays, materialized, fused_slice, inputs)

    # When each value is allocated (-1: before the first action) and freed.
    made_at = np.concatenate([arrays.run_at[a.def_op], arrays.reshard_at])
    last_use = last_uses_of_values(arrays, liveness)
    kept = np.array([k not in donated for k in range(len(program.inputs))], dtype=bool)
    outliving = np.zeros(len(size), dtype=bool)
    outliving[outputs] = outliving[inputs[kept]] = True
    # A value that is not needed is freed at once, but an argument.
    freed_at = np.where(last_use >= 0, last_use, np.where(made_at >= 0, made_at, arrays.num_actions))
    freed_at[outliving] = arrays.num_actions

    made_later = np.flatnonzero(made_at >= 0)
    allocated = _sum_by_action(made_at[made_later], size[made_later], arrays.num_actions)
    freed = _sum_by_action(freed_at, size, arrays.num_actions + 1)[: arrays.num_actions]
    at_start = float(size[inputs].sum())
    live = at_start + np.cumsum(allocated) - (np.cumsum(freed) - freed)
    dies = np.flatnonzero((last_use >= 0) & ~outliving)
    dying = _sum_by_action(last_use[dies], size[dies], arrays.num_actions)
    extra = _while_running(arrays, liveness, materialized, size, dying, allocated)
    extra += _gathered_beside_arguments(arrays, outputs, size, donated) + _kept_edges(arrays)
    early_at = _early_at(arrays, made_at, liveness.materialized)
    for m in np.flatnonzero(early_at < arrays.reshard_at).tolist():
        extra[early_at[m] : arrays.reshard_at[m]] += size[len(arrays.result_layout) + m]
    return LiveRanges(size, made_at, freed_at, outputs, np.concatenate([[at_start], live + extra]), early_at)


def _gathered_beside_arguments(
    arrays: ScheduleArrays, outputs: Ints, size: Floats, donated: frozenset[int]
) -> Floats:
    """(actions,) bytes of collectives' own buffers, which are copied into those of donated arguments."""
    out = np.zeros(arrays.num_actions)
    tensors, layout_of = tensor_of(arrays), np.concatenate([arrays.result_layout, arrays.target])
    values = [(int(tensors[v]), arrays.layouts[layout_of[v]]) for v in outputs.tolist()]
    number = dict(zip(values, outputs.tolist(), strict=True))
    made_by_operators = len(arrays.result_layout)
    for value in results_over_arguments(arrays.assignment, values, donated):
        m = number[value] - made_by_operators
        if m >= 0 and arrays.first_collective[arrays.reshard_at[m]] >= 0:
            out[arrays.reshard_at[m]] += size[number[value]]
    return out


def _early_at(arrays: ScheduleArrays, made_at: Ints, materialized: Sequence[bool]) -> Ints:
    """(reshards,) from when each copy is in memory: those made again from one product before.

    Compilers begin the collective so early, but not before what it awaits is there: `awaited_values`, and the result of a
    product where the assignment says so.
    """
    out, program = arrays.reshard_at.copy(), arrays.assignment.program
    again = np.flatnonzero(arrays.regathered & ~arrays.only_slices).tolist()
    if not again:
        return out
    products = np.sort(arrays.run_at[unfusible_operators(program) & (arrays.run_at >= 0)])
    tensors = tensor_of(arrays)
    after = {(t, op): awaited for t, op, awaited in arrays.assignment.regather_after}
    for m in again:
        reader, tensor = int(arrays.reader[m]), int(arrays.tensor[m])
        awaited = made_at[awaited_values(program, materialized, reader, tensor)]
        if (tensor, reader) in after:
            made = made_at[tensors == after[tensor, reader]]
            awaited = np.append(awaited, made[made < out[m]])
        before = np.searchsorted(products, out[m])
        out[m] = max([int(products[before - 1]) if before else 0, *(awaited + 1).tolist()])
    return out


def _kept_edges(arrays: ScheduleArrays) -> Floats:
    """(actions,) bytes of edges that wait for another operator; the two operators count theirs as workspace."""
    out = np.zeros(arrays.num_actions)
    for kept in arrays.assignment.kept_edges:
        out[arrays.run_at[kept.op] + 1 : arrays.run_at[kept.until]] += kept.nbytes
    return out


def _sum_by_action(actions: Ints, size: Floats, num_actions: int) -> Floats:
    """(actions,) the sum of the sizes at each action."""
    return np.bincount(actions, size, num_actions).astype(np.float64, copy=False)


def _value_bytes(arrays: ScheduleArrays, materialized: Bools, fused_slice: Bools, inputs: Ints) -> Floats:
    """(values,) bytes on a device; none for values that are recomputed where they are read."""
    a = arrays.assignment.program.use_def
    as_made = a.nbytes / arrays.num_shards[arrays.result_layout]
    copies = a.nbytes[arrays.tensor] / arrays.num_shards[arrays.target]
    size = np.concatenate([np.where(materialized, as_made, 0.0), np.where(fused_slice, 0.0, copies)])
    size[inputs] = as_made[inputs]
    return size


def _while_running(
    arrays: ScheduleArrays, liveness: Liveness, materialized: Bools, size: Floats, dying: Floats, allocated: Floats
) -> Floats:  # fmt: skip
    """(actions,) bytes that are live while an action runs, beside its operands and results.

    - A fused value is materialized to be resharded.
    - A product writes the result of its epilogue beside its operands.
    - An operator that may alias an operand overwrites those that die there.
    - Products read transposed copies of some operands.
    - The local implementation of an operator may have a workspace.
    """
    a = arrays.assignment.program.use_def
    extra = np.zeros(arrays.num_actions)
    made_by_operator = arrays.source_value < len(a.def_op)
    materialized_here = (size[len(a.def_op) :] > 0) & ~materialized[arrays.tensor] & made_by_operator
    source_bytes = a.nbytes[arrays.tensor] / arrays.num_shards[arrays.source]
    extra[arrays.reshard_at[materialized_here]] = source_bytes[materialized_here]

    ops = np.flatnonzero(arrays.run_at >= 0)
    epilogues = np.array(liveness.epilogue_bytes) / arrays.num_shards[arrays.result_layout]
    extra[arrays.run_at[ops]] = np.bincount(a.def_op, epilogues, len(arrays.run_at))[ops]
    aliasing = arrays.run_at[ops][liveness.traits.may_alias_operand[ops]]
    extra[aliasing] = -np.minimum(dying, allocated)[aliasing]
    for op, nbytes in arrays.assignment.workspaces.items():
        extra[arrays.run_at[op]] += nbytes
    return extra + _transposed_copy_bytes(arrays)


def _transposed_copy_bytes(arrays: ScheduleArrays) -> Floats:
    """(actions,) bytes of the copies that products read transposed: from when they are made until the product runs."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    out = np.zeros(arrays.num_actions)
    for op, k in memory_layout(program, arrays.assignment.topology.chip).transposed_operands:
        read = int(np.flatnonzero((a.use_op == op) & (a.use_operand == k))[0])
        v, run_at = int(arrays.read_value[read]), int(arrays.run_at[op])
        m = v - len(a.def_op)
        if m < 0:
            tensor, layout, made_at = v, arrays.result_layout[v], int(arrays.run_at[a.def_op[v]])
        else:
            tensor, layout, made_at = arrays.tensor[m], arrays.target[m], int(arrays.reshard_at[m])
        out[made_at + 1 if made_at >= 0 else run_at : run_at + 1] += (
            a.nbytes[tensor] / arrays.num_shards[layout]
        )
    return out


def last_uses_of_values(arrays: ScheduleArrays, liveness: Liveness, among: Bools | None = None) -> Ints:
    """(values,) the last action that needs each, -1 for none; `among`: (operators,) the readers that count, all for None."""
    a, traits = arrays.assignment.program.use_def, liveness.traits
    n, operators = len(a.def_op), len(arrays.run_at)
    casts = np.array(liveness.duplicated_cast, dtype=bool)
    counts = np.ones(operators, dtype=bool) if among is None else among
    run_at = arrays.run_at[a.use_op]
    # Readers that recompute a duplicated cast need only its source; a resharded copy of it cannot be recomputed.
    recomputes = traits.fuses_operands[a.use_op] & casts[a.use_tensor] & (arrays.read_value < n)
    scopes = arrays.assignment.program.scopes
    recomputes &= scopes.use_scope == scopes.def_scope[a.use_tensor]  # none does so over the bounds of a call
    last_read, last_recomputed = np.full(n + len(arrays.tensor), -1), np.full(n + len(arrays.tensor), -1)
    read, recomputed = ~recomputes & counts[a.use_op], recomputes & counts[a.use_op]
    np.maximum.at(last_recomputed, arrays.read_value[recomputed], run_at[recomputed])
    np.maximum.at(last_read, arrays.read_value[read], run_at[read])
    for_counted = (arrays.reader < 0) | counts[arrays.reader]
    np.maximum.at(last_read, arrays.source_value[for_counted], arrays.reshard_at[for_counted])
    np.maximum.at(last_read, arrays.held_value, arrays.held_until)
    has_results = np.diff(a.result_begin) > 0
    materialized = np.array(liveness.materialized, dtype=bool)
    stores = np.bincount(a.def_op, materialized, operators) > 0
    fused = traits.duplicable & has_results & ~stores & (arrays.run_at >= 0) & counts
    fused_slice = (
        np.array(liveness.sliced_in_readers, dtype=bool)[arrays.tensor] & arrays.only_slices & for_counted
    )
    slices = [
        (int(arrays.reshard_at[m]), int(arrays.source_value[m]), n + m)
        for m in np.flatnonzero(fused_slice).tolist()
    ]
    return propagate_last_use(
        arrays.assignment.program,
        DirectUses(
            arrays.run_at, fused, casts, arrays.read_value, recomputes, last_read, last_recomputed, slices
        ),
    )


def tensor_of(arrays: ScheduleArrays) -> Ints:
    """(values,) the tensor of each value."""
    return np.concatenate([np.arange(len(arrays.assignment.program.use_def.def_op)), arrays.tensor])


def classes_of_values(arrays: ScheduleArrays, values: Ints, outputs: Ints) -> tuple[Ints, list[str]]:
    """The class of some values, as indices into the list of names."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    n = len(a.def_op)
    names = {"results": 0, "redistributed copies": 1, "captured arrays": 2, INTERMEDIATE: 3}
    tensors = tensor_of(arrays)
    is_copy, tensor = values >= n, tensors[values]
    def_op = a.def_op[tensor]
    is_output = np.isin(values, outputs)
    is_returned = np.isin(tensor, tensors[outputs])
    kind = np.where(is_copy, np.where(is_output, 0, 1), np.where(is_returned, 0, 3))
    kind[~is_copy & a.has_kind("const")[def_op]] = 2
    arguments = np.flatnonzero(~is_copy & a.has_kind("input")[def_op])
    kind[arguments] = [
        names.setdefault("argument " + program.operators[i].name.split(".")[0], len(names))
        for i in def_op[arguments].tolist()
    ]
    return kind, list(names)
