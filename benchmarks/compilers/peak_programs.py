"""Programs whose peak memory `peaks.py` compares: training steps, prefill and decode steps, from shapes only.

A decode step writes one row into the cache of every layer and attends to what is there. The cache of all layers goes
through the step in one of three forms: `carry`, one array that a `scan` over layers carries; `stacked`, one array as `xs`
of the `scan` and as its `ys`; `list`, one array a layer, with the layers unrolled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import workloads
from benchmarks.workloads import (
    F32,
    I32,
    Tree,
    adam,
    adam_state,
    array,
    attention,
    block,
    block_shapes,
    cross_entropy,
    heads,
    layer_norm,
    rms_norm,
    rotate,
    sgd,
    shapes,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, its arguments, what the caller pins, and which arguments are donated."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    in_strategy: tuple[Any, ...] | None
    donated: tuple[int, ...]


def training(step: Callable[..., Any], state: Tree, *batch: Any, donated: bool = True) -> Case:
    """A step of training whose batch is cut over sixteen devices, and whose state is donated."""
    cut = tuple((16, *(None,) * (len(b.shape) - 1)) for b in batch)
    return Case(step, (state, *batch), (None, *cut), (0,) if donated else ())


def of_workload(name: str) -> Case:
    """A training step of `workloads.py`."""
    w = workloads.get(name, devices=16)
    return Case(w.step, w.args, w.in_strategy(16), (0,))


def gpt(*, remat: bool, scanned: bool = False, donated: bool = True, layers: int = 2) -> Case:
    """GPT with Adam; `remat`: `jax.checkpoint` of every layer."""
    d, ff, h, t, b, vocab = 1024, 4096, 16, 1024, 128, 32768
    layer = functools.partial(block, n_heads=h)
    layer = jax.checkpoint(layer) if remat else layer

    def loss(p: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = p["embed"][tokens] + p["position"]
        if scanned:
            x, _ = lax.scan(lambda x, q: (layer(x, q), None), x, p["blocks"])
        else:
            for q in p["blocks"]:
                x = layer(x, q)
        return cross_entropy(layer_norm(x, p["norm"]) @ p["head"], targets)

    blocks = block_shapes(d, ff, layers) if scanned else [block_shapes(d, ff) for _ in range(layers)]
    params = shapes(embed=(vocab, d), position=(t, d), norm=(d,), head=(d, vocab)) | {"blocks": blocks}
    tokens = array(b, t, dtype=I32)
    return training(adam(loss), adam_state(params), tokens, tokens, donated=donated)


def _llama_layer(x: jax.Array, p: Tree, kv: int, size: int) -> jax.Array:
    y = rms_norm(x, p["norm1"])
    q, k, v = (heads(y @ p[w], p[w].shape[-1] // size) for w in ("wq", "wk", "wv"))
    q = rotate(q).reshape(*y.shape[:2], kv, -1, size)
    x = x + attention(q, rotate(k), v).reshape(x.shape) @ p["wo"]
    y = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def _llama_shapes(d: int, ff: int, m: int, *stacked: int) -> Tree:
    sizes = {"wq": (d, d), "wk": (d, m), "wv": (d, m), "wo": (d, d), "gate": (d, ff), "up": (d, ff),
             "down": (ff, d), "norm1": (d,), "norm2": (d,)}  # fmt: skip
    return shapes(**{k: (*stacked, *s) for k, s in sizes.items()})


def llama(*, scanned: bool, remat: bool, layers: int = 2) -> Case:
    """Llama blocks with grouped-query attention and Adam."""
    d, ff, kv, size, t, b = 2048, 5632, 4, 128, 1024, 128
    layer = functools.partial(_llama_layer, kv=kv, size=size)
    layer = jax.checkpoint(layer) if remat else layer

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        if scanned:
            x, _ = lax.scan(lambda x, q: (layer(x, q), None), x, p)
        else:
            for q in p:
                x = layer(x, q)
        return jnp.mean(x.astype(F32) ** 2)

    lead = (layers,) if scanned else ()
    params = _llama_shapes(d, ff, kv * size, *lead)
    params = params if scanned else [params] * layers
    return training(adam(loss), adam_state(params), array(b, t, d))


def experts(*, layers: int = 4, remat: bool = True) -> Case:
    """Mixtral's feed-forward layers: stacked weights of 8 experts, every token through all of them by its gates; SGD."""
    d, ff, e, t, b = 2048, 7168, 8, 512, 32

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        y = rms_norm(x, p["norm"])
        gates = jax.nn.softmax((y @ p["router"]).astype(F32), axis=-1).astype(x.dtype)
        wide = jax.nn.silu(jnp.einsum("btd,edf->betf", y, p["gate"])) * jnp.einsum(
            "btd,edf->betf", y, p["up"]
        )
        return x + jnp.einsum("betf,efd,bte->btd", wide, p["down"], gates), None

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(jax.checkpoint(layer) if remat else layer, x, p)[0].astype(F32) ** 2)

    n = layers
    params = shapes(norm=(n, d), router=(n, d, e), gate=(n, e, d, ff), up=(n, e, d, ff), down=(n, e, ff, d))
    return training(sgd(loss), params, array(b, t, d))


def _decoder_shapes(layers: int, d: int, ff: int, m: int, listed: bool) -> Tree:
    return [_llama_shapes(d, ff, m) for _ in range(layers)] if listed else _llama_shapes(d, ff, m, layers)


def _attend_cached(
    x: jax.Array, p: Tree, cache: jax.Array, at: jax.Array, kv: int, size: int
) -> tuple[Any, Any]:
    """One row of a decoder layer (batch, width); `cache` is (2, batch, kv, length, size)."""
    b, d = x.shape
    y = rms_norm(x, p["norm1"])
    q = (y @ p["wq"]).reshape(b, kv, -1, size)
    new = jnp.stack([y @ p["wk"], y @ p["wv"]]).reshape(2, b, kv, 1, size)
    cache = lax.dynamic_update_slice(cache, new, (0, 0, 0, at, 0))
    scores = jnp.einsum("bkgh,bklh->bkgl", q, cache[0]).astype(F32) * size**-0.5
    scores = jnp.where(jnp.arange(cache.shape[3]) <= at, scores, -1e9)
    out = jnp.einsum("bkgl,bklh->bkgh", jax.nn.softmax(scores, -1).astype(x.dtype), cache[1])
    x = x + out.reshape(b, d) @ p["wo"]
    y = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], cache


def decode(form: str, *, donated: bool = True, layers: int = 8, tokens: int = 1) -> Case:
    """A decode step of a Llama, or a loop over some tokens; `form` of the cache as this module says."""
    d, ff, kv, size, vocab, b, t = 4096, 14336, 8, 128, 32768, 64, 8192

    def through(p: Tree, cache: Tree, x: jax.Array, at: jax.Array) -> tuple[jax.Array, Tree]:
        if form == "list":
            out = []
            for q, c in zip(p, cache, strict=True):
                x, c = _attend_cached(x, q, c, at, kv, size)
                out.append(c)
            return x, out
        if form == "stacked":
            return lax.scan(lambda x, pc: _attend_cached(x, *pc, at, kv, size), x, (p, cache))

        def layer(state: Tree, given: Tree) -> tuple[Tree, None]:
            (x, cache), (q, i) = state, given
            x, c = _attend_cached(x, q, lax.dynamic_index_in_dim(cache, i, keepdims=False), at, kv, size)
            return (x, lax.dynamic_update_index_in_dim(cache, c, i, 0)), None

        return lax.scan(layer, (x, cache), (p, jnp.arange(layers)))[0]

    def token(p: Tree, cache: Tree, row: jax.Array, at: jax.Array) -> tuple[jax.Array, Tree]:
        x, cache = through(p["blocks"], cache, p["embed"][row], at)
        return jnp.argmax(x @ p["head"], -1).astype(I32), cache

    def step(p: Tree, cache: Tree, row: jax.Array, at: jax.Array) -> tuple[jax.Array, Tree]:
        if tokens == 1:
            return token(p, cache, row, at)
        return lax.fori_loop(0, tokens, lambda i, s: token(p, s[1], s[0], at + i), (row, cache))

    listed = form == "list"
    one = (2, b, kv, t, size)
    cache = [array(*one)] * layers if listed else array(layers, *one)
    params = shapes(embed=(vocab, d), head=(d, vocab)) | {
        "blocks": _decoder_shapes(layers, d, ff, kv * size, listed)
    }
    args = (params, cache, array(b, dtype=I32), array(dtype=I32))
    return Case(step, args, None, (1,) if donated else ())


def prefill(form: str, *, layers: int = 4) -> Case:
    """Keys and values of a prompt, of all layers: stacked by a `scan`, or a list of one array a layer."""
    d, ff, kv, size, b, t = 4096, 14336, 8, 128, 16, 2048

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, jax.Array]:
        y = rms_norm(x, p["norm1"])
        q, k, v = (heads(y @ p[w], p[w].shape[-1] // size) for w in ("wq", "wk", "wv"))
        q, k = rotate(q).reshape(*y.shape[:2], kv, -1, size), rotate(k)
        x = x + attention(q, k, v).reshape(x.shape) @ p["wo"]
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], jnp.stack([k, v])

    def step(p: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        if form == "stacked":
            x, cache = lax.scan(layer, x, p)
            return x[:, -1], cache
        cache = []
        for q in p:
            x, c = layer(x, q)
            cache.append(c)
        return x[:, -1], cache

    params = _decoder_shapes(layers, d, ff, kv * size, form == "list")
    return Case(step, (params, array(b, t, d)), (None, (16, None, None)), ())


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: gpt(remat=False),
    "gpt-checkpoint": lambda: gpt(remat=True),
    "gpt-scan": lambda: gpt(remat=False, scanned=True, layers=6),
    "llama": lambda: llama(scanned=False, remat=False),
    "llama-scan": lambda: llama(scanned=True, remat=False, layers=4),
    "llama-scan-checkpoint": lambda: llama(scanned=True, remat=True, layers=6),
    "llama-checkpoint": lambda: llama(scanned=False, remat=True),
    "experts": experts,
    "moe": lambda: of_workload("moe"),
    "conv": lambda: of_workload("conv"),
    "lm-head": lambda: of_workload("lm-head"),
    "mlp-64k": lambda: of_workload("mlp-64k"),
    "lora": lambda: of_workload("lora"),
    "gpt-kept-state": lambda: gpt(remat=True, donated=False),
    "prefill-stacked": lambda: prefill("stacked"),
    "prefill-list": lambda: prefill("list"),
    "decode-carry": lambda: decode("carry"),
    "decode-stacked": lambda: decode("stacked"),
    "decode-list": lambda: decode("list"),
    "decode-carry-kept": lambda: decode("carry", donated=False),
    "decode-stacked-kept": lambda: decode("stacked", donated=False),
    "decode-list-kept": lambda: decode("list", donated=False),
    "generate-carry": lambda: decode("carry", tokens=16),
    "generate-stacked": lambda: decode("stacked", tokens=16),
    "generate-list": lambda: decode("list", tokens=16),
}
NAMES: Sequence[str] = tuple(CASES)
