"""`roll pad rev`: elements keep their neighbours and change their place, so that a cut dimension sends edges, or blocks.

`pad` with a low padding of 1 and a high one of -1 is a shift: each block is its own rows but the last, behind a row of the
block before. Any padding that keeps most of a dimension is cut so, by the exchange of `block_reads.py`: a slice that drops
the first elements is a negative padding. A roll is the same around a ring. Padding between elements, `low + high` in all as
many as between two of them, interleaves with zeros: `o -> (o k)`, which each device does alone. A reversed dimension
exchanges whole blocks.

>>> from jax import ShapeDtypeStruct as S
>>> shift = {"padding_config": ((0, 0, 0), (1, -1, 0))}
>>> print(pad(OpView("pad", shift, (S((4, 8), "int8"), S((), "int8")), (S((4, 8), "int8"),))))
a b,  -> a c  (halo: b c)
>>> interleave = {"padding_config": ((0, 0, 0), (0, 1, 1))}
>>> print(pad(OpView("pad", interleave, (S((4, 8), "int8"), S((), "int8")), (S((4, 16), "int8"),))))
a b,  -> a (b c)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core.jaxcompat import itemsize, to_common_vma
from jshard._program.roll_primitive import ROLL, run_roll
from jshard._program.shifted_pieces import padding_config
from jshard._rules.block_reads import RolledReads, WindowReads
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.halo import Halo, with_halos
from jshard._rules.neighbour_exchange import with_neighbours
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import WHOLE, Dims, InternalCollective, JointCut, Rule, joint_code


rule = family("shift")

_MOST_DROPPED = 4
"""A padding is cut by an exchange if it keeps all but one in so many elements, of the operand and of the result."""


def _roll_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    if ctx.mesh.size(*ctx.axes(joint_code(ctx.rule, 0))) == 1 if ctx.rule.joint else True:
        return run_roll(x, **ctx.op.params)
    return with_neighbours(ctx, [x])


@rule(ROLL, local=_roll_local)
def roll(op: OpView) -> Rule:
    """The rolled dimension is cut with a permute of the rows that change their block."""
    f, (dim, by) = Factors(), (op.params["dim"], op.params["by"])
    dims = f.dims(op.ins[0].shape)
    found = Rule(
        (dims,), (dims,), f.sizes, blocked=dims[dim], linear=linear_sets(op, (0,)), work=0.0,
        note="a rolled dimension shifts across blocks",
    )  # fmt: skip
    cut = JointCut("roll", dims[dim], dims[dim], alone=True)
    return _without_buffers(
        with_halos(found, op.ins, [Halo(cut, ((0, dim, RolledReads(op.ins[0].shape[dim], by)),))])
    )


def _without_buffers(found: Rule) -> Rule:
    """The rule without a workspace: what arrives is the result itself."""
    return dataclasses.replace(found, workspace=())


@dataclasses.dataclass(frozen=True)
class _Padded:
    """A dimension of a padding: its factors in operand and result, which of them is blocked, what blocks of it read."""

    operand: tuple[int, ...]
    result: tuple[int, ...]
    blocked: tuple[int, ...] = ()
    reads: WindowReads | None = None


def _padded(f: Factors, n: int, m: int, config: Sequence[int]) -> _Padded:
    low, high, between = (int(c) for c in config)
    if (low, high, between) == (0, 0, 0):
        one = (f.new(n),)
        return _Padded(one, one)
    if between and low >= 0 and high >= 0 and low + high == between:
        major, minor = f.new(n), f.new(between + 1)
        return _Padded((major,), (major, minor), (minor,))
    if between or not n or not m:
        return _Padded((), ())
    kept = min(n, m - low) - max(0, -low)
    if kept > 1 and kept * _MOST_DROPPED >= (_MOST_DROPPED - 1) * max(n, m):
        before, after = f.new(n), f.new(m)
        return _Padded((before,), (after,), (before, after), WindowReads(n, m, low=low))
    if n * _MOST_DROPPED <= m:  # each device makes its block of the whole operand
        return _Padded((), (f.new(m),))
    return _Padded((), ())


def _pad_local(ctx: LocalContext, x: jax.Array, padding: jax.Array) -> Sequence[jax.Array]:
    partial = ctx.operand_layout(0).partial
    if partial and not ctx.operand_layout(1).partial:
        # Only one addend may contain the padding.
        padding = jnp.where(block_index(partial, ctx.mesh) == 0, padding, jnp.zeros_like(padding))
    x, padding = to_common_vma([x, padding])
    padding = padding.astype(x.dtype) if partial else padding
    config = padding_config(ctx.op.params)
    before, after = ctx.operand_layout(0).dims, ctx.result_layout(0).dims
    cut = [ctx.mesh.size(*axes) > 1 for axes in after]
    exchanged = {one.dim for one in ctx.rule.internal if one.over is not None and ctx.axes(one.over)}
    x = with_neighbours(ctx, [x, padding], fills=(padding,))[0]
    for d in range(x.ndim):
        if d in exchanged and cut[d]:
            config[d] = (0, 0, 0)
        elif cut[d] and not before[d]:
            x = _block_of_whole(ctx, x, padding, d, config[d][0])
            config[d] = (0, 0, 0)
    x, padding = to_common_vma([x, padding])
    return [lax.pad(x, padding, config)]


def _block_of_whole(ctx: LocalContext, x: jax.Array, padding: jax.Array, d: int, low: int) -> jax.Array:
    """This device's block of a padded dimension of which it has the whole operand."""
    block, n = ctx.result_shape()[d], x.shape[d]
    x, padding = to_common_vma([x, padding])
    around = lax.pad(x, padding, [(block, block, 0) if k == d else (0, 0, 0) for k in range(x.ndim)])
    start = jnp.clip(jnp.asarray(ctx.result_offset(0, d) - low + block, jnp.int32), 0, n + block)
    return lax.dynamic_slice_in_dim(around, start, block, d)


@rule("pad", local=_pad_local)
def pad(op: OpView) -> Rule:
    """Most of a dimension kept: a halo; interleaved: the result's major factor; little of the result: that alone is cut.

    Of partial sums one device pads with the value, the others with zero.
    """
    f = Factors()
    dims = [
        _padded(f, n, m, c)
        for n, m, c in zip(op.ins[0].shape, op.outs[0].shape, op.params["padding_config"], strict=True)
    ]
    operand: Dims = tuple(d.operand for d in dims)
    found = Rule(
        (operand, ()), (tuple(d.result for d in dims),), f.sizes, blocked=tuple(b for d in dims for b in d.blocked),
        linear=linear_sets(op, (0,), (0, 1)), work=0.0, note="padded dimensions shift across blocks",
    )  # fmt: skip
    halos = [
        Halo(JointCut("halo", (*d.operand, WHOLE), d.result, alone=True), ((0, i, d.reads),))
        for i, d in enumerate(dims)
        if d.reads is not None
    ]
    return _without_buffers(with_halos(found, op.ins, halos))


def _rev_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """Blocks in reverse order, each reversed."""
    number = 0
    for one in ctx.rule.internal:
        axes = ctx.axes(-1 if one.over is None else one.over)
        n = ctx.mesh.size(*axes)
        if n > 1:
            with ctx.collective_scope(number):
                x = lax.ppermute(x, axes, [(i, n - 1 - i) for i in range(n)])
            number += 1
    return ctx.bind(x)


@rule("rev", local=_rev_local)
def rev(op: OpView) -> Rule:
    """A reversed dimension is cut with a permute of whole blocks: block i becomes block n - 1 - i."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    turned = [dims[d][0] for d in op.params["dimensions"]]
    found = Rule(
        (dims,), (dims,), f.sizes, blocked=tuple(turned), linear=linear_sets(op, (0,)), work=0.0,
        note="a reversed dimension changes blocks",
    )  # fmt: skip
    if jnp.issubdtype(op.ins[0].dtype, jax.dtypes.extended):
        return found
    cuts = tuple(JointCut("reverse", (k,), (k,), alone=True) for k in turned if f.sizes[k] > 1)
    size = itemsize(op.ins[0].dtype)
    sent = tuple(
        InternalCollective("permute", size, operand=0, over=joint_code(found, i)) for i in range(len(cuts))
    )
    return dataclasses.replace(found, joint=cuts, internal=sent)
