"""Operators without a rule, run exactly as they were traced.

A primitive of another library may keep, among its parameters, the shapes and types of what it was traced with, and
compare them when it is compiled: Equinox's linear solve keeps the structure of its operands. Inside `shard_map` every
value is typed by the mesh and its manual axes, so the comparison fails ("pytree does not match out_structure"), as it
would in a plain `jax.shard_map`.

Such an operator runs on whole arrays, the same on every device, so it need not be inside `shard_map` at all. It becomes
a call that is traced and compiled outside of any mesh, on the avals of the traced equation, weak types included. Its
derivative is that of the call, taken there: linearized once, with the residuals handed on, and transposed from them;
under `vmap` the call is mapped there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprEqn, PyTreeDef
from jshard._core.layout import ArrayType


def run_as_traced(eqn: JaxprEqn, operands: Sequence[ArrayLike]) -> list[jax.Array]:
    """Run an equation on whole operands inside `shard_map` and return its results.

    >>> closed = jax.make_jaxpr(jnp.sin)(1.0)
    >>> [float(x) for x in run_as_traced(closed.jaxpr.eqns[0], [0.0])]
    [0.0]
    """
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}

    def run(*arrays: jax.Array) -> list[jax.Array]:
        out = eqn.primitive.bind(*arrays, **compat.bind_params(eqn, params))
        return list(out) if eqn.primitive.multiple_results else [out]

    avals, outs = ([_struct(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
    return list(as_traced_p.bind(*operands, call=OutsideCall(run, tuple(avals), tuple(outs))))


class OutsideCall:
    """A function of plain arrays with the types of its operands and results: the parameter of `as_traced_p`."""

    def __init__(
        self,
        run: Callable[..., list[jax.Array]],
        in_avals: Sequence[jax.ShapeDtypeStruct],
        out_avals: Sequence[jax.ShapeDtypeStruct] | None = None,
    ):
        self.run, self.in_avals = run, tuple(in_avals)
        self.out_avals = tuple(_result_structs(run, self.in_avals) if out_avals is None else out_avals)

    def linearized(self, which: tuple[int, ...]) -> tuple[OutsideCall, OutsideCall]:
        """The call that returns its residuals after its results, and the tangent map from them.

        `which` are the numbers of the operands to differentiate with respect to; the second call takes the residuals and
        the tangents of those operands.
        """
        trees: list[PyTreeDef] = []

        def forward(*arrays: jax.Array) -> list[jax.Array]:
            def of_differentiated(*values: jax.Array) -> list[jax.Array]:
                operands = list(arrays)
                for i, x in zip(which, values, strict=True):
                    operands[i] = x
                return [y for y in self.run(*operands) if _is_inexact(y)]

            exact = [y for y in self.run(*arrays) if not _is_inexact(y)] if self.has_integer_results else []
            inexact, tangent = jax.linearize(of_differentiated, *(arrays[i] for i in which))
            residuals, tree = jax.tree.flatten(tangent)
            trees[:] = [tree]
            remaining = {True: iter(inexact), False: iter(exact)}
            return [next(remaining[_is_inexact(o)]) for o in self.out_avals] + residuals

        first = OutsideCall(forward, self.in_avals)
        residuals = first.out_avals[len(self.out_avals) :]

        def tangent(*arrays: jax.Array) -> list[jax.Array]:
            n = len(residuals)
            return list(jax.tree.unflatten(trees[0], arrays[:n])(*arrays[n:]))

        return first, OutsideCall(tangent, [*residuals, *(self.in_avals[i] for i in which)])

    @functools.cached_property
    def has_integer_results(self) -> bool:
        """Whether some results are of integer or boolean type, which have no derivative."""
        return not all(map(_is_inexact, self.out_avals))

    def transposed(self, linear: tuple[int, ...]) -> OutsideCall:
        """The map from the other operands and the results' cotangents to the cotangents of the `linear` operands."""
        others = [i for i in range(len(self.in_avals)) if i not in linear]
        n = len(others)

        def transpose(*arrays: jax.Array) -> list[jax.Array]:
            def of_linear(*values: jax.Array) -> list[jax.Array]:
                operand = dict(zip((*others, *linear), (*arrays[:n], *values), strict=True))
                return [y for y in self.run(*(operand[i] for i in range(len(operand)))) if _is_inexact(y)]

            return list(
                jax.linear_transpose(of_linear, *(self.in_avals[i] for i in linear))(list(arrays[n:]))
            )

        cotangents = filter(_is_inexact, self.out_avals)
        return OutsideCall(transpose, [*(self.in_avals[i] for i in others), *cotangents])

    def batched(self, dims: tuple[int | None, ...], size: int) -> OutsideCall:
        """The call under `vmap`; results have the new dimension, of length `size`, first."""
        avals = [
            a if d is None else jax.ShapeDtypeStruct((*a.shape[:d], size, *a.shape[d:]), a.dtype)
            for a, d in zip(self.in_avals, dims, strict=True)
        ]
        return OutsideCall(jax.vmap(self.run, in_axes=dims, out_axes=0), list(map(_struct, avals)))


def _result_structs(
    run: Callable[..., list[jax.Array]], avals: Sequence[ArrayType]
) -> list[jax.ShapeDtypeStruct]:
    with compat.without_mesh():
        return [_struct(a) for a in jax.make_jaxpr(run)(*avals).out_avals]


def _struct(aval: ArrayType) -> jax.ShapeDtypeStruct:
    """Shape, type and weak type, without a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _is_inexact(x: ArrayType) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.inexact))


as_traced_p = compat.multi_result_primitive("jshard_as_traced")
"""An `OutsideCall` as a primitive inside `shard_map`; its results vary over all axes that an operand varies over."""


def _abstract_eval(*avals: core.ShapedArray, call: OutsideCall) -> list[core.ShapedArray]:
    axes = frozenset().union(*map(compat.vma_of_type, avals))
    outs = [core.ShapedArray(o.shape, o.dtype, weak_type=o.weak_type) for o in call.out_avals]
    return [compat.with_axes(o, axes) for o in outs] if axes else outs


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, call: OutsideCall
) -> tuple[Sequence[jax.Array], Sequence[jax.Array | ad.Zero]]:
    which = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    forward, tangent = call.linearized(which)
    results = as_traced_p.bind(*primals, call=forward)
    outs, residuals = results[: len(call.out_avals)], results[len(call.out_avals) :]
    out_tangents = iter(as_traced_p.bind(*residuals, *(tangents[i] for i in which), call=tangent))
    return outs, [
        next(out_tangents) if _is_inexact(aval) else ad.Zero(jax.typeof(out).to_tangent_aval())
        for aval, out in zip(call.out_avals, outs, strict=True)
    ]


def _transpose(
    cotangents: Sequence[jax.Array | ad.Zero], *operands: jax.Array | ad.UndefinedPrimal, call: OutsideCall
) -> list[jax.Array | None]:
    linear = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    others = [x for x in operands if not isinstance(x, ad.UndefinedPrimal)]
    inexact = [c for c, o in zip(cotangents, call.out_avals, strict=True) if _is_inexact(o)]
    values = compat.to_common_vma([*others, *map(ad.instantiate_zeros, inexact)])
    out = iter(as_traced_p.bind(*values, call=call.transposed(linear)))
    return [next(out) if i in linear else None for i in range(len(operands))]


def _batch(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, call: OutsideCall
) -> tuple[Sequence[jax.Array], list[int]]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out = as_traced_p.bind(*args, call=call.batched(tuple(dims), size))
    return out, [0] * len(out)


def _lower(
    ctx: mlir.LoweringRuleContext, *args: mlir.ir.Value, call: OutsideCall
) -> Sequence[mlir.ir.Value | Sequence[mlir.ir.Value]]:
    with compat.without_mesh():
        plain = [core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in call.in_avals]
        return mlir.lower_fun(call.run)(ctx.replace(avals_in=plain), *args)


as_traced_p.def_impl(lambda *xs, call: call.run(*xs))
as_traced_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[as_traced_p] = _jvp
ad.primitive_transposes[as_traced_p] = _transpose
batching.primitive_batchers[as_traced_p] = _batch
mlir.register_lowering(as_traced_p, _lower)
