"""Programs whose operators write collectives of every kind on blocks, each with its arguments and strategies.

`PROGRAMS` maps a name to `(function, shapes, in_strategy)` for 8 devices on one axis. Reductions are pinned to read a
cut dimension, so that no plan moves the data first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as S, lax

import jshard


ROWS, COLUMNS = 64, 1024


def over_rows(f: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over rows that stay cut in eight."""
    return jshard.op(f, in_strategy=((8, 1),))


def twice_normal(x: jax.Array) -> jax.Array:
    """Mean and variance: the variance takes the mean again."""
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1)


def cast_twice(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One weight, cast in two places and read in full."""
    return x @ w.astype(jnp.bfloat16), (2 * x) @ w.astype(jnp.bfloat16)


def steady(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loop that computes the same sum of its constants in every turn."""
    return lax.scan(lambda c, _: (jnp.tanh(c * (w / jnp.abs(w).sum(0))), None), x, None, length=10)[0]


def gathered_in_turn(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loop that is told to gather a constant in every turn."""

    def turn(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(
            c @ jshard.op(lambda v: v * 1.5, None, (1, 1))(jshard.op(jnp.sin, ((8, 1),))(w))
        ), None

    return lax.scan(turn, x, None, length=10)[0]


def until_small(x: jax.Array) -> jax.Array:
    """A loop whose trip count is not known, with a sum in its test and one in its body."""
    return lax.while_loop(
        lambda c: (c * c).sum() > 1e-3, lambda c: 0.5 * c / jnp.abs(c).sum(0, keepdims=True), x
    )


def counted(x: jax.Array) -> jax.Array:
    """A `while` of five turns, as its counter says."""
    turn = lambda c: (c[0] + 1, c[1] / jnp.abs(c[1]).sum(0, keepdims=True))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 5, turn, (0, x))[1]


def cut_after_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product whose sum is asked for in two pieces, and read in eight: an all-reduce and a slice."""
    return jax.nn.relu(jshard.op(jnp.dot, ((1, 8), (8, 1)), (1, 1))(a, b))


def f32(*shape: int) -> S:
    """Shape of a float32 array."""
    return S(shape, jnp.float32)


X, I = f32(ROWS, COLUMNS), S((ROWS, COLUMNS), jnp.int32)  # noqa: E741
CUT = ((8, 1),)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[S, ...], tuple[Any, ...] | None]] = {
    "any": (lambda x: over_rows(lambda t: t.any(0))(x > 0), (X,), CUT),
    "all": (lambda x: over_rows(lambda t: t.all(0))(x > 0), (X,), CUT),
    "max": (over_rows(lambda x: x.max(0)), (X,), CUT),
    "argmax": (over_rows(lambda x: jnp.argmax(x, 0)), (X,), CUT),
    "argmin of int8": (over_rows(lambda x: jnp.argmin(x, 0)), (S((ROWS, COLUMNS), jnp.int8),), CUT),
    "prod": (over_rows(lambda x: jnp.prod(x, 0)), (X,), CUT),
    "xor": (over_rows(lambda x: lax.reduce_xor(x, (0,))), (I,), CUT),
    "and": (over_rows(lambda x: lax.reduce_and(x, (0,))), (I,), CUT),
    "or": (over_rows(lambda x: lax.reduce_or(x, (0,))), (I,), CUT),
    "sort of float8": (lambda x: jnp.sort(x.astype(jnp.float8_e4m3fn), 0).astype(jnp.float32), (X,), CUT),
    "complex sum": (lambda a, b: a @ b, (S((64, 512), jnp.complex64), S((512, 64), jnp.complex64)), ((1, 8), (8, 1))),
    "variance": (twice_normal, (X,), CUT),
    "cast twice": (cast_twice, (S((ROWS, 512), jnp.bfloat16), f32(512, 512)), ((8, 1), (8, 1))),
    "steady": (steady, (X, X), (*CUT, *CUT)),
    "gathered in turn": (gathered_in_turn, (f32(ROWS, 512), f32(512, 512)), (*CUT, *CUT)),
    "until small": (until_small, (X,), CUT),
    "counted": (counted, (X,), CUT),
    "relu of a product": (cut_after_product, (f32(64, 128), f32(128, 64)), None),
}  # fmt: skip
