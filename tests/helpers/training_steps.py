"""Five training steps of middle size in plain JAX, whose named values a hand-written sharding can pin.

`gpt`, `llama`, `convnet`, `embedding` (lookup and a large softmax) and `moe` (GShard's einsums) each give a
`Workload`: shapes of parameters and batch, and a loss that calls `pin(name, x)` on the values that people pin when
they write such plans. `step` makes the whole step of it, AdamW included.

>>> w = embedding(vocab=64, width=8, batch=16)
>>> params, opt_state, loss = jax.eval_shape(step(w), *w.arguments())
>>> params["head"].shape, loss.shape
((8, 64), ())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


Pin = Callable[[str, Any], Any]
S = jax.ShapeDtypeStruct


def unpinned(name: str, x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Workload:
    """`loss(params, batch, pin)`, and the shapes of its parameters and batch."""

    name: str
    params: Any
    batch: Any
    loss: Callable[[Any, Any, Pin], Any]

    def arguments(self) -> tuple[Any, Any, Any]:
        """Shapes of the step's arguments."""
        return self.params, jax.eval_shape(adam().init, self.params), self.batch


def adam() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def step(w: Workload, pin: Pin = unpinned, pin_gradients: Callable[[Any], Any] = lambda g: g) -> Callable:
    """(params, opt_state, batch) -> (params, opt_state, loss)."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(w.loss)(params, batch, pin)
        updates, opt_state = adam().update(pin_gradients(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def _f32(*shape: int) -> S:
    return S(shape, jnp.float32)


def cross_entropy(logits: Any, labels: Any, pin: Pin) -> Any:
    logits = pin("logits", logits)
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, (b, t, h, d) each."""
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)


def gpt(layers: int = 1, width: int = 512, heads: int = 8, context: int = 256, batch: int = 32,
        vocab: int = 4096) -> Workload:  # fmt: skip
    """Pre-norm transformer with GELU and untied head, batch of tokens (b, t + 1)."""
    d, f = width, 4 * width
    layer = {
        "norm1": _f32(d), "query": _f32(d, heads, d // heads), "key": _f32(d, heads, d // heads),
        "value": _f32(d, heads, d // heads), "out": _f32(heads, d // heads, d), "norm2": _f32(d),
        "up": _f32(d, f), "up_bias": _f32(f), "down": _f32(f, d), "down_bias": _f32(d),
    }  # fmt: skip
    params = {"embed": _f32(vocab, d), "position": _f32(context, d), "layers": [layer] * layers,
              "norm": _f32(d), "head": _f32(d, vocab)}  # fmt: skip

    def norm(scale: Any, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    def loss(p: Any, tokens: Any, pin: Pin) -> Any:
        x = pin("residual", p["embed"][tokens[:, :-1]] + p["position"])
        for lp in p["layers"]:
            h = norm(lp["norm1"], x)
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, lp[n]) for n in ("query", "key", "value"))
            x = pin("residual", x + jnp.einsum("bthk,hkd->btd", pin("heads", attend(q, k, v)), lp["out"]))
            hidden = pin("hidden", jax.nn.gelu(norm(lp["norm2"], x) @ lp["up"] + lp["up_bias"]))
            x = pin("residual", x + hidden @ lp["down"] + lp["down_bias"])
        return cross_entropy(norm(p["norm"], x) @ p["head"], tokens[:, 1:], pin)

    return Workload("gpt", params, S((batch, context + 1), jnp.int32), loss)


def llama(layers: int = 1, width: int = 512, heads: int = 8, kv_heads: int = 4, context: int = 256, batch: int = 32,
          vocab: int = 4096, hidden: int = 1536) -> Workload:  # fmt: skip
    """RMS norms, rotary places, grouped heads, SwiGLU."""
    d, k = width, width // heads
    layer = {
        "norm1": _f32(d), "query": _f32(d, kv_heads, heads // kv_heads, k), "key": _f32(d, kv_heads, k),
        "value": _f32(d, kv_heads, k), "out": _f32(kv_heads, heads // kv_heads, k, d), "norm2": _f32(d),
        "gate": _f32(d, hidden), "up": _f32(d, hidden), "down": _f32(hidden, d),
    }  # fmt: skip
    params = {"embed": _f32(vocab, d), "layers": [layer] * layers, "norm": _f32(d), "head": _f32(d, vocab)}

    def norm(scale: Any, x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def rotary(x: Any) -> Any:
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(k // 2) / (k // 2))
        angle = angle.reshape((x.shape[1],) + (1,) * (x.ndim - 3) + (k // 2,))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
        )

    def loss(p: Any, tokens: Any, pin: Pin) -> Any:
        x = pin("residual", p["embed"][tokens[:, :-1]])
        causal = jnp.tril(jnp.ones((context, context), bool))
        for lp in p["layers"]:
            h = norm(lp["norm1"], x)
            q = rotary(jnp.einsum("btd,dgrk->btgrk", h, lp["query"]))
            key = rotary(jnp.einsum("btd,dgk->btgk", h, lp["key"]))
            v = jnp.einsum("btd,dgk->btgk", h, lp["value"])
            scores = jnp.where(causal, jnp.einsum("bqgrk,bsgk->bgrqs", q, key) / k**0.5, -1e30)
            mixed = pin("heads", jnp.einsum("bgrqs,bsgk->bqgrk", jax.nn.softmax(scores), v))
            x = pin("residual", x + jnp.einsum("btgrk,grkd->btd", mixed, lp["out"]))
            h = norm(lp["norm2"], x)
            h = pin("hidden", jax.nn.silu(h @ lp["gate"]) * (h @ lp["up"]))
            x = pin("residual", x + h @ lp["down"])
        return cross_entropy(norm(p["norm"], x) @ p["head"], tokens[:, 1:], pin)

    return Workload("llama", params, S((batch, context + 1), jnp.int32), loss)


def convnet(
    layers: int = 4, channels: int = 256, size: int = 16, batch: int = 64, classes: int = 1024
) -> Workload:
    """3x3 convolutions with ReLU, the mean over places, a dense layer."""
    params = {"convs": [_f32(3, 3, channels, channels)] * layers, "head": _f32(channels, classes)}
    shapes = {"image": _f32(batch, size, size, channels), "label": S((batch,), jnp.int32)}

    def loss(p: Any, batch: Any, pin: Pin) -> Any:
        x = batch["image"]
        for i, kernel in enumerate(p["convs"]):
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = pin("odd" if i % 2 else "even", jax.nn.relu(x))
        return cross_entropy(x.mean((1, 2)) @ p["head"], batch["label"], pin)

    return Workload("convnet", params, shapes, loss)


def embedding(vocab: int = 65536, width: int = 256, batch: int = 2048) -> Workload:
    """A lookup in a large table and a softmax over it."""
    params = {"embed": _f32(vocab, width), "head": _f32(width, vocab)}

    def loss(p: Any, pairs: Any, pin: Pin) -> Any:
        x = pin("rows", jnp.tanh(p["embed"][pairs[:, 0]]))
        return cross_entropy(x @ p["head"], pairs[:, 1], pin)

    return Workload("embedding", params, S((batch, 2), jnp.int32), loss)


def moe(groups: int = 64, tokens: int = 128, width: int = 512, experts: int = 16, hidden: int = 1024,
        capacity: int = 16) -> Workload:  # fmt: skip
    """GShard's mixture of experts (Lepikhin et al. 2020), top 1, as einsums with a place in each expert's buffer."""
    params = {
        "gate": _f32(width, experts),
        "up": _f32(experts, width, hidden),
        "down": _f32(experts, hidden, width),
    }

    def loss(p: Any, x: Any, pin: Pin) -> Any:
        scores = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["gate"]))
        mask = jax.nn.one_hot(scores.argmax(-1), experts, dtype=x.dtype)
        place = jnp.cumsum(mask, axis=1) * mask - mask
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
        dispatch = jnp.einsum("gse,gsc->gsec", mask, slot)
        combine = jnp.einsum("gsec,gse->gsec", dispatch, scores)
        sent = pin("sent", jnp.einsum("gsec,gsm->egcm", dispatch, x))
        h = jax.nn.relu(pin("expert", jnp.einsum("egcm,emh->egch", sent, p["up"])))
        out = pin("back", jnp.einsum("egch,ehm->egcm", h, p["down"]))
        return ((x - pin("combined", jnp.einsum("gsec,egcm->gsm", combine, out))) ** 2).mean()

    return Workload("moe", params, _f32(groups, tokens, width), loss)
