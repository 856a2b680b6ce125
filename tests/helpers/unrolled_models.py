"""Steps whose layers a Python loop applies, each with parameters of its own: what most models are before they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.batch.test_microbatches import BATCH, clipped, normal
from tests.helpers.pipeline_models import llama_shapes


Model = tuple[Callable[..., jax.Array], tuple[Any, jax.Array]]
"""A loss of parameters and data, and both."""


def mlp(layers: int) -> Model:
    """Residual layers with a bias between two matrices, each scaled by its number."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, each = x @ w["in"], []
        for k, one in enumerate(w["layers"]):
            h = h + jnp.tanh(h @ one["kernel"] + one["bias"]) * 0.9**k
            each.append(jnp.mean(h**2))
        return jnp.mean((h @ w["out"]) ** 2) + 0.1 * sum(each)

    stacked = [{"kernel": normal(k, 8, 8) / 3, "bias": normal(50 + k, 8)} for k in range(layers)]
    return loss, (
        {"in": normal(100, 6, 8), "layers": stacked, "out": normal(101, 8, 3)},
        normal(102, BATCH, 6),
    )


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return gain * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def gpt(layers: int, remat: bool = False, keys: str = "split") -> Model:
    """Tied embeddings, learned positions, dropout with a key for each layer: `split` from the last, or folded in."""
    d, vocabulary, heads = 8, 11, 2

    def layer(one: Any, h: jax.Array, key: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)
        batch, length, _ = h.shape
        q, k, v = (
            a.reshape(batch, length, heads, -1) for a in jnp.split(_norm(h, one["g1"]) @ one["qkv"], 3, -1)
        )
        scores = jnp.where(
            jnp.tril(jnp.ones((length, length), bool)), jnp.einsum("bthd,bshd->bhts", q, k), -1e9
        )
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(h.shape) @ one["o"]
        h = h + jnp.where(jax.random.bernoulli(first, 0.8, h.shape), out / 0.8, 0)
        out = jax.nn.gelu(_norm(h, one["g2"]) @ one["up"]) @ one["down"]
        return h + jnp.where(jax.random.bernoulli(second, 0.8, h.shape), out / 0.8, 0)

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        h, key = w["embedding"][tokens] + w["positions"], jax.random.key(3)
        run = jax.checkpoint(layer) if remat else layer
        for k in range(layers):
            if keys == "split":
                key, own = jax.random.split(key)
            else:
                own = jax.random.fold_in(key, k)
            h = run(w[f"layer_{k}"], h, own)
        logits = jax.nn.log_softmax(_norm(h, w["g"]) @ w["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))

    w: dict[str, Any] = {
        "embedding": normal(1, vocabulary, d),
        "positions": normal(2, 5, d),
        "g": normal(3, d),
    }
    for k in range(layers):
        shapes = {
            "qkv": (d, 3 * d),
            "o": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
            "g1": (d,),
            "g2": (d,),
        }
        w[f"layer_{k}"] = {n: normal(10 * k + i, *s) / 3 for i, (n, s) in enumerate(shapes.items())}
    return loss, (w, jax.random.randint(jax.random.key(3), (BATCH, 5), 0, vocabulary))


def llama(layers: int, remat: bool = False) -> Model:
    """Grouped-query attention with rotated positions, a gated MLP; the last layer is followed by a norm like its own."""
    d, f, heads, kv = 16, 12, 4, 2

    def rotated(x: jax.Array, turn: jax.Array) -> jax.Array:
        z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return jnp.concatenate([z.real, z.imag], -1)

    def layer(one: Any, h: jax.Array, turn: jax.Array, mask: jax.Array) -> jax.Array:
        batch, length, _ = h.shape
        x = _norm(h, one["g1"])
        q, k, v = ((x @ one[n]).reshape(batch, length, -1, 4) for n in ("q", "k", "v"))
        q = rotated(q, turn).reshape(batch, length, kv, heads // kv, 4)
        scores = jnp.where(mask, jnp.einsum("btgnd,bsgd->bgnts", q, rotated(k, turn)) / 2, -1e30)
        h = (
            h
            + jnp.einsum("bgnts,bsgd->btgnd", jax.nn.softmax(scores), v).reshape(batch, length, -1) @ one["o"]
        )
        x = _norm(h, one["g2"])
        return h + (jax.nn.silu(x @ one["up"]) * (x @ one["gate"])) @ one["down"]

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        turn = jnp.exp(1j * jnp.arange(length)[:, None] / 10 ** jnp.arange(2))[None, :, None]
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)
        h = w["embedding"][tokens]
        for one in w["layers"]:
            h = (jax.checkpoint(layer) if remat else layer)(one, h, turn, mask)
        logits = jax.nn.log_softmax(_norm(h, w["g"]) @ w["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))

    shapes = {**llama_shapes(d, f), "g1": (d,), "g2": (d,)}
    ws = [{n: normal(20 * k + i, *s) / 4 for i, (n, s) in enumerate(shapes.items())} for k in range(layers)]
    tokens = jax.random.randint(jax.random.key(3), (BATCH, 4), 0, 11)
    return loss, ({"embedding": normal(900, 11, d), "layers": ws, "g": normal(901, d)}, tokens)


def _plain(step: Callable[[int, jax.Array, jax.Array], jax.Array], layers: int) -> Model:
    """Layers of one matrix each, on the data."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for k, w in enumerate(ws):
            x = step(k, w, x)
        return jnp.mean(x**2)

    return loss, ([normal(k, 8, 8) / 3 for k in range(layers)], normal(500, BATCH, 8))


def of_data(layers: int) -> Model:
    """The first layer needs no gradient of what enters it."""
    return _plain(lambda k, w, x: jnp.tanh(x @ w), layers)


def checkpointed_of_data(layers: int) -> Model:
    """The same under `jax.checkpoint`: the first layer's backward pass is another call, without that gradient."""
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w) @ w.T))
    return _plain(lambda k, w, x: layer(x, w), layers)


def experts(layers: int, policy: Callable[..., Any] | None = None, embedded: bool = True) -> Model:
    """Experts under `jax.checkpoint` with a loss of the loads, sums over the batch that the backward pass computes again."""

    def layer(h: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(h @ one["router"])
        top = jax.nn.one_hot(jnp.argmax(gates, -1), 3)
        out = jnp.einsum("bk,bf,kfd->bd", gates * top, jnp.tanh(h), one["experts"])
        return h + out, jnp.sum(jnp.mean(top, 0) * jnp.mean(gates, 0))

    checkpointed = jax.checkpoint(layer, policy=policy)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, balance = x @ w["in"] if embedded else x, jnp.zeros(())
        for one in w["layers"]:
            h, more = checkpointed(h, one)
            balance += more
        return jnp.mean(h**2) + 0.01 * balance

    each = [{"router": normal(2 * k, 8, 3), "experts": normal(2 * k + 1, 3, 8, 8) / 3} for k in range(layers)]
    return loss, (({"in": normal(100, 8, 8)} if embedded else {}) | {"layers": each}, normal(102, BATCH, 8))


def gated(layers: int) -> Model:
    """Gated layers on the data: of the first one the backward pass has less than half."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for one in ws:
            y = _norm(x, jnp.ones(8))
            x = x + (jax.nn.silu(y @ one[0]) * (y @ one[1])) @ one[2]
        return jnp.mean(x**2)

    ws = [[normal(3 * k + n, 8, 8) / 3 for n in range(3)] for k in range(layers)]
    return loss, (ws, normal(500, BATCH, 8))


def alternating(layers: int) -> Model:
    """Two kinds of layers in turn, so that a repeated part has one of each."""
    return _plain(lambda k, w, x: x + (jnp.tanh(x @ w) if k % 2 else jnp.sin(x @ w) * w[0]), layers)


def with_constants(layers: int) -> Model:
    """An equal and another constant array in every layer."""
    return _plain(lambda k, w, x: x + jnp.tanh(x @ w) * np.linspace(0, 1, 8) + np.full(8, k), layers)


def with_custom_rules(layers: int) -> Model:
    """A `custom_vjp` function in every layer."""
    return _plain(lambda k, w, x: x + clipped(x @ w, w[0, 0]), layers)


def numbered(layers: int) -> Model:
    """Checkpointed layers that close over their number, between two matrices."""
    key = jax.random.key(1)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = x @ w[0]
        for k, one in enumerate(w[1:]):

            def layer(one: jax.Array, h: jax.Array, k: int = k) -> jax.Array:
                kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, h.shape)
                return h + jnp.where(kept, jnp.tanh(h @ one), 0)

            h = jax.checkpoint(layer)(one, h)
        return jnp.mean(h**2)

    return loss, ([normal(k, 8, 8) / 3 for k in range(layers + 1)], normal(500, BATCH, 8))


def indexed(layers: int) -> Model:
    """Layers that slice one stacked array."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for k in range(layers):
            x = jnp.tanh(x @ w[k])
        return jnp.mean(x**2)

    return loss, (normal(1, layers, 8, 8) / 3, normal(2, BATCH, 8))


def with_keys_of_a_split(layers: int, remat: bool = False) -> Model:
    """Layers that are skipped for some examples, by a key and a rate of their own, each one of an array of all."""

    def layer(w: jax.Array, x: jax.Array, key: jax.Array, rate: jax.Array) -> jax.Array:
        return x + jnp.where(jax.random.bernoulli(key, 1 - rate, (len(x), 1)), jnp.tanh(x @ w), 0)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        keys, rates = jax.random.split(jax.random.key(4), layers), jnp.linspace(0, 0.3, layers)
        for w, key, rate in zip(ws, keys, rates, strict=True):
            x = (jax.checkpoint(layer) if remat else layer)(w, x, key, rate)
        return jnp.mean(x**2)

    return loss, ([normal(k, 8, 8) / 3 for k in range(layers)], normal(500, BATCH, 8))


def collected(layers: int) -> Model:
    """What single layers return is read after the loop; a matrix is shared by all layers."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        ws, shared = w
        each = []
        for one in ws:
            x = x + jnp.tanh(x @ one) @ shared
            each.append(x)
        return jnp.mean(jnp.concatenate(each, -1) ** 2) + jnp.mean(each[1])

    return loss, (([normal(k, 8, 8) / 3 for k in range(layers)], normal(77, 8, 8) / 3), normal(2, BATCH, 8))


def penalized(layers: int, penalty: Callable[[jax.Array], jax.Array], remat: bool = False) -> Model:
    """Layers on the data with a penalty of what enters each: of that of the first one no gradient is taken."""

    def layer(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + jnp.tanh(x @ w), penalty(x)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for w in ws:
            x, more = (jax.checkpoint(layer) if remat else layer)(w, x)
            total += more
        return jnp.mean(x**2) + 0.1 * total

    return loss, ([normal(k, 8, 8) / 3 for k in range(layers)], normal(500, BATCH, 8))


def supervised(layers: int, remat: str = "", embedded: bool = False) -> Model:
    """A loss after each layer, by a matrix of its own; `remat`: "layer", "loss" or "both" are checkpointed."""

    def layer(w: Any, x: jax.Array) -> jax.Array:
        centered = x - jnp.mean(x, -1, keepdims=True)
        return x + jnp.tanh(centered @ w["kernel"])

    def loss_of(w: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(jax.nn.log_softmax(x @ w["head"])[:, 1])

    def both(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = layer(w, x)
        return x, loss_of(w, x)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        if embedded:
            x = x @ w["in"]
        total = jnp.zeros(())
        for k, one in enumerate(w["layers"]):
            if remat == "both":
                x, own = jax.checkpoint(both)(one, x)
            else:
                x = (jax.checkpoint(layer) if remat == "layer" else layer)(one, x)
                own = (jax.checkpoint(loss_of) if remat == "loss" else loss_of)(one, x)
            total += own * 0.8 ** (layers - k)
        return total

    ws = [{"kernel": normal(k, 8, 8) / 3, "head": normal(40 + k, 8, 3)} for k in range(layers)]
    return loss, ({"layers": ws} | ({"in": normal(99, 8, 8)} if embedded else {}), normal(500, BATCH, 8))


def in_branches(x: jax.Array) -> jax.Array:
    """The mean square, or another mean, by a value that no example enters."""
    return lax.cond(jnp.array(True), lambda x: jnp.mean(x**2), lambda x: jnp.mean(jnp.abs(x)), x)


def of_means_in_branches(x: jax.Array) -> jax.Array:
    """Squares of means in one branch, a mean in the other, none in the third; and a number of the branch alone."""
    branches = [
        lambda x: (jnp.sum(jnp.mean(x, 0) ** 2), 2.0),
        lambda x: (jnp.mean(jnp.abs(x)), 3.0),
        lambda x: (jnp.zeros(()), 4.0),
    ]
    chosen = [lax.switch(jnp.array(k), branches, x) for k in range(3)]
    return sum(penalty * number for penalty, number in chosen)


def of_other_means_in_branches(x: jax.Array) -> jax.Array:
    """Branches within branches: the largest of the means, or squares of means of other values."""

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.mean(jnp.sin(x), 0) ** 2)

    def inner(x: jax.Array) -> jax.Array:
        return lax.cond(jnp.array(True), lambda x: jnp.max(jnp.mean(x, 0)), squares, x)

    return lax.cond(jnp.array(True), inner, squares, x)


def in_a_loop(x: jax.Array) -> jax.Array:
    """A mean of what a loop over the features carries."""
    return jnp.mean(lax.scan(lambda c, y: (jnp.tanh(c + y), c * y), jnp.zeros(len(x)), x.T)[1] ** 2)


def of_means(x: jax.Array) -> jax.Array:
    """Squares of means over the batch: no piece of it has a share."""
    return jnp.sum(jnp.mean(x, 0) ** 2)


def masked_after(layers: int) -> Model:
    """Two masks behind the layers, alike and one after the other, but no layers: their numbers are no parameters."""
    _, args = _plain(lambda k, w, x: x, layers)

    def masked(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        for kept, number in [(ws[k][0, 0] > k, jnp.full(x.shape, 0.5 + k)) for k in range(2)]:
            x = lax.select_n(kept, number, x)
        return jnp.mean(x**2)

    return masked, args
