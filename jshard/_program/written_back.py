"""Slices that are updated and written back, as updates of the array that they are part of.

Problem.  A decoder carries the cache of all layers through a loop, takes one layer's part, updates a row of it and
writes the part back: `c = cache[i]; c = update(c, row); cache = update(cache, c, i)`. Compiled as written, the part is
a copy: every layer's cache is read and written once more in every step, to change one row.

Idea.  If the part is written back where it was taken, updating it there is the same: `cache = update(cache, row, (i,
at))`, and the part is read from the array. The array is then only ever updated in place (`_program/memory/in_place.py`), and
its parts are read by the products themselves.

Worked case.  `d = c[i]; e = d.at[j].set(x)` by slices; `c' = c with e at i`; products read e: the update is one of c at
(i, j), and what is read of e is read of c' at i. A part that something else of c is read beside is left as it is.

>>> import jax, jax.numpy as jnp
>>> from jax import lax
>>> def f(c, x, i):
...     d = lax.dynamic_slice(c, (i, 0), (1, 8)).reshape(8)
...     d = lax.dynamic_update_slice(d, x, (2,))
...     return lax.dynamic_update_slice(c, d[None], (i, 0)), d.sum()
>>> before = jax.make_jaxpr(f)(jnp.ones((4, 8)), jnp.ones(1), 3).jaxpr
>>> after = with_updates_in_place(before)
>>> [e.invars[1].aval.shape for e in after.eqns if e.primitive.name == "dynamic_update_slice"]
[(1, 1)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ArrayFunction, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import substituted, with_calls_inlined
from jshard._program.loop_invariants import INLINED_CALLS, body_of


_UPDATE, _SLICE = "dynamic_update_slice", "dynamic_slice"
_RESHAPES = ("broadcast_in_dim", "reshape", "squeeze")
_WITH_BODIES = frozenset(("scan", "while", "cond", "jit", "pjit", "closed_call", "remat2"))


def with_updates_in_place(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr in which slices that are updated and written back are updated in their array, inner bodies too."""
    jaxpr = _with_inner_bodies(jaxpr)
    if not _has_update(jaxpr):
        return jaxpr
    flat, changed = with_calls_inlined(jaxpr), False
    while found := _find(flat):
        writer = _Writer(found)
        for eqn in flat.eqns:
            writer.write(eqn)
        flat, changed = flat.replace(eqns=writer.eqns, outvars=substituted(flat.outvars, writer.env)), True
    return compat.without_dead_code(flat) if changed else jaxpr


def _with_inner_bodies(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr whose equations have rewritten bodies; the same one if nothing changes."""
    eqns = [
        with_bodies(eqn, lambda _, body: with_updates_in_place(body))
        if eqn.primitive.name in _WITH_BODIES
        else eqn
        for eqn in jaxpr.eqns
    ]
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _has_update(jaxpr: Jaxpr) -> bool:
    """Whether an array is sliced and updated, in calls too."""
    names = set()
    pending = [jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            names.add(eqn.primitive.name)
            body = body_of(eqn) if eqn.primitive.name in INLINED_CALLS else None
            if body is not None:
                pending.append(compat.open_jaxpr(body)[0])
    return {_UPDATE, _SLICE} <= names


@dataclasses.dataclass(frozen=True, eq=False)
class _WrittenBack:
    """A slice, the equations that it goes through (reshapes and updates), and the update that writes it back."""

    taken: JaxprEqn
    passed: tuple[JaxprEqn, ...]
    written: JaxprEqn


def _find(jaxpr: Jaxpr) -> list[_WrittenBack]:
    """Slices of a body that are updated and written back where they were taken; no equation is in two of them."""
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    readers: dict[JaxprAtom, list[int]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not compat.is_literal(v):
                readers.setdefault(v, []).append(id(eqn))
    returned = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    keys: dict[JaxprAtom, Hashable] = {}
    found: list[_WrittenBack] = []
    used: set[int] = set()
    for written in jaxpr.eqns:
        candidate = _taken_and_written(written, made_by, keys)
        if candidate is None:
            continue
        array, equations = written.invars[0], {id(e) for e in (candidate.taken, written)}
        if array in returned or len(readers[array]) != 2 or set(readers[array]) != equations:
            continue
        equations |= {id(e) for e in candidate.passed}
        if not used & equations:
            used |= equations
            found.append(candidate)
    return found


def _taken_and_written(
    written: JaxprEqn, made_by: Mapping[JaxprAtom, JaxprEqn], keys: dict[JaxprAtom, Hashable]
) -> _WrittenBack | None:
    """The slice that an equation writes back where it was taken, with at least one update; None for any other."""
    if written.primitive.name != _UPDATE or compat.is_literal(written.invars[0]):
        return None
    array, v = written.invars[0], written.invars[1]
    passed: list[JaxprEqn] = []
    while not compat.is_literal(v) and v in made_by:
        eqn = made_by[v]
        updates = eqn.primitive.name == _UPDATE and eqn.invars[1].aval.size > 0
        if not (updates or _only_adds_or_drops_ones(eqn)):
            break
        passed.append(eqn)
        v = eqn.invars[0]
    taken = None if compat.is_literal(v) else made_by.get(v)
    if taken is None or taken.primitive.name != _SLICE or taken.invars[0] is not array:
        return None
    if not any(eqn.primitive.name == _UPDATE for eqn in passed) or max(array.aval.shape) >= 2**31:
        return None
    if tuple(taken.params["slice_sizes"]) != tuple(written.invars[1].aval.shape):
        return None
    starts = zip(taken.invars[1:], written.invars[2:], strict=True)
    if any(_key(a, made_by, keys) != _key(b, made_by, keys) for a, b in starts):
        return None
    return _WrittenBack(taken, tuple(reversed(passed)), written)


def _only_adds_or_drops_ones(eqn: JaxprEqn) -> bool:
    """Whether an equation only adds or drops dimensions of length one."""
    if eqn.primitive.name not in _RESHAPES or compat.is_literal(eqn.invars[0]):
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = eqn.params.get("broadcast_dimensions", ())
    in_order = tuple(dims) == tuple(sorted(dims)) and eqn.params.get("dimensions") is None
    is_squeeze = eqn.primitive.name == "squeeze"
    return (in_order or is_squeeze) and [n for n in before if n != 1] == [n for n in after if n != 1]


def _key(atom: JaxprAtom, made_by: Mapping[JaxprAtom, JaxprEqn], keys: dict[JaxprAtom, Hashable]) -> Hashable:
    """The same for atoms that are computed alike: an index is made non-negative anew wherever it is used."""
    if compat.is_literal(atom):
        return "literal", str(atom.aval), np.asarray(atom.val).tobytes()
    if atom not in keys:
        eqn = made_by.get(atom)
        if eqn is None or eqn.effects or len(eqn.outvars) != 1 or atom.aval.shape:
            keys[atom] = ("variable", id(atom))
        else:
            operands = tuple(_key(a, made_by, keys) for a in eqn.invars)
            keys[atom] = (eqn.primitive.name, str(sorted(eqn.params.items(), key=str)), operands)
    return keys[atom]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A value as a part of an array: of size `sizes` from `starts` on; `dims` are the array's for each of its own
    dimensions that are longer than one."""

    array: JaxprAtom
    starts: tuple[JaxprAtom, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


class _Writer:
    """Writes the equations of a body anew, with some slices updated in their arrays; used once."""

    def __init__(self, found: Sequence[_WrittenBack]):
        self.eqns: list[JaxprEqn] = []
        self.env: dict[JaxprAtom, JaxprAtom] = {}
        self.primitive = found[0].taken.primitive
        self.of_equation = {id(e): f for f in found for e in (*f.passed, f.written)}
        self.part_of = {id(f): _part_of(f.taken) for f in found}
        self.parts: dict[JaxprAtom, _Part] = {}  # values after an update that are parts of an array

    def write(self, eqn: JaxprEqn) -> None:
        """An equation, in the place of one of the body."""
        found = self.of_equation.get(id(eqn))
        reads_part = eqn.primitive.name == _SLICE or (
            eqn.primitive.name == "slice" and not eqn.params["strides"]
        )
        if found is not None and eqn is found.written:
            self.env[eqn.outvars[0]] = self.part_of[id(found)].array
        elif found is not None and eqn.primitive.name == _UPDATE:
            self.update(eqn, found)
        elif reads_part and not compat.is_literal(eqn.invars[0]) and eqn.invars[0] in self.parts:
            self.read_part(eqn)
        else:
            self.eqns.append(eqn.replace(invars=substituted(eqn.invars, self.env)))

    def update(self, eqn: JaxprEqn, found: _WrittenBack) -> None:
        """An update of the part, as one of the array; and the part as it is then."""
        before, part = eqn.invars[0].aval, self.part_of[id(found)]
        kept = [k for k, n in enumerate(before.shape) if n != 1]
        update_shape = [1] * len(part.sizes)
        for k, d in zip(kept, part.dims, strict=True):
            update_shape[d] = eqn.invars[1].aval.shape[k]
        inner = [eqn.invars[2 + k] for k in kept]
        update_primitive, slice_primitive = eqn.primitive, self.primitive

        def run(array: jax.Array, update: jax.Array, *starts: jax.Array) -> tuple[jax.Array, jax.Array]:
            outer, within = starts[: len(part.sizes)], starts[len(part.sizes) :]
            at = _clamped(outer, array.shape, part.sizes)
            offsets = _clamped(
                within, [part.sizes[d] for d in part.dims], [update_shape[d] for d in part.dims]
            )
            there = list(at)
            for d, offset in zip(part.dims, offsets, strict=True):
                there[d] = lax.add(at[d], offset)
            array = update_primitive.bind(array, lax.reshape(update, update_shape), *there)
            taken = slice_primitive.bind(array, *at, slice_sizes=part.sizes)
            return array, lax.reshape(taken, before.shape)

        array, value = self.traced(run, [part.array, eqn.invars[1], *part.starts, *inner], eqn)
        self.env[eqn.outvars[0]] = value
        self.parts[eqn.outvars[0]] = self.part_of[id(found)] = dataclasses.replace(part, array=array)

    def read_part(self, eqn: JaxprEqn) -> None:
        """A slice of a part, read from the array."""
        part = self.parts[eqn.invars[0]]
        value, result = eqn.invars[0].aval, eqn.outvars[0].aval
        kept = [k for k, n in enumerate(value.shape) if n != 1]
        sizes = list(part.sizes)
        for k, d in zip(kept, part.dims, strict=True):
            sizes[d] = result.shape[k]
        static = eqn.params["start_indices"] if eqn.primitive.name == "slice" else ()
        primitive = self.primitive

        def run(array: jax.Array, *starts: jax.Array) -> tuple[jax.Array]:
            outer, within = starts[: len(part.sizes)], starts[len(part.sizes) :]
            there = list(_clamped(outer, array.shape, part.sizes))
            whole = [part.sizes[d] for d in part.dims]
            offsets = (
                [jnp.int32(static[k]) for k in kept]
                if static
                else _clamped(within, whole, [sizes[d] for d in part.dims])
            )
            for d, offset in zip(part.dims, offsets, strict=True):
                there[d] = lax.add(there[d], offset)
            return (lax.reshape(primitive.bind(array, *there, slice_sizes=tuple(sizes)), result.shape),)

        inner = [] if static else [eqn.invars[1 + k] for k in kept]
        (self.env[eqn.outvars[0]],) = self.traced(run, [part.array, *part.starts, *inner], eqn)

    def traced(self, run: ArrayFunction, operands: Sequence[JaxprAtom], like: JaxprEqn) -> list[JaxprAtom]:
        """Append the equations of a function of some atoms, in the place of another equation; its results."""
        operands = substituted(operands, self.env)
        types = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
            for v in operands
        ]
        traced, _ = compat.open_jaxpr(compat.make_jaxpr(run, *types))
        env = dict(zip(traced.invars, operands, strict=True))
        self.eqns += [
            e.replace(invars=substituted(e.invars, env), source_info=like.source_info, ctx=like.ctx)
            for e in traced.eqns
        ]
        return substituted(traced.outvars, env)


def _part_of(taken: JaxprEqn) -> _Part:
    """The part that a slice takes."""
    sizes = tuple(taken.params["slice_sizes"])
    return _Part(
        taken.invars[0], tuple(taken.invars[1:]), sizes, tuple(d for d, n in enumerate(sizes) if n != 1)
    )


def _clamped(starts: Sequence[jax.Array], shape: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    """Starts of a slice of some sizes in range, as int32."""
    out = []
    for start, n, size in zip(starts, shape, sizes, strict=True):
        start = jnp.asarray(start)
        last = min(n - size, int(jnp.iinfo(start.dtype).max))
        bounds = np.array(0, start.dtype), np.array(last, start.dtype)
        out.append(lax.clamp(bounds[0], start, bounds[1]).astype(np.int32) if n > size else jnp.int32(0))
    return out
