"""Padding at the end of a dimension (`_program/tail_primitives.py`): the padded dimension may be cut.

`pad_tail` reads the dimension whole and gives each device its block of the padded one, without communication. `mask_tail`
is elementwise: each device compares the positions of its block with the true length.

>>> from jax import ShapeDtypeStruct as S
>>> print(pad_tail(OpView("pad_tail", {"dim": 0, "size": 8}, (S((7, 4), "float32"),), (S((8, 4), "float32"),))))
() a -> b a
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._program.tail_primitives import DIAGONAL, MASK_TAIL, PAD_TAIL, run_mask, run_pad
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("tail")


def _pad_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    dim, size = ctx.op.params["dim"], ctx.op.params["size"]
    block, n = ctx.result_shape()[dim], x.shape[dim]
    if block == size:
        return run_pad(x, dim=dim, size=size)
    if ctx.for_products and ctx.chip.startswith("tpu"):
        # The kernels of the products read their blocks of the padded operand; of two slices the first is a copy.
        (padded,) = run_pad(x, dim=dim, size=size)
        return [lax.dynamic_slice_in_dim(padded, ctx.result_offset(0, dim), block, dim)]
    # The last block is moved by what it lacks: other kernels would read a block of the padded operand from a copy of it.
    offset = jnp.asarray(ctx.result_offset(0, dim), jnp.int32)
    start = jnp.minimum(offset, max(0, n - block))
    own = lax.dynamic_slice_in_dim(x, start, min(n, block), dim)
    (padded,) = run_pad(own, dim=dim, size=size - max(0, n - block))
    return [lax.dynamic_slice_in_dim(padded, offset - start, block, dim)]


@rule(PAD_TAIL, local=_pad_local)
def pad_tail(op: OpView) -> Rule:
    """The padded dimension is a factor of the result alone."""
    f, dim = Factors(), op.params["dim"]
    operand = tuple(() if d == dim else (f.new(s),) for d, s in enumerate(op.ins[0].shape))
    out = tuple((f.new(op.params["size"]),) if d == dim else k for d, k in enumerate(operand))
    return Rule((operand,), (out,), f.sizes, linear=linear_sets(op, (0,)))


def _mask_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    p, last = ctx.op.params, x.ndim - 1
    corner = (0, 0)
    if p["value"] == DIAGONAL:
        corner = ctx.operand_offset(0, last - 1), ctx.operand_offset(0, last)
    offset = ctx.operand_offset(0, p["dim"])
    return run_mask(x, dim=p["dim"], length=p["length"], value=p["value"], offset=offset, corner=corner)


@rule(MASK_TAIL, local=_mask_local)
def mask_tail(op: OpView) -> Rule:
    """Elementwise; partial sums pass where the padding becomes zero."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    linear = linear_sets(op, (0,)) if op.params["value"] == 0 else ()
    return Rule((dims,), (dims,), f.sizes, linear=linear, work=0.0)
