"""Steps with loops over layers, for pipelines: residual MLP, grouped-query Llama, experts with an auxiliary loss, GPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.batch.test_microbatches import BATCH, decoder, normal


def mlp(remat: bool) -> Callable[..., jax.Array]:
    """Residual layers with a bias, scaled by what only the layer's number and a loop-carried count decide."""

    def layer(carry: Any, one: Any) -> tuple[Any, jax.Array]:
        h, count = carry
        kernel, bias, i = one
        h = h + jnp.tanh(h @ kernel + bias) / (1 + count)
        return (h, count + i % 2), jnp.mean(h**2)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        xs = (w["kernel"], w["bias"], jnp.arange(w["kernel"].shape[0]))
        (h, _), each = lax.scan(jax.checkpoint(layer) if remat else layer, (x @ w["in"], 0), xs)
        return jnp.mean((h @ w["out"]) ** 2) + 0.1 * jnp.sum(each)

    return loss


def mlp_arguments(layers: int) -> tuple[Any, jax.Array]:
    w = {
        "in": normal(0, 6, 8), "kernel": normal(1, layers, 8, 8) / 3, "bias": normal(2, layers, 8),
        "out": normal(3, 8, 3),
    }  # fmt: skip
    return w, normal(4, BATCH, 6)


def llama(remat: bool) -> Callable[..., jax.Array]:
    """Grouped-query attention with rotated positions, a gated MLP, RMS norms; positions enter every layer."""

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        batch, length = tokens.shape
        heads, kv, d = 4, 2, 4
        place = jnp.broadcast_to(jnp.arange(length), (batch, length))
        angle = place[..., None] / 10 ** jnp.arange(d // 2)
        turn = jnp.exp(1j * angle)[:, :, None]

        def rotated(x: jax.Array) -> jax.Array:
            z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            return jnp.concatenate([z.real, z.imag], -1)

        def norm(x: jax.Array, g: jax.Array) -> jax.Array:
            return g * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            x = norm(h, one["g"])
            q, k, v = ((x @ one[n]).reshape(batch, length, -1, d) for n in ("q", "k", "v"))
            q, k = rotated(q), rotated(k)
            q = q.reshape(batch, length, kv, heads // kv, d)
            scores = jnp.einsum("btgnd,bsgd->bgnts", q, k) / 2
            mask = place[:, None, None, :, None] >= place[:, None, None, None, :]
            out = jnp.einsum("bgnts,bsgd->btgnd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
            h = h + out.reshape(batch, length, -1) @ one["o"]
            x = norm(h, one["g"])
            return h + (jax.nn.silu(x @ one["up"]) * (x @ one["gate"])) @ one["down"], None

        h, _ = lax.scan(jax.checkpoint(layer) if remat else layer, w["embedding"][tokens], w["layers"])
        logits = jax.nn.log_softmax(h @ w["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))

    return loss


def llama_shapes(d: int, f: int) -> dict[str, tuple[int, int]]:
    """Weights of a layer with two heads of keys and values for four of queries."""
    attention = {"q": (d, 16), "k": (d, 8), "v": (d, 8), "o": (16, d)}
    return attention | {"up": (d, f), "gate": (d, f), "down": (f, d)}


def llama_arguments(layers: int) -> tuple[Any, jax.Array]:
    d, f = 16, 12
    shapes = llama_shapes(d, f)
    stacked = {n: normal(i, layers, *s) / 4 for i, (n, s) in enumerate(shapes.items())}
    stacked["g"] = jnp.ones((layers, d))
    tokens = jax.random.randint(jax.random.key(3), (BATCH, 4), 0, 11)
    return {"layers": stacked, "embedding": normal(9, 11, d)}, tokens


def experts(rate: float, remat: bool = False) -> Callable[..., jax.Array]:
    """Two experts a layer with an auxiliary loss of their loads, summed up by the carry; dropout with carried keys."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(carry: Any, one: Any) -> tuple[Any, None]:
            h, balance, key = carry
            key, own = jax.random.split(key)
            gates = jax.nn.softmax(h @ one["router"])
            top = jax.nn.one_hot(jnp.argmax(gates, -1), 2)
            h = h + jnp.einsum("bk,bf,kfd->bd", gates * top, h, one["experts"])
            if rate:
                h = jnp.where(jax.random.bernoulli(own, rate, h.shape), h, 0)
            return (h, balance + 2 * jnp.sum(jnp.mean(top, 0) * jnp.mean(gates, 0)), key), None

        start = (x @ w["in"], jnp.zeros(()), jax.random.key(5))
        (h, balance, _), _ = lax.scan(jax.checkpoint(layer) if remat else layer, start, w["layers"])
        return jnp.mean(h**2) + 0.01 * balance

    return loss


def experts_arguments(layers: int) -> tuple[Any, jax.Array]:
    stacked = {"router": normal(1, layers, 8, 2), "experts": normal(2, layers, 2, 8, 8) / 3}
    return {"in": normal(0, 6, 8), "layers": stacked}, normal(4, BATCH, 6)


def gpt(remat: bool) -> Callable[..., jax.Array]:
    """Tied embeddings, masked tokens, dropout in every layer."""
    return decoder(remat, 0.8)


def gpt_arguments(layers: int) -> tuple[Any, jax.Array]:
    tokens = jax.random.randint(jax.random.key(7), (BATCH, 5), 0, 11)
    return {"layers": normal(4, layers, 8, 8) / 3, "embedding": normal(5, 11, 8)}, tokens


def momentum_step(loss: Callable) -> Callable:
    def run(w: Any, m: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradient)
        return value, jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m

    return run
