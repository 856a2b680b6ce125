"""Reshape: dimensions of both shapes are products of common factors, major first.

`(32, 64) -> (4, 8, 64)` is `(a b) c -> a b c`; `(8, 2) -> (4, 4)` is `(a b) c -> a (b c)`. Both shapes are traversed
from the left; the next common factor is the greatest common divisor of the remaining lengths of the two current
dimensions. If it is 1, no shard of one shape is a shard of the other: the dimensions up to the next index at which both
shapes have the same number of elements to the left get blocked factors.

>>> print(common_factors((32, 64), (4, 8, 64)))
(a b) c -> a b c
>>> r = common_factors((6, 4, 5), (4, 6, 5))
>>> print(r, r.blocked)
(a b) c d -> (a e) f d (1, 2, 3, 4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("reshape")


def common_factors(old: Sequence[int], new: Sequence[int]) -> Rule:
    """The finest common refinement of two shapes with the same number of elements."""
    f = Factors()
    a: list[list[int]] = [[] for _ in old]
    b: list[list[int]] = [[] for _ in new]
    blocked: list[int] = []

    def block(side: list[list[int]], d: int, size: int) -> None:
        if size != 1:
            side[d].append(f.new(size))
            blocked.append(side[d][-1])

    if math.prod(old) == 0:
        for side, shape in ((a, old), (b, new)):
            for d, s in enumerate(shape):
                block(side, d, s)
        return Rule((_dims(a),), (_dims(b),), f.sizes, blocked=tuple(blocked), work=0.0)

    i = j = 0
    # m and n: remaining lengths of dimension i of the old and j of the new shape
    m = old[0] if old else 1
    n = new[0] if new else 1
    while i < len(old) and j < len(new):
        common = math.gcd(m, n)
        if common > 1:
            k = f.new(common)
            a[i].append(k)
            b[j].append(k)
        elif m > 1 and n > 1:
            # Shards do not align: block everything up to the next common boundary.
            block(a, i, m)
            block(b, j, n)
            seen_a, seen_b = m, n
            while seen_a != seen_b:
                if seen_a < seen_b:
                    i += 1
                    block(a, i, old[i])
                    seen_a *= old[i]
                else:
                    j += 1
                    block(b, j, new[j])
                    seen_b *= new[j]
            m = n = common = 1
        m, n = m // common, n // common
        if m == 1:
            i += 1
            m = old[i] if i < len(old) else 1
        if n == 1:
            j += 1
            n = new[j] if j < len(new) else 1
    note = "blocks of the two shapes do not align" if blocked else ""
    return Rule((_dims(a),), (_dims(b),), f.sizes, blocked=tuple(blocked), work=0.0, note=note)


def _dims(side: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, side))


def _reshape_local(ctx: LocalContext, x: jax.Array, *_: jax.Array) -> Sequence[jax.Array]:
    order = ctx.op.params.get("dimensions")
    return [lax.reshape(x, ctx.result_shape(), order)]


@rule("reshape", local=_reshape_local)
def reshape(op: OpView) -> Rule:
    """Common factors of both shapes; `dimensions` transposes the operand first."""
    order = op.params.get("dimensions")
    shape = op.ins[0].shape
    if order is None:
        r = common_factors(shape, op.outs[0].shape)
        operand = r.operands[0]
    else:
        r = common_factors([shape[d] for d in order], op.outs[0].shape)
        back = {d: r.operands[0][k] for k, d in enumerate(order)}
        operand = tuple(back[d] for d in range(len(shape)))
    return Rule(
        (operand,), r.results, r.sizes, blocked=r.blocked, linear=linear_sets(op, (0,)), work=0.0, note=r.note
    )
