"""Networks as users write them, for pipelines: several loops, skips, caches, experts, dropout, checkpoints, Flax modules.

Each function takes the number of layers and gives `(step, arguments)`, as those of `pipeline_steps.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import lax

from tests.helpers.pipeline_steps import (
    ATTENTION,
    BATCH,
    HIDDEN,
    LENGTH,
    MLP,
    WIDTH,
    WORDS,
    Step,
    attention,
    block,
    causal,
    cross_entropy,
    decoder_loss,
    decoder_weights,
    heads,
    mlp,
    norm,
    normal,
    sgd,
    stack,
    tokens,
    unrolled_loss,
    unrolled_weights,
    unstacked,
)
from tests.helpers.pipeline_updates import with_optax


# -- several loops ----------------------------------------------------------------------------------------------------


def cross(p: Any, h: jax.Array, memory: jax.Array) -> jax.Array:
    """A layer of a decoder that reads an encoder's output."""
    h = h + attention(p["own"], norm(h), norm(h), causal())
    return mlp(p["own"], h + attention(p["cross"], norm(h), memory))


def encoder_decoder_weights(layers: int) -> Any:
    return {
        "encoder": stack(layers, **ATTENTION, **MLP),
        "decoder": {"own": stack(layers, 20, **ATTENTION, **MLP), "cross": stack(layers, 40, **ATTENTION)},
        "embedding": normal(90, WORDS, WIDTH),
    }


def encoder_decoder(layers: int) -> Step:
    """Cross attention of every decoder layer to the encoder's output."""

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        e = w["embedding"]
        memory, _ = lax.scan(lambda h, p: (mlp(p, h + attention(p, h, h)), None), e[x], w["encoder"])
        memory = norm(memory)
        h, _ = lax.scan(lambda h, p: (cross(p, h, memory), None), e[y], w["decoder"])
        return jnp.mean(cross_entropy(h @ e.T, jnp.roll(y, -1, 1)))

    return sgd(loss), (encoder_decoder_weights(layers), tokens(), tokens()[::-1])


def unrolled_encoder_decoder(layers: int) -> Step:
    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        e = w["embedding"]
        memory, h = e[x], e[y]
        for p in w["encoder"]:
            memory = mlp(p, memory + attention(p, memory, memory))
        memory = norm(memory)
        for p in w["decoder"]:
            h = cross(p, h, memory)
        return jnp.mean(cross_entropy(h @ e.T, jnp.roll(y, -1, 1)))

    w = encoder_decoder_weights(layers)
    w |= {n: unstacked(w[n], layers) for n in ("encoder", "decoder")}
    return sgd(loss), (w, tokens(), tokens()[::-1])


def u_shape(layers: int) -> Step:
    """Outputs of the layers on the way down enter those on the way up, the last first."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def down(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            h = mlp(p, h)
            return h, h

        h, skips = lax.scan(down, x, w["down"])
        h, _ = lax.scan(
            lambda h, one: (mlp(one[0], h + one[1] @ one[0]["skip"]), None), h, (w["up"], skips[::-1])
        )
        return jnp.mean(h**2)

    w = {"down": stack(layers, **MLP), "up": stack(layers, 10, **MLP, skip=(WIDTH, WIDTH))}
    return sgd(loss), (w, normal(92, BATCH, WIDTH))


def unrolled_u_shape(layers: int) -> Step:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, skips = x, []
        for p in w["down"]:
            h = mlp(p, h)
            skips.append(h)
        for p in w["up"]:
            h = mlp(p, h + skips.pop() @ p["skip"])
        return jnp.mean(h**2)

    w = {"down": unstacked(stack(layers, **MLP), layers)}
    w |= {"up": unstacked(stack(layers, 10, **MLP, skip=(WIDTH, WIDTH)), layers)}
    return sgd(loss), (w, normal(92, BATCH, WIDTH))


def first_to_all(layers: int) -> Step:
    """Every layer adds the embeddings again."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        first = w["embedding"][x]
        h = first
        for p in w["layers"]:
            h = block(p, h + 0.1 * first)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (unrolled_weights(layers), tokens())


def deep_supervision(layers: int) -> Step:
    """A loss of each layer's output."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            h = block(p, h)
            return h, jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

        return jnp.mean(lax.scan(layer, w["embedding"][x], w["layers"])[1])

    return sgd(loss), (decoder_weights(layers), tokens())


def teacher(layers: int) -> Step:
    """A student's outputs approach those of its moving average, which has no gradient."""

    def step(w: Any, slow: Any, x: jax.Array) -> Any:
        def run(w: Any, x: jax.Array) -> jax.Array:
            return lax.scan(lambda h, p: (mlp(p, h), None), x, w)[0]

        def loss(w: Any) -> jax.Array:
            return jnp.mean((run(w, x) - lax.stop_gradient(run(slow, x + 0.1))) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        w = jax.tree.map(lambda w, g: w - 0.1 * g, w, g)
        return w, jax.tree.map(lambda s, w: 0.9 * s + 0.1 * w, slow, w), value

    return step, (stack(layers, **MLP), stack(layers, 10, **MLP), normal(92, BATCH, WIDTH))


def contrastive(layers: int) -> Step:
    """A loss over all pairs of examples, after the layers."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = x
        for p in w:
            h = mlp(p, h)
        h = norm(h)
        scores = h @ h.T - 1e9 * jnp.eye(BATCH)
        return jnp.mean(cross_entropy(scores, jnp.arange(BATCH) ^ 1))

    return sgd(loss), (unstacked(stack(layers, **MLP), layers), normal(92, BATCH, WIDTH))


def input_gradient(layers: int) -> Step:
    """The gradient of the data is part of the loss: second derivatives."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def value(x: jax.Array) -> jax.Array:
            return jnp.sum(lax.scan(lambda h, p: (mlp(p, h), None), x, w)[0] ** 2)

        return value(x) / BATCH + 0.1 * jnp.mean(jax.grad(value)(x) ** 2)

    return sgd(loss), (stack(layers, **MLP), normal(92, BATCH, WIDTH))


def example_gradients(layers: int) -> Step:
    """Gradients of each example, clipped by their own norm and then averaged."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(lax.scan(lambda h, p: (mlp(p, h), None), x, w)[0] ** 2)

        each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
        size = jnp.sqrt(sum(jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(each)))
        factor = jnp.minimum(1, 0.1 / size)
        g = jax.tree.map(lambda g: jnp.tensordot(factor, g, 1) / BATCH, each)
        return jax.tree.map(lambda w, g: w - g, w, g)

    return step, (stack(layers, **MLP), normal(92, BATCH, WIDTH))


# -- decoding ---------------------------------------------------------------------------------------------------------


def cached_layer(p: Any, h: jax.Array, cache: Any, at: jax.Array) -> tuple[jax.Array, Any]:
    """One position with the keys and values of those before it."""
    x = norm(h)
    k, v = (lax.dynamic_update_slice_in_dim(cache[n], x @ p[n], at, 1) for n in ("k", "v"))
    scores = jnp.einsum("bthd,bshd->bhts", heads(x @ p["q"]), heads(k)) / 2
    scores = jnp.where(jnp.arange(LENGTH) <= at, scores, -1e30)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), heads(v)).reshape(h.shape)
    return mlp(p, h + out @ p["o"]), {"k": k, "v": v}


def cached(layers: int) -> Step:
    """A step of decoding with a cache of each layer, in a scan."""

    def step(w: Any, cache: Any, at: jax.Array, x: jax.Array) -> Any:
        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, Any]:
            return cached_layer(one[0], h, one[1], at)

        h, cache = lax.scan(layer, w["embedding"][x], (w["layers"], cache))
        return jnp.argmax(h @ w["embedding"].T, -1), cache

    cache = {n: normal(60 + i, layers, BATCH, LENGTH, WIDTH) for i, n in enumerate("kv")}
    return step, (decoder_weights(layers), cache, jnp.int32(2), tokens()[:, :1])


def unrolled_cached(layers: int) -> Step:
    def step(w: Any, caches: Any, at: jax.Array, x: jax.Array) -> Any:
        h, new = w["embedding"][x], []
        for p, cache in zip(w["layers"], caches, strict=True):
            h, cache = cached_layer(p, h, cache, at)
            new.append(cache)
        return h @ w["embedding"].T, new

    cache = {n: normal(60 + i, layers, BATCH, LENGTH, WIDTH) for i, n in enumerate("kv")}
    return step, (unrolled_weights(layers), unstacked(cache, layers), jnp.int32(2), tokens()[:, :1])


# -- experts, dropout, checkpoints ------------------------------------------------------------------------------------


EXPERTS = {"router": (WIDTH, 3), "up": (3, WIDTH, HIDDEN), "down": (3, HIDDEN, WIDTH)}


def experts_layer(p: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two best of three experts, and their auxiliary loss."""
    gates = jax.nn.softmax(norm(h) @ p["router"])
    best, which = lax.top_k(gates, 2)
    weights = jnp.sum(jax.nn.one_hot(which, 3) * best[..., None], -2)
    out = jnp.einsum("btw,ewf->btef", h, p["up"])
    out = jnp.einsum("btef,efw,bte->btw", jnp.tanh(out), p["down"], weights)
    load = jnp.mean(weights > 0, (0, 1))
    return h + out, 3 * jnp.sum(load * jnp.mean(gates, (0, 1)))


def experts(layers: int) -> Step:
    """Auxiliary losses of all layers in a list."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, balance = w["embedding"][x], []
        for p in w["layers"]:
            h, more = experts_layer(p, h)
            balance.append(more)
        each = cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1))
        return jnp.mean(each) + 0.01 * sum(balance) / layers

    w = {"layers": unstacked(stack(layers, **EXPERTS), layers), "embedding": normal(90, WORDS, WIDTH)}
    return sgd(loss), (w, tokens())


def checkpointed_experts(layers: int) -> Step:
    """Auxiliary losses stacked by a scan, the layers under `jax.checkpoint`."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        run = jax.checkpoint(experts_layer)
        h, balance = lax.scan(lambda h, p: run(p, h), w["embedding"][x], w["layers"])
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1))) + 0.01 * jnp.mean(balance)

    return sgd(loss), ({"layers": stack(layers, **EXPERTS), "embedding": normal(90, WORDS, WIDTH)}, tokens())


def dropout(layers: int) -> Step:
    """Keys split before the loop, one for each layer; the next key is a result."""

    def step(w: Any, key: jax.Array, x: jax.Array) -> Any:
        new, own = jax.random.split(key)

        def loss(w: Any) -> jax.Array:
            def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
                p, key = one
                keep = jax.random.bernoulli(key, 0.8, h.shape)
                return h + jnp.where(keep, block(p, h) - h, 0) / 0.8, None

            h, _ = lax.scan(layer, w["embedding"][x], (w["layers"], jax.random.split(own, layers)))
            return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

        value, g = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), jax.random.key_data(new), value

    return step, (decoder_weights(layers), jax.random.key(4), tokens())


def stochastic_depth(layers: int) -> Step:
    """Layers that are left out of an example, more often the later they are; in a list."""

    def loss(w: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for k, p in enumerate(w["layers"]):
            keep = jax.random.bernoulli(jax.random.fold_in(key, k), 1 - 0.1 * k / layers, (BATCH, 1, 1))
            h = jnp.where(keep, block(p, h), h)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (unrolled_weights(layers), jax.random.key(4), tokens())


def skipped_layers(layers: int) -> Step:
    """Layers that are left out of the whole batch, by a `cond` on a random number."""

    def loss(w: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            p, key = one
            return lax.cond(jax.random.bernoulli(key, 0.7), block, lambda p, h: h, p, h), None

        h, _ = lax.scan(layer, w["embedding"][x], (w["layers"], jax.random.split(key, layers)))
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), jax.random.key(4), tokens())


def checkpointed(layers: int) -> Step:
    """Layers of a list under `jax.checkpoint` with a policy."""
    layer = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    return sgd(unrolled_loss(layer)), (unrolled_weights(layers), tokens())


def offloadable_names(layers: int) -> Step:
    """A scan under a policy of names."""

    def named(p: Any, h: jax.Array) -> jax.Array:
        h = h + jax.ad_checkpoint.checkpoint_name(attention(p, norm(h), norm(h), causal()), "attention")
        return mlp(p, h)

    policy = jax.checkpoint_policies.save_only_these_names("attention")
    return sgd(decoder_loss(jax.checkpoint(named, policy=policy))), (decoder_weights(layers), tokens())


def checkpointed_pairs(layers: int) -> Step:
    """A scan over pairs of layers, each pair under one `jax.checkpoint`, with a scan inside. `layers`: of pairs."""

    def pair(p: Any, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, p: (block(p, h), None), h, p)[0]

    w = decoder_weights(2 * layers)
    w["layers"] = jax.tree.map(lambda a: a.reshape(layers, 2, *a.shape[1:]), w["layers"])
    return sgd(decoder_loss(jax.checkpoint(pair))), (w, tokens())


# -- frozen parts -----------------------------------------------------------------------------------------------------


def frozen_layers(layers: int) -> Step:
    """The first half of the layers has no gradient."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for k, p in enumerate(w["layers"]):
            h = block(lax.stop_gradient(p) if k < layers // 2 else p, h)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (unrolled_weights(layers), tokens())


def adapters(layers: int) -> Step:
    """Low-rank adapters of frozen weights, in a scan."""

    def loss(a: Any, w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            p, a = one
            q = {**p, "up": p["up"] + a["left"] @ a["right"]}
            return block(q, h), None

        h, _ = lax.scan(layer, w["embedding"][x], (w["layers"], a))
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    a = stack(layers, 70, left=(WIDTH, 2), right=(2, HIDDEN))
    return with_optax(loss, optax.adam(0.1, eps=1e-2), a, decoder_weights(layers), tokens())


def unrolled_adapters(layers: int) -> Step:
    """The same in a list, the adapters added to the activations."""

    def loss(a: Any, w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for p, b in zip(w["layers"], a, strict=True):
            h = block(p, h) + (norm(h) @ b["left"]) @ b["right"]
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    a = unstacked(stack(layers, 70, left=(WIDTH, 2), right=(2, WIDTH)), layers)
    return sgd(loss), (a, unrolled_weights(layers), tokens())


# -- other data, and Flax ---------------------------------------------------------------------------------------------


def convolutions(layers: int) -> Step:
    """Residual convolutions of images with group norm."""

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = h.reshape(*h.shape[:3], 2, -1)
        x = (x - x.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(x.var((1, 2, 4), keepdims=True) + 1e-3)
        x = lax.conv_general_dilated(
            x.reshape(h.shape), p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return h + jax.nn.relu(x * p["gain"]), None

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(layer, x, w)[0].mean((1, 2)) ** 2)

    return sgd(loss), (stack(layers, kernel=(3, 3, 4, 4), gain=(4,)), normal(92, BATCH, 5, 5, 4))


class LinenNetwork(linen.Module):
    """Layers by a Python loop, with dropout."""

    layers: int

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        h = linen.Embed(WORDS, WIDTH, param_dtype=jnp.float64)(x)
        for k in range(self.layers):
            y = linen.LayerNorm(param_dtype=jnp.float64, name=f"norm_{k}")(h)
            y = linen.MultiHeadDotProductAttention(2, param_dtype=jnp.float64, name=f"attention_{k}")(y)
            h = h + linen.Dropout(0.2, deterministic=not train)(y)
        return linen.Dense(WORDS, param_dtype=jnp.float64)(h)


def linen_network(layers: int) -> Step:
    model = LinenNetwork(layers)
    w = jax.tree.map(lambda a: a + 0.1, model.init(jax.random.key(1), tokens(), False))

    def loss(w: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        logits: Any = model.apply(w, x, True, rngs={"dropout": key})
        return jnp.mean(cross_entropy(logits, jnp.roll(x, -1, 1)))

    return sgd(loss), (w, jax.random.key(9), tokens())


class NnxLayer(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, decode=False, use_bias=False, param_dtype=jnp.float64, rngs=rngs
        )  # fmt: skip
        self.norm = nnx.RMSNorm(WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        h = h + self.attention(self.norm(h), mask=causal()[None, None])
        return h + self.down(nnx.gelu(self.up(self.norm(h))))


def nnx_network(layers: int) -> Step:
    """A list of nnx modules with an `nnx.Optimizer`, state in and out."""
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        embed=nnx.Embed(WORDS, WIDTH, param_dtype=jnp.float64, rngs=rngs),
        layers=nnx.List([NnxLayer(rngs) for _ in range(layers)]),
    )
    optimizer = nnx.Optimizer(model, optax.adam(0.1, eps=1e-2), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any) -> jax.Array:
            h = model.embed(x)
            for layer in model.layers:
                h = layer(h)
            return jnp.mean(cross_entropy(model.embed.attend(h), jnp.roll(x, -1, 1)))

        value, g = nnx.value_and_grad(loss)(model)
        optimizer.update(model, g)
        return nnx.state((model, optimizer)), value

    return step, (state, tokens())
