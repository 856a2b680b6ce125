"""Inputs over whose first dimension a recurrence runs, among those that other loops and transposes read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jshard._program.time_major import time_major_inputs


def states(x: Any) -> Any:
    """(t, b, n) of a recurrence over (t, b, n)."""
    return jax.lax.scan(lambda s, x: (jnp.tanh(s + x),) * 2, jnp.zeros(x.shape[1:]), x)[1]


def mapped(x: Any) -> Any:
    return jax.lax.map(jnp.sin, x)


def embedded(tokens: Any) -> Any:
    return states(jnp.ones((50, 3))[tokens])


def gradient(x: Any) -> Any:
    return jax.grad(lambda x: jax.checkpoint(states)(x).sum())(x)


def accumulated(pieces: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + (x**2).sum(), None), 0.0, pieces)[0]


@pytest.mark.parametrize(
    "function, dtype, is_time_major",
    [
        (states, "float32", True),
        (jax.jit(lambda x: states(2 * x.astype("float32"))), "bfloat16", True),
        (gradient, "float32", True),
        (embedded, "int32", True),
        (accumulated, "float32", True),
        (mapped, "float32", False),
        (lambda x: states(x.swapaxes(0, 1)), "float32", False),
        (lambda x: states(x.sum(0)), "float32", False),
    ],
)
def test_time_major(function: Callable[..., Any], dtype: str, is_time_major: bool) -> None:
    shape = (12, 12) if dtype == "int32" else (12, 12, 3)  # equal sizes: only transposes tell them apart
    x = jax.ShapeDtypeStruct(shape, dtype)
    jaxpr = jax.make_jaxpr(lambda w, x: (w, function(x)))(jax.ShapeDtypeStruct((12, 3), "float32"), x)
    assert time_major_inputs(jaxpr.jaxpr) == ({1} if is_time_major else set())
