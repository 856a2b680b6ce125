"""A custom derivative rule acts through the results of its call, whatever the body does with its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


TABLE = jnp.arange(8.0)
BODIES = {
    "passes its argument on": lambda x: x,
    "gives it twice": lambda x: (x, x),
    "gives a captured array": lambda x: TABLE,
    "uses a captured array": lambda x: x * TABLE,
    "gives something new": lambda x: (jnp.sin(x), x * 0 + 1),
}


def with_vjp(body):
    f = jax.custom_vjp(body)
    f.defvjp(lambda x: (body(x), x), lambda x, g: (jax.tree.leaves(g)[0] * 3 + jnp.sin(x),))
    return f


def with_jvp(body):
    f = jax.custom_jvp(body)
    f.defjvp(lambda p, t: (f(*p), jax.tree.map(lambda _: 7 * t[0], f(*p))))
    return f


@pytest.mark.parametrize("rule", [with_vjp, with_jvp])
@pytest.mark.parametrize("body", BODIES)
def test_the_rule_is_kept(body, rule):
    f = rule(BODIES[body])

    def loss(x):
        return sum(jnp.sum(y * jnp.cos(TABLE)) for y in jax.tree.leaves(f(x))) + jnp.sum(jnp.tanh(x))

    x = jnp.linspace(0, 1, 8)
    want = jax.grad(loss)(x)
    for cut in (None, (8,)):
        np.testing.assert_allclose(jax.grad(jshard.shard(loss, (cut,)))(x), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jshard.shard(jax.grad(loss), (cut,))(x), want, rtol=1e-5, atol=1e-6)
