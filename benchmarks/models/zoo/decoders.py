"""Decoders and mixtures of experts, our own: like Qwen2, Qwen3, Mixtral and Qwen3-MoE, which no installed library has.

`fused` makes attention one operator, or norms fused functions, by name.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from benchmarks.models.zoo.kinds import Model, cross_entropy


BATCH, LENGTH, WORDS, WIDTH, HEADS, SIZE, HIDDEN, LAYERS = 8, 16, 256, 64, 4, 16, 128, 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """What differs between the families; `experts`: number, of which each token takes `chosen`."""

    kv_heads: int = 2
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    window: int | None = None
    experts: int = 0
    chosen: int = 2
    renormalized: bool = True


QWEN2 = Kind(qkv_bias=True, tied=True)
QWEN3 = Kind(qk_norm=True)
MIXTRAL = Kind(experts=4, window=8)
QWEN3_MOE = Kind(qk_norm=True, experts=8)


def parameters(kind: Kind) -> dict[str, Any]:
    """Parameters, each from a key of its own."""
    numbers = iter(range(1000))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), next(numbers)), shape) * 0.1

    def layer() -> dict[str, Any]:
        p = {
            "norm": jnp.ones(WIDTH), "mlp_norm": jnp.ones(WIDTH), "out": normal(HEADS, SIZE, WIDTH),
            "q": normal(WIDTH, HEADS, SIZE), "k": normal(WIDTH, kind.kv_heads, SIZE),
            "v": normal(WIDTH, kind.kv_heads, SIZE),
        }  # fmt: skip
        if kind.qkv_bias:
            heads = {"q": HEADS, "k": kind.kv_heads, "v": kind.kv_heads}
            p |= {f"{n}_bias": normal(h, SIZE) for n, h in heads.items()}
        if kind.qk_norm:
            p |= {"q_norm": jnp.ones(SIZE), "k_norm": jnp.ones(SIZE)}
        lead = (kind.experts,) if kind.experts else ()
        if kind.experts:
            p["router"] = normal(WIDTH, kind.experts)
        return p | {
            "gate": normal(*lead, WIDTH, HIDDEN), "up": normal(*lead, WIDTH, HIDDEN), "down": normal(*lead, HIDDEN, WIDTH)
        }  # fmt: skip

    p = {"embed": normal(WORDS, WIDTH), "layers": [layer() for _ in range(LAYERS)], "norm": jnp.ones(WIDTH)}
    return p if kind.tied else {**p, "head": normal(WIDTH, WORDS)}


def rms_norm(x: Any, scale: Any, fused: bool) -> Any:
    """RMS norm over the last dimension."""
    if fused:
        return jshard.ops.rms_norm(x, scale, epsilon=1e-6)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x: Any) -> Any:
    """Rotary positions of (batch, positions, heads, size)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle), x.dtype)[:, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(kind: Kind, p: Any, x: Any, fused: tuple[str, ...]) -> Any:
    """Grouped-query attention, causal."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]) for n in "qkv")
    if kind.qkv_bias:
        q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
    if kind.qk_norm:
        q, k = (rms_norm(y, p[n], "norm" in fused) for y, n in ((q, "q_norm"), (k, "k_norm")))
    q, k = rotated(q), rotated(k)
    if "attention" in fused:
        window = None if kind.window is None else (kind.window - 1, 0)
        y = jshard.ops.attention(q, k, v, causal=True, window=window)
    else:
        at = np.arange(x.shape[1])
        seen = at[:, None] >= at
        seen = seen if kind.window is None else seen & (at[:, None] - at < kind.window)
        group = HEADS // kind.kv_heads
        k, v = (jnp.repeat(y, group, axis=2) for y in (k, v))
        scores = jnp.where(seen, jnp.einsum("btnh,bsnh->bnts", q, k) * SIZE**-0.5, -1e30)
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return jnp.einsum("btnh,nhd->btd", y, p["out"])


def mlp(kind: Kind, p: Any, x: Any) -> Any:
    """The gated layer, or experts of which each token's are weighted by the router."""
    if not kind.experts:
        return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
    weights = jax.nn.softmax(x @ p["router"])
    best, which = jax.lax.top_k(weights, kind.chosen)
    best = best / best.sum(-1, keepdims=True) if kind.renormalized else best
    share = (jax.nn.one_hot(which, kind.experts, dtype=x.dtype) * best[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["gate"])) * jnp.einsum("btd,edf->btef", x, p["up"])
    return jnp.einsum("btef,efd,bte->btd", hidden, p["down"], share)


def decoder(kind: Kind, fused: tuple[str, ...] = ()) -> Model:
    """Two layers of a family."""

    def apply(p: Any, state: Any, batch: Any, train: bool) -> Any:
        x, norm = p["embed"][batch["input_ids"]], "norm" in fused
        for layer in p["layers"]:
            x = x + attention(kind, layer, rms_norm(x, layer["norm"], norm), fused)
            x = x + mlp(kind, layer, rms_norm(x, layer["mlp_norm"], norm))
        return rms_norm(x, p["norm"], norm) @ (p["embed"].T if kind.tied else p["head"]), state

    rng = np.random.default_rng(0)
    batch = {n: rng.integers(0, WORDS, (BATCH, LENGTH), dtype=np.int32) for n in ("input_ids", "labels")}
    create = functools.partial(parameters, kind)
    return Model(create(), batch, apply, cross_entropy, create=create, fused=functools.partial(decoder, kind))


MODELS = {
    "Qwen2": functools.partial(decoder, QWEN2), "Qwen3": functools.partial(decoder, QWEN3),
    "Mixtral": functools.partial(decoder, MIXTRAL), "Qwen3-MoE": functools.partial(decoder, QWEN3_MOE),
}  # fmt: skip
