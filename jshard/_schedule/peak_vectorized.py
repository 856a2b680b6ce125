"""Bytes that a device holds while a flat schedule runs: what `peak.py` walks through, as running sums.

Each value is held from the action that makes it to the last one that needs it, so the bytes that are live at an
action are those made up to it less those let go before. Only who needs a value *through* readers that compute
it again takes a walk, backwards over those readers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._memory.liveness import Liveness, propagate_last_use
from jshard._memory.memory_layout import memory_layout
from jshard._program.use_def import Bools, Floats, Ints
from jshard._schedule.vectorized import ScheduleArrays


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Peak bytes, bytes live while each operator runs, and bytes by class at the peak."""

    peak: float
    curve: dict[int, float]
    classes: dict[str, float]


def peak_of_arrays(arrays: ScheduleArrays, liveness: Liveness, donated: frozenset[int]) -> Held:
    """The peak of a flat schedule, its curve, and what is held then."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    n, traits = len(a.def_op), liveness.traits
    held, written = np.array(liveness.materialized, dtype=bool), np.array(liveness.epilogue_bytes)
    view = ~held[arrays.tensor] & arrays.only_slices
    whole = a.nbytes / arrays.num_shards[arrays.result_layout]
    size = np.concatenate([
        np.where(held, whole, 0.0),
        np.where(view, 0.0, a.nbytes[arrays.tensor] / arrays.num_shards[arrays.target]),
    ])  # fmt: skip
    made_at = np.concatenate([arrays.run_at[a.def_op], arrays.move_at])
    given = np.array([k in donated for k in range(len(program.inputs))], dtype=bool)
    inputs = a.result[a.result_begin[np.array(program.inputs, dtype=np.int64)]]
    size[inputs] = whole[inputs]
    read_by_end = arrays.read_value[a.has_kind("output")[a.use_op]]
    kept = np.zeros(len(size), dtype=bool)
    kept[read_by_end] = kept[inputs[~given]] = True
    last = _last_uses(arrays, liveness, view)
    # What nobody needs goes at once, but an argument.
    goes = np.where(last >= 0, last, np.where(made_at >= 0, made_at, arrays.num_actions))
    goes[kept] = arrays.num_actions
    run = np.flatnonzero(made_at >= 0)
    made = np.bincount(made_at[run], size[run], arrays.num_actions)
    gone = np.bincount(goes, size, arrays.num_actions + 1)[: arrays.num_actions]
    begun = float(size[inputs].sum())
    live = begun + np.cumsum(made) - (np.cumsum(gone) - gone)
    extra = np.zeros(arrays.num_actions)
    # A fluid value is written out to be moved.
    out = (size[n:] > 0) & ~held[arrays.tensor] & (arrays.source_value < n)
    extra[arrays.move_at[out]] = (a.nbytes[arrays.tensor] / arrays.num_shards[arrays.source])[out]
    ops = np.flatnonzero(arrays.run_at >= 0)
    at = arrays.run_at[ops]
    # What a product writes in its reader's place is there beside its operands.
    extra[at] = np.bincount(a.def_op, written / arrays.num_shards[arrays.result_layout], len(arrays.run_at))[
        ops
    ]
    # An elementwise result is written over an operand that nobody needs any more.
    over = at[traits.may_alias_operand[ops]]
    ending = np.flatnonzero((last >= 0) & ~kept)
    dying = np.bincount(last[ending], size[ending], arrays.num_actions)
    extra[over] = -np.minimum(dying, made)[over]
    extra += _transposed_copy_bytes(arrays)
    noted = np.concatenate([[begun], live + extra])
    when = int(noted.argmax()) - 1
    curve = dict(zip(ops.tolist(), np.maximum(0.0, noted[at + 1]).tolist(), strict=True))
    there = np.flatnonzero((made_at <= when) & (goes >= when) & (size > 0))
    there = there[np.argsort(made_at[there], kind="stable")]
    return Held(float(noted.max()), curve, _bytes_by_class(arrays, there, size[there], read_by_end))


def _transposed_copy_bytes(arrays: ScheduleArrays) -> Floats:
    """(actions,) bytes of the copies that products read transposed, from when that is made on."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    n = len(a.def_op)
    out = np.zeros(arrays.num_actions)
    for op, k in memory_layout(program, arrays.assignment.topology.chip).transposed_operands:
        read = int(np.flatnonzero((a.use_op == op) & (a.use_operand == k))[0])
        v, at = int(arrays.read_value[read]), int(arrays.run_at[op])
        if v < n:
            nbytes, made = (
                a.nbytes[v] / arrays.num_shards[arrays.result_layout[v]],
                int(arrays.run_at[a.def_op[v]]),
            )
        else:
            m = v - n
            nbytes, made = (
                a.nbytes[arrays.tensor[m]] / arrays.num_shards[arrays.target[m]],
                int(arrays.move_at[m]),
            )
        out[made + 1 if made >= 0 else at : at + 1] += nbytes
    return out


def _last_uses(arrays: ScheduleArrays, liveness: Liveness, view: Bools) -> Ints:
    """(values,) the last action that needs each, -1 for none: a fluid reader needs it as long as its own readers."""
    a, traits = arrays.assignment.program.use_def, liveness.traits
    n = len(a.def_op)
    copied = np.array(liveness.duplicated_cast, dtype=bool)
    last, through = np.full(n + len(arrays.tensor), -1), np.full(n + len(arrays.tensor), -1)
    time = arrays.run_at[a.use_op]
    # Of a copied value the readers that compute it again need only what it is made from; not once it was moved.
    again = traits.fuses_operands[a.use_op] & copied[a.use_tensor] & (arrays.read_value < n)
    np.maximum.at(through, arrays.read_value[again], time[again])
    np.maximum.at(last, arrays.read_value[~again], time[~again])
    np.maximum.at(last, arrays.source_value, arrays.move_at)
    count = np.diff(a.result_begin)
    stored = np.bincount(a.def_op, np.array(liveness.materialized, dtype=bool), len(arrays.run_at)) > 0
    fluid = traits.duplicable & (count > 0) & ~stored & (arrays.run_at >= 0)
    some = np.flatnonzero(
        fluid | ((np.bincount(a.def_op, copied, len(arrays.run_at)) > 0) & (arrays.run_at >= 0))
    )
    views = [
        (int(arrays.move_at[m]), int(arrays.source_value[m]), n + m) for m in np.flatnonzero(view).tolist()
    ]
    return propagate_last_use(
        arrays.assignment.program,
        some,
        arrays.run_at,
        fluid,
        copied,
        again,
        arrays.read_value,
        last,
        through,
        views,
    )


def _bytes_by_class(arrays: ScheduleArrays, values: Ints, size: Floats, results: Ints) -> dict[str, float]:
    """Bytes of some values by what they are, in the order in which the values are made."""
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    n = len(a.def_op)
    names = {"results": 0, "redistributed copies": 1, "captured arrays": 2, "intermediate values": 3}
    moved, tensor = values >= n, np.concatenate([np.arange(n), arrays.tensor])[values]
    maker = a.def_op[tensor]
    ended = np.isin(values, results)
    returned = np.isin(tensor, np.concatenate([np.arange(n), arrays.tensor])[results])
    kind = np.where(moved, np.where(ended, 0, 1), np.where(returned, 0, 3))
    kind[~moved & a.has_kind("const")[maker]] = 2
    arguments = np.flatnonzero(~moved & a.has_kind("input")[maker])
    kind[arguments] = [
        names.setdefault("argument " + program.operators[i].name.split(".")[0], len(names))
        for i in maker[arguments].tolist()
    ]
    total = np.bincount(kind, size, len(names))
    listed = list(names)
    here, first = np.unique(kind, return_index=True)
    return {listed[k]: float(total[k]) for k in here[np.argsort(first)].tolist()}
