"""Values that differ by dimensions of size 1 are found to be one, others are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard._program.trace import build


def _same(x: Any) -> Any:
    row = lax.rev(lax.transpose(lax.reshape(x, (8, 1)), (1, 0)), (0,))
    return jnp.sin(lax.squeeze(row, (0,))) + jnp.sin(x)


def _turned_twice(x: Any) -> Any:
    y = lax.reshape(x, (4, 2))
    return jnp.sin(lax.transpose(lax.transpose(y, (1, 0)), (1, 0))) + jnp.sin(y)


def _reversed(x: Any) -> Any:
    return jnp.sin(lax.rev(x, (0,))) + jnp.sin(x)


def _transposed(x: Any) -> Any:
    y = lax.reshape(x, (1, 8))
    square = lax.broadcast_in_dim(y, (8, 8), (0, 1)) if y.shape[0] == 8 else jnp.tile(y, (8, 1))
    return jnp.sin(square) + jnp.sin(square.T)


def _repeated(x: Any) -> Any:
    y = lax.broadcast_in_dim(lax.reshape(x, (8, 1)), (8, 4), (0, 1))
    return jnp.sin(y[:, :1]) + jnp.sin(lax.slice(y, (0, 1), (8, 2)))


@pytest.mark.parametrize(
    "f, sines", [(_same, 1), (_turned_twice, 1), (_reversed, 2), (_transposed, 2), (_repeated, 2)]
)
def test_sines_of_one_value_are_one(f: Any, sines: int) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=8))
    program = build(jax.make_jaxpr(f)(x), name="f", input_names=["x"])
    assert [op.primitive for op in program.operators].count("sin") == sines
