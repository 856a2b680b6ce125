"""Results have the types that `jit` gives them, weak types included, wherever a sharded function runs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


X = jnp.ones(8, jnp.bfloat16)


@jax.custom_jvp
def scaled(x, by):
    return x * by


@scaled.defjvp
def _(primals, tangents):
    (x, by), (t, u) = primals, tangents
    return scaled(x, by), t * by + x * u


@functools.partial(jax.custom_vjp)
def shifted(x, by):
    return x + by


shifted.defvjp(lambda x, by: (x + by, None), lambda _, ct: (ct, ct.sum()))

by_rule = jshard.op(lambda a, b: a * b, rule="b, -> b")

FUNCTIONS = {
    "numbers": lambda x: (x, 2.0, 3, True, 1j, x.shape[0]),
    "of numbers": lambda x: (jnp.asarray(2.0), jnp.full((8, 2), 0.5), jnp.sum(jnp.ones(3) * 1.0), jnp.zeros(3, int)),
    "passed through": lambda x: (x, x * 1.0, x.astype(float)),
    "fori": lambda x: lax.fori_loop(0, 5, lambda i, c: (c[0] + 1, c[1] * 2), (0, x)),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2, c[2] * 0.5), (0, x, 1.0)),
    "scan": lambda x: lax.scan(lambda c, y: ((c[0] + 1, c[1] + y), (c[0], y * 0.5)), (0, 0.0), x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda: (1.0, x), lambda: (2.0, x + 1)),
    "jit inside": lambda x: jax.jit(lambda: 2.0)() * jnp.ones(()),
    "remat": lambda x: (jax.checkpoint(lambda a: a * 2.0)(x), jax.checkpoint(lambda a: a * 2.0)(1.0)),
    "custom rules": lambda x: (scaled(x, 2.0), scaled(1.0, 2.0), shifted(x, 1.0), shifted(1.0, 2.0)),
    "an operator of the user's": lambda x: (by_rule(x, 2.0), by_rule(jnp.full(8, 0.5), 2.0)),
    "vmap": lambda x: jax.vmap(lambda a: (a * 2.0, 1.0))(x),
}  # fmt: skip


def types(tree):
    return [(a.shape, a.dtype, a.weak_type) for a in map(jax.typeof, jax.tree.leaves(tree))]


def in_scan(f):
    return lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1]


def in_cond(f):
    return lambda x: lax.cond(x[0] > 0, f, f, x)


def as_carry(f):
    """What a function returns goes round a loop, which takes only the types it has."""
    return lambda x: lax.while_loop(lambda c: False, lambda c: f(x), f(x))


def as_values(f):
    return lambda x: jax.value_and_grad(lambda a: (jnp.sum(a).astype("float32"), f(a)), has_aux=True)(x)[0][1]


PATHS = {
    "called": lambda f: f,
    "under jit": jax.jit,
    "in a scan": in_scan,
    "in a cond": in_cond,
    "carried": as_carry,
    "beside a gradient": as_values,
    "shapes": lambda f: lambda x: jax.eval_shape(f, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_those_of_jit(name):
    plain, sharded = jax.jit(FUNCTIONS[name]), jshard.shard(FUNCTIONS[name])
    for path, around in PATHS.items():
        want, run = around(plain)(X), around(sharded)
        for _ in range(3 if path == "called" else 1):
            got = run(X)
            if path == "shapes":
                got, want = (
                    [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(t)] for t in (got, want)
                )
                assert got == want
                break
            assert types(got) == types(want), path
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_number_gives_way_to_the_type_of_an_array():
    f = jshard.shard(lambda z: (z, 2.0), ((8,),))
    for _ in range(2):
        a = f(X)
        assert (a[0] * a[1]).dtype == jnp.bfloat16
    a = jax.jit(f)(X)
    assert (a[0] * a[1]).dtype == jnp.bfloat16


@pytest.mark.parametrize("args", [(2.0,), (jnp.float32(2.0),), (jnp.asarray(2.0),), (2,), (True,)])
def test_arguments_keep_their_types(args):
    f = lambda a: (a, a * X, a + 1)  # noqa: E731
    for around in (lambda g: g, jax.jit):
        assert types(around(jshard.shard(f))(*args)) == types(around(jax.jit(f))(*args))


def test_gradients_of_numbers_and_through_rules():
    def f(x, by):
        return scaled(x, by).astype("float32").sum() + shifted(by, 1.0)

    for argument in (0, 1):
        for args in ((X, 2.0), (X, jnp.float32(2.0)), (jnp.ones(8), 2.0)):
            want, got = (jax.grad(g, argument)(*args) for g in (jax.jit(f), jshard.shard(f)))
            assert types(got) == types(want)
            np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=1e-2)


def test_results_under_an_explicit_mesh():
    mesh = jax.make_mesh(
        (8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:8]
    )
    with jax.set_mesh(mesh):
        f = jshard.shard(lambda x: (x * 2.0, 1.0))
        for around in (lambda g: g, jax.jit):
            assert types(around(f)(X)) == [((8,), jnp.bfloat16, False), ((), jnp.float32, True)]
