"""Indices out of range: what JAX clamps, drops or fills is the same on blocks, in values and gradients.

XLA of jaxlib 0.10 merges a slice of a slice into one and loses the clamping of both (openxla/xla#48024), which
reshardings beside a user's slice would trigger everywhere; so every rule keeps its indices in range itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jshard


X = jnp.arange(32.0).reshape(8, 4)
ROWS = -jnp.ones((2, 4))
SLICES = {
    "slice": lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 4)),
    "long slice": lambda x, i: lax.dynamic_slice(x, (i, 0), (6, 4)) * 2,
    "row": lambda x, i: lax.dynamic_index_in_dim(x, i, 0) + x,
    "slice by vmap": lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (4, 4)))(i[None])[0],
    "update": lambda x, i: lax.dynamic_update_slice(x, ROWS, (i, 0)),
    "update of a slice": lambda x, i: lax.dynamic_update_slice(
        x, lax.dynamic_update_slice(lax.dynamic_slice(x, (i, 0), (4, 4)), ROWS, (i, 0)), (i, 0)
    ),
    "set a row": lambda x, i: x.at[i].set(ROWS[0]),
}


@pytest.mark.parametrize("cut", [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, cut):
    f = SLICES[name]
    g = jshard.shard(f, (P(), None), (cut,))
    for i in (-12, 2, 7):
        # Each operation compiled alone is right on every version.
        want = f(X, jnp.int32(i))
        np.testing.assert_array_equal(g(X, jnp.int32(i)), want, err_msg=str(i))


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
@pytest.mark.parametrize("cut", [(8, 1), (2, 2)])
def test_gathers_and_their_gradients(mode, cut):
    def f(x, i):
        return (x.at[i].get(mode=mode) * jnp.arange(1.0, 5.0)).sum()

    g = jshard.shard(f, (cut, None))
    for rows in ([9], [0, 8, 7, -20]):
        i = jnp.array(rows)
        for got, want in zip(jax.value_and_grad(g)(X, i), jax.value_and_grad(f)(X, i), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=str(rows))


def test_an_update_of_a_captured_array_around_a_sharded_function():
    # The update is the user's own, outside: JAX cuts it as the sharded argument is cut, and on jaxlib 0.10 XLA reads
    # the wrong rows there, without this library too. As an argument the array is cut where it lies.
    r = -jnp.ones(4)
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    g = jshard.shard(lambda z: (z @ z.T) @ z, ((2, 2),), mesh=mesh)

    def loss(f, r, x):
        return jnp.sin(f(x.at[0].set(r))).sum()

    def cut(r, x):
        return lax.with_sharding_constraint(x.at[0].set(r), NamedSharding(mesh, P("a", "b")))

    x = jnp.sin(X[:4])
    want = jax.hessian(lambda r: loss(g.__wrapped__, r, x))(r)
    got = jax.jit(jax.hessian(lambda r, x: loss(g, r, x)))(r, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    if (jax.jit(lambda r: cut(r, x))(r) == x.at[0].set(r)).all():
        got = jax.jit(jax.hessian(lambda r: loss(g, r, x)))(r)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
