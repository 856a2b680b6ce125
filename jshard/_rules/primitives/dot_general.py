"""Contractions: `dot_general` has batch, free and contracted factors; the contracted ones leave partial sums.

>>> from jax import ShapeDtypeStruct as S
>>> a, b, c = S((4, 8), "float32"), S((8, 2), "float32"), S((4, 2), "float32")
>>> print(dot_general(OpView("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, (a, b), (c,))))
a b, b c -> a c  (reduce b)
"""

from __future__ import annotations

from jshard._rules.factors import Factors, summable
from jshard._rules.registry import OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("dot")


@rule("dot_general")
def dot_general(op: OpView) -> Rule:
    """Batch dims first, then free dims of the left, then of the right operand.

    Partial sums do not pass: the product would be computed once per device.
    """
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    lhs, rhs = op.ins[0], op.ins[1]
    f = Factors()
    left: list[int] = [-1] * len(lhs.shape)
    right: list[int] = [-1] * len(rhs.shape)
    for dl, r in [*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)]:
        left[dl] = right[r] = f.new(lhs.shape[dl])
    contracted = tuple(left[d] for d in lc)
    free_left = [d for d in range(len(left)) if left[d] < 0]
    free_right = [d for d in range(len(right)) if right[d] < 0]
    for d in free_left:
        left[d] = f.new(lhs.shape[d])
    for d in free_right:
        right[d] = f.new(rhs.shape[d])
    out = [left[d] for d in lb] + [left[d] for d in free_left] + [right[d] for d in free_right]

    def dims(factors: list[int]) -> Dims:
        return tuple((x,) for x in factors)

    sums = summable(op.outs[0])
    return Rule(
        (dims(left), dims(right)),
        (dims(out),),
        f.sizes,
        reduction=contracted if sums else (),
        blocked=() if sums else contracted,
        work=2.0,
        note="" if sums else f"sums of {op.outs[0].dtype} are not split",
    )
