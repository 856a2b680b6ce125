"""Objectives of training as users write them, for pipelines and microbatches: preferences, policies, diffusion, masks.

Each function takes the number of layers and gives `(step, arguments)`, as those of `pipeline_steps.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
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
    mlp,
    norm,
    normal,
    sgd,
    stack,
    tokens,
    unrolled_weights,
    unstacked,
)
from tests.helpers.pipeline_updates import with_optax


def size_of(g: Any) -> jax.Array:
    """The global norm."""
    return jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(g)))


def hidden(w: Any, x: jax.Array) -> jax.Array:
    """Activations after the last layer of a decoder, in a scan."""
    return norm(lax.scan(lambda h, p: (block(p, h), None), w["embedding"][x], w["layers"])[0])


def log_probability(w: Any, x: jax.Array) -> jax.Array:
    """Of each sequence after its first token."""
    return -jnp.sum(cross_entropy(hidden(w, x)[:, :-1] @ w["embedding"].T, x[:, 1:]), 1)


# -- losses of tokens -------------------------------------------------------------------------------------------------


def weighted_tokens_loss(w: Any, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    """Weights of tokens over their sum, label smoothing, a z-loss; accuracy and perplexity beside it."""
    logits = hidden(w, x) @ w["embedding"].T
    labels = jnp.roll(x, -1, 1)
    z = jax.nn.logsumexp(logits, -1)
    smooth = 0.9 * cross_entropy(logits, labels) + 0.1 * (z - jnp.mean(logits, -1))
    total = jnp.maximum(jnp.sum(weight), 1)
    value = jnp.sum(weight * (smooth + 1e-2 * z**2)) / total
    hits = jnp.sum(weight * (jnp.argmax(logits, -1) == labels)) / total
    return value, {"accuracy": hits, "perplexity": jnp.exp(value), "tokens": total}


def token_weights() -> jax.Array:
    return (normal(80, BATCH, LENGTH) > -0.3).astype(jnp.float64)


def weighted_tokens(layers: int) -> Step:
    """Gradients clipped by their global norm, momentum, decay of matrices, a moving average of the weights."""

    def step(w: Any, m: Any, ema: Any, x: jax.Array, weight: jax.Array) -> Any:
        (value, metrics), g = jax.value_and_grad(weighted_tokens_loss, has_aux=True)(w, x, weight)
        size = size_of(g)
        g = jax.tree.map(lambda a: a * jnp.minimum(1, 0.5 / size), g)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        w = jax.tree.map(lambda w, m: w - 0.1 * (m + 0.01 * w * (w.ndim > 2)), w, m)
        ema = jax.tree.map(lambda e, w: 0.99 * e + 0.01 * w, ema, w)
        return w, m, ema, {"loss": value, "size": size, **metrics}

    w = decoder_weights(layers)
    return step, (w, jax.tree.map(jnp.zeros_like, w), w, tokens(), token_weights())


def several_tokens(layers: int) -> Step:
    """A second head predicts the token after the next from the layers' output and the next one's embedding."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        e, h = w["embedding"], hidden(w, x)
        after, last = jnp.roll(x, -1, 1), jnp.roll(x, -2, 1)
        second = mlp(w["second"], h + e[after])
        return jnp.mean(cross_entropy(h @ e.T, after)) + 0.3 * jnp.mean(cross_entropy(second @ e.T, last))

    w = decoder_weights(layers) | {
        "second": {"up": normal(81, WIDTH, HIDDEN), "down": normal(82, HIDDEN, WIDTH)}
    }
    return sgd(loss), (w, tokens())


# -- preferences, policies, distillation ------------------------------------------------------------------------------


def preferences(layers: int) -> Step:
    """Pairs of sequences, the better one first, against a reference that is not trained (Rafailov et al. 2023)."""

    def loss(w: Any, reference: Any, good: jax.Array, bad: jax.Array) -> jax.Array:
        gain = log_probability(w, good) - log_probability(w, bad)
        before = log_probability(reference, good) - log_probability(reference, bad)
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (gain - lax.stop_gradient(before))))

    w = decoder_weights(layers)
    return sgd(loss), (w, jax.tree.map(lambda a: 0.9 * a, w), tokens(), tokens()[::-1])


def preferences_at_once(layers: int) -> Step:
    """The same with both sequences of a pair in one batch, the better ones first."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        good, bad = jnp.split(log_probability(w, x), 2)
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (good - bad)))

    return sgd(loss), (decoder_weights(layers), tokens())


def policy(layers: int) -> Step:
    """Clipped ratios of probabilities, advantages normalized over the batch, a value head, an entropy (PPO)."""

    def loss(w: Any, x: jax.Array, old: jax.Array, reward: jax.Array) -> jax.Array:
        advantage = (reward - jnp.mean(reward)) / (jnp.std(reward) + 1e-6)
        h = hidden(w, x)
        logits = h[:, :-1] @ w["embedding"].T
        ratio = jnp.exp(-cross_entropy(logits, x[:, 1:]) - old[:, 1:])
        gain = jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 0.8, 1.2) * advantage[:, None])
        value = jnp.mean(h, 1) @ w["value"]
        entropy = -jnp.mean(jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1))
        return -jnp.mean(gain) + 0.5 * jnp.mean((value - reward) ** 2) - 0.01 * entropy

    w = decoder_weights(layers) | {"value": normal(83, WIDTH)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1e-2))
    return with_optax(loss, optimizer, w, tokens(), normal(84, BATCH, LENGTH) / 9 - 2.4, normal(85, BATCH))


def distillation(layers: int) -> Step:
    """A teacher of other widths, its probabilities at a temperature, layers of both unrolled."""

    def run(w: Any, x: jax.Array) -> jax.Array:
        h = w["embedding"][x]
        for p in w["layers"]:
            h = block(p, h)
        return h @ w["embedding"].T

    def loss(w: Any, teacher: Any, x: jax.Array) -> jax.Array:
        wanted = jax.nn.softmax(lax.stop_gradient(run(teacher, x)) / 2)
        found = run(w, x)
        divergence = jnp.sum(wanted * (jnp.log(wanted) - jax.nn.log_softmax(found / 2)), -1)
        return 4 * jnp.mean(divergence) + 0.1 * jnp.mean(cross_entropy(found, jnp.roll(x, -1, 1)))

    teacher = {"layers": stack(layers, 30, **ATTENTION, **MLP), "embedding": normal(91, WORDS, WIDTH)}
    teacher["layers"] = unstacked(teacher["layers"], layers)
    return sgd(loss), (unrolled_weights(layers), teacher, tokens())


# -- images and noise -------------------------------------------------------------------------------------------------


def modulated(p: Any, h: jax.Array, c: jax.Array) -> jax.Array:
    """A layer whose scale, shift and gate come from each example's condition (Peebles and Xie 2022)."""
    scale, shift, gate = jnp.split(jax.nn.silu(c) @ p["condition"], 3, -1)
    y = norm(h) * (1 + scale[:, None]) + shift[:, None]
    h = h + gate[:, None] * attention(p, y, y)
    return mlp(p, h)


def diffusion(layers: int) -> Step:
    """Noise of every example at a time of its own, predicted by layers that read the time and the label."""

    def loss(w: Any, key: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
        k, q = jax.random.split(key)
        t = jax.random.uniform(k, (BATCH,), jnp.float64)
        noise = jax.random.normal(q, x.shape, jnp.float64)
        a = jnp.cos(t * jnp.pi / 2)[:, None, None]
        noisy = a * x + jnp.sqrt(1 - a**2) * noise
        waves = t[:, None] * 2.0 ** jnp.arange(WIDTH // 2)
        c = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1) + w["label"][label]
        h, _ = lax.scan(lambda h, p: (modulated(p, h, c), None), noisy @ w["patch"], w["layers"])
        error = jnp.mean((norm(h) @ w["out"] - noise) ** 2, (1, 2))
        return jnp.mean(jnp.minimum(1 / (1 - a[:, 0, 0] ** 2 + 1e-2), 5) * error)

    w = {
        "layers": stack(layers, **ATTENTION, **MLP, condition=(WIDTH, 3 * WIDTH)),
        "patch": normal(86, 3, WIDTH), "out": normal(87, WIDTH, 3), "label": normal(88, WORDS, WIDTH),
    }  # fmt: skip
    args = jax.random.key(11), normal(89, BATCH, LENGTH, 3), tokens()[:, 0]
    return with_optax(loss, optax.adamw(0.1, eps=1e-2), w, *args)


def images(layers: int) -> Step:
    """Patches by a convolution, a class token, positions, examples mixed with their neighbours, dropped labels."""

    def loss(w: Any, x: jax.Array, label: jax.Array, share: jax.Array) -> jax.Array:
        wanted = jax.nn.one_hot(label, WORDS, dtype=x.dtype)
        x, wanted = (share * a + (1 - share) * jnp.roll(a, 1, 0) for a in (x, wanted))
        patches = lax.conv_general_dilated(
            x, w["patch"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = patches.reshape(BATCH, -1, WIDTH)
        h = jnp.concatenate([jnp.broadcast_to(w["class"], (BATCH, 1, WIDTH)), h], 1) + w["position"]

        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return mlp(p, h + attention(p, norm(h), norm(h))), None

        h, _ = lax.scan(jax.checkpoint(layer), h, w["layers"])
        logits = norm(h[:, 0]) @ w["head"]
        return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), -1))

    w = {
        "layers": stack(layers, **ATTENTION, **MLP), "patch": normal(86, 2, 2, 3, WIDTH),
        "class": normal(87, WIDTH), "position": normal(88, 5, WIDTH), "head": normal(89, WIDTH, WORDS),
    }  # fmt: skip
    return sgd(loss), (w, normal(91, BATCH, 4, 4, 3), tokens()[:, 0], jnp.float64(0.7))


def masked_patches(layers: int) -> Step:
    """Half of each example's places, chosen by sorting noise, pass through the layers; the others are predicted."""

    def loss(w: Any, noise: jax.Array, x: jax.Array) -> jax.Array:
        order = jnp.argsort(noise, 1)
        kept = jnp.take_along_axis(x @ w["patch"] + w["position"], order[:, : LENGTH // 2, None], 1)

        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return mlp(p, h + attention(p, norm(h), norm(h))), None

        h, _ = lax.scan(layer, kept, w["layers"])
        blank = jnp.broadcast_to(w["blank"], (BATCH, LENGTH - LENGTH // 2, WIDTH))
        back = jnp.take_along_axis(jnp.concatenate([h, blank], 1), jnp.argsort(order, 1)[..., None], 1)
        error = jnp.mean((mlp(w["decoder"], back + w["position"]) @ w["out"] - x) ** 2, -1)
        masked = jnp.argsort(order, 1) >= LENGTH // 2
        return jnp.sum(error * masked) / jnp.sum(masked)

    w = {
        "layers": stack(layers, **ATTENTION, **MLP), "patch": normal(86, 3, WIDTH), "out": normal(87, WIDTH, 3),
        "position": normal(88, LENGTH, WIDTH), "blank": normal(89, WIDTH),
        "decoder": {"up": normal(81, WIDTH, HIDDEN), "down": normal(82, HIDDEN, WIDTH)},
    }  # fmt: skip
    return sgd(loss), (w, normal(92, BATCH, LENGTH), normal(93, BATCH, LENGTH, 3))


# -- other layers and updates -----------------------------------------------------------------------------------------


def routed(layers: int) -> Step:
    """The two best experts of each token, losses that balance them and keep the router's logits small."""

    def loss(w: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def layer(carry: Any, p: Any) -> tuple[Any, jax.Array]:
            h, balance, size = carry
            y = norm(h)
            h = h + attention(p, y, y, causal())
            logits = norm(h) @ p["router"]
            best, chosen = lax.top_k(jax.nn.softmax(logits), 2)
            gates = jnp.sum(jax.nn.one_hot(chosen, 3, dtype=h.dtype) * best[..., None], -2)
            gates = gates / jnp.sum(gates, -1, keepdims=True)
            out = jnp.einsum(
                "btef,efd->bted", jnp.tanh(jnp.einsum("btd,edf->btef", norm(h), p["up"])), p["down"]
            )
            h = h + jnp.einsum("bted,bte->btd", out, gates)
            load = jnp.mean(gates > 0, (0, 1), dtype=h.dtype)
            balance = balance + 3 * jnp.sum(load * jnp.mean(jax.nn.softmax(logits), (0, 1)))
            size = size + jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
            return (h, balance, size), load

        begin = (w["embedding"][x], jnp.zeros(()), jnp.zeros(()))
        (h, balance, size), loads = lax.scan(layer, begin, w["layers"])
        main = jnp.mean(cross_entropy(norm(h) @ w["embedding"].T, jnp.roll(x, -1, 1)))
        return main + 0.01 * balance + 1e-3 * size, (balance, loads)

    def step(w: Any, x: jax.Array) -> Any:
        (value, metrics), g = jax.value_and_grad(loss, has_aux=True)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value, metrics

    shapes = {"router": (WIDTH, 3), "up": (3, WIDTH, HIDDEN), "down": (3, HIDDEN, WIDTH)}
    return step, (
        {"layers": stack(layers, **ATTENTION, **shapes), "embedding": normal(90, WORDS, WIDTH)},
        tokens(),
    )


def recurrent(layers: int) -> Step:
    """Layers of a recurrence over the sequence: a scan over time in a scan over layers."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            def cell(c: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                keep = jax.nn.sigmoid(y @ p["gate"])
                c = keep * c + (1 - keep) * jnp.tanh(y @ p["in"] + c @ p["own"])
                return c, c

            _, out = lax.scan(cell, jnp.zeros_like(h[:, 0]), jnp.swapaxes(norm(h), 0, 1))
            return h + jnp.swapaxes(out, 0, 1), None

        h, _ = lax.scan(layer, w["embedding"][x], w["layers"])
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    cell = {n: (WIDTH, WIDTH) for n in ("gate", "in", "own")}
    return sgd(loss), ({"layers": stack(layers, **cell), "embedding": normal(90, WORDS, WIDTH)}, tokens())


def flat_minimum(layers: int) -> Step:
    """The gradient at the worst point nearby: two passes, the second at other weights (Foret et al. 2021)."""

    def step(w: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(decoder_loss())(w, x)
        size = size_of(g)
        g = jax.grad(decoder_loss())(jax.tree.map(lambda w, g: w + 0.05 * g / size, w, g), x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value

    return step, (decoder_weights(layers), tokens())


def orthogonal_updates(layers: int) -> Step:
    """Matrices move by their gradient's nearest orthogonal matrix, by Newton-Schulz steps (Jordan et al. 2024)."""

    def orthogonal(g: jax.Array) -> jax.Array:
        x = g / (jnp.sqrt(jnp.sum(g**2, (-2, -1), keepdims=True)) + 1e-3)
        for _ in range(3):
            a = x @ jnp.swapaxes(x, -2, -1)
            x = 1.5 * x - 0.5 * a @ x
        return x

    def step(w: Any, m: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(decoder_loss())(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        moves = jax.tree.map(lambda m: orthogonal(m) if m.ndim == 3 else m, m)
        return jax.tree.map(lambda w, u: w - 0.05 * u, w, moves), m, value

    w = decoder_weights(layers)
    return step, (w, jax.tree.map(lambda a: 0.1 * a, w), tokens())


def curvature(layers: int) -> Step:
    """A diagonal of the Hessian from a random direction scales the gradient (Liu et al. 2023)."""

    def step(w: Any, key: jax.Array, x: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(w)
        keys = jax.random.split(key, len(leaves))
        v = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
        v = jax.tree.unflatten(tree, v)
        g, hv = jax.jvp(lambda w: jax.grad(decoder_loss())(w, x), (w,), (v,))
        d = jax.tree.map(lambda v, h: jnp.maximum(v * h, 0.1), v, hv)
        return jax.tree.map(lambda w, g, d: w - 0.01 * jnp.clip(g / d, -1, 1), w, g, d)

    return step, (decoder_weights(layers), jax.random.key(5), tokens())


def keys_in_the_carry(layers: int) -> Step:
    """A key that each layer splits: dropout of attention and of the MLP, the rest passed on."""

    def loss(w: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: Any, p: Any) -> tuple[Any, None]:
            h, key = carry
            key, k, q = jax.random.split(key, 3)
            y = attention(p, norm(h), norm(h), causal())
            h = h + jnp.where(jax.random.bernoulli(k, 0.8, y.shape), y / 0.8, 0)
            y = mlp(p, h) - h
            return (h + jnp.where(jax.random.bernoulli(q, 0.9, y.shape), y / 0.9, 0), key), None

        (h, _), _ = lax.scan(layer, (w["embedding"][x], key), w["layers"])
        return jnp.mean(cross_entropy(h @ w["embedding"].T, jnp.roll(x, -1, 1)))

    return sgd(loss), (decoder_weights(layers), jax.random.key(9), tokens())
