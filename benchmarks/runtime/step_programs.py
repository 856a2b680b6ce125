"""Programs whose predicted steps `calibration.py` compares with measured ones, for n devices.

`programs`: the twelve of the table since it was first made. `further_programs`: ten that were written after what
calibration measures had been chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Program(NamedTuple):
    """A function with its arguments' shapes and how they are cut over the axes of a mesh, by number of pieces."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    cut: tuple[tuple[int, ...] | None, ...]


def mlp(w1: Any, w2: Any, x: Any) -> Any:
    """Two products with a nonlinearity."""
    return jnp.tanh(x @ w1) @ w2


def training_step(w1: Any, w2: Any, x: Any) -> Any:
    """One step of gradient descent of `mlp`."""
    g = jax.grad(lambda w: (mlp(w[0], w[1], x) ** 2).mean())((w1, w2))
    return w1 - 0.1 * g[0], w2 - 0.1 * g[1]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention over the last two dimensions."""
    s = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(s), v)


def layers(ws: Any, x: Any) -> Any:
    """Scanned layers, each a product and a normalisation."""

    def layer(h: Any, w: Any) -> Any:
        h = jnp.tanh(h @ w)
        return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6), None

    return lax.scan(layer, x, ws)[0].sum()


def programs(n: int, scale: int) -> list[Program]:
    """Twelve programs for n devices; `scale` multiplies the rows of what is cut by the batch."""
    r, d = 1024 * scale, 512
    return [
        Program("products of a cut batch", mlp, ((d, 2 * d), (2 * d, d), (r, d)), (None, None, (n, 1))),
        Program("gathered weights", mlp, ((d, 2 * d), (2 * d, d), (r, d)), ((n, 1), (n, 1), (n, 1))),
        Program("columns then rows", mlp, ((d, 2 * d), (2 * d, d), (r, d)), ((1, n), (n, 1), (1, 1))),
        Program("training, copies of weights", training_step, ((d, 2 * d), (2 * d, d), (r, d)), ((1, 1), (1, 1), (n, 1))),
        Program("training, gathered weights", training_step, ((d, 2 * d), (2 * d, d), (r, d)), ((n, 1), (n, 1), (n, 1))),
        Program("a small product", lambda x, w: x @ w, ((256, 256), (256, 256)), ((n, 1), None)),
        Program("attention, heads", attention, ((16, 256 * scale, 64),) * 3, ((8 if n % 8 == 0 else n, 1, 1),) * 3),
        Program("scanned layers", layers, ((4, d, d), (r, d)), ((1, n, 1), (n, 1))),
        Program("light operators", lambda x: jnp.tanh(x * 2 + 1) * x - x.mean(-1, keepdims=True), ((4 * r, d),), ((n, 1),)),
        Program("transpose of a cut matrix", lambda x: x.T * 2, ((2 * r, 1024),), ((n, 1),)),
        Program("sum to one copy", lambda x: x.sum(0) + 1, ((4 * r, d),), ((n, 1),)),
        Program("contracted dimension cut", lambda x, w: x @ w, ((512, 4 * r), (4 * r, 512)), ((1, n), (n, 1))),
    ]  # fmt: skip


def convolutions(w1: Any, w2: Any, x: Any) -> Any:
    """One step of gradient descent of two convolutions."""
    dims = ("NHWC", "HWIO", "NHWC")

    def loss(ws: Any) -> Any:
        h = jax.nn.relu(lax.conv_general_dilated(x, ws[0], (1, 1), "SAME", dimension_numbers=dims))
        h = jax.nn.relu(lax.conv_general_dilated(h, ws[1], (2, 2), "SAME", dimension_numbers=dims))
        return (h**2).mean()

    g = jax.grad(loss)((w1, w2))
    return w1 - 0.1 * g[0], w2 - 0.1 * g[1]


def block(x: Any, wqkv: Any, wo: Any, w1: Any, w2: Any) -> Any:
    """A transformer's block with causal attention of eight heads."""

    def norm(h: Any) -> Any:
        return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

    b, t, d = x.shape
    q, k, v = (a.reshape(b, t, 8, d // 8) for a in jnp.split(norm(x) @ wqkv, 3, -1))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (d // 8) ** 0.5
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v).reshape(b, t, d) @ wo
    return x + jax.nn.gelu(norm(x) @ w1) @ w2


def block_step(x: Any, *ws: Any) -> Any:
    """One step of gradient descent of `block`."""
    g = jax.grad(lambda ws: (block(x, *ws) ** 2).mean())(ws)
    return tuple(w - 0.1 * a for w, a in zip(ws, g, strict=True))


def recurrence(w: Any, u: Any, x: Any) -> Any:
    """The last state of a gated recurrent network over the first dimension."""

    def cell(h: Any, xt: Any) -> Any:
        z = jax.nn.sigmoid(xt @ w + h @ u)
        return (1 - z) * h + z * jnp.tanh(xt @ w), None

    return lax.scan(cell, jnp.zeros_like(x[0]), x)[0]


def adam(w: Any, m: Any, v: Any, x: Any) -> Any:
    """One step of Adam."""
    g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.01 * m / (jnp.sqrt(v) + 1e-8), m, v


def running_mean(x: Any) -> Any:
    """Means of all beginnings of rows."""
    return jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1)


def distances(x: Any, y: Any) -> Any:
    """Distances of all pairs of points."""
    return jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1) + 1e-6)


def low_rank(x: Any, a: Any, b: Any) -> Any:
    """A softmax over the columns of a product of low rank."""
    return jax.nn.softmax(x @ a @ b)


def further_programs(n: int, scale: int) -> list[Program]:
    """Ten programs for n devices, as `programs`."""
    weights, x = ((256, 768), (256, 256), (256, 1024), (1024, 256)), (16 * scale, 128, 256)
    low = ((2048 * scale, 512), (512, 32), (32, 4096))
    filters, images = ((3, 3, 16, 32), (3, 3, 32, 32)), (16 * scale, 64, 64, 16)
    return [
        Program("convolutions, training", convolutions, (*filters, images), (None, None, (n, 1, 1, 1))),
        Program("block, batch", block, (x, *weights), ((n, 1, 1), *(None,) * 4)),
        Program("block, columns and rows", block, (x, *weights), (None, None, None, (1, n), (n, 1))),
        Program("block, training", block_step, (x, *weights), ((n, 1, 1), *(None,) * 4)),
        Program("gated recurrence", recurrence, ((256, 256), (256, 256), (16, 512 * scale, 256)), (None, None, (1, n, 1))),
        Program("Adam, gathered weights", adam, (*((1024, 1024),) * 3, (512 * scale, 1024)), ((n, 1),) * 4),
        Program("running mean", running_mean, ((2048 * scale, 1024),), ((n, 1),)),
        Program("distances", distances, ((1024 * scale, 32), (512, 32)), ((n, 1), None)),
        Program("low rank, batch", low_rank, low, ((n, 1), None, None)),
        Program("low rank, columns", low_rank, low, (None, None, (1, n))),
    ]  # fmt: skip
