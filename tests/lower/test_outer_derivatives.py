"""`jax.grad` of a sharded function differentiates every operator inside `shard_map`, where values have varying types.

JAX requires there that all operands of a primitive vary over the same mesh axes. Local functions that use the device's
position, and derivative rules of JAX that make constants, are where that goes wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jshard


X = jnp.linspace(0.1, 0.9, 32).reshape(8, 4)
UNARY = """
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
    floor lgamma log log1p logistic neg reciprocal round rsqrt sign sin sinh sqrt square tan tanh
""".split()
BINARY = "add atan2 div max min mul pow rem sub".split()


def unary(x):
    return sum(getattr(lax, name)(x) for name in UNARY)


def binary(x):
    return sum(getattr(lax, name)(x, 1.5 + x) for name in BINARY) + x**5


FUNCTIONS = {
    "unary": unary,
    "binary": binary,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "ndtri": jax.scipy.special.ndtri,
    "log_ndtr": jax.scipy.special.log_ndtr,
    "xlogy": lambda x: jax.scipy.special.xlogy(x, x),
    "logit": jax.scipy.special.logit,
    "polyval": lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x),
    "segment_sum of one piece": lambda x: jax.ops.segment_sum(x[:, :1], jnp.arange(8) % 4, 4),
    "at add": lambda x: x.at[jnp.arange(4) * 2].add(0.5),
    "at set": lambda x: x.at[3].set(jnp.sin(x[0])),
    "at max": lambda x: x.at[jnp.array([1, 5])].max(0.25),
    "take": lambda x: jnp.take(x, jnp.array([7, 0, 3]), axis=0),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, 2 * x[:2], (5, 0)),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "cummax": lambda x: lax.cummax(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "reverse": lambda x: x[::-1] * jnp.arange(8.0)[:, None],
    "pad": lambda x: jnp.pad(x, ((2, 1), (0, 0)), mode="edge"),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    "clip": lambda x: jnp.clip(x, 0.2, 0.7),
    "triangle": lambda x: jnp.triu(x @ x.T),
    "prod": lambda x: jnp.prod(x, axis=0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=0),
    "while": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * (i + 1), x),
    "cond": lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_derivative_of_a_sharded_function(name):
    def loss(x):
        y = FUNCTIONS[name](x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    want = jax.jit(jax.grad(loss))(X)
    got = jax.jit(jax.grad(jshard.shard(loss, ((8, 1),))))(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * float(jnp.abs(want).max()))


def test_a_fourier_transform_of_a_sum_that_is_scattered_afterwards():
    """XLA on CPU hands the memory layout of a reduce-scatter to the transform: see `docs/jax_bugs.md`."""
    a, b = jnp.sin(jnp.arange(32.0)).reshape(2, 16), jnp.cos(jnp.arange(128.0)).reshape(16, 8)

    def f(a, b):
        return jnp.real(jnp.fft.fft(a @ b))

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jshard.shard(f, ((1, 8), (8, 1)), (1, 8), mesh=mesh)
    assert [c.kind for c in sharded.plan(a, b).collectives] == ["reduce_scatter"]
    np.testing.assert_allclose(sharded(a, b), f(a, b), rtol=1e-4, atol=1e-5)
    got = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(sharded(a, b)))))(a)
    np.testing.assert_allclose(got, jax.grad(lambda a: jnp.sum(jnp.sin(f(a, b))))(a), rtol=1e-3, atol=1e-5)


def test_rules_that_ask_which_operands_move():
    """`symbolic_zeros=True`: what the gradient does not reach is told to stand still, as in the plain program."""

    @jax.custom_vjp
    def scaled(x, a):
        return jnp.sin(x) * a

    def forward(x, a):
        assert x.perturbed and not a.perturbed
        return jnp.sin(x.value) * a.value, (x.value, a.value)

    def backward(kept, ct):
        return 3 * ct * jnp.cos(kept[0]) * kept[1], None

    scaled.defvjp(forward, backward, symbolic_zeros=True)

    @jax.custom_jvp
    def shifted(x, a):
        return jnp.cos(x) + a

    def pushed(primals, tangents):
        assert isinstance(tangents[1], jax.custom_derivatives.SymbolicZero)
        assert not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero)
        return shifted(*primals), 5 * tangents[0]

    shifted.defjvp(pushed, symbolic_zeros=True)
    x, a = jnp.arange(32.0).reshape(8, 4) / 9, jnp.arange(32.0).reshape(8, 4) + 1

    def f(x, a):
        return jax.lax.scan(lambda c, _: (jnp.tanh(shifted(scaled(c, a), a)), c.sum()), x, None, length=2)

    def total(f):
        return lambda x: sum(jnp.sum(jnp.cos(y)) for y in f(x, a))

    for strategy in (None, ((2, 4), None), ((8, 1), (1, 4))):
        sharded = jshard.shard(f, strategy)
        want = jax.jit(jax.value_and_grad(total(f)))(x)
        for got in (
            jax.jit(jax.value_and_grad(total(sharded)))(x),
            jshard.shard(jax.value_and_grad(total(f)), strategy and strategy[:1])(x),
        ):
            jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("f", [lambda *xs: jax.device_put(xs), lambda *xs: lax.optimization_barrier(xs)])
def test_a_result_beside_a_cut_one_is_not_typed_as_that(f):
    """A scalar beside a cut array was typed as varying over the array's axes, and refused as a result that does not."""
    x, scale = jnp.arange(16.0).reshape(8, 2), jnp.float32(3.0)
    sharded = jshard.shard(
        f, ((8, 1), None), (jax.P(("x",)), jax.P()), mesh=jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    )
    got = jax.grad(lambda *xs: sum(jnp.sum(y**2) for y in sharded(*xs)), (0, 1))(x, scale)
    np.testing.assert_allclose(got[0], 2 * x)
    assert float(got[1]) == 6
