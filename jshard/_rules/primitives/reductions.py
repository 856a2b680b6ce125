"""Reductions: the reduced dimensions are reduction factors.

A sharded `reduce_sum` leaves a partial sum. The others have no partial layout: their local implementations finish the
reduction at once by `pmax` or `pmin` or, where no collective exists (product, bitwise), by an all-gather of one value
per device. `argmax` reduces values first, then indices: two all-reduces. Each rule lists its internal collectives.

>>> from jax import ShapeDtypeStruct as S
>>> print(reduce_sum(OpView("reduce_sum", {"axes": (1,)}, (S((4, 8), "float32"),), (S((4,), "float32"),))))
a b -> a  (reduce b)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.jaxcompat import all_gather_invariant, itemsize
from jshard._rules.factors import Factors, is_float, linear_sets, summable
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, InternalCollective, Rule


rule = family("reduce")


def _reduce_dims(op: OpView, axes: Sequence[int]) -> tuple[Factors, tuple[int, ...], Dims, Dims]:
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    reduced = tuple(dims[a][0] for a in axes)
    return f, reduced, dims, tuple(d for i, d in enumerate(dims) if i not in set(axes))


@rule("reduce_sum")
def reduce_sum(op: OpView) -> Rule:
    """Sharding a reduced dimension leaves a partial sum; partial sums pass."""
    f, reduced, dims, out = _reduce_dims(op, op.params["axes"])
    ok = summable(op.outs[0])
    return Rule(
        (dims,), (out,), f.sizes,
        reduction=reduced if ok else (),
        blocked=() if ok else reduced,
        linear=linear_sets(op, (0,)),
    )  # fmt: skip


def _ordered_bits(x: jax.Array, take_max: bool) -> jax.Array:
    """Integers with the order of floats `x`, in which NaN is the extremum: XLA's collectives may drop NaN.

    The bits of IEEE floats, read as integers, have the order of the floats once those of negative numbers are flipped.
    Both zeros become the same integer.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    nan = jnp.asarray(jnp.nan if take_max else -jnp.nan, x.dtype)
    x = jnp.where(x == 0, jnp.zeros_like(x), jnp.where(x != x, nan, x))
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    extremum = jnp.asarray(jnp.iinfo(integer).max if take_max else jnp.iinfo(integer).min, integer)
    bits = jnp.where(x != x, extremum, lax.bitcast_convert_type(x, integer))
    return jnp.where((bits < 0) & (x == x), bits ^ jnp.iinfo(integer).max, bits)


def _unordered(key: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse of `_ordered_bits`."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return key
    info = jnp.iinfo(key.dtype)
    x = lax.bitcast_convert_type(jnp.where(key < 0, key ^ info.max, key), dtype)
    return jnp.where((key == info.max) | (key == info.min), jnp.asarray(jnp.nan, dtype), x)


def _extremum_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """Finish max or min across devices; differentiable as in JAX, where ties share the tangent equally."""
    across = ctx.reduced_axes()
    if not across:
        return ctx.bind(x)
    take_max = ctx.op.primitive == "reduce_max"
    collective = lax.pmax if take_max else lax.pmin
    axes = tuple(ctx.op.params["axes"])

    def value(x: jax.Array) -> jax.Array:
        (y,) = ctx.bind(x)
        with ctx.collective_scope(0):
            best = collective(_ordered_bits(y, take_max), across)
        return _unordered(best, y.dtype)

    if not is_float(ctx.op.ins[0]):
        return [value(x)]
    finish = jax.custom_jvp(value)

    def jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (t,) = primals, tangents
        y = finish(x)
        is_extremum = (x == jnp.expand_dims(y, axes)).astype(t.dtype)
        total = lax.psum(jnp.sum(is_extremum * t, axes), across)
        return y, total / lax.psum(jnp.sum(is_extremum, axes), across)

    finish.defjvp(jvp)
    return [finish(x)]


@rule("reduce_max", "reduce_min", local=_extremum_local)
def reduce_extremum(op: OpView) -> Rule:
    """Finished by `pmax` or `pmin`; complex numbers have no such collective."""
    f, reduced, dims, out = _reduce_dims(op, op.params["axes"])
    ok = not jnp.issubdtype(op.ins[0].dtype, jnp.complexfloating)
    return Rule(
        (dims,), (out,), f.sizes,
        reduction=reduced if ok else (),
        blocked=() if ok else reduced,
        reducer=op.primitive.removeprefix("reduce_"), internal=_all_reduces(op.outs[0].dtype),
    )  # fmt: skip


def _all_reduces(*dtypes: np.dtype) -> tuple[InternalCollective, ...]:
    return tuple(InternalCollective("all_reduce", itemsize(d)) for d in dtypes)


def _gathered_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """Reduce locally, all-gather one value per device, reduce again: for any associative operator.

    `any` and `all` of predicates use `pmax` and `pmin` instead.
    """
    across = ctx.reduced_axes()
    (y,) = ctx.bind(x)
    if not across:
        return [y]
    with ctx.collective_scope(0):
        if _is_test(ctx.op):
            return [(lax.pmin if ctx.op.primitive == "reduce_and" else lax.pmax)(y, across)]
        bits = y.astype(jnp.uint8) if y.dtype == bool else y
        stacked = all_gather_invariant(bits[None], across, axis=0)
    params = {k: v for k, v in ctx.op.params.items() if k != "axes"}
    return ctx.bind_plain(stacked.astype(y.dtype), axes=(0,), **params)


def _is_test(op: OpView) -> bool:
    """Whether a reduction is `any` or `all` of predicates."""
    return op.outs[0].dtype == bool and op.primitive in ("reduce_and", "reduce_or")


@rule("reduce_prod", "reduce_and", "reduce_or", "reduce_xor", local=_gathered_local)
def reduce_gathered(op: OpView) -> Rule:
    """Finished by an all-gather of one value per device: no collective multiplies or combines bits of integers."""
    f, reduced, dims, out = _reduce_dims(op, op.params["axes"])
    sent = InternalCollective("all_reduce" if _is_test(op) else "all_gather", itemsize(op.outs[0].dtype))
    return Rule(
        (dims,), (out,), f.sizes, reduction=reduced, reducer=op.primitive.removeprefix("reduce_"), internal=(sent,)
    )  # fmt: skip


def _arg_extremum_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """The first index of the extremum over all devices: first the extremum, then the smallest index that has it."""
    across = ctx.reduced_axes()
    (index,) = ctx.bind(x)
    if not across:
        return [index]
    (axis,) = ctx.op.params["axes"]
    take_max = ctx.op.primitive == "argmax"
    value = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis), axis)
    key = _ordered_bits(value, take_max)
    with ctx.collective_scope(0):
        best = lax.pmax(key, across) if take_max else lax.pmin(key, across)
    index = index + jnp.asarray(ctx.operand_offset(0, axis), index.dtype)
    last = jnp.asarray(jnp.iinfo(index.dtype).max, index.dtype)
    index = jnp.where(key == best, index, last)
    with ctx.collective_scope(1):
        return [lax.pmin(index, across)]


@rule("argmax", "argmin", local=_arg_extremum_local)
def arg_extremum(op: OpView) -> Rule:
    """Finished by reducing the devices' extrema, then the global indices of those equal to the result."""
    f, reduced, dims, out = _reduce_dims(op, op.params["axes"])
    return Rule(
        (dims,), (out,), f.sizes, reduction=reduced, reducer=op.primitive.removeprefix("arg"),
        internal=_all_reduces(op.ins[0].dtype, op.outs[0].dtype),
    )  # fmt: skip


@rule("reduce")
def reduce(op: OpView) -> Rule:
    """A reduction by a function of the user's: reduced dimensions are not sharded."""
    dimensions = op.params["dimensions"]
    n = len(op.ins) // 2
    f, reduced, dims, out = _reduce_dims(op, dimensions)
    return Rule(
        (dims,) * n + ((),) * n, (out,) * n, f.sizes, blocked=reduced,
        note="the reduction's function is the user's: its dimensions stay whole",
    )  # fmt: skip
