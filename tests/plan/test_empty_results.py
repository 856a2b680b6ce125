"""Operators whose results have no elements read nothing: no collective is planned for them, as compilers drop it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


def window(x):
    return lax.reduce_window(x, 0.0, lax.add, (9,), (1,), "VALID")


def convolution(x):
    return lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 9)), (1,), "VALID")


def sorted_part(x):
    return jnp.sort(x)[:0], jnp.cumsum(x)[8:], x * 2


def in_a_loop(x):
    return lax.scan(lambda total, _: (total + x.sum(), window(x)), 0.0, None, length=3)


@pytest.mark.parametrize("fn", [window, convolution, sorted_part, in_a_loop])
def test_nothing_is_gathered_for_empty_results(fn):
    x = jnp.arange(8.0)
    f = jshard.shard(fn, ((8,),), mesh=jax.make_mesh((8,), ("x",)))
    plan = f.plan(x, verify=True)
    assert plan.verification.ok
    assert not [c for c in plan.collectives if c.kind == "all_gather"]
    for got, want in zip(jax.tree.leaves(f(x)), jax.tree.leaves(fn(x)), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_gradients_through_empty_results():
    def loss(x):
        return (window(x) ** 2).sum() + (x**2).sum()

    f = jshard.shard(jax.grad(loss), ((8,),), mesh=jax.make_mesh((8,), ("x",)))
    x = jnp.arange(8.0)
    assert f.plan(x, verify=True).verification.ok
    np.testing.assert_allclose(f(x), 2 * x, rtol=1e-6)
