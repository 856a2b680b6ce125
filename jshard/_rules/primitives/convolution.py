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

from collections.abc import Sequence

import jax

from jshard._rules.block_reads import WindowReads
from jshard._rules.factors import HALO, Factors, summable
from jshard._rules.halo import Halo, local_windows, with_halos
from jshard._rules.neighbour_exchange import with_neighbours
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import PARTIAL, WHOLE, JointCut, Rule


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
    return Halo(cut, ((0, dim, reads),))


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
