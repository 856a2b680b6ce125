"""Convolutions: factors for batch and output features, a reduction over input features, space if windows are disjoint.

Groups are the major factor of the feature dimension, `(g c)`, and of the kernel's, `(g o)`; with batch groups (gradients
of grouped convolutions) the batch is `(g b)`. A spatial dimension may be sharded in three cases, in each of which every
window is in one shard: adjacent windows (`(o k), k -> o`, patch embedding), their transpose (`i -> (i k)`, upsampling),
and the gradient of the kernel (`(o k), o -> k`, with positions as a reduction).

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

from jshard._rules.factors import HALO, Factors, summable
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


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
    return ctx.bind(x, w, feature_group_count=feature, batch_group_count=batch)


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

    overlaps = False
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
            overlaps = True
            window, place = f.new(w[k]), f.new(y[o])
            blocked += [window, place]
            rhs[k], out[o] = (window,), (place,)
    if not summable(op.outs[0]):
        blocked, reduction = blocked + reduction, []
    return Rule(
        (tuple(lhs), tuple(rhs)), (tuple(out),), f.sizes,
        reduction=tuple(reduction), blocked=tuple(blocked), work=2.0, note=HALO if overlaps else "",
    )  # fmt: skip
