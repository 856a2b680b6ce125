"""`vmap` inside a sharded function: batched loops and fused operators."""

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


ATTENTION = jshard.op(jax.nn.dot_product_attention, rule="b q h _, b k h _, b k h _ -> b q h _")
PRODUCT = jshard.op(lambda a, b: (a @ b, (a @ b).T), rule="m k, k n -> m n, n m", reduction=("k",))


def numbers(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def mapped_attention(attend):
    """Over a leading dimension of the queries, and over the second one of the keys."""
    return jax.vmap(lambda q, k, v: attend(q, k, v), in_axes=(0, 1, 1), out_axes=1)


def test_a_mapped_fused_operator_is_cut_over_the_mapped_dimension():
    args = numbers((16, 2, 4, 2, 8), (2, 16, 6, 2, 8), (2, 16, 6, 2, 8))
    want = mapped_attention(jax.nn.dot_product_attention)(*args)
    f = jshard.shard(mapped_attention(ATTENTION), ((16, 1, 1, 1, 1), None, None))
    plan = f.plan(*args)
    (row,) = [r for r in plan.operators if r.primitive == "jshard_fused"]
    assert row.strategy == ((16, 1, 1, 1, 1), (1, 16, 1, 1, 1), (1, 16, 1, 1, 1)) and not plan.collectives
    np.testing.assert_allclose(f(*args), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 1), (1, 2)])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_a_mapped_fused_operator(in_axes, twice):
    a, b = numbers((4, 8), (8, 4))
    grown = [
        x if k is None else jnp.stack([x * (i + 1) for i in range(4)], axis=k)
        for x, k in zip((a, b), in_axes, strict=True)
    ]

    def loss(product):
        f = jax.vmap(product, in_axes=in_axes)
        if twice:
            f = jax.vmap(lambda s, a, b: jax.tree.map(lambda y: y * s, jax.vmap(product, in_axes=in_axes)(a * s, b)),
                         in_axes=(0, None, None))  # fmt: skip
            return lambda a, b: sum(jnp.sum(jnp.sin(y)) for y in f(jnp.arange(1.0, 3.0), a, b))
        return lambda a, b: sum(jnp.sum(jnp.sin(y)) for y in f(a, b))

    want = jax.value_and_grad(loss(lambda a, b: (a @ b, (a @ b).T)), argnums=(0, 1))(*grown)
    got = jshard.shard(jax.value_and_grad(loss(PRODUCT), argnums=(0, 1)))(*grown)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)
