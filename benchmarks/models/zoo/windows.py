"""Attention in windows of an image, our own: like Swin (shifted windows) and like SAM's encoder (relative positions).

No installed library has them for JAX. `fused` makes attention one operator, or norms fused functions, by name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from benchmarks.models.zoo.kinds import Model, cross_entropy


BATCH, SIZE, PATCH, WIDTH, HEADS, WINDOW, CLASSES = 8, 32, 2, 32, 4, 4, 8


def _norm(x: Any, p: Any, fused: tuple[str, ...]) -> Any:
    if "norm" in fused:
        return jshard.ops.layer_norm(x, p["scale"], p["bias"], epsilon=1e-5)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _attention(q: Any, k: Any, v: Any, bias: Any, fused: tuple[str, ...]) -> Any:
    """Attention of (batch, positions, heads, size) with a bias (batch or 1, heads, positions, positions)."""
    if "attention" in fused:
        return jshard.ops.attention(q, k, v, bias=bias)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def _into_windows(x: Any, window: int) -> Any:
    """(batch, rows, columns, width) to (batch and windows, positions, width)."""
    b, h, w, d = x.shape
    x = x.reshape(b, h // window, window, w // window, window, d).swapaxes(2, 3)
    return x.reshape(-1, window * window, d)


def _out_of_windows(x: Any, shape: tuple[int, ...], window: int) -> Any:
    b, h, w, d = shape
    return x.reshape(b, h // window, w // window, window, window, d).swapaxes(2, 3).reshape(shape)


def _relative(window: int) -> np.ndarray:
    """(positions, positions) the number of the offset between two positions of a window."""
    at = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    offset = at[:, :, None] - at[:, None] + window - 1
    return offset[0] * (2 * window - 1) + offset[1]


def _shift_mask(rows: int, window: int, shift: int) -> np.ndarray:
    """(windows, positions, positions) 0, or very low between positions that the shift brought together."""
    part = np.zeros((1, rows, rows, 1), np.int32)
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for i, r in enumerate(cuts):
        for j, c in enumerate(cuts):
            part[:, r, c] = 3 * i + j
    of_window = _into_windows(part, window)[..., 0]
    return np.where(of_window[:, :, None] == of_window[:, None], 0, -1e9).astype(np.float32)


class _Parameters:
    """Parameters by shape, each from a key of its own."""

    def __init__(self) -> None:
        self.made = 0

    def normal(self, *shape: int) -> jax.Array:
        self.made += 1
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), self.made), shape) * 0.1

    def norm(self, d: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

    def block(self, d: int, **more: jax.Array) -> dict[str, Any]:
        return {
            "norm": self.norm(d), "q": self.normal(d, d), "k": self.normal(d, d), "v": self.normal(d, d),
            "out": self.normal(d, d), "mlp_norm": self.norm(d), "up": self.normal(d, 4 * d),
            "down": self.normal(4 * d, d), **more,
        }  # fmt: skip


def _block(p: Any, x: Any, attend: Any, fused: tuple[str, ...]) -> Any:
    """A layer on (batch, rows, columns, width); `attend(q, k, v)` takes and gives that shape with heads."""
    y = _norm(x, p["norm"], fused)
    x = x + attend(*(y @ p[n] for n in "qkv")) @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["mlp_norm"], fused) @ p["up"]) @ p["down"]


def _by_head(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], HEADS, -1)


def swin(fused: tuple[str, ...] = ()) -> Model:
    """Two stages of two layers, the second of each with shifted windows; patches merged between them."""

    def create() -> Any:
        made, table = _Parameters(), (2 * WINDOW - 1) ** 2

        def stage(d: int) -> list[Any]:
            return [made.block(d, table=made.normal(table, HEADS)) for _ in range(2)]

        return {
            "patch": made.normal(PATCH * PATCH * 3, WIDTH), "first": stage(WIDTH),
            "merge": made.normal(4 * WIDTH, 2 * WIDTH), "second": stage(2 * WIDTH), "norm": made.norm(2 * WIDTH),
            "head": made.normal(2 * WIDTH, CLASSES),
        }  # fmt: skip

    params = create()

    def windows(p: Any, shift: int) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            shape, rows = q.shape, q.shape[1]
            q, k, v = (
                _by_head(_into_windows(jnp.roll(a, (-shift, -shift), (1, 2)), WINDOW)) for a in (q, k, v)
            )
            bias = p["table"][_relative(WINDOW)].transpose(2, 0, 1)[None]
            if shift:
                mask = _shift_mask(rows, WINDOW, shift)
                bias = jnp.tile(bias + mask[:, None], (shape[0], 1, 1, 1))
            y = _attention(q, k, v, bias, fused).reshape(-1, WINDOW**2, shape[-1])
            return jnp.roll(_out_of_windows(y, shape, WINDOW), (shift, shift), (1, 2))

        return attend

    def apply(p: Any, state: Any, batch: Any, train: bool) -> Any:
        x = _patches(batch["images"], PATCH) @ p["patch"]
        for name in ("first", "second"):
            if name == "second":
                x = _patches(x, 2) @ p["merge"]
            for k, block in enumerate(p[name]):
                x = _block(block, x, windows(block, k * WINDOW // 2), fused)
        return _norm(x, p["norm"], fused).mean((1, 2)) @ p["head"], state

    rng = np.random.default_rng(1)
    batch = {"images": _images(rng), "labels": rng.integers(0, CLASSES, BATCH).astype(np.int32)}
    return Model(params, batch, apply, cross_entropy, fused=swin, create=create)


def sam(fused: tuple[str, ...] = ()) -> Model:
    """A layer in windows and a global one, with relative positions by rows and columns; a neck of two convolutions."""
    rows, size = SIZE // PATCH // 2, WIDTH // HEADS

    def create() -> Any:
        made = _Parameters()

        def block(window: int) -> Any:
            return made.block(
                WIDTH, rows=made.normal(2 * window - 1, size), columns=made.normal(2 * window - 1, size)
            )

        return {
            "patch": made.normal((2 * PATCH) ** 2 * 3, WIDTH), "positions": made.normal(rows, rows, WIDTH),
            "windowed": block(WINDOW), "global": block(rows), "neck": made.normal(1, 1, WIDTH, WIDTH),
            "neck_norm": made.norm(WIDTH), "mask": made.normal(3, 3, WIDTH, 1),
        }  # fmt: skip

    params = create()

    def decomposed(p: Any, window: int) -> Any:
        offset = np.arange(window)[:, None] - np.arange(window) + window - 1

        def attend(q: Any, k: Any, v: Any) -> Any:
            shape = q.shape
            q, k, v = (_by_head(_into_windows(a, window)) for a in (q, k, v))
            grid = q.reshape(q.shape[0], window, window, HEADS, size)
            by_row = jnp.einsum("bhwnc,hkc->bnhwk", grid, p["rows"][offset])
            by_column = jnp.einsum("bhwnc,wkc->bnhwk", grid, p["columns"][offset])
            bias = by_row[..., :, None] + by_column[..., None, :]
            bias = bias.reshape(q.shape[0], HEADS, window**2, window**2)
            y = _attention(q, k, v, bias, fused).reshape(-1, window**2, shape[-1])
            return _out_of_windows(y, shape, window)

        return attend

    def apply(p: Any, state: Any, batch: Any, train: bool) -> Any:
        x = _patches(batch["images"], 2 * PATCH) @ p["patch"] + p["positions"]
        for name, window in (("windowed", WINDOW), ("global", rows)):
            x = _block(p[name], x, decomposed(p[name], window), fused)
        for name in ("neck", "mask"):
            x = jax.lax.conv_general_dilated(
                x, p[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = _norm(x, p["neck_norm"], fused) if name == "neck" else x
        return x[..., 0], state

    def loss(out: Any, batch: Any) -> Any:
        return (jax.nn.softplus(out) - batch["masks"] * out).mean()

    rng = np.random.default_rng(2)
    masks = rng.integers(0, 2, (BATCH, rows, rows)).astype(np.float32)
    batch = {"images": _images(rng), "masks": masks}
    return Model(params, batch, apply, loss, fused=sam, create=create)


def _images(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((BATCH, SIZE, SIZE, 3), dtype=np.float32)


def _patches(x: Any, size: int) -> Any:
    """(batch, rows, columns, width) to (batch, rows / size, columns / size, size * size * width)."""
    b, h, w, d = x.shape
    x = x.reshape(b, h // size, size, w // size, size, d).swapaxes(2, 3)
    return x.reshape(b, h // size, w // size, -1)


MODELS = {"Swin-like": swin, "SAM-like": sam}
"""By name a function of `fused` that makes the model."""
