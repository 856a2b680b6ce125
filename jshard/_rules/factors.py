"""Small tools that the families of rules share: numbering factors, and which partial sums may pass.

A rule function walks the dimensions of its operator and asks a `Factors` for a fresh factor per loop index.
`linear` turns "the operator is linear in these operands" into the sets a `Rule` stores: a literal operand
is never a partial sum, so a set with a literal falls away.

>>> f = Factors()
>>> f.dims((4, 8)), f.new(2), f.sizes
(((0,), (1,)), 2, (4, 8, 2))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._core.errors import RuleError
from jshard._rules.registry import OpView
from jshard._rules.rule import Dims, Rule


class Factors:
    """Numbers the factors of one rule; `sizes` is what `Rule` wants."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def new(self, size: int) -> int:
        """A fresh factor of length `size`."""
        self._sizes.append(int(size))
        return len(self._sizes) - 1

    def dims(self, shape: Sequence[int]) -> Dims:
        """A fresh factor for each dimension of `shape`."""
        return tuple((self.new(s),) for s in shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each factor so far."""
        return tuple(self._sizes)


def unsharded_dims(aval: Any) -> Dims:
    """Dimensions of a tensor that is never cut."""
    return ((),) * len(aval.shape)


def literal(op: OpView, i: int) -> Any:
    """Value of operand `i` when it is a literal, else None."""
    return op.literals[i] if i < len(op.literals) else None


def summable(aval: Any) -> bool:
    """Whether partial sums of this element type can be added up by `psum`."""
    return _summable(aval.dtype)


@functools.lru_cache(maxsize=256)
def _summable(dtype: Any) -> bool:
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    if not jnp.issubdtype(dtype, jnp.number):
        return False
    # One-byte floats and sub-byte integers hold data, not sums.
    return not (np.dtype(dtype).itemsize == 1 and not jnp.issubdtype(dtype, jnp.integer)) and str(
        dtype
    ) not in ("int4", "uint4", "int2", "uint2", "int1", "uint1")


def linear_sets(op: OpView, *sets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The sets of operands through which partial sums may pass; a set with a literal falls away.

    A literal zero is a sum of zeros, but rules do not look at values: the planner keeps one set of states for
    all operators that differ only in the values of their literals.
    """
    if not all(summable(o) for o in op.outs):
        return ()
    return tuple(s for s in sets if s and all(literal(op, i) is None for i in s))


def is_float(aval: Any) -> bool:
    """Whether elements are real or complex floating point numbers."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def validate(rule: Rule, op: OpView) -> None:
    """Raise `RuleError` unless the rule's tensors, dimensions and factor sizes fit the operator.

    Raises: `RuleError` naming the first operand or result that does not fit.
    """
    _check_side(rule, op, "operand", rule.operands, op.ins)
    _check_side(rule, op, "result", rule.results, op.outs)
    for operand in {i for s in rule.linear for i in s}:
        if not 0 <= operand < len(op.ins):
            where = f"rule of {op.primitive!r}"
            raise RuleError(f"a linear set names operand {operand} of {len(op.ins)}", where=where)


def _check_side(rule: Rule, op: OpView, side: str, dims: tuple[Dims, ...], avals: Sequence[Any]) -> None:
    where = f"rule of {op.primitive!r}"
    if len(dims) != len(avals):
        raise RuleError(f"the rule has {len(dims)} {side}s, the operator {len(avals)}", where=where)
    for i, (tensor, aval) in enumerate(zip(dims, avals, strict=True)):
        if len(tensor) != len(aval.shape):
            raise RuleError(
                f"{side} {i} has {len(aval.shape)} dimensions, the rule {len(tensor)}", where=where
            )
        seen: set[int] = set()
        for d, (factors, size) in enumerate(zip(tensor, aval.shape, strict=True)):
            if seen & set(factors) or len(set(factors)) != len(factors):
                raise RuleError(f"{side} {i} carries a factor twice", where=where)
            seen |= set(factors)
            product = math.prod([rule.sizes[f] for f in factors])
            if factors and product != size:
                raise RuleError(
                    f"{side} {i}, dimension {d}: factors multiply to {product}, not {size}", where=where
                )
