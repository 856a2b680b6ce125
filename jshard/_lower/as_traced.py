"""Operators that nothing is known about, run exactly as they were traced.

Problem.  A primitive of another library may keep, among its parameters, the shapes and types of what it was traced
with, and compare them when it is compiled. Equinox's do: a linear solve holds the structure of its operands. Inside
`shard_map` every value is typed by the mesh and its manual axes, so the comparison fails ("pytree does not match
out_structure"), and would in a plain `jax.shard_map` as well.

Idea.  Such an operator is run on whole arrays, the same on every device, so it does not have to know that it is
inside. It becomes a call that is traced and compiled outside of any mesh, on the avals of the traced equation, weak
types included. Its derivative is that of the call, taken there: linearized once, with residuals handed on, and
transposed from those; under `vmap` the call is mapped there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.interpreters import ad, batching, mlir

from jshard import _jaxcompat as compat


def run_as_traced(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation on whole operands, inside `shard_map`.

    >>> closed = jax.make_jaxpr(jnp.sin)(1.0)
    >>> [float(x) for x in run_as_traced(closed.jaxpr.eqns[0], [0.0])]
    [0.0]
    """
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}

    def run(*arrays: Any) -> list[Any]:
        out = eqn.primitive.bind(*arrays, **compat.bind_params(eqn, params))
        return list(out) if eqn.primitive.multiple_results else [out]

    avals, outs = ([_struct(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
    return list(as_traced_p.bind(*operands, call=OutsideCall(run, tuple(avals), tuple(outs))))


class OutsideCall:
    """A function of plain arrays with the types of its operands and results; what `as_traced_p` calls."""

    def __init__(
        self, run: Callable[..., list[Any]], in_avals: Sequence[Any], out_avals: Sequence[Any] | None = None
    ):
        self.run, self.avals = run, tuple(in_avals)
        self.outs = tuple(_result_structs(run, self.avals) if out_avals is None else out_avals)

    def linearized(self, which: tuple[int, ...]) -> tuple[OutsideCall, OutsideCall]:
        """The call with its residuals after its results, and the tangent map of its operands `which` from those."""
        trees: list[Any] = []

        def forward(*arrays: Any) -> list[Any]:
            def moving(*some: Any) -> list[Any]:
                every = list(arrays)
                for i, x in zip(which, some, strict=True):
                    every[i] = x
                return [y for y in self.run(*every) if _inexact(y)]

            rest = [y for y in self.run(*arrays) if not _inexact(y)] if self.has_integer_results else []
            out, tangent = jax.linearize(moving, *(arrays[i] for i in which))
            kept, tree = jax.tree.flatten(tangent)
            trees[:] = [tree]
            real, whole = iter(out), iter(rest)
            return [next(real) if _inexact(o) else next(whole) for o in self.outs] + kept

        first = OutsideCall(forward, self.avals)
        kept = first.outs[len(self.outs) :]

        def tangent(*arrays: Any) -> list[Any]:
            return list(jax.tree.unflatten(trees[0], arrays[: len(kept)])(*arrays[len(kept) :]))

        return first, OutsideCall(tangent, [*kept, *(self.avals[i] for i in which)])

    @functools.cached_property
    def has_integer_results(self) -> bool:
        """Whether some results are integers or the like, which have no derivative."""
        return not all(map(_inexact, self.outs))

    def transposed(self, linear: tuple[int, ...]) -> OutsideCall:
        """From the other operands and the cotangents of the results to the cotangents of the `linear` operands."""
        kept = [i for i in range(len(self.avals)) if i not in linear]

        def pulled(*arrays: Any) -> list[Any]:
            def of_linear(*some: Any) -> list[Any]:
                at = dict(zip((*kept, *linear), (*arrays[: len(kept)], *some), strict=True))
                return [y for y in self.run(*(at[i] for i in range(len(at)))) if _inexact(y)]

            back = jax.linear_transpose(of_linear, *(self.avals[i] for i in linear))
            return list(back(list(arrays[len(kept) :])))

        return OutsideCall(pulled, [*(self.avals[i] for i in kept), *filter(_inexact, self.outs)])

    def batched(self, dims: tuple[int | None, ...], size: int) -> OutsideCall:
        """The mapped call; results have the new dimension first."""
        avals = [
            a if d is None else jax.ShapeDtypeStruct((*a.shape[:d], size, *a.shape[d:]), a.dtype)
            for a, d in zip(self.avals, dims, strict=True)
        ]
        return OutsideCall(jax.vmap(self.run, in_axes=dims, out_axes=0), list(map(_struct, avals)))


def _result_structs(run: Callable[..., list[Any]], avals: Sequence[Any]) -> list[Any]:
    with compat.without_mesh():
        return [_struct(a) for a in jax.make_jaxpr(run)(*avals).out_avals]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and weak type, without a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.inexact))


as_traced_p = compat.multi_result_primitive("jshard_as_traced")
"""An `Outside` as a primitive inside `shard_map`; its results vary over what any operand varies over."""


def _abstract_eval(*avals: Any, call: OutsideCall) -> Any:
    axes = frozenset().union(*map(compat.vma_of_type, avals))
    outs = [core.ShapedArray(o.shape, o.dtype, weak_type=o.weak_type) for o in call.outs]
    return [compat.with_axes(o, axes) for o in outs] if axes else outs


def _jvp(primals: Any, tangents: Any, *, call: OutsideCall) -> Any:
    which = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    first, second = call.linearized(which)
    results = as_traced_p.bind(*primals, call=first)
    outs, kept = results[: len(call.outs)], results[len(call.outs) :]
    moved = iter(as_traced_p.bind(*kept, *(tangents[i] for i in which), call=second))
    still = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]
    return outs, [next(moved) if _inexact(o) else zero for o, zero in zip(call.outs, still, strict=True)]


def _transpose(cotangents: Any, *operands: Any, call: OutsideCall) -> Any:
    linear = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    kept = [x for x in operands if not ad.is_undefined_primal(x)]
    given = [ad.instantiate_zeros(c) for c, o in zip(cotangents, call.outs, strict=True) if _inexact(o)]
    axes = frozenset().union(*map(compat.vma, (*kept, *given)))
    alike = [
        lax.pcast(x, tuple(sorted(axes - compat.vma(x))), to="varying") if axes - compat.vma(x) else x
        for x in (*kept, *given)
    ]
    out = iter(as_traced_p.bind(*alike, call=call.transposed(linear)))
    return [next(out) if i in linear else None for i in range(len(operands))]


def _batch(args: Any, dims: Any, *, call: OutsideCall) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out = as_traced_p.bind(*args, call=call.batched(tuple(dims), size))
    return out, [0] * len(out)


def _lower(ctx: Any, *args: Any, call: OutsideCall) -> Any:
    with compat.without_mesh():
        plain = [core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in call.avals]
        return mlir.lower_fun(call.run)(ctx.replace(avals_in=plain), *args)


as_traced_p.def_impl(lambda *xs, call: call.run(*xs))
as_traced_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[as_traced_p] = _jvp
ad.primitive_transposes[as_traced_p] = _transpose
batching.primitive_batchers[as_traced_p] = _batch
mlir.register_lowering(as_traced_p, _lower)
