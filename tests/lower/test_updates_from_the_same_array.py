"""Elements that are written come from other elements of the same array: none is written over before it is read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


def _later(x: Any) -> Any:
    """XLA on CPU, given the constraint of a row-major array, doubles some of these twice: see `docs/jax_bugs.md`."""
    return lax.dynamic_update_slice(x, 2 * lax.slice(x, (0, 0, 0), (8, 6, 8)), (0, 4, 0))


def _through_others(x: Any) -> Any:
    shifted = jnp.where(x[:, :6] > 0, -x[:, :6], x[:, 1:7]).astype(x.dtype)
    return x.at[:, 4:10].set(shifted)


def _in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, y: lax.dynamic_update_slice(y, 2 * y[:, :6], (0, i + 2, 0)), x)


def _indexed(x: Any) -> Any:
    return x.at[:, jnp.array([4, 5, 6, 7])].set(2 * x[:, :4], unique_indices=True)


def _same_place(x: Any) -> Any:
    part = lax.dynamic_slice(x, (0, 4, 0), (8, 6, 8))
    return lax.dynamic_update_slice(x, 2 * part, (0, 4, 0))


@pytest.mark.parametrize("f", [_later, _through_others, _in_a_loop, _indexed, _same_place])
@pytest.mark.parametrize("cut", [(1, 1, 1), (1, 1, 4)], ids=str)
def test_all_elements_are_read_first(f: Any, cut: Any) -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(8, 13, 8)), "float32")
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharded = jshard.shard(f, mesh=mesh, in_strategy=(cut,))
    with jax.disable_jit():
        want = f(x)
    np.testing.assert_allclose(sharded(x), want, rtol=1e-6)
