"""Wrong calls have their error texts, and a correct call works afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core.errors import MeshError, ShardError


def test_foreign_devices_are_refused_and_the_mesh_s_own_are_placed():
    devices = jax.devices()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:4])
    f = jshard.shard(lambda x: x + 1, ((4,),), mesh=mesh)
    x = jnp.arange(8.0)
    with pytest.raises(MeshError) as caught:
        f(jax.device_put(x, devices[5]))
    assert (
        caught.value.what == f"an argument of shape (8,) lies on {devices[5]}, outside the mesh of 4 devices"
    )
    assert caught.value.where == "call of <lambda>"
    assert "in_shardings" in caught.value.fix
    np.testing.assert_array_equal(f(jax.device_put(x, devices[3])), x + 1)


def test_unhashable_static_argument():
    f = jshard.shard(lambda x, n: x * len(n), static_argnums=1)
    with pytest.raises(ShardError) as caught:
        f(jnp.ones(2), [1, 2])
    assert caught.value.what == "a static argument of <lambda> cannot be hashed: list"
    assert caught.value.where == "call of <lambda>"
    assert caught.value.fix.startswith("a hashable value (a tuple instead of a list)")
    np.testing.assert_array_equal(f(jnp.ones(2), (1, 2)), 2 * jnp.ones(2))


def test_a_kernel_on_each_devices_block():
    def kernel(q, k):
        return jnp.exp(q) @ k

    inside = jshard.op(kernel, rule="b m k, b k n -> b m n")
    f = jshard.shard(lambda q, k: inside(q, k) + 1, ((8, 1, 1), None))
    q, k = jnp.ones((8, 2, 4)), jnp.ones((8, 4, 2))
    np.testing.assert_allclose(f(q, k), kernel(q, k) + 1, rtol=1e-6)
