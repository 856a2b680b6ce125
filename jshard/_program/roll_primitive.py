"""`roll` as one operator: what `jnp.roll` traces to, two slices and a concatenation, would be moved twice where it is cut.

A dimension that is cut is rolled by one permute of as many rows as it is rolled by (`_rules/primitives/shifts.py`).
`shift_patterns.py` finds rolls in a traced program. The operator is linear, its transpose is the roll back.

>>> import jax.numpy as jnp
>>> roll(jnp.arange(5), 0, 2).tolist()
[3, 4, 0, 1, 2]
>>> jax.grad(lambda x: (roll(x, 0, 1) * jnp.arange(3.0)).sum())(jnp.ones(3)).tolist()
[1.0, 2.0, 0.0]
"""

from __future__ import annotations

import jax
from jax import core, lax
from jax.interpreters import batching

from jshard._core import jaxcompat as compat
from jshard._program.array_primitive import define_linear_rules, define_primitive


ROLL = "roll"

roll_p = compat.multi_result_primitive(ROLL)


def roll(x: jax.Array, dim: int, by: int) -> jax.Array:
    """`x` with element i of dimension `dim` at position i + `by` modulo its length; `by` is from 1 to length - 1."""
    return roll_p.bind(x, dim=dim, by=by)[0]


def run_roll(x: jax.Array, *, dim: int, by: int) -> list[jax.Array]:
    """`roll` on one device."""
    n = x.shape[dim]
    parts = lax.slice_in_dim(x, n - by, n, axis=dim), lax.slice_in_dim(x, 0, n - by, axis=dim)
    return [lax.concatenate(parts, dim)]


def _type(x: core.ShapedArray, *, dim: int, by: int) -> list[core.ShapedArray]:
    return [x]


def _back(ct: jax.Array, avals: list, *, dim: int, by: int) -> list[jax.Array]:
    return [roll(ct, dim, ct.shape[dim] - by)]


def _batched(args: list, dims: list, *, dim: int, by: int) -> tuple[list, list]:
    (x,), (d,) = args, dims
    return roll_p.bind(x, dim=dim if dim < d else dim + 1, by=by), [d]


def _define() -> None:
    define_primitive(roll_p, run_roll, _type, "dim", "by")
    define_linear_rules(roll_p, _back)
    batching.primitive_batchers[roll_p] = _batched


_define()
