"""Thirty functions and the transformations under which the sharded function must equal the unsharded one.

Each function takes two (4, 4) arrays. Its rules are such that a lost one shows: custom derivatives are wrong on
purpose, by factors of 3 and 3.5. `check` is the law for one function under one transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jshard


@jax.custom_jvp
def tripled(x):
    return jnp.sin(x)


@tripled.defjvp
def _tripled_jvp(primals, tangents):
    return tripled(primals[0]), 3 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def sevenfold(x):
    return x * x


sevenfold.defvjp(lambda x: (x * x, x), lambda x, ct: (7 * x * ct,))


def attention(x, w):
    return jax.nn.softmax(x @ w @ x.T / 2, axis=-1) @ x


def newton(x, w):
    def turn(c):
        i, y = c
        return i + 1, y - (y * y - 2 - jnp.abs(x).mean()) / (2 * y)

    return lax.while_loop(lambda c: c[0] < 3, turn, (0, 1.5 + w[0] * 0))[1]


def power(x, w):
    return lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x)


def rnn(x, w):
    return lax.scan(lambda h, r: ((h := jnp.tanh(h @ w + r)), h), x[0], x)


def layers(x, w):
    @jax.checkpoint
    def layer(c, _):
        return jnp.tanh(c @ w) + c, None

    return lax.scan(layer, x, None, length=2)[0]


def branches(x, w):
    return lax.cond(x[0, 0] > 0, lambda a, b: a @ b, lambda a, b: a - b, x, w)


def conv(x, w):
    return lax.conv_general_dilated(x.reshape(1, 4, 4, 1), w[:3, :3].reshape(3, 3, 1, 1), (1, 1), "SAME",
                                    dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip


def dropout(x, w):
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), x @ w, 0.0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w: x @ w,
    "mlp": lambda x, w: jax.nn.gelu(jnp.tanh(x @ w) @ w),
    "softmax": lambda x, w: jax.nn.softmax(x @ w) * x,
    "logsumexp": lambda x, w: jax.nn.logsumexp(x @ w, axis=1),
    "relu": lambda x, w: jax.nn.relu(x - w).sum(0),
    "attention": attention,
    "layer norm": lambda x, w: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * w
    ),
    "einsum": lambda x, w: jnp.einsum("ij,kj,il->kl", x, w, x),
    "outer": lambda x, w: x[:, None, :] * w[None],
    "reshape": lambda x, w: (x.reshape(2, 8) * w.reshape(2, 8)).reshape(8, 2),
    "gather": lambda x, w: x[jnp.array([3, 0, 0])] @ w,
    "scatter": lambda x, w: x.at[jnp.array([1, 1, 2])].add(w[:3]),
    "slices": lambda x, w: jnp.concatenate([x[1:], lax.dynamic_slice(w, (1, 0), (2, 4))]),
    "cumsum": lambda x, w: jnp.cumsum(x * w, axis=0),
    "sort": lambda x, w: jnp.sort(x, axis=1) @ w,
    "max": lambda x, w: jnp.max(x @ w, axis=0),
    "solve": lambda x, w: jnp.linalg.solve(w @ w.T + 4 * jnp.eye(4, dtype=w.dtype), x),
    "conv": conv,
    "dropout": dropout,
    "pytree": lambda x, w: {"a": (x @ w, x.sum()), "b": [w * 2.0]},
    "integers": lambda x, w: (jnp.argmax(x @ w, axis=1), jnp.exp(x)),
    "rnn": rnn,
    "remat in scan": layers,
    "fori": power,
    "while": newton,
    "cond": branches,
    "vmap inside": lambda x, w: jax.vmap(lambda r: jnp.tanh(w @ r))(x),
    "grad inside": lambda x, w: jax.grad(lambda y: jnp.sum(jnp.sin(y @ w)))(x),
    "custom jvp": lambda x, w: tripled(x @ w) + tripled(w),
    "custom vjp": lambda x, w: sevenfold(x @ w) + x,
}


def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that every element of every floating result enters with a weight of its own."""

    def loss(x, w):
        leaves = [y for y in jax.tree.leaves(f(x, w)) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum((y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum() for y in leaves)

    return loss


def floats(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: [y for y in jax.tree.leaves(f(x, w)) if jnp.issubdtype(y.dtype, jnp.floating)]


def in_scan(f, x, w):
    out, ys = lax.scan(lambda c, _: (c + scalar(f)(x + c, w) / 8, c), jnp.zeros((), x.dtype), None, length=2)
    return out, ys


TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, x, w: f(x, w),
    "jit": lambda f, x, w: jax.jit(f)(x, w),
    "grad": lambda f, x, w: jax.grad(scalar(f), (0, 1))(x, w),
    "value_and_grad": lambda f, x, w: jax.value_and_grad(scalar(f), 1)(x, w),
    "jit of grad": lambda f, x, w: jax.jit(jax.grad(scalar(f)))(x, w),
    "grad of jit": lambda f, x, w: jax.grad(scalar(jax.jit(f)))(x, w),
    "vjp": lambda f, x, w: jax.vjp(lambda w: floats(f)(x, w), w)[1](floats(f)(x, w)),
    "jvp": lambda f, x, w: jax.jvp(floats(f), (x, w), (w, x)),
    "linearize": lambda f, x, w: jax.linearize(lambda x: floats(f)(x, w), x)[1](w),
    "hessian": lambda f, x, w: jax.jit(lambda x, w: jax.hessian(lambda r: scalar(f)(x.at[0].set(r), w))(x[0]))(x, w),
    "jacfwd": lambda f, x, w: jax.jacfwd(lambda r: floats(f)(x.at[1].set(r), w))(x[1]),
    "jacrev": lambda f, x, w: jax.jacrev(lambda r: floats(f)(x, w.at[:, 2].set(r)))(w[:, 2]),
    "remat": lambda f, x, w: jax.grad(scalar(jax.checkpoint(f)))(x, w),
    "scan": in_scan,
    "grad of scan": lambda f, x, w: jax.grad(lambda x, w: in_scan(f, x, w)[0], (0, 1))(x, w),
    "cond": lambda f, x, w: lax.cond(x.sum() > w.sum(), f, lambda x, w: f(w, x), x, w),
}  # fmt: skip
# jacfwd, jacrev and hessian map over basis vectors outside of the sharded function: `vmap` of derivatives passes.


@functools.lru_cache
def mesh() -> Any:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=auto, devices=jax.devices()[:4])


@functools.lru_cache
def inputs(dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.normal(size=(4, 4)) / 2, dtype), jnp.asarray(rng.normal(size=(4, 4)) / 2, dtype)


def check(name: str, transformation: str, dtype: str) -> str:
    """The law; says "equal", or "refused" where JAX refuses the plain function with the same error."""
    fn, transform = FUNCTIONS[name], TRANSFORMATIONS[transformation]
    with jax.enable_x64(dtype == "float64"):
        x, w = inputs(dtype)
        f = jshard.shard(fn, ((2, 2), None), mesh=mesh())
        try:
            want = jax.jit(functools.partial(transform, fn))(x, w)  # one program, and not one an operator
        except Exception as refused:
            try:
                transform(f, x, w)
            except type(refused):
                return "refused"
            raise AssertionError(f"plain: {refused!r}, sharded: none") from refused
        got = transform(f, x, w)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        close = 1e-12 if dtype == "float64" else 1e-6
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
            scale = max(1.0, float(jnp.max(jnp.abs(b)))) if b.size else 1.0
            np.testing.assert_allclose(a, b, rtol=close, atol=close * scale)
    return "equal"
