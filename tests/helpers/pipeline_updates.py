"""Updates of training steps as users write them, for pipelines: optimizers, rates, averages, scales, accumulation.

Each function takes the number of layers and gives `(step, arguments)`, as those of `pipeline_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.helpers.pipeline_steps import (
    MLP,
    Step,
    decoder_loss,
    decoder_weights,
    sgd,
    tokens,
    unrolled_loss,
    unrolled_weights,
)


def with_optax(loss: Callable[..., jax.Array], optimizer: Any, w: Any, *data: Any) -> Step:
    """A step of an optimizer; Adam's denominators are kept away from zero, where they multiply rounding."""

    def step(w: Any, state: Any, *data: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, *data)
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state, value

    return step, (w, optimizer.init(w), *data)


def clipped_adamw(layers: int) -> Step:
    """Clipping by the global norm, Adam, weight decay of matrices, a schedule."""
    schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10)
    chain = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(schedule, eps=1e-2, mask=lambda w: jax.tree.map(lambda a: a.ndim > 2, w)),
    )
    return with_optax(decoder_loss(), chain, decoder_weights(layers), tokens())


def unrolled_clipped_adamw(layers: int) -> Step:
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, eps=1e-2))
    return with_optax(unrolled_loss(), chain, unrolled_weights(layers), tokens())


def adafactor(layers: int) -> Step:
    """Factored second moments, updates clipped by their own norm and scaled by the parameters'."""
    return with_optax(
        decoder_loss(),
        optax.adafactor(0.1, min_dim_size_to_factor=4, eps=1e-3),
        decoder_weights(layers),
        tokens(),
    )


def lion(layers: int) -> Step:
    return with_optax(unrolled_loss(), optax.lion(0.1), unrolled_weights(layers), tokens())


def multi_steps(layers: int) -> Step:
    """Accumulation over calls: a `cond` on the count of calls around the update."""
    optimizer = optax.MultiSteps(optax.adam(0.1, eps=1e-2), every_k_schedule=2)
    step, (w, state, x) = with_optax(decoder_loss(), optimizer, decoder_weights(layers), tokens())
    _, state, _ = step(w, state, x)
    return step, (w, state, x)


def masked_layers(layers: int) -> Step:
    """Labels of parameters decide the optimizer; biases of `frozen` get no update."""
    optimizer = optax.multi_transform(
        {"train": optax.adam(0.1, eps=1e-2), "frozen": optax.set_to_zero()},
        lambda w: {
            "layers": {n: "train" if n in MLP else "frozen" for n in w["layers"]},
            "embedding": "frozen",
        },
    )
    return with_optax(decoder_loss(), optimizer, decoder_weights(layers), tokens())


def layer_rates(layers: int) -> Step:
    """Learning rates that decay with the distance from the last layer."""

    def step(w: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(decoder_loss())(w, x)
        rates = 0.1 * 0.9 ** jnp.arange(layers)[::-1]
        new = jax.tree.map(
            lambda w, g: w - rates.reshape(-1, *(1,) * (w.ndim - 1)) * g, w["layers"], g["layers"]
        )
        return {**w, "layers": new, "embedding": w["embedding"] - 0.01 * g["embedding"]}, value

    return step, (decoder_weights(layers), tokens())


def unrolled_layer_rates(layers: int) -> Step:
    def step(w: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(unrolled_loss())(w, x)
        new = [
            jax.tree.map(lambda w, g, k=k: w - 0.1 * 0.9 ** (layers - k) * g, p, q)
            for k, (p, q) in enumerate(zip(w["layers"], g["layers"], strict=True))
        ]
        return {**w, "layers": new}, value

    return step, (unrolled_weights(layers), tokens())


def moving_average(layers: int) -> Step:
    """An exponential moving average of the weights beside them."""

    def step(w: Any, ema: Any, x: jax.Array) -> Any:
        w, value = sgd(decoder_loss())(w, x)
        return w, jax.tree.map(lambda e, w: 0.99 * e + 0.01 * w, ema, w), value

    w = decoder_weights(layers)
    return step, (w, jax.tree.map(lambda a: 0.9 * a, w), tokens())


def master_weights(layers: int) -> Step:
    """The model's weights are those of the optimizer rounded to fewer bits, its gradients too."""

    def step(w: Any, x: jax.Array) -> Any:
        low = jax.tree.map(lambda a: a.astype(jnp.float32), w)

        def loss(low: Any) -> jax.Array:
            return decoder_loss()(jax.tree.map(lambda a: a.astype(jnp.float64), low), x)

        value, g = jax.value_and_grad(loss)(low)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), w, g), value

    return step, (decoder_weights(layers), tokens())


def loss_scale(layers: int) -> Step:
    """A dynamic scale of the loss: infinite gradients halve it and update nothing."""

    def step(w: Any, scale: jax.Array, good: jax.Array, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(lambda w: scale * unrolled_loss()(w, x))(w)
        g = jax.tree.map(lambda a: a / scale, g)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(g)]))
        new = jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g, w), w, g)
        scale = jnp.where(finite, jnp.where(good > 3, 2 * scale, scale), scale / 2)
        return new, scale, jnp.where(finite, good + 1, 0), value / scale

    return step, (unrolled_weights(layers), jnp.float64(1024.0), jnp.int32(4), tokens())


def skipped_update(layers: int) -> Step:
    """The update runs in a `cond` on the norm of the gradients."""

    def step(w: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(decoder_loss())(w, x)
        size = jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(g)))
        new = lax.cond(
            size < 1e3, lambda w, g: jax.tree.map(lambda a, b: a - 0.1 * b, w, g), lambda w, g: w, w, g
        )
        return new, value, size

    return step, (decoder_weights(layers), tokens())


def accumulated(layers: int) -> Step:
    """Gradients added up over two halves of the batch, each through the layers, by a Python loop."""

    def step(w: Any, x: jax.Array) -> Any:
        total, value = jax.tree.map(jnp.zeros_like, w), jnp.zeros(())
        for part in jnp.split(x, 2):
            v, g = jax.value_and_grad(decoder_loss())(w, part)
            total, value = jax.tree.map(jnp.add, total, g), value + v
        return jax.tree.map(lambda w, g: w - 0.05 * g, w, total), value / 2

    return step, (decoder_weights(layers), tokens())


def accumulated_over_calls(layers: int) -> Step:
    """The sum of gradients is an argument and a result."""

    def step(w: Any, total: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(decoder_loss())(w, x)
        return jax.tree.map(jnp.add, total, g), value

    w = decoder_weights(layers)
    return step, (w, jax.tree.map(jnp.ones_like, w), tokens())
