"""Plans for tests of reports: small, made once per process.

`plans()` has a scan, partial sums, a pinned operator, a budget, a training step, and a tall unrolled network.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import jshard
from tests.helpers.models import Config, dense_relu, ffn, gpt_step


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array's shape."""
    return jax.ShapeDtypeStruct(shape, "float32")


def mesh(*sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first CPU devices with axes x, y, ..."""
    n = 1
    for s in sizes:
        n *= s
    return jax.make_mesh(
        sizes,
        ("x", "y", "z")[: len(sizes)],
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:n],
    )


FFN = (f32(64, 64), f32(64, 64), f32(64), f32(64, 64), f32(64))


def scanned(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Layers in a scan: x (n, d), w (layers, d, d)."""
    return jax.lax.scan(lambda c, m: (jax.nn.softmax(c @ m), c.sum()), x, w)


def pinned(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
    """The feed-forward network with its first product pinned."""
    product = jshard.op(jnp.dot, in_strategy=((2, 1), (1, 4)))
    return jax.nn.relu(product(x, w1) + b1) @ w2 + b2


def unruled(x: jax.Array) -> jax.Array:
    """A primitive without a rule."""
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x.T) + 1


def tall(layers: int, width: int = 16, train: bool = True):
    """An unrolled network of many equal layers, each in a scope `blocks.i`, and arguments for it."""

    def loss(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            with jax.named_scope(f"blocks.{i}"):
                with jax.named_scope("mlp"):
                    x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    def step(params: list[dict[str, jax.Array]], x: jax.Array) -> list[dict[str, jax.Array]]:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    params = [{"up": f32(width, 4 * width), "down": f32(4 * width, width)} for _ in range(layers)]
    return (step if train else loss), (params, f32(32, width))


@functools.cache
def sharded(name: str) -> tuple[jshard.Sharded, tuple]:
    """A sharded function and its arguments."""
    if name == "dense":
        return jshard.shard(dense_relu, ((4, 2), None, None), mesh=mesh(4, 2)), (
            f32(32, 128),
            f32(128, 10),
            f32(10),
        )
    if name == "ffn":
        return jshard.shard(
            ffn, {"x": (2, 1)}, parameter_plan={"w1": (1, 4), "w2": (4, 1)}, mesh=mesh(2, 4)
        ), FFN
    if name == "propagation":
        return jshard.shard(ffn, {"x": (2, 1)}, search="propagation", mesh=mesh(2, 4)), FFN
    if name == "budget":
        return jshard.shard(ffn, {"x": (8, 1)}, memory_budget="1MiB", level=1, mesh=mesh(2, 4)), FFN
    if name == "pinned":
        return jshard.shard(pinned, mesh=mesh(2, 4)), FFN
    if name == "scan":
        return jshard.shard(scanned, ((2, 4), None), mesh=mesh(2, 4)), (f32(8, 16), f32(3, 16, 16))
    if name == "unknown":
        return jshard.shard(unruled, ((2, 1),), mesh=mesh(2)), (f32(8, 8),)
    if name == "gpt":
        step, args = gpt_step(Config(layers=2, width=32, heads=2, context=16, batch=16))
        return jshard.shard(step, {"batch": (8, 1)}, mesh=mesh(2, 4)), args
    step, args = tall(int(name.removeprefix("tall")))
    return jshard.shard(step, {"x": (8, 1)}, mesh=mesh(8)), args


NAMES = ("dense", "ffn", "propagation", "budget", "pinned", "scan", "unknown", "gpt", "tall126")


@functools.cache
def plan(name: str) -> jshard.Plan:
    """The plan of `sharded(name)`."""
    f, args = sharded(name)
    return f.plan(*args)
