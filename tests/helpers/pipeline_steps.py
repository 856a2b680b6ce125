"""Training and decoding steps as users write them, for pipelines: what a model's layers and its update do besides products.

Each function takes the number of layers and gives `(step, arguments)`. The batch is `BATCH` examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax


BATCH, LENGTH, WIDTH, HIDDEN, WORDS, HEADS = 16, 4, 8, 12, 11, 2
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(i: int, *shape: int) -> jax.Array:
    """Numbers of a standard normal distribution."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), i), shape, jnp.float64)


def stack(layers: int, first: int = 0, /, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Stacked weights of layers."""
    return {n: normal(first + i, layers, *s) / 3 for i, (n, s) in enumerate(shapes.items())}


def unstacked(w: Any, layers: int) -> list[Any]:
    """The weights of each layer."""
    return [jax.tree.map(lambda a, k=k: a[k], w) for k in range(layers)]


def norm(x: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def mlp(p: Any, h: jax.Array) -> jax.Array:
    """A residual MLP."""
    return h + jnp.tanh(norm(h) @ p["up"]) @ p["down"]


MLP = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
ATTENTION = {n: (WIDTH, WIDTH) for n in ("q", "k", "v", "o")}


def heads(x: jax.Array) -> jax.Array:
    """(batch, length, heads, size)."""
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(p: Any, x: jax.Array, y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Attention of `x` to `y`."""
    q, k, v = heads(x @ p["q"]), heads(y @ p["k"]), heads(y @ p["v"])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["o"]


def causal(length: int = LENGTH) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def block(p: Any, h: jax.Array) -> jax.Array:
    """Causal attention and an MLP."""
    return mlp(p, h + attention(p, norm(h), norm(h), causal()))


def decoder_weights(layers: int) -> Any:
    return {"layers": stack(layers, **ATTENTION, **MLP), "embedding": normal(90, WORDS, WIDTH)}


def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(3), (BATCH, LENGTH), 0, WORDS)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of every token."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def decoder_loss(layer: Callable[[Any, jax.Array], jax.Array] = block) -> Callable[..., jax.Array]:
    """Next-token loss with tied embeddings, the layers in a scan."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, p: (layer(p, h), None), w["embedding"][x], w["layers"])
        return jnp.mean(cross_entropy(norm(h) @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return loss


def unrolled_loss(layer: Callable[[Any, jax.Array], jax.Array] = block) -> Callable[..., jax.Array]:
    """The same with the layers in a list."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for p in w["layers"]:
            h = layer(p, h)
        return jnp.mean(cross_entropy(norm(h) @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return loss


def unrolled_weights(layers: int) -> Any:
    w = decoder_weights(layers)
    return {**w, "layers": unstacked(w["layers"], layers)}


def sgd(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(w: Any, *data: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, *data)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value

    return step


# -- layers -----------------------------------------------------------------------------------------------------------


def alternating(layers: int) -> Step:
    """Layers of two kinds take turns: gated without attention, and attention with a window. `layers`: of pairs."""

    def window(p: Any, h: jax.Array) -> jax.Array:
        return h + attention(p, norm(h), norm(h), causal() & ~causal().T | jnp.eye(LENGTH, dtype=bool))

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for k, p in enumerate(w["layers"]):
            h = window(p, h) if k % 2 else mlp(p, h)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    w = {
        "layers": [
            stack(1, 20 * k, **(ATTENTION if k % 2 else MLP)) for k in range(2 * layers)
        ],
        "embedding": normal(90, WORDS, WIDTH),
    }  # fmt: skip
    w["layers"] = [jax.tree.map(lambda a: a[0], p) for p in w["layers"]]
    return sgd(loss), (w, tokens())


def alternating_scan(layers: int) -> Step:
    """The same in a scan over pairs."""

    def pair(p: Any, h: jax.Array) -> jax.Array:
        h = h + attention(p["wide"], norm(h), norm(h), causal())
        return mlp(p["narrow"], h)

    w = {
        "layers": {"wide": stack(layers, **ATTENTION), "narrow": stack(layers, 10, **MLP)},
        "embedding": normal(90, WORDS, WIDTH),
    }
    return sgd(decoder_loss(pair)), (w, tokens())


def by_number(layers: int) -> Step:
    """A `cond` on the layer's number chooses what it does."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            i, p = one
            return lax.cond(i % 2 == 0, lambda h: mlp(p, h), lambda h: block(p, h), h), None

        h, _ = lax.scan(layer, w["embedding"][x], (jnp.arange(layers), w["layers"]))
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), tokens())


def metrics(layers: int) -> Step:
    """Every layer returns the mean and the greatest of its activations, and how many are positive."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> tuple[jax.Array, Any]:
            def layer(h: jax.Array, p: Any) -> tuple[jax.Array, Any]:
                h = block(p, h)
                return h, {"mean": jnp.mean(h), "max": jnp.max(jnp.abs(h)), "positive": jnp.sum(h > 0)}

            h, found = lax.scan(layer, w["embedding"][x], w["layers"])
            return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1))), found

        (value, found), g = jax.value_and_grad(loss, has_aux=True)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value, found

    return step, (decoder_weights(layers), tokens())


def unrolled_metrics(layers: int) -> Step:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> tuple[jax.Array, Any]:
            h, found = w["embedding"][x], []
            for p in w["layers"]:
                h = block(p, h)
                found.append({"norm": jnp.mean(jnp.sum(h**2, (1, 2))), "max": jnp.max(jnp.abs(h))})
            return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1))), found

        (value, found), g = jax.value_and_grad(loss, has_aux=True)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value, found

    return step, (unrolled_weights(layers), tokens())


def rotary(layers: int) -> Step:
    """Tables of cosines and sines that the layers close over."""
    angle = jnp.arange(LENGTH)[:, None] / 10.0 ** jnp.arange(2)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def turned(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def layer(p: Any, h: jax.Array) -> jax.Array:
        x = norm(h)
        q, k, v = (heads(x @ p[n]) for n in ("q", "k", "v"))
        scores = jnp.einsum("bthd,bshd->bhts", turned(q), turned(k)) / 2
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(causal(), scores, -1e30)), v)
        return mlp(p, h + out.reshape(h.shape) @ p["o"])

    return sgd(decoder_loss(layer)), (decoder_weights(layers), tokens())


def example_masks(layers: int) -> Step:
    """Lengths of each example make the mask that all layers read, and the weights of the loss."""

    def loss(w: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        there = jnp.arange(LENGTH) < lengths[:, None]
        mask = causal()[None, None] & there[:, None, None, :]
        h = w["embedding"][x]
        for p in w["layers"]:
            h = mlp(p, h + attention(p, norm(h), norm(h), mask))
        each = cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1))
        return jnp.sum(each * there) / jnp.sum(there)

    return sgd(loss), (unrolled_weights(layers), tokens(), 1 + jnp.arange(BATCH) % LENGTH)


def windows(layers: int) -> Step:
    """Layers with windows of their own, numbers beside the weights, in a scan."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        away = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)

        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            p, size = one
            mask = (away >= 0) & (away < size)
            return mlp(p, h + attention(p, norm(h), norm(h), mask)), None

        h, _ = lax.scan(layer, w["embedding"][x], (w["layers"], 1 + jnp.arange(layers) % LENGTH))
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), tokens())


def shared_temperature(layers: int) -> Step:
    """A scalar and a matrix that every layer reads are trained too."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(p: Any, h: jax.Array) -> jax.Array:
            return mlp(p, h + jnp.exp(w["log_scale"]) * jnp.tanh(norm(h) @ w["shared"]))

        return decoder_loss(layer)(w, x)

    w = decoder_weights(layers) | {"log_scale": jnp.float64(-1.0), "shared": normal(91, WIDTH, WIDTH) / 3}
    return sgd(loss), (w, tokens())


def layer_scale(layers: int) -> Step:
    """A trained number and a trained vector of each layer, in a list, the number a scalar."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for p, a, g in zip(w["layers"], w["alpha"], w["gain"], strict=True):
            h = h + a * g * (mlp(p, h) - h)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    w = unrolled_weights(layers)
    w |= {
        "alpha": [jnp.float64(0.5 + 0.1 * k) for k in range(layers)],
        "gain": [normal(k, WIDTH) for k in range(layers)],
    }
    return sgd(loss), (w, tokens())


@jax.custom_vjp
def clipped_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x)


def _clipped_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return clipped_gelu(x), x


def _clipped_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (jnp.clip(g, -0.01, 0.01) * (1 + jnp.tanh(x)) / 2,)


clipped_gelu.defvjp(_clipped_forward, _clipped_backward)


def custom_gradient(layers: int) -> Step:
    def layer(p: Any, h: jax.Array) -> jax.Array:
        return h + clipped_gelu(norm(h) @ p["up"]) @ p["down"]

    return sgd(unrolled_loss(layer)), (unrolled_weights(layers), tokens())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def straight_through(x: jax.Array, w: jax.Array, scale: float) -> jax.Array:
    return x @ (jnp.round(w * scale) / scale)


straight_through.defvjp(
    lambda x, w, scale: (straight_through(x, w, scale), (x, w)),
    lambda scale, kept, g: (g @ kept[1].T, jnp.einsum("...i,...j->ij", kept[0], g)),
)


def quantized(layers: int) -> Step:
    """Products with rounded weights, whose gradient passes through the rounding; `jax.checkpoint` outside."""

    @jax.checkpoint
    def layer(p: Any, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(straight_through(norm(h), p["up"], 8.0)) @ p["down"]

    return sgd(decoder_loss(layer)), (decoder_weights(layers), tokens())


def mapped_heads(layers: int) -> Step:
    """Heads one after the other, by `lax.map`."""

    def layer(p: Any, h: jax.Array) -> jax.Array:
        x = norm(h)
        q, k, v = (jnp.moveaxis(heads(x @ p[n]), 2, 0) for n in ("q", "k", "v"))

        def head(one: Any) -> jax.Array:
            q, k, v = one
            return jax.nn.softmax(jnp.where(causal(), jnp.einsum("btd,bsd->bts", q, k), -1e30)) @ v

        return mlp(p, h + jnp.moveaxis(lax.map(head, (q, k, v)), 0, 2).reshape(h.shape) @ p["o"])

    return sgd(decoder_loss(layer)), (decoder_weights(layers), tokens())


def mapped_examples(layers: int) -> Step:
    """Examples one after the other inside a layer, by `lax.map`."""

    def layer(p: Any, h: jax.Array) -> jax.Array:
        return lax.map(lambda one: mlp(p, one), h)

    return sgd(decoder_loss(layer)), (decoder_weights(layers), tokens())


def layer_of_one_example(layers: int) -> Step:
    """A layer of one example under `vmap`, with a scan over positions inside: recurrent."""

    def layer(p: Any, h: jax.Array) -> jax.Array:
        def one(h: jax.Array) -> jax.Array:
            def cell(c: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                c = jnp.tanh(c @ p["q"] + x @ p["k"])
                return c, c

            return h + lax.scan(cell, jnp.zeros(WIDTH), norm(h))[1] @ p["v"]

        return jax.vmap(one)(h)

    return sgd(decoder_loss(layer)), (decoder_weights(layers), tokens())


def jitted_layers(layers: int) -> Step:
    """Each layer a call of a jitted function."""
    return sgd(unrolled_loss(jax.jit(block))), (unrolled_weights(layers), tokens())


def by_index(layers: int) -> Step:
    """A `fori_loop` over layers, which index their weights."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def body(i: jax.Array, h: jax.Array) -> jax.Array:
            return block(jax.tree.map(lambda a: a[i], w["layers"]), h)

        h = lax.fori_loop(0, layers, body, w["embedding"][x])
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), tokens())


def stacked_and_indexed(layers: int) -> Step:
    """A Python loop over layers that indexes stacked weights."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for k in range(layers):
            h = block(jax.tree.map(lambda a, k=k: a[k], w["layers"]), h)
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), tokens())
