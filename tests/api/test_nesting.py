"""A sharded function under `vmap` or inside another sharded function is refused, however it is wrapped."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._core.errors import NestedShardError


X, W = jnp.ones((8, 4)), jnp.ones((4, 4))


def inner(x, w):
    return jnp.tanh(x @ w)


F = jshard.shard(inner, ((2, 1), None))
warm = jax.jit(F)


class Model:
    def apply(self, x):
        return F(x, W)


DISGUISES = {
    "direct": lambda x: F(x, W),
    "called": lambda x: (lambda y: F(y, W))(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (F(c, W), None), x, None, length=2)[0],
    "grad": lambda x: jax.grad(lambda y: F(y, W).sum())(x),
    "warm jit": lambda x: warm(x, W),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda y: F(y, W), lambda y: y, x),
    "method": lambda x: Model().apply(x),
    "partial": lambda x: functools.partial(F, w=W)(x),
    "remat": lambda x: jax.checkpoint(lambda y: F(y, W))(x),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_shard_in_shard(name):
    warm(X, W)

    def outer(x):
        return DISGUISES[name](x)

    with pytest.raises(NestedShardError) as caught:
        jshard.shard(outer)(X)
    e = caught.value
    assert e.what == "the sharded function inner is called inside the sharded function outer"
    assert e.fix == "shard only outer, and pin what inner fixed with jshard.op"
    assert "test_nesting.py:" in e.where
    assert jnp.allclose(F(X, W), inner(X, W))


BATCH = jnp.ones((3, 8, 4))
VMAPS = {
    "vmap": lambda: jax.vmap(F, (0, None)),
    "vmap of a warm jit": lambda: jax.vmap(warm, (0, None)),
    "vmap of scan": lambda: jax.vmap(
        lambda x, w: jax.lax.scan(lambda c, _: (F(c, w), None), x, None, length=2)[0], (0, None)
    ),
    "vmap of remat": lambda: jax.vmap(jax.checkpoint(lambda x, w: F(x, w)), (0, None)),
    "jit of vmap": lambda: jax.jit(jax.vmap(lambda x, w: F(x, w), (0, None), spmd_axis_name="rows")),
    "vmap of grad": lambda: jax.vmap(jax.grad(lambda x, w: F(x, w).sum()), (0, None)),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_around_is_refused(name):
    warm(X, W)
    with pytest.raises(NestedShardError) as caught:
        VMAPS[name]()(BATCH, W)
    assert caught.value.what == "vmap of the sharded function inner"
    assert caught.value.where == "jax.vmap(inner)"
    assert "jshard.shard(jax.vmap(f), ...)" in caught.value.fix


def test_vmap_that_batches_no_argument_passes():
    got = jax.vmap(lambda b: F(X, W) + b)(jnp.arange(3.0))
    assert jnp.allclose(got, inner(X, W) + jnp.arange(3.0)[:, None, None], atol=1e-6)


def test_vmap_inside_works():
    twice = jax.vmap(jax.vmap(lambda r, w: r @ w, (0, None)), (0, None))
    for f in (twice, jax.vmap(inner, (0, None), spmd_axis_name="rows")):
        assert jnp.allclose(jshard.shard(f)(BATCH, W), f(BATCH, W), atol=1e-6)
