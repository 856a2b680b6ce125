"""Bytes that a device holds while a flat schedule runs: what `peak.py` walks through, as running sums.

Each value is held from the action that makes it to the last one that needs it, so the bytes that are live at an
action are those made up to it less those let go before. Only who needs a value *through* readers that compute
it again takes a walk, backwards over those readers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._cost.memory_order import memory_order
from jshard._cost.residency import Residency, carried
from jshard._plan.flat import Flat
from jshard._program.arrays import Bools, Floats, Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Peak bytes, bytes live while each operator runs, and bytes by class at the peak."""

    peak: float
    curve: dict[int, float]
    classes: dict[str, float]


def held_by(found: Flat, life: Residency, donated: frozenset[int]) -> Held:
    """The peak of a flat schedule, its curve, and what is held then."""
    program, a = found.choice.program, found.choice.program.arrays
    n, traits = len(a.maker), life.traits
    held, written = np.array(life.held, dtype=bool), np.array(life.written)
    view = ~held[found.tensor] & found.sliced
    whole = a.nbytes / found.pieces[found.made]
    size = np.concatenate([
        np.where(held, whole, 0.0),
        np.where(view, 0.0, a.nbytes[found.tensor] / found.pieces[found.target]),
    ])  # fmt: skip
    made_at = np.concatenate([found.run_at[a.maker], found.move_at])
    given = np.array([k in donated for k in range(len(program.inputs))], dtype=bool)
    inputs = a.result[a.result_begin[np.array(program.inputs, dtype=np.int64)]]
    size[inputs] = whole[inputs]
    read_by_end = found.value[a.of_kind("output")[a.reader]]
    kept = np.zeros(len(size), dtype=bool)
    kept[read_by_end] = kept[inputs[~given]] = True
    last = _last(found, life, view)
    # What nobody needs goes at once, but an argument.
    goes = np.where(last >= 0, last, np.where(made_at >= 0, made_at, found.count))
    goes[kept] = found.count
    run = np.flatnonzero(made_at >= 0)
    made = np.bincount(made_at[run], size[run], found.count)
    gone = np.bincount(goes, size, found.count + 1)[: found.count]
    begun = float(size[inputs].sum())
    live = begun + np.cumsum(made) - (np.cumsum(gone) - gone)
    extra = np.zeros(found.count)
    # A fluid value is written out to be moved.
    out = (size[n:] > 0) & ~held[found.tensor] & (found.source_value < n)
    extra[found.move_at[out]] = (a.nbytes[found.tensor] / found.pieces[found.source])[out]
    ops = np.flatnonzero(found.run_at >= 0)
    at = found.run_at[ops]
    # What a product writes in its reader's place is there beside its operands.
    extra[at] = np.bincount(a.maker, written / found.pieces[found.made], len(found.run_at))[ops]
    # An elementwise result is written over an operand that nobody needs any more.
    over = at[traits.reuses[ops]]
    ending = np.flatnonzero((last >= 0) & ~kept)
    dying = np.bincount(last[ending], size[ending], found.count)
    extra[over] = -np.minimum(dying, made)[over]
    extra += _turned_copies(found)
    noted = np.concatenate([[begun], live + extra])
    when = int(noted.argmax()) - 1
    curve = dict(zip(ops.tolist(), np.maximum(0.0, noted[at + 1]).tolist(), strict=True))
    there = np.flatnonzero((made_at <= when) & (goes >= when) & (size > 0))
    there = there[np.argsort(made_at[there], kind="stable")]
    return Held(float(noted.max()), curve, _classes(found, there, size[there], read_by_end))


def _turned_copies(found: Flat) -> Floats:
    """(actions,) bytes of the copies that products read transposed, from when that is made on."""
    program, a = found.choice.program, found.choice.program.arrays
    n = len(a.maker)
    out = np.zeros(found.count)
    for op, k in memory_order(program, found.choice.topology.chip).copies:
        read = int(np.flatnonzero((a.reader == op) & (a.operand == k))[0])
        v, at = int(found.value[read]), int(found.run_at[op])
        if v < n:
            nbytes, made = a.nbytes[v] / found.pieces[found.made[v]], int(found.run_at[a.maker[v]])
        else:
            m = v - n
            nbytes, made = a.nbytes[found.tensor[m]] / found.pieces[found.target[m]], int(found.move_at[m])
        out[made + 1 if made >= 0 else at : at + 1] += nbytes
    return out


def _last(found: Flat, life: Residency, view: Bools) -> Ints:
    """(values,) the last action that needs each, -1 for none: a fluid reader needs it as long as its own readers."""
    a, traits = found.choice.program.arrays, life.traits
    n = len(a.maker)
    copied = np.array(life.copied, dtype=bool)
    last, through = np.full(n + len(found.tensor), -1), np.full(n + len(found.tensor), -1)
    time = found.run_at[a.reader]
    # Of a copied value the readers that compute it again need only what it is made from; not once it was moved.
    again = traits.fuses[a.reader] & copied[a.read] & (found.value < n)
    np.maximum.at(through, found.value[again], time[again])
    np.maximum.at(last, found.value[~again], time[~again])
    np.maximum.at(last, found.source_value, found.move_at)
    count = np.diff(a.result_begin)
    stored = np.bincount(a.maker, np.array(life.held, dtype=bool), len(found.run_at)) > 0
    fluid = traits.light & (count > 0) & ~stored & (found.run_at >= 0)
    some = np.flatnonzero(
        fluid | ((np.bincount(a.maker, copied, len(found.run_at)) > 0) & (found.run_at >= 0))
    )
    views = [
        (int(found.move_at[m]), int(found.source_value[m]), n + m) for m in np.flatnonzero(view).tolist()
    ]
    return carried(
        found.choice.program, some, found.run_at, fluid, copied, again, found.value, last, through, views
    )


def _classes(found: Flat, values: Ints, size: Floats, results: Ints) -> dict[str, float]:
    """Bytes of some values by what they are, in the order in which the values are made."""
    program, a = found.choice.program, found.choice.program.arrays
    n = len(a.maker)
    names = {"results": 0, "redistributed copies": 1, "captured arrays": 2, "intermediate values": 3}
    moved, tensor = values >= n, np.concatenate([np.arange(n), found.tensor])[values]
    maker = a.maker[tensor]
    ended = np.isin(values, results)
    returned = np.isin(tensor, np.concatenate([np.arange(n), found.tensor])[results])
    kind = np.where(moved, np.where(ended, 0, 1), np.where(returned, 0, 3))
    kind[~moved & a.of_kind("const")[maker]] = 2
    arguments = np.flatnonzero(~moved & a.of_kind("input")[maker])
    kind[arguments] = [
        names.setdefault("argument " + program.operators[i].name.split(".")[0], len(names))
        for i in maker[arguments].tolist()
    ]
    total = np.bincount(kind, size, len(names))
    listed = list(names)
    here, first = np.unique(kind, return_index=True)
    return {listed[k]: float(total[k]) for k in here[np.argsort(first)].tolist()}
