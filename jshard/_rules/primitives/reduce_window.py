"""Window reductions and their gradients (pooling).

Dimensions without windows, such as batch and features, may be sharded; adjacent windows are `(o k) -> o`. If windows
overlap or are padded, a shard would need a halo of its neighbours, so the dimension is not sharded.

>>> from jax import ShapeDtypeStruct as S
>>> p = dict(window_dimensions=(1, 2), window_strides=(1, 2), padding=((0, 0), (0, 0)))
>>> print(reduce_window(OpView("reduce_window_max", p, (S((4, 8), "float32"),), (S((4, 4), "float32"),))))
a (b c) -> a b
"""

from __future__ import annotations

from jshard._rules.factors import HALO, Factors, linear_sets
from jshard._rules.registry import OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("window")


def _dims(
    op: OpView, big: tuple[int, ...], small: tuple[int, ...]
) -> tuple[Factors, Dims, Dims, tuple[int, ...]]:
    """Dimensions of the tensor with windows, of the one with a value per window, and the blocked factors."""
    p, f = op.params, Factors()
    ones = (1,) * len(big)
    base, dilation = p.get("base_dilation", ones), p.get("window_dilation", ones)
    many, one, blocked = [], [], []
    for d, (m, n) in enumerate(zip(big, small, strict=True)):
        size, stride = p["window_dimensions"][d], p["window_strides"][d]
        plain = tuple(p["padding"][d]) == (0, 0) and base[d] == dilation[d] == 1
        if plain and size == stride and m == n * size and n > 0:
            place = f.new(n)
            one.append((place,))
            window = (f.new(size),) if size > 1 else ()
            many.append((place, *window))
            blocked += window
        else:
            # Factors without a dimension, so that the work counts every element of every window.
            place, window = f.new(n), (f.new(size),)
            blocked += [place, *window]
            one.append((place,))
            many.append(())
    return f, tuple(many), tuple(one), tuple(blocked)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def reduce_window(op: OpView) -> Rule:
    """One result per window; `reduce_window` takes several operands and their initial scalars."""
    f, many, one, blocked = _dims(op, op.ins[0].shape, op.outs[0].shape)
    n = len(op.outs)
    return Rule(
        (many,) * n + ((),) * (len(op.ins) - n), (one,) * n, f.sizes, blocked=blocked,
        linear=linear_sets(op, (0,)) if op.primitive == "reduce_window_sum" else (), note=HALO,
    )  # fmt: skip


@rule("select_and_scatter_add")
def select_and_scatter_add(op: OpView) -> Rule:
    """`(source, operand) -> like operand`: each window's gradient goes to its chosen element."""
    f, many, one, blocked = _dims(op, op.ins[1].shape, op.ins[0].shape)
    return Rule((one, many), (many,), f.sizes, blocked=blocked, linear=linear_sets(op, (0,)), note=HALO)


@rule("select_and_gather_add")
def select_and_gather_add(op: OpView) -> Rule:
    """`(tangents, operand) -> one per window`: the tangent of each window's chosen element."""
    f, many, one, blocked = _dims(op, op.ins[1].shape, op.outs[0].shape)
    return Rule((many, many), (one,), f.sizes, blocked=blocked, linear=linear_sets(op, (0,)), note=HALO)


@rule("select_and_scatter")
def select_and_scatter(op: OpView) -> Rule:
    """`(operand, source, init) -> like operand`, by a function of the user's."""
    f, many, one, blocked = _dims(op, op.ins[0].shape, op.ins[1].shape)
    return Rule((many, one, ()), (many,), f.sizes, blocked=blocked, note=HALO)
