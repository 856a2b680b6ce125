"""Contractions: `dot_general` has batch, free and contracted factors; the contracted ones leave partial sums.

>>> from jax import ShapeDtypeStruct as S
>>> a, b, c = S((4, 8), "float32"), S((8, 2), "float32"), S((4, 2), "float32")
>>> print(dot_general(OpView("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, (a, b), (c,))))
a b, b c -> a c  (reduce b)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax import lax

from jshard._rules.factors import Factors, summable
from jshard._rules.registry import OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("dot")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Factors of a contraction: of each operand dimension (-1: none), of the result, and the free left dimensions."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]
    free_left: tuple[int, ...]


def contraction(
    f: Factors,
    lhs: Sequence[int],
    rhs: Sequence[int],
    dimension_numbers: lax.DotDimensionNumbers,
    skipped_rhs: Sequence[int] = (),
) -> Contraction:
    """Number the factors of operands of shapes `lhs` and `rhs`: batch, contracted, free left, free right.

    Arguments:

    - `dimension_numbers`: ((contracted of lhs, of rhs), (batch of lhs, of rhs)), as for `lax.dot_general`.
    - `skipped_rhs`: dimensions of `rhs` without a factor.
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    left, right = [-1] * len(lhs), [-1] * len(rhs)
    for i, j in [*zip(lhs_batch, rhs_batch, strict=True), *zip(lhs_contracted, rhs_contracted, strict=True)]:
        left[i] = right[j] = f.new(lhs[i])
    free_left = [d for d in range(len(left)) if left[d] < 0]
    free_right = [d for d in range(len(right)) if right[d] < 0 and d not in skipped_rhs]
    for d in free_left:
        left[d] = f.new(lhs[d])
    for d in free_right:
        right[d] = f.new(rhs[d])
    out = [*(left[d] for d in lhs_batch), *(left[d] for d in free_left), *(right[d] for d in free_right)]
    return Contraction(tuple(left), tuple(right), tuple(out), tuple(free_left))


def one_factor_each(factors: Sequence[int]) -> Dims:
    """Dimensions with one factor each, or none for -1."""
    return tuple((k,) if k >= 0 else () for k in factors)


@rule("dot_general")
def dot_general(op: OpView) -> Rule:
    """Batch dimensions, then free dimensions of the left, then of the right operand.

    Partial sums do not pass, although the product is linear in either operand: each device would compute all of it.
    """
    f = Factors()
    c = contraction(f, op.ins[0].shape, op.ins[1].shape, op.params["dimension_numbers"])
    contracted = tuple(c.left[d] for d in op.params["dimension_numbers"][0][0])
    sums = summable(op.outs[0])
    return Rule(
        (one_factor_each(c.left), one_factor_each(c.right)),
        (one_factor_each(c.out),),
        f.sizes,
        reduction=contracted if sums else (),
        blocked=() if sums else contracted,
        work=2.0,
        note="" if sums else f"sums of {op.outs[0].dtype} are not split",
    )
