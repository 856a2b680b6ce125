"""Small functions of a size n that no number of devices divides, for whole programs with padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


_RANDOM = np.random.default_rng


def _x(*shape: int, seed: int = 0) -> np.ndarray:
    return _RANDOM(seed + sum(shape)).normal(size=shape)


def _ids(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return _RANDOM(high + seed).integers(-1, high + 2, shape).astype(np.int32)


def head(n: int) -> tuple[Any, ...]:
    """A softmax over n classes."""

    def f(w: Any, x: Any) -> Any:
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logp, jnp.arange(16)[:, None] % n, 1).mean() + jnp.max(x @ w)

    return f, _x(8, n), _x(16, 8)


def embedding(n: int) -> tuple[Any, ...]:
    """A table of n rows, with ids out of range."""

    def f(t: Any, ids: Any) -> Any:
        return jnp.sum(jnp.sin(t[ids])) + jnp.sum(t.at[ids].get(mode="fill", fill_value=2.0))

    return f, _x(n, 8), _ids(n, 16)


def attention(n: int) -> tuple[Any, ...]:
    """Causal attention over n positions."""

    def f(x: Any, w: Any) -> Any:
        q, k = x @ w, x
        s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
        y = jax.nn.softmax(s, -1) @ x
        return jnp.sum(jnp.tanh(y) ** 2) + jnp.sum(jnp.mean(y, 1) ** 2)

    return f, _x(4, n, 8), _x(8, 8)


def normalised(n: int) -> tuple[Any, ...]:
    """Layer norm over n features between two products."""

    def f(w: Any, v: Any, x: Any) -> Any:
        h = x @ w
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
        return jnp.sum(jax.nn.gelu(h) @ v) + jnp.prod(jnp.tanh(h), -1).sum() + jnp.min(h) + jnp.linalg.norm(h)

    return f, _x(8, n), _x(n, 8), _x(16, 8)


def messages(n: int) -> tuple[Any, ...]:
    """Message passing over n edges: gather, segment sum, maximum, and a softmax by segment."""

    def f(h: Any, e: Any, src: Any, dst: Any) -> Any:
        m = h[src] * e[:, None]
        top = jax.ops.segment_max(e, dst, 16)
        p = jnp.exp(e - top[dst])
        p = p / jax.ops.segment_sum(p, dst, 16)[dst]
        return jnp.sum(jax.ops.segment_sum(m * p[:, None], dst, 16) ** 2)

    return f, _x(16, 8), _x(n), _ids(16, n) % 16, _ids(16, n, seed=1) % 16


def nodes(n: int) -> tuple[Any, ...]:
    """Message passing between n nodes."""

    def f(h: Any, w: Any, src: Any, dst: Any) -> Any:
        y = jnp.zeros_like(h).at[dst].add((h @ w)[jnp.clip(src, 0, n - 1)], mode="drop")
        return jnp.sum(jax.nn.relu(y) ** 2)

    return f, _x(n, 8), _x(8, 8), _ids(n, 32), _ids(n, 32, seed=1)


def recurrent(n: int) -> tuple[Any, ...]:
    """A scan whose carry has n features, with a branch and an inner checkpoint."""

    def f(w: Any, x: Any) -> Any:
        def step(h: Any, u: Any) -> Any:
            h = jax.checkpoint(lambda h: jnp.tanh(h @ w + u))(h)
            return h, jnp.sum(h**2, -1)

        h, ys = lax.scan(step, jnp.zeros((4, n)), x)
        return jnp.sum(ys) + lax.cond(ys[0, 0] > 0, lambda h: jnp.sum(h), lambda h: jnp.max(h), h)

    return f, _x(n, n) / n, _x(3, 4, n)


def adam(n: int) -> tuple[Any, ...]:
    """An update of n x 8 parameters with the norm of the gradient clipped."""

    def f(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w.T) ** 2))(w)
        g = g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))
        m = 0.9 * m + 0.1 * g
        return jnp.sum((w - 0.1 * m / (jnp.sqrt(m * m) + 1e-3)) ** 2)

    return f, _x(n, 8), _x(n, 8, seed=1), _x(16, 8)


def statistics(n: int) -> tuple[Any, ...]:
    """Batch statistics over n examples, an argmax, a cumulative sum, and a sort, which restores the true size."""

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        c = jnp.cumsum(h, 0)
        best = jnp.argmax(h, 0)
        ones = jnp.sum(jnp.ones(n) * x[0, 0]) + jnp.sum((x + 1.0) @ w) + jnp.sum(jnp.maximum(x, 2.0))
        picked = jnp.sum(jnp.take_along_axis(h, best[None], 0)) + jnp.sum(h[:-1] * h[1:])
        return ones + picked + jnp.sum(jnp.sort(h, 0) * c)

    return f, _x(n, 8), _x(8, 8)


def both_ends(n: int) -> tuple[Any, ...]:
    """Prefixes from both ends, and each element beside its mirror image."""

    def f(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        backward = jnp.flip(jnp.cumsum(jnp.flip(h, 0), 0), 0)
        return (jnp.cumsum(h, 0) * backward * jnp.flip(x, (0, 1))).sum() + jnp.flip(h, 0)[0].sum()

    return f, _x(n, 6), _x(6, 6)


def images(n: int) -> tuple[Any, ...]:
    """Convolutions, pooling and their gradients over images of n x 10 points."""

    def f(x: Any, v: Any, w: Any, u: Any) -> Any:
        def conv(x: Any, w: Any, stride: int, padding: Any) -> Any:
            return lax.conv_general_dilated(
                x, w, (stride, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        h = jnp.tanh(conv(x, v, 1, "SAME"))
        h = h + jnp.max(h, (1, 2), keepdims=True)
        top = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "VALID")
        mean = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
        up = lax.conv_transpose(conv(mean, w, 2, ((2, 1), (0, 0))), u, (2, 1), "SAME")
        return jnp.mean(top**2) + jnp.mean(up**3) + jnp.mean(conv(h, w, 3, "VALID"))

    return f, _x(2, n, 10, 3), _x(3, 3, 3, 4), _x(4, 1, 4, 2), _x(3, 2, 2, 3)


def resampled(n: int) -> tuple[Any, ...]:
    """A strided, dilated convolution with uneven edges, and a transposed one back to the size."""

    def f(x: Any, w: Any, v: Any) -> Any:
        dims = ("NHC", "HIO", "NHC")
        h = lax.conv_general_dilated(x, w, (3,), [(4, 1)], rhs_dilation=(2,), dimension_numbers=dims)
        up = lax.conv_transpose(jnp.tanh(h), v, (3,), "VALID", dimension_numbers=dims)
        mirrored = jnp.pad(x, ((0, 0), (2, 1), (0, 0)), mode="reflect")
        return jnp.sum(up[:, : n // 2] * x[:, : n // 2]) + jnp.sum(mirrored[:, 1::2] ** 3)

    return f, _x(2, n, 3), _x(4, 3, 2), _x(3, 2, 3)


def wrapped(n: int) -> tuple[Any, ...]:
    """Rolls by several amounts, differences over the wrap, and the halves interleaved."""

    def f(x: Any, y: Any) -> Any:
        moved = jnp.roll(x, 5, 0) * jnp.roll(y, -3, 0) + jnp.roll(x, (2, 1), (0, 1))
        change = jnp.concatenate([x[-2:], x[:-2]]) - jnp.diff(y, axis=0, prepend=y[-1:])
        pairs = jnp.stack([x[1::2], x[::2][: n // 2]], 1).reshape(-1, x.shape[1])
        return jnp.sum(moved * change) + jnp.sum(pairs**2 * y[: pairs.shape[0]])

    return f, _x(n, 5), _x(n, 5, seed=1)


def scanned(n: int) -> tuple[Any, ...]:
    """`associative_scan` of pytrees: a linear recurrence from both ends, and a maximum that starts anew at marks."""

    def f(x: Any, y: Any, starts: Any) -> Any:
        def linear(p: Any, q: Any) -> Any:
            return {"a": p["a"] * q["a"], "b": q["a"] * p["b"] + q["b"]}

        def greatest(p: Any, q: Any) -> Any:
            return p[0] | q[0], jnp.where(q[0], q[1], jnp.maximum(p[1], q[1]))

        forward = lax.associative_scan(linear, {"a": jax.nn.sigmoid(x), "b": y})["b"]
        backward = lax.associative_scan(linear, {"a": jax.nn.sigmoid(y), "b": x}, reverse=True)["b"]
        top = lax.associative_scan(greatest, (starts[:, None] & jnp.ones((1, 3), bool), x))[1]
        return jnp.sum(forward * backward) + jnp.sum(top**2)

    return f, _x(n, 3), _x(n, 3, seed=1), _RANDOM(n).random(n) < 0.3


def ranked(n: int) -> tuple[Any, ...]:
    """Sorted values with others that go along, the greatest few, positions in a table, and firsts of equals."""

    def f(x: Any, y: Any, kinds: Any) -> Any:
        s, t = lax.sort((x, y), dimension=0, num_keys=1)
        best, at = lax.top_k(x, 3)
        place = jnp.searchsorted(jnp.sort(y), jnp.linspace(-1.0, 1.0, 5))
        order = jnp.sort(kinds)
        first = jnp.concatenate([jnp.ones(1, bool), order[1:] != order[:-1]])
        of = jax.ops.segment_max(x, kinds, 6)
        share = jnp.exp(x - of[kinds]) * (jnp.cumsum(first) - 1)
        return jnp.sum(s * t) + jnp.sum(best * y[at]) + jnp.sum(y[jnp.clip(place, 0, n - 1)]) + jnp.sum(share)

    return f, _x(n), _x(n, seed=1), _ids(3, n) % 5


PROGRAMS: Mapping[str, Callable[[int], tuple[Any, ...]]] = {
    f.__name__: f
    for f in (
        head,
        embedding,
        attention,
        normalised,
        messages,
        nodes,
        recurrent,
        adam,
        statistics,
        both_ends,
        images,
        resampled,
        wrapped,
        scanned,
        ranked,
    )
}


def step_of(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The value and the gradients by all arguments that are no indices."""
    return jax.value_and_grad(fn, tuple(i for i, x in enumerate(args) if x.dtype.kind == "f"))
