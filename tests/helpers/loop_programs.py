"""Random nests of loops with invariants: computed from values outside, from captured arrays, from literals.

Every value is a vector of `WIDTH` numbers or a scalar, so that a wrong value has the right shape often enough.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


WIDTH = 4
CAPTURED = np.linspace(0.5, 1.5, WIDTH, dtype="float32")


def nest(seed: int, depth: int = 3) -> Callable[[Any, Any], Any]:
    """A function of two vectors: up to three statements at each of `depth` levels, some of which are loops."""

    def function(x: Any, y: Any) -> Any:
        return tuple(_body(random.Random(seed), [x, y, jnp.asarray(CAPTURED)], depth))

    return function


def _body(rng: random.Random, outer: list[Any], depth: int) -> list[Any]:
    """Statements on values from outside and on those made here; the last few are the results."""
    values = list(outer)
    for _ in range(rng.randint(2, 4)):
        values.append(_loop(rng, values, depth) if depth and rng.random() < 0.5 else _light(rng, values))
    return values[-3:]


def _light(rng: random.Random, values: list[Any]) -> Any:
    a, b = rng.choice(values), rng.choice(values)
    kind = rng.randrange(6)
    if kind == 0:
        return jnp.sin(a) + b * 0.5
    if kind == 1:
        return jnp.sum(jnp.cos(a)) * 0.2  # a scalar: fewer bytes than it is made of
    if kind == 2:
        return jax.jit(lambda a, b: jnp.tanh(a * b) + jnp.mean(b))(a, b)
    if kind == 3:
        return jnp.dot(jnp.ones(WIDTH) * a, jnp.ones(WIDTH) * b) * 0.1
    if kind == 4:
        return jnp.maximum(a, 0.3) - jnp.sum(b) * 0.05
    return (jnp.asarray(a) * 1.5).astype("float16").astype("float32") - b * 0.25


def _loop(rng: random.Random, values: list[Any], depth: int) -> Any:
    kind, seed = rng.randrange(5), rng.random()
    start = jnp.ones(WIDTH) * rng.choice(values) * 0.1
    given = rng.sample(values, min(len(values), rng.randint(1, 3)))
    carried = rng.random() < 0.7  # or nothing in the body depends on the turn

    def turn(carry: Any, row: Any) -> Any:
        inside = [*given, carry, row] if carried else [*given]
        out = _body(random.Random(seed), inside, depth - 1)
        made = sum(jnp.sum(v) * 0.05 for v in out)
        return jnp.tanh(carry * 0.5 + made), out[-1]

    rows = jnp.ones(WIDTH) * rng.choice(values)
    if kind == 0:
        carry, ys = lax.scan(turn, start, rows)
        return carry + jnp.mean(ys)
    if kind == 1:
        return lax.fori_loop(0, 3, lambda i, c: turn(c, i * 0.1)[0], start)
    if kind == 2:
        return lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, turn(c[1], c[0] * 0.1)[0]), (0, start)
        )[1]
    if kind == 3:
        return jnp.mean(lax.map(lambda r: turn(start, r)[0], rows), axis=0)
    return lax.cond(jnp.sum(start) > 0.1, lambda c: turn(c, 0.3)[0], lambda c: c * 0.5, start)
