"""Functions under `vmap`: what it makes of loops inside a sharded function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


X = jnp.linspace(0.5, 2.0, 16).reshape(8, 2)


def doubled_until_large(x):
    """As many turns as the element needs; the limit is captured by the test, the factor by the body."""
    limit, factor = jnp.sum(x) * 0 + 50.0, x[0] * 0 + 2.0
    return lax.while_loop(
        lambda c: jnp.sum(c[1]) < limit, lambda c: (c[0] + 1, c[1] * factor), (jnp.int32(0), x)
    )


@pytest.mark.parametrize("cut", [(8, 1), (1, 2), (1, 1), None])
@pytest.mark.parametrize("level", [0, 2])
def test_every_element_of_a_vmapped_while_loop_stops_by_its_own_test(cut, level):
    f = jax.vmap(doubled_until_large)
    want = f(X)
    assert len(set(np.asarray(want[0]).tolist())) > 2  # the elements stop at different turns
    got = jshard.shard(f, (cut,), level=level)(X)
    for w, g in zip(want, got, strict=True):
        np.testing.assert_array_equal(w, g)


def test_two_mapped_dimensions_and_random_keys_in_the_loop():
    def one(x, key):
        def turn(c):
            n, key = c
            key, sub = jax.random.split(key)
            return n + jax.random.uniform(sub), key

        return lax.while_loop(lambda c: c[0] < x, turn, (0.0, key))[0]

    f = jax.vmap(jax.vmap(one))
    keys = jax.random.split(jax.random.key(0), (8, 2))
    np.testing.assert_array_equal(jshard.shard(f, ((4, 1), None))(X, keys), f(X, keys))
