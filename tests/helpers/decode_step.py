"""A decode step of a transformer with a cache, from shapes only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def decode(
    layers: int, width: int, kv: int, hidden: int, vocab: int, batch: int, length: int
) -> tuple[Any, ...]:
    """A decode step of a transformer with grouped keys and values, and the shapes of its weights, caches and rows."""
    head = 128
    shapes = {
        "q": (layers, width, width), "kv": (layers, 2, width, kv * head), "o": (layers, width, width),
        "up": (layers, 2, width, hidden), "down": (layers, hidden, width), "out": (width, vocab),
    }  # fmt: skip
    weights = {k: jax.ShapeDtypeStruct(s, "bfloat16") for k, s in shapes.items()}
    cache = jax.ShapeDtypeStruct((layers, 2, batch, kv, length, head), "bfloat16")

    def step(w: Any, cache: Any, x: Any, at: Any) -> Any:
        def layer(x: Any, given: Any) -> Any:
            w, cache = given
            q = (x @ w["q"]).reshape(batch, kv, -1, head)
            new = jnp.einsum("bd,ndk->nbk", x, w["kv"]).reshape(2, batch, kv, 1, head)
            cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, 0, at, 0))
            p = jax.nn.softmax(jnp.einsum("bkgh,bklh->bkgl", q, cache[0]))
            x = x + jnp.einsum("bkgl,bklh->bkgh", p, cache[1]).reshape(batch, width) @ w["o"]
            gate, up = jnp.einsum("bd,ndh->nbh", x, w["up"])
            return x + (jax.nn.silu(gate) * up) @ w["down"], cache

        inner = {k: v for k, v in w.items() if k != "out"}
        x, cache = jax.lax.scan(layer, x, (inner, cache))
        return jnp.argmax(x @ w["out"], -1), cache

    return step, (
        weights,
        cache,
        jax.ShapeDtypeStruct((batch, width), "bfloat16"),
        jax.ShapeDtypeStruct((), "int32"),
    )
