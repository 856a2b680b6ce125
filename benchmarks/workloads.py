"""Training steps to plan, compile and compare: plain JAX, from shapes only, in bfloat16.

Each workload is a step `(state, *batch) -> (state, loss)`: value, gradient, and SGD or Adam; the state is
donated. Parameters are not pinned: `in_strategy(devices)` cuts the batch and leaves all else open.

>>> from benchmarks import workloads
>>> w = workloads.get("mlp-512")
>>> w.args[1], w.in_strategy(8), f"{w.flops:.3g}"
(ShapeDtypeStruct(shape=(512, 4096), dtype=bfloat16), (None, (8, None)), '3.44e+11')

`mark=` is for hand annotations: it is called on activations as `mark(x, kind)`, with the kinds of `Mark`.

Sizes are those of issue 5; `small=True` scales them for eight CPU devices. On more devices than the batch has
rows, the batch grows with them (`devices=`), as it does in practice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
Tree = Any

# What is marked: "rows" (batch, features) and "hidden" (batch, tokens, features), "wide" hidden features,
# "heads" (batch, tokens, heads, ...), "logits" (..., vocabulary), "experts" (experts, groups, slots, features).
Mark = Callable[[Any, str], Any]


def unmarked(x: Any, kind: str) -> Any:
    """The mark that says nothing."""
    return x


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step and the shapes it is for; `batch` are the arguments that are cut, after the state."""

    name: str
    step: Callable[..., Any]
    state: Tree
    batch: tuple[jax.ShapeDtypeStruct, ...]
    layers: int = 1

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments, as shapes."""
        return (self.state, *self.batch)

    def in_strategy(self, devices: int) -> tuple[Any, ...]:
        """Cut dimension 0 of the batch over as many devices as it divides; leave the rest to the search."""
        cut = math.gcd(self.batch[0].shape[0], devices)
        return (None, *((cut, *(None,) * (len(b.shape) - 1)) for b in self.batch))

    @property
    def flops(self) -> float:
        """Multiply-adds x 2 of all matrix products and convolutions of a step: the least that it needs."""
        return flops(jax.make_jaxpr(self.step)(*self.args))


def flops(jaxpr: Any) -> float:
    """Operations of the matrix products and convolutions of a jaxpr, loops times their length."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += (
                2.0 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            )
            continue
        if eqn.primitive.name == "conv_general_dilated":
            total += _convolution(eqn)
            continue
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    total += times * flops(inner)
    return total


def _convolution(eqn: Any) -> float:
    """Pairs of an output and a kernel position that hit a real element, times features and batch."""
    p, (lhs, rhs), out = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    n = p["dimension_numbers"]
    pairs = 1
    for k in range(len(p["window_strides"])):
        size, kernel, result = (a.shape[s[2 + k]] for a, s in zip((lhs, rhs, out), n, strict=True))
        low, base = p["padding"][k][0], p["lhs_dilation"][k]
        at = [
            o * p["window_strides"][k] - low + j * p["rhs_dilation"][k]
            for o in range(result)
            for j in range(kernel)
        ]
        pairs *= sum(0 <= a <= (size - 1) * base and a % base == 0 for a in at)
    features = out.shape[n.out_spec[1]] * rhs.shape[n.rhs_spec[1]]
    return 2.0 * features * pairs * lhs.shape[n.lhs_spec[0]] / p["batch_group_count"]


def shapes(dtype: Any = BF16, /, **named: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """A dict of abstract arrays."""
    return {k: jax.ShapeDtypeStruct(s, dtype) for k, s in named.items()}


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


# -- optimizers ------------------------------------------------------------------------------------------


def sgd(loss: Callable[..., Any], rate: float = 0.01) -> Callable[..., Any]:
    """A step that moves the parameters along the gradient; its state is the parameters."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads), value

    return step


def adam(
    loss: Callable[..., Any], rate: float = 1e-3, b1: float = 0.9, b2: float = 0.99
) -> Callable[..., Any]:
    """A step of Adam with float32 moments (bias correction left out); its state has `params`, `m` and `v`."""

    def step(state, *batch):
        frozen = {k: v for k, v in state.items() if k == "frozen"}
        value, grads = jax.value_and_grad(loss)(state["params"], *frozen.values(), *batch)
        grads = jax.tree.map(lambda g: g.astype(F32), grads)
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], grads)
        params = jax.tree.map(
            lambda p, m, v: (p - rate * m * lax.rsqrt(v + 1e-8)).astype(p.dtype), state["params"], m, v
        )
        return {"params": params, "m": m, "v": v, **frozen}, value

    return step


def adam_state(params: Tree, **frozen: Tree) -> Tree:
    """Abstract parameters with their moments."""
    moments = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, F32), params)
    return {"params": params, "m": moments, "v": moments, **frozen}


# -- layers ----------------------------------------------------------------------------------------------


def layer_norm(x, scale):
    """Normalised over the features, in float32."""
    y = x.astype(F32)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def rms_norm(x, scale):
    """Scaled by the root mean square over the features, in float32."""
    y = x.astype(F32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def attention(q, k, v, causal: bool = True):
    """Softmax attention; q is (batch, tokens, heads..., size), k and v have one head for a group of q's."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(F32) * q.shape[-1] ** -0.5
    if causal:
        n = scores.shape[-1]
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


def heads(x, n: int):
    """Split the features into heads."""
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def block(x, p, n_heads: int, causal: bool = True, mark: Mark = unmarked):
    """A pre-norm transformer block with fused feature dimensions, as most code writes it."""
    y = layer_norm(x, p["norm1"])
    q, k, v = (mark(heads(y @ p[n], n_heads), "heads") for n in ("wq", "wk", "wv"))
    o = mark(attention(q[:, :, :, None], k, v, causal)[:, :, :, 0], "heads")
    x = mark(x + o.reshape(x.shape) @ p["wo"], "hidden")
    y = mark(jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]), "wide")
    return mark(x + y @ p["down"], "hidden")


def block_shapes(d: int, ff: int, *stacked: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of `block`."""
    square = {n: (*stacked, d, d) for n in ("wq", "wk", "wv", "wo")}
    norms = {n: (*stacked, d) for n in ("norm1", "norm2")}
    return shapes(**square, **norms, up=(*stacked, d, ff), down=(*stacked, ff, d))


def rotate(x):
    """Rotary position embedding; x is (batch, tokens, ..., size)."""
    t, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(t, dtype=F32)[:, None] * 10000.0 ** (-jnp.arange(half, dtype=F32) / half)
    angle = angle.reshape(t, *(1,) * (x.ndim - 3), half)
    a, b = jnp.split(x.astype(F32), 2, axis=-1)
    out = jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )
    return out.astype(x.dtype)


def cross_entropy(logits, targets):
    """Mean negative log-likelihood, in float32."""
    logits = logits.astype(F32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


# -- the workloads ---------------------------------------------------------------------------------------


def mlp(name: str, rows: int, small: bool, devices: int, mark: Mark) -> Workload:
    """Two matrix products of widths 4096 and 16384."""
    d, ff, n = (64, 256, 64) if small else (4096, 16384, rows)

    def loss(p, x):
        return jnp.mean((mark(mark(jax.nn.relu(x @ p["w1"]), "wide") @ p["w2"], "rows")).astype(F32) ** 2)

    return Workload(name, sgd(loss), shapes(w1=(d, ff), w2=(ff, d)), (array(max(n, devices), d),))


def gpt(name: str, scanned: bool, small: bool, devices: int, mark: Mark) -> Workload:
    """GPT, 4 layers; Adam."""
    layers, d, ff, h, t, b, vocab = (
        (2, 64, 256, 8, 32, 16, 256) if small else (4, 1024, 4096, 16, 1024, 32, 32768)
    )
    b = max(b, devices)

    def loss(p, tokens, targets):
        x = mark(p["embed"][tokens] + p["position"], "hidden")
        if scanned:
            x, _ = lax.scan(lambda x, q: (block(x, q, h, mark=mark), None), x, p["blocks"])
        else:
            for q in p["blocks"]:
                x = block(x, q, h, mark=mark)
        return cross_entropy(mark(layer_norm(x, p["norm"]) @ p["head"], "logits"), targets)

    blocks = block_shapes(d, ff, layers) if scanned else [block_shapes(d, ff) for _ in range(layers)]
    params = shapes(embed=(vocab, d), position=(t, d), norm=(d,), head=(d, vocab)) | {"blocks": blocks}
    tokens = array(b, t, dtype=I32)
    return Workload(name, adam(loss), adam_state(params), (tokens, tokens), layers)


def lm_head(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """An embedding, one hidden product, and a softmax over a large vocabulary."""
    d, t, b, vocab = (64, 16, 16, 1024) if small else (1024, 512, 32, 131072)

    def loss(p, tokens, targets):
        x = mark(jax.nn.gelu(mark(p["embed"][tokens], "hidden") @ p["w"]), "hidden")
        return cross_entropy(mark(x @ p["head"], "logits"), targets)

    tokens = array(max(b, devices), t, dtype=I32)
    return Workload(name, sgd(loss), shapes(embed=(vocab, d), w=(d, d), head=(d, vocab)), (tokens, tokens))


def conv(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """Residual convolutions with batch normalisation over the whole batch."""
    c, size, b, blocks = (8, 8, 16, 1) if small else (64, 32, 256, 2)
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolve(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def norm(x, scale, shift):
        y = x.astype(F32)
        mean = y.mean((0, 1, 2))
        var = ((y - mean) ** 2).mean((0, 1, 2))
        return ((y - mean) * lax.rsqrt(var + 1e-5) * scale + shift).astype(x.dtype)

    def loss(p, images, labels):
        x = convolve(images, p["stem"])
        for stage in p["stages"]:
            x = jax.nn.relu(norm(convolve(x, stage["down"], 2), *stage["n0"]))
            for q in stage["blocks"]:
                y = jax.nn.relu(norm(convolve(x, q["w1"]), *q["n1"]))
                x = jax.nn.relu(x + norm(convolve(y, q["w2"]), *q["n2"]))
        return cross_entropy(x.mean((1, 2)) @ p["head"], labels)

    def stage(a: int, z: int) -> Tree:
        pair = (array(z), array(z))
        some = [{**shapes(w1=(3, 3, z, z), w2=(3, 3, z, z)), "n1": pair, "n2": pair} for _ in range(blocks)]
        return {"down": array(3, 3, a, z), "n0": pair, "blocks": some}

    params = {
        "stem": array(3, 3, 3, c),
        "stages": [stage(c, 2 * c), stage(2 * c, 4 * c)],
        "head": array(4 * c, 1024),
    }
    b = max(b, devices)
    return Workload(name, sgd(loss), params, (array(b, size, size, 3), array(b, dtype=I32)), blocks)


def moe(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """GShard's mixture of experts as einsums: top-2 of 16 experts, capacity factor 2, groups of tokens."""
    g, s, d, ff, e = (16, 32, 32, 64, 16) if small else (32, 256, 1024, 4096, 16)
    g = max(g, devices)
    capacity = max(1, 2 * 2 * s // e)

    def route(x, wg):
        """Dispatch mask and combining weights of the two best experts, (groups, tokens, experts, capacity)."""
        gates = jax.nn.softmax((x @ wg).astype(F32), axis=-1)
        combine, taken, rest = jnp.zeros(()), jnp.zeros(()), gates
        for _ in range(2):
            chosen = jax.nn.one_hot(jnp.argmax(rest, -1), e, dtype=F32)
            place = jnp.cumsum(chosen, axis=1) - chosen + taken
            taken = taken + chosen.sum(1, keepdims=True)
            keep = chosen * (place < capacity)
            slot = jax.nn.one_hot((place * keep).sum(-1).astype(I32), capacity, dtype=F32)
            combine = combine + ((gates * keep).sum(-1)[..., None] * keep)[..., None] * slot[:, :, None]
            rest = rest * (1 - chosen)
        combine = jnp.asarray(combine)
        return (combine > 0).astype(x.dtype), combine.astype(x.dtype)

    def loss(p, x):
        dispatch, combine = route(x, p["gate"])
        y = mark(jnp.einsum("gsec,gsd->egcd", dispatch, x), "experts")
        y = mark(jax.nn.relu(jnp.einsum("egcd,edf->egcf", y, p["up"])), "experts")
        y = mark(jnp.einsum("egcf,efd->egcd", y, p["down"]), "experts")
        y = x + mark(jnp.einsum("gsec,egcd->gsd", combine, y), "hidden")
        return jnp.mean(y.astype(F32) ** 2)

    params = shapes(gate=(d, e), up=(e, d, ff), down=(e, ff, d))
    return Workload(name, sgd(loss), params, (array(g, s, d),))


def llama(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """Llama blocks with grouped-query attention, scanned and rematerialised; Adam."""
    layers, d, ff, h, kv, t, b = (2, 64, 128, 8, 2, 32, 16) if small else (4, 2048, 5632, 16, 4, 1024, 32)
    b, size = max(b, devices), d // h

    def layer(x, p):
        y = rms_norm(x, p["norm1"])
        q, k, v = (mark(heads(y @ p[w], n), "heads") for w, n in (("wq", h), ("wk", kv), ("wv", kv)))
        o = attention(rotate(q).reshape(*y.shape[:2], kv, h // kv, size), rotate(k), v)
        x = mark(x + o.reshape(x.shape) @ p["wo"], "hidden")
        y = rms_norm(x, p["norm2"])
        y = mark(jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "wide")
        return mark(x + y @ p["down"], "hidden"), None

    def loss(p, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, p)[0].astype(F32) ** 2)

    n, m = layers, kv * size
    params = shapes(
        wq=(n, d, d), wk=(n, d, m), wv=(n, d, m), wo=(n, d, d), gate=(n, d, ff), up=(n, d, ff), down=(n, ff, d),
        norm1=(n, d), norm2=(n, d),
    )  # fmt: skip
    return Workload(name, adam(loss), adam_state(params), (array(b, t, d),), layers)


def vit(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """A vision transformer: patches by reshape and product, mean of the tokens."""
    layers, d, ff, h, side, patch, b = (
        (1, 48, 96, 12, 16, 4, 16) if small else (4, 768, 3072, 12, 224, 16, 256)
    )
    b, n = max(b, devices), side // patch

    def loss(p, images, labels):
        x = images.reshape(b, n, patch, n, patch, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, n * n, -1)
        x = x @ p["patch"] + p["position"]
        for q in p["blocks"]:
            x = block(x, q, h, causal=False, mark=mark)
        return cross_entropy(layer_norm(x, p["norm"]).mean(1) @ p["head"], labels)

    params = shapes(patch=(patch * patch * 3, d), position=(n * n, d), norm=(d,), head=(d, 1024))
    params = params | {"blocks": [block_shapes(d, ff) for _ in range(layers)]}
    return Workload(name, sgd(loss), params, (array(b, side, side, 3), array(b, dtype=I32)), layers)


def lora(name: str, small: bool, devices: int, mark: Mark) -> Workload:
    """Fine-tuning of low-rank additions `(x @ a) @ b` to frozen weights; Adam on the additions."""
    layers, d, ff, r, t, b = (2, 64, 256, 8, 16, 16) if small else (4, 4096, 11008, 16, 1024, 32)

    def loss(p, frozen, x):
        for q, w in zip(p, frozen, strict=True):
            y = rms_norm(x, w["norm"])
            y = mark(jax.nn.silu(y @ w["up"] + (y @ q["a1"]) @ q["b1"]), "wide")
            x = mark(x + y @ w["down"] + (y @ q["a2"]) @ q["b2"], "hidden")
        return jnp.mean(x.astype(F32) ** 2)

    params = [shapes(a1=(d, r), b1=(r, ff), a2=(ff, r), b2=(r, d)) for _ in range(layers)]
    frozen = [shapes(up=(d, ff), down=(ff, d), norm=(d,)) for _ in range(layers)]
    state = adam_state(params, frozen=frozen)
    return Workload(name, adam(loss), state, (array(max(b, devices), t, d),), layers)


_MAKE: dict[str, Callable[..., Workload]] = {
    "mlp-512": functools.partial(mlp, "mlp-512", 512),
    "mlp-64k": functools.partial(mlp, "mlp-64k", 65536),
    "gpt": functools.partial(gpt, "gpt", False),
    "gpt-scan": functools.partial(gpt, "gpt-scan", True),
    "lm-head": functools.partial(lm_head, "lm-head"),
    "conv": functools.partial(conv, "conv"),
    "moe": functools.partial(moe, "moe"),
    "llama": functools.partial(llama, "llama"),
    "vit": functools.partial(vit, "vit"),
    "lora": functools.partial(lora, "lora"),
}
NAMES: Sequence[str] = tuple(_MAKE)


def get(name: str, *, small: bool = False, devices: int = 1, mark: Mark = unmarked) -> Workload:
    """The workload of a name (one of `NAMES`), for tests if `small`, with at least `devices` rows of batch."""
    return _MAKE[name](small, devices, mark)
