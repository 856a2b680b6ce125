"""The cases of Alpa's own tests as functions: small training steps, and a machine with the constants of their costs.

Alpa prices an all-reduce of `bytes` over axis k at `a + 2 b[k] (n-1)/n bytes`, with `a = 1` and `b = (1, 1)` unless a
case says otherwise, and never computes a product twice. `machine` gives a mesh of two axes with just these costs, and
a processor so slow that a repeated product costs more than what any case communicates.

>>> all_reduce(256 * 32 * 4, 4)
49153.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from jshard._core import hardware as hardware
from jshard._core.layout import MeshAxes
from jshard._core.topology import AxisLink, Topology, Wire


S = jax.ShapeDtypeStruct
Arguments = tuple[Any, ...]


def all_reduce(nbytes: float, n: int, b: float = 1.0, a: float = 1.0) -> float:
    """Alpa's cost of an all-reduce of `nbytes` held by each of `n` devices, without its small tie breakers."""
    return a + 2 * b * (n - 1) / n * nbytes


@dataclasses.dataclass(frozen=True)
class Machine:
    """What `shard(mesh=...)` takes: a mesh and the wires below it."""

    jax_mesh: jax.sharding.Mesh | AbstractMesh
    links: Topology
    chip: hardware.Chip


def machine(
    sizes: tuple[int, int], b: tuple[float, float] = (1.0, 1.0), a: float = 1.0, flops: float = 100.0
) -> Machine:
    """A mesh `x` x `y` whose axes cost `a` and `b` a byte; products take `1 / flops` seconds an operation."""
    chip = dataclasses.replace(
        hardware.get("cpu"), name="alpa", interconnect="switch", bf16_flops=flops, f32_flops=flops,
        hbm_bandwidth=1e60, startup=a, alpha=0.0, node_size=64,
    )  # fmt: skip
    names = ("x", "y")
    kinds = ("network", "nvlink")
    wires = zip(kinds, sizes, b, strict=True)
    links = tuple(AxisLink((Wire(kind, n, 1 / beta, 0.0),)) for kind, n, beta in wires)
    auto, count = (AxisType.Auto,) * 2, sizes[0] * sizes[1]
    if count > jax.device_count():
        mesh: Any = AbstractMesh(sizes, names, axis_types=auto)
    else:
        mesh = jax.make_mesh(sizes, names, axis_types=auto, devices=jax.devices()[:count])
    return Machine(mesh, Topology(MeshAxes(names, sizes), chip, links), chip)


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """(params, Adam's state, batch) -> the same after one step, for `loss(params, batch)`."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = optax.adam(1e-3).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def of(params: Any, *batch: Any) -> Arguments:
    """Arguments of a step."""
    return params, jax.eval_shape(optax.adam(1e-3).init, params), batch


def f32(*shape: int) -> S:
    return S(shape, "float32")


def dense(params: Any, x: Any) -> Any:
    w, b = params
    return x @ w + b


def mlp(params: Any, batch: Any) -> Any:
    """Dense, ReLU, ..., Dense; mean squared error."""
    x, y = batch
    for p in params[:-1]:
        x = jax.nn.relu(dense(p, x))
    return ((dense(params[-1], x) - y) ** 2).mean()


def rows_only(mesh: Any, spec: P) -> Callable[..., Any]:
    """The same with every activation pinned to lie like the batch: what Alpa's option of data parallelism forces."""

    def pin(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for p in params[:-1]:
            x = pin(jax.nn.relu(pin(dense(p, x))))
        return ((pin(dense(params[-1], x)) - y) ** 2).mean()

    return loss


def mlp_arguments(layers: int, width: int, batch: int) -> Arguments:
    return of([(f32(width, width), f32(width))] * layers, f32(batch, width), f32(batch, width))


def products(params: Any, batch: Any) -> Any:
    """Products only, as in Alpa's tests of its solver."""
    x, y = batch
    for w in params:
        x = x @ w
    return ((x - y) ** 2).mean()


def norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def attention(p: Any, x: Any, heads: int) -> Any:
    b, t, h = x.shape
    q, k, v = jnp.moveaxis(dense(p["qkv"], x).reshape(b, t, heads, h // heads, 3), -1, 0)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (h // heads) ** 0.5)
    return dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, t, h))


def layers(heads: int) -> Callable[..., Any]:
    """BERT's layers: attention and a feed-forward block, each with its residual and norm behind it."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for p in params:
            x = norm(x + attention(p, x, heads), *p["norm1"])
            x = norm(x + dense(p["down"], jax.nn.gelu(dense(p["up"], x))), *p["norm2"])
        return ((x - y) ** 2).mean()

    return loss


def layer_parameters(h: int) -> dict[str, Any]:
    return {
        "qkv": (f32(h, 3 * h), f32(3 * h)), "out": (f32(h, h), f32(h)),
        "up": (f32(h, 4 * h), f32(4 * h)), "down": (f32(4 * h, h), f32(h)),
        "norm1": (f32(h), f32(h)), "norm2": (f32(h), f32(h)),
    }  # fmt: skip


def tied(params: Any, batch: Any) -> Any:
    """Lookup and head of one table; summed cross entropy."""
    ids, labels = batch
    logits = params["table"][ids] @ params["table"].T
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum()


def convolution(x: Any, w: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def convolutions(params: Any, batch: Any) -> Any:
    """Convolutions with bias; a kernel of one input channel is depthwise."""
    x, y = batch
    for w, b in params:
        x = jax.nn.relu(convolution(x, w, x.shape[-1] // w.shape[2]) + b)
    return ((x - y) ** 2).mean()


def dropout(params: Any, batch: Any) -> Any:
    """Dense, dropout, Dense on (32, 32, 16)."""
    x, y, key = batch
    h = dense(params[0], x)
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)
    return ((dense(params[1], h) - y) ** 2).mean()


def experts(heads: int, group: int) -> Callable[..., Any]:
    """Attention, then a mixture of experts: the two best of each token, in groups of `group` tokens."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        x = norm(x + attention(params, x, heads), *params["norm1"])
        b, t, h = x.shape
        tokens = x.reshape(b * t // group, group, h)
        scores = jax.nn.softmax(jnp.einsum("gsh,he->gse", tokens, params["gate"]))
        count = scores.shape[-1]
        room = 2 * group // count
        first = jax.nn.one_hot(scores.argmax(-1), count)
        second = jax.nn.one_hot((scores * (1 - first)).argmax(-1), count)
        taken, combine = jnp.zeros_like(first[:, :1]), 0.0
        for best in (first, second):
            place = (jnp.cumsum(best, 1) - 1 + taken) * best
            taken = taken + best.sum(1, keepdims=True)
            slot = jax.nn.one_hot(place.sum(-1).astype("int32"), room) * best.max(-1, keepdims=True)
            combine = combine + jnp.einsum("gse,gsc->gsec", scores * best, slot)
        sent = jnp.einsum("gsec,gsh->egch", (combine > 0).astype(x.dtype), tokens)
        done = jax.nn.relu(jnp.einsum("egch,ehm->egcm", sent, params["wi"]))
        back = jnp.einsum("egcm,emh->egch", done, params["wo"])
        out = jnp.einsum("gsec,egch->gsh", combine, back).reshape(b, t, h)
        return ((norm(x + out, *params["norm2"]) - y) ** 2).mean()

    return loss


def expert_parameters(h: int, count: int) -> dict[str, Any]:
    p = {n: v for n, v in layer_parameters(h).items() if n not in ("up", "down")}
    return p | {"gate": f32(h, count), "wi": f32(count, h, 8 * h), "wo": f32(count, 8 * h, h)}
