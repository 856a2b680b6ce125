"""Helpers for rule functions: numbering of factors, linear sets, validation of a rule against its operator.

A rule function numbers the loop indices of its operator by a `Factors`, and passes the sets of operands in which the
operator is jointly linear through `linear_sets`.

>>> f = Factors()
>>> f.dims((4, 8)), f.new(2), f.sizes
(((0,), (1,)), 2, (4, 8, 2))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jshard._core.errors import RuleError
from jshard._core.layout import ArrayType
from jshard._rules.registry import OpView
from jshard._rules.rule import Dims, Rule


HALO = "neighbouring windows overlap: a cut dimension would need its neighbours' edges"
"""Why a rule keeps the dimensions whole that its windows go over."""


class Factors:
    """Numbers the factors of one rule, and records their `sizes`."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._aligned: dict[tuple[int, int], int] = {}  # (dimension, size) -> factor

    def new(self, size: int) -> int:
        """A new factor of length `size`."""
        self._sizes.append(int(size))
        return len(self._sizes) - 1

    def dims(self, shape: Sequence[int]) -> Dims:
        """A new factor per dimension of `shape`."""
        return tuple((self.new(s),) for s in shape)

    def aligned_dims(self, shape: Sequence[int]) -> Dims:
        """A factor per dimension, the same one for dimensions of equal index and length in all tensors.

        A mesh axis shards one factor, so tensors without common factors could not be sharded along the same axis.
        """
        for key in enumerate(shape):
            if key not in self._aligned:
                self._aligned[key] = self.new(key[1])
        return tuple((self._aligned[key],) for key in enumerate(shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each factor."""
        return tuple(self._sizes)


def unsharded_dims(aval: ArrayType) -> Dims:
    """Dimensions of a tensor that is never sharded."""
    return ((),) * len(aval.shape)


def literal(op: OpView, i: int) -> ArrayLike | None:
    """Value of operand `i` if it is a literal, else None."""
    return op.literals[i] if i < len(op.literals) else None


def summable(aval: ArrayType) -> bool:
    """Whether partial sums of this element type can be summed by `psum`."""
    return _summable(aval.dtype)


@functools.lru_cache(maxsize=256)
def _summable(dtype: np.dtype) -> bool:
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    if not jnp.issubdtype(dtype, jnp.number):
        return False
    # Not one-byte floats and sub-byte integers: too narrow for sums.
    if np.dtype(dtype).itemsize == 1 and not jnp.issubdtype(dtype, jnp.integer):
        return False
    return str(dtype) not in ("int4", "uint4", "int2", "uint2", "int1", "uint1")


def linear_sets(op: OpView, *sets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The sets through which partial sums may pass: none with a literal operand, which is never a partial sum.

    A literal zero would be one, but rules do not depend on the values of literals: the planner shares candidates among
    operators that differ in nothing else.
    """
    if not all(summable(o) for o in op.outs):
        return ()
    return tuple(s for s in sets if s and all(literal(op, i) is None for i in s))


def is_float(aval: ArrayType) -> bool:
    """Whether elements are real or complex floating point numbers."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


REDUCERS = ("sum", "max", "min", "prod", "and", "or", "xor")


def validate(rule: Rule, op: OpView) -> None:
    """Check that a rule is consistent, and that its tensors, dimensions and factor sizes fit the operator.

    Raises: `RuleError` for the first thing that does not fit, with what to write instead.
    """
    where = f"rule of {op.primitive!r}"
    _check_factors(rule, where)
    _check_side(rule, where, "operand", rule.operands, op.ins)
    _check_side(rule, where, "result", rule.results, op.outs)
    for operand in {i for s in rule.linear for i in s}:
        if not 0 <= operand < len(op.ins):
            raise RuleError(
                f"a linear set names operand {operand} of {len(op.ins)}",
                where=where,
                fix=f"linear= with operands 0 to {len(op.ins) - 1}",
            )


def _check_factors(rule: Rule, where: str) -> None:
    """Factors are numbers of entries of `sizes`; a blocked factor is no reduction; the reducer is a known one."""
    count = len(rule.sizes)
    used = {f for side in (rule.operands, rule.results) for tensor in side for dim in tensor for f in dim}
    for what, factors in (("a tensor", used), ("reduction", rule.reduction), ("blocked", rule.blocked)):
        for f in sorted(factors):
            if not 0 <= f < count:
                known = f"0 to {count - 1}" if count else "none, since sizes is empty"
                raise RuleError(f"{what} names factor {f} of {count}", where=where, fix=f"factors {known}")
    if both := sorted(set(rule.reduction) & set(rule.blocked)):
        raise RuleError(
            f"factor {both[0]} is both a reduction and blocked",
            where=where,
            fix="one of reduction= and blocked=",
        )
    if rule.reducer not in REDUCERS:
        raise RuleError(
            f"unknown reducer {rule.reducer!r}", where=where, fix=f"reducer= one of {', '.join(REDUCERS)}"
        )


def _check_side(
    rule: Rule, where: str, side: str, dims: tuple[Dims, ...], avals: Sequence[ArrayType]
) -> None:
    if len(dims) != len(avals):
        raise RuleError(
            f"the rule has {len(dims)} {side}s, the operator {len(avals)}",
            where=where,
            fix=f"{side}s= with one entry for each of the {len(avals)}",
        )
    for i, (tensor, aval) in enumerate(zip(dims, avals, strict=True)):
        if len(tensor) != len(aval.shape):
            raise RuleError(
                f"{side} {i} has {len(aval.shape)} dimensions, the rule {len(tensor)}",
                where=where,
                fix="a tuple of factors for each dimension, () for one that is never sharded",
            )
        seen: set[int] = set()
        for d, (factors, size) in enumerate(zip(tensor, aval.shape, strict=True)):
            if seen & set(factors) or len(set(factors)) != len(factors):
                raise RuleError(
                    f"{side} {i} carries a factor twice",
                    where=where,
                    fix="each factor in one dimension of a tensor",
                )
            seen |= set(factors)
            product = math.prod([rule.sizes[f] for f in factors])
            if factors and product != size:
                raise RuleError(
                    f"{side} {i}, dimension {d}: factors multiply to {product}, not {size}",
                    where=where,
                    fix=f"factors whose sizes= multiply to {size}",
                )
