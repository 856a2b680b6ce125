"""Partial sums that a loop accumulates or stacks are reduced once after the loop where that is cheaper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jshard


BATCH, WIDTH, STEPS = 16, 32, 6


def mesh():
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def product(x, w):
    """`x @ w` by rows: left to itself, a plan for such small arrays would cut nothing."""
    return jshard.op(jnp.matmul, ((8, 1), (1, 1)))(x, w)


def accumulated(w, batches):
    """Gradients of many small batches, added up: the usual way to a large one."""

    def turn(g, x):
        def loss(w):
            return jnp.sum(jnp.tanh(product(x, w)) ** 2)

        return g + jax.grad(loss)(w), None

    return lax.scan(turn, jnp.ones_like(w), batches)[0]


def recurrent(w, batches):
    """The gradient of a weight that every turn reads."""

    def loss(w):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(product(h, w) + x), None), jnp.zeros_like(batches[0]), batches)
        return jnp.sum(h**2)

    return jax.grad(loss)(w)


def nested(w, batches):
    """A sum in a loop in a loop, taken away and added."""

    def inner(g, x):
        return (x.T @ jnp.sin(product(x, w))) + g - 2 * (x.T @ x), None

    def outer(g, x):
        return lax.scan(inner, g, jnp.stack([x, 2 * x]))[0], None

    return lax.scan(outer, w, batches)[0]


def stacked(w, batches):
    """Gradients of many scales, one a turn."""
    scaled = jshard.op(jnp.multiply, ((8, 1), (1,)))

    def loss(w):
        return jnp.sum(lax.scan(lambda h, s: (jnp.sin(scaled(h, s)), None), batches[0], w)[0] ** 2)

    return jax.grad(loss)(w)


CASES = {f.__name__: f for f in (accumulated, recurrent, nested, stacked)}


@pytest.mark.parametrize("name", CASES)
def test_sums_wait_for_the_end_of_the_loop(name):
    f = CASES[name]
    batches = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, WIDTH)), "float32")
    w = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), "float32") / 8
    sharded = jshard.shard(f, (None, (1, 8, 1)), level=2, mesh=mesh(), hardware="tpu-v5e")
    plan = sharded.plan(w, batches)
    sums = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert sums and all(c.count == 1 for c in sums)
    verdict = plan.verify(sharded.lower(w, batches).compile())
    assert verdict.ok, str(verdict)
    np.testing.assert_allclose(sharded(w, batches), f(w, batches), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_differentiated_from_outside(name):
    f = CASES[name]
    batches = jnp.asarray(np.random.default_rng(0).normal(size=(2, BATCH, WIDTH)), "float32")
    w = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), "float32") / 8
    w = w[:2] if f is stacked else w
    sharded = jshard.shard(f, (None, (1, 8, 1)), level=2, mesh=mesh(), hardware="tpu-v5e")
    mine = jax.jit(jax.grad(lambda w: jnp.sum(sharded(w, batches) ** 2)))(w)
    plain = jax.jit(jax.grad(lambda w: jnp.sum(f(w, batches) ** 2)))(w)
    np.testing.assert_allclose(mine, plain, rtol=1e-3, atol=1e-3 * float(jnp.abs(plain).max()))
