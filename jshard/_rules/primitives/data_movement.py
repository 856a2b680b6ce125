"""Data movement: `broadcast_in_dim transpose squeeze tile stack unstack concatenate split iota`.

A dimension along which elements are rearranged is not sharded, the others are. These operators are linear, so partial
sums pass.

>>> from jax import ShapeDtypeStruct as S
>>> p = {"shape": (2, 4), "broadcast_dimensions": (1,)}
>>> print(broadcast_in_dim(OpView("broadcast_in_dim", p, (S((4,), "int8"),), (S((2, 4), "int8"),))))
a -> b a
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("move")


def _broadcast_local(ctx: LocalContext, x: jax.Array, *_: jax.Array) -> Sequence[jax.Array]:
    return ctx.bind(x, shape=ctx.result_shape())


@rule("broadcast_in_dim", local=_broadcast_local)
def broadcast_in_dim(op: OpView) -> Rule:
    """Dimensions of the operand share the result's factor; a dimension of size one that grows has none."""
    f = Factors()
    out = f.dims(op.outs[0].shape)
    place = op.params["broadcast_dimensions"]
    shape = op.ins[0].shape
    operand = tuple(out[p] if shape[d] == op.outs[0].shape[p] else () for d, p in enumerate(place))
    return Rule((operand,), (out,), f.sizes, linear=linear_sets(op, (0,)), work=0.0)


@rule("transpose")
def transpose(op: OpView) -> Rule:
    """A permutation of the dimensions."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    out = tuple(dims[p] for p in op.params["permutation"])
    return Rule((dims,), (out,), f.sizes, linear=linear_sets(op, (0,)), work=0.0)


def _squeeze_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    return [lax.squeeze(x, ctx.op.params["dimensions"])]


@rule("squeeze", local=_squeeze_local)
def squeeze(op: OpView) -> Rule:
    """Dimensions of size one are removed."""
    removed = {d % len(op.ins[0].shape) for d in op.params["dimensions"]}
    f = Factors()
    dims = tuple(() if i in removed else (f.new(s),) for i, s in enumerate(op.ins[0].shape))
    return Rule(
        (dims,),
        (tuple(d for i, d in enumerate(dims) if i not in removed),),
        f.sizes,
        linear=linear_sets(op, (0,)),
        work=0.0,
    )


def _expand_dims_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    return [lax.expand_dims(x, ctx.op.params["dimensions"])]


@rule("expand_dims", local=_expand_dims_local)
def expand_dims(op: OpView) -> Rule:
    """Dimensions of size one are added."""
    added = {d % len(op.outs[0].shape) for d in op.params["dimensions"]}
    f = Factors()
    out = tuple(() if i in added else (f.new(s),) for i, s in enumerate(op.outs[0].shape))
    return Rule(
        (tuple(d for i, d in enumerate(out) if i not in added),),
        (out,),
        f.sizes,
        linear=linear_sets(op, (0,)),
        work=0.0,
    )


def _tile_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    reps = tuple(
        o // s if s else r for o, s, r in zip(ctx.result_shape(), x.shape, ctx.op.params["reps"], strict=True)
    )
    return ctx.bind(x, reps=reps)


@rule("tile", local=_tile_local)
def tile(op: OpView) -> Rule:
    """A repeated dimension is `(repeat, old)`: its copies may be on different devices."""
    f = Factors()
    operand, out = [], []
    for size, reps in zip(op.ins[0].shape, op.params["reps"], strict=True):
        d = f.new(size)
        operand.append((d,))
        out.append((d,) if reps == 1 else (f.new(reps), d))
    return Rule((tuple(operand),), (tuple(out),), f.sizes, linear=linear_sets(op, (0,)), work=0.0)


@rule("stack")
def stack(op: OpView) -> Rule:
    """The new dimension is not sharded."""
    f = Factors()
    axis = op.params["axis"] % len(op.outs[0].shape)
    dims = f.dims(op.ins[0].shape)
    out = (*dims[:axis], (), *dims[axis:])
    return Rule(
        (dims,) * len(op.ins), (out,), f.sizes, linear=linear_sets(op, tuple(range(len(op.ins)))), work=0.0,
        note="stacked operands lie on every device",
    )  # fmt: skip


@rule("unstack")
def unstack(op: OpView) -> Rule:
    """The dimension that is removed is not sharded."""
    f = Factors()
    axis = op.params["axis"] % len(op.ins[0].shape)
    dims = tuple(() if i == axis else (f.new(s),) for i, s in enumerate(op.ins[0].shape))
    out = tuple(d for i, d in enumerate(dims) if i != axis)
    return Rule((dims,), (out,) * len(op.outs), f.sizes, linear=linear_sets(op, (0,)), work=0.0)


@rule("concatenate")
def concatenate(op: OpView) -> Rule:
    """The concatenated dimension is not sharded: shards of the result would mix operands."""
    f = Factors()
    axis = op.params["dimension"]
    out = tuple(() if i == axis else (f.new(s),) for i, s in enumerate(op.outs[0].shape))
    return Rule(
        (out,) * len(op.ins), (out,), f.sizes, linear=linear_sets(op, tuple(range(len(op.ins)))), work=0.0,
        note="the joined dimension mixes operands",
    )  # fmt: skip


@rule("split")
def split(op: OpView) -> Rule:
    """The split dimension is not sharded."""
    f = Factors()
    axis = op.params["axis"]
    dims = tuple(() if i == axis else (f.new(s),) for i, s in enumerate(op.ins[0].shape))
    return Rule((dims,), (dims,) * len(op.outs), f.sizes, linear=linear_sets(op, (0,)), work=0.0)


def _iota_local(ctx: LocalContext) -> Sequence[jax.Array]:
    shape, d, dtype = ctx.result_shape(), ctx.op.params["dimension"], ctx.op.params["dtype"]
    (block,) = ctx.bind(shape=shape)
    offset = ctx.result_offset(0, d)
    return [block] if isinstance(offset, int) else [block + jnp.asarray(offset).astype(dtype)]


@rule("iota", local=_iota_local)
def iota(op: OpView) -> Rule:
    """Each shard starts at its offset."""
    f = Factors()
    return Rule((), (f.dims(op.outs[0].shape),), f.sizes, work=0.0)


def _empty_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    # The contents are undefined; `zeros` needs no parameters with a shape.
    out = ctx.op.outs[0]
    return [jnp.zeros(ctx.result_shape(), out.dtype)]


@rule("empty", "empty2", local=_empty_local)
def empty(op: OpView) -> Rule:
    """Undefined contents: any sharding is correct."""
    f = Factors()
    return Rule(tuple(((),) * len(a.shape) for a in op.ins), (f.dims(op.outs[0].shape),), f.sizes, work=0.0)
