"""Convolutions: factors for batch and output features, a reduction over input features, and cuts of space.

Groups are the major factor of the feature dimension, `(g c)`, and of the kernel's, `(g o)`; with batch groups (gradients
of grouped convolutions) the batch is `(g b)`. In three cases every window is in one shard of a spatial dimension, and
it may be sharded as it is: adjacent windows (`(o k), k -> o`, patch embedding), their transpose (`i -> (i k)`,
upsampling), and the gradient of the kernel (`(o k), o -> k`, with positions as a reduction).

In all others space is cut by a joint cut "halo" of operand and result, with an exchange of the edges that windows read
beyond a block. Where the kernel is longer than the result, as in the gradient of a kernel, the cut is of operand and
kernel, and the result is a partial sum.

>>> from jax import ShapeDtypeStruct as S
>>> from jax.lax import ConvDimensionNumbers as N
>>> n = N((0, 1, 2), (0, 1, 2), (0, 1, 2))
>>> p = dict(dimension_numbers=n, window_strides=(4,), padding=((0, 0),), lhs_dilation=(1,),
...          rhs_dilation=(1,), feature_group_count=1, batch_group_count=1)
>>> x, w, y = S((8, 3, 32), "float32"), S((16, 3, 4), "float32"), S((8, 16, 8), "float32")
>>> print(conv(OpView("conv_general_dilated", p, (x, w), (y,))))
a b (c d), e b d -> a e c  (reduce b)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core.jaxcompat import to_common_vma
from jshard._rules.block_reads import WindowReads, exchange
from jshard._rules.factors import HALO, Factors, summable
from jshard._rules.halo import Halo, local_windows, with_halos
from jshard._rules.neighbour_exchange import received_pieces, with_neighbours
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import PARTIAL, WHOLE, InternalCollective, JointCut, Rule


rule = family("conv")


def _conv_local(ctx: LocalContext, x: jax.Array, w: jax.Array) -> Sequence[jax.Array]:
    n = ctx.op.params["dimension_numbers"]
    # A sharded group factor is sharded on every tensor that carries it: fewer groups of the same size.
    feature, batch = ctx.op.params["feature_group_count"], ctx.op.params["batch_group_count"]
    if feature > 1:
        feature = feature * w.shape[n.rhs_spec[0]] // ctx.op.ins[1].shape[n.rhs_spec[0]]
        per_group = ctx.op.ins[1].shape[n.rhs_spec[0]] // ctx.op.params["feature_group_count"]
        feature = max(1, feature) if per_group else feature
    if batch > 1:
        batch = max(1, batch * w.shape[n.rhs_spec[0]] // ctx.op.ins[1].shape[n.rhs_spec[0]])
    if not ctx.rule.internal:
        return ctx.bind(x, w, feature_group_count=feature, batch_group_count=batch)
    cuts = [
        one for one in ctx.rule.internal if one.over is not None and ctx.mesh.size(*ctx.axes(one.over)) > 1
    ]
    if len(cuts) == 1 and cuts[0].added and _has_own_rows(ctx, cuts[0]):
        return [_sum_over_pieces(ctx, x, w, cuts[0], feature, batch)]
    (x,) = with_neighbours(ctx, [x])
    padding, dilation = list(ctx.op.params["padding"]), list(ctx.op.params["lhs_dilation"])
    for one in ctx.rule.internal:
        assert one.over is not None and isinstance(one.reads, WindowReads)
        axes = ctx.axes(one.over)
        if ctx.mesh.size(*axes) > 1:
            s = n.lhs_spec[2:].index(one.dim)
            x, padding[s], dilation[s] = local_windows(x, one.dim, one.reads, axes, ctx.mesh)
    return ctx.bind(
        x, w, feature_group_count=feature, batch_group_count=batch, padding=tuple(padding),
        lhs_dilation=tuple(dilation),
    )  # fmt: skip


def _has_own_rows(ctx: LocalContext, one: InternalCollective) -> bool:
    """Whether a block's windows read rows of the block itself."""
    assert one.over is not None and one.reads is not None
    return any(p.hop == 0 for p in exchange(one.reads, ctx.mesh.size(*ctx.axes(one.over))).pieces)


def _sum_over_pieces(
    ctx: LocalContext, x: jax.Array, w: jax.Array, one: InternalCollective, feature: int, batch: int
) -> jax.Array:
    """The convolution of the block, with what each edge contributes added: a convolution is linear.

    The block is not copied together with its edges, and is convolved while they travel.
    """
    assert one.over is not None and isinstance(one.reads, WindowReads)
    reads, axes, n = one.reads, ctx.axes(one.over), ctx.op.params["dimension_numbers"]
    s, shards = n.lhs_spec[2:].index(one.dim), ctx.mesh.size(*axes)
    contracted = ctx.rule.joint[one.over - len(ctx.rule.sizes)].results == (PARTIAL,)
    e, phase = exchange(reads, shards), int(reads.phases(shards)[0])
    # The forward pass has exchanged the same edges; where its are not used, none must look alike.
    others = [d for d in range(x.ndim) if d != one.dim and x.shape[d] > 1]
    edges = ctx.edges.get(0)
    reverse = others[-1] if contracted and others and edges is None else None
    before = ctx.exchanged_before.get(0, 0)
    parts = received_pieces(x, one.dim, reads, axes, ctx.mesh, ctx.collective_scope, edges, reverse, before)
    total: jax.Array | None = None
    for piece, part in sorted(zip(e.pieces, parts, strict=True), key=lambda p: p[0].hop != 0):
        points = reads.reading(shards, piece) if piece.hop else range(reads.points // shards)
        if piece.hop is None or not points:
            continue
        low = phase + reads.base * piece.places[0] - reads.stride * points[0]
        high = reads.stride * (len(points) - 1) + reads.span - low - reads.base * (piece.rows - 1)
        padding = list(ctx.op.params["padding"])
        padding[s] = (low, high)
        kernel = w
        if contracted:
            kernel = lax.slice_in_dim(w, points[0], points[-1] + 1, axis=n.rhs_spec[2 + s])
        (y,) = ctx.bind(
            part, kernel, padding=tuple(padding), feature_group_count=feature, batch_group_count=batch
        )
        if total is None:
            total = y
            continue
        if not contracted:
            config = [(0, 0, 0)] * y.ndim
            config[n.out_spec[2 + s]] = (points[0], reads.points // shards - points[-1] - 1, 0)
            y = lax.pad(y, jnp.zeros((), y.dtype), config)
        total = jnp.add(*to_common_vma([total, y]))
    assert total is not None, "a block reads rows of its own"
    return total


def _halo(op: OpView, s: int, factors: tuple[int, int, int]) -> Halo | None:
    """The cut of spatial dimension `s`, whose factors in operand, kernel and result are given."""
    p = op.params
    n = p["dimension_numbers"]
    dim = n.lhs_spec[2 + s]
    (size, window, places) = (
        op.ins[0].shape[dim], op.ins[1].shape[n.rhs_spec[2 + s]], op.outs[0].shape[n.out_spec[2 + s]],
    )  # fmt: skip
    stride, dilation = p["window_strides"][s], p["rhs_dilation"][s]
    low, base = p["padding"][s][0], p["lhs_dilation"][s]
    if min(size, window, places) == 0:
        return None
    if window <= places:
        reads = WindowReads(size, places, stride, low, (window - 1) * dilation, base)
        cut = JointCut("halo", (factors[0], WHOLE), (factors[2],))
    elif summable(op.outs[0]):
        reads = WindowReads(size, window, dilation, low, (places - 1) * stride, base)
        cut = JointCut("halo", factors[:2], (PARTIAL,))
    else:
        return None
    if not reads.regular:
        return Halo(cut, ((0, dim, reads),))
    factor = factors[2] if window <= places else factors[1]
    cut = dataclasses.replace(cut, repeated=(factor, reads.edge_points(2)))
    return Halo(cut, ((0, dim, reads),), added=True)


@rule("conv_general_dilated", local=_conv_local)
def conv(op: OpView) -> Rule:
    """Factors: groups, batch, output features, input features, then space."""
    p = op.params
    n = p["dimension_numbers"]
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    x, w, y = op.ins[0].shape, op.ins[1].shape, op.outs[0].shape
    f = Factors()
    lhs: list[tuple[int, ...]] = [()] * len(x)
    rhs: list[tuple[int, ...]] = [()] * len(w)
    out: list[tuple[int, ...]] = [()] * len(y)
    reduction, blocked = [], []

    feature_group = (f.new(groups),) if groups > 1 else ()
    batch_group = (f.new(batches),) if batches > 1 else ()
    batch, features = f.new(y[n.out_spec[0]]), f.new(w[n.rhs_spec[0]] // (groups * batches))
    inputs = f.new(w[n.rhs_spec[1]])
    reduction.append(inputs)
    lhs[n.lhs_spec[0]] = (*batch_group, batch)
    lhs[n.lhs_spec[1]] = (*feature_group, inputs)
    rhs[n.rhs_spec[0]] = (*feature_group, *batch_group, features)
    rhs[n.rhs_spec[1]] = (inputs,)
    out[n.out_spec[0]] = (batch,)
    out[n.out_spec[1]] = (*feature_group, *batch_group, features)

    halos, work = [], 2.0
    space = zip(n.lhs_spec[2:], n.rhs_spec[2:], n.out_spec[2:], strict=True)
    for s, (i, k, o) in enumerate(space):
        stride, (low, high) = p["window_strides"][s], p["padding"][s]
        ldil, rdil = p["lhs_dilation"][s], p["rhs_dilation"][s]
        if stride == w[k] and low == high == 0 and ldil == rdil == 1 and x[i] == y[o] * w[k]:
            place, window = f.new(y[o]), f.new(w[k])
            blocked.append(window)
            lhs[i], rhs[k], out[o] = (place, window), (window,), (place,)
        elif stride == rdil == 1 and ldil == w[k] and low == high == w[k] - 1 and y[o] == x[i] * w[k]:
            place, window = f.new(x[i]), f.new(w[k])
            blocked.append(window)
            # The kernel is reversed within the window, so it is replicated and has no factor.
            lhs[i], out[o] = (place,), (place, window)
        elif stride == ldil == 1 and rdil == y[o] and low == high == 0 and x[i] == w[k] * y[o]:
            place, window = f.new(w[k]), f.new(y[o])
            blocked.append(window)
            reduction.append(place)
            lhs[i], rhs[k], out[o] = (place, window), (place,), (window,)
        else:
            window, place = f.new(w[k]), f.new(y[o])
            position = place
            if x[i] != y[o]:
                position, work = f.new(x[i]), work / max(1, x[i])  # no loop index of its own
            blocked += list(dict.fromkeys((window, place, position)))
            lhs[i], rhs[k], out[o] = (position,), (window,), (place,)
            halos.append(_halo(op, s, (position, window, place)))
    if not summable(op.outs[0]):
        blocked, reduction = blocked + reduction, []
    found = Rule(
        (tuple(lhs), tuple(rhs)), (tuple(out),), f.sizes,
        reduction=tuple(reduction), blocked=tuple(blocked), work=work, note=HALO if halos else "",
    )  # fmt: skip
    return with_halos(found, op.ins, [h for h in halos if h is not None])
