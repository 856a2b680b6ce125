"""Steps over images, graphs, fields and episodes that nobody tuned the plans for, in plain JAX.

As in `unseen_sequences.py` each function gives a `Case` for `unseen_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.compilers.peak_programs import Case, training
from benchmarks.compilers.unseen_sequences import KEY
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
    sgd,
    shapes,
)


def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution over the middle dimensions of x, padded to the same size."""
    space = "DHW"[5 - x.ndim :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(x, w, (stride,) * len(space), "SAME", dimension_numbers=numbers)


def group_norm(x: jax.Array, scale: jax.Array, groups: int = 32) -> jax.Array:
    """Normalised over space and the channels of a group, in float32."""
    y = x.astype(F32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    y = (y - y.mean((1, 3), keepdims=True)) * lax.rsqrt(y.var((1, 3), keepdims=True) + 1e-5)
    return (y.reshape(x.shape) * scale).astype(x.dtype)


def diffusion_transformer(width: int = 1152, tokens: int = 4096) -> Case:
    """A block of DiT-XL over latents of 128 x 128 in patches of 2: norms modulated by the time; SGD."""

    def norm(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(F32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return (y * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)

    def loss(p: Tree, x: jax.Array, time: jax.Array) -> jax.Array:
        m = jnp.split(jax.nn.silu(time) @ p["mod"], 6, -1)
        q, k, v = (heads(a, 16) for a in jnp.split(norm(x, m[0], m[1]) @ p["qkv"], 3, -1))
        o = attention(q[:, :, :, None], k, v, causal=False).reshape(x.shape)
        x = x + m[2][:, None] * (o @ p["out"])
        x = x + m[5][:, None] * (jax.nn.gelu(norm(x, m[3], m[4]) @ p["up"]) @ p["down"])
        return jnp.mean(x.astype(F32) ** 2)

    params = shapes(mod=(width, 6 * width), qkv=(width, 3 * width), out=(width, width), up=(width, 4 * width))
    params |= shapes(down=(4 * width, width))
    return training(sgd(loss), params, array(16, tokens, width), array(16, width))


def message_passing(nodes: int = 524_288, edges: int = 8_388_608, width: int = 128) -> Case:
    """Two layers of a graph network: messages of both ends of an edge, summed at the receiver; Adam."""

    def loss(p: Tree, x: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        for q in p["layers"]:
            message = jax.nn.relu(x[senders] @ q["from"] + x[receivers] @ q["to"])
            x = layer_norm(x + jax.ops.segment_sum(message, receivers, nodes) @ q["out"], q["norm"])
        return cross_entropy(x @ p["head"], labels)

    square = {w: (width, width) for w in ("from", "to", "out")}
    params = shapes(head=(width, 64)) | {"layers": [shapes(norm=(width,), **square) for _ in range(2)]}
    ends = array(edges, dtype=I32)
    batch = (array(nodes, width), ends, ends, array(nodes, dtype=I32))
    return Case(adam(loss), (adam_state(params), *batch), (None, (16, None), (16,), (16,), (16,)), (0,))


def residual_batch_norm(images: int = 512, size: int = 56) -> Case:
    """Stages of a ResNet whose batch norm also keeps running statistics; momentum."""

    def norm(x: jax.Array, p: Tree) -> tuple[jax.Array, Tree]:
        y = x.astype(F32)
        mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        y = (y - mean) * lax.rsqrt(square - mean * mean + 1e-5) * p["scale"] + p["shift"]
        return y.astype(x.dtype), (mean, square)

    def loss(p: Tree, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Tree]:
        seen = []
        for stage in p["stages"]:
            for n, q in enumerate(stage):
                y, s1 = norm(convolve(x, q["w1"], 2 if n == 0 else 1), q["n1"])
                y, s2 = norm(convolve(jax.nn.relu(y), q["w2"]), q["n2"])
                x = jax.nn.relu(y + (convolve(x, q["skip"], 2) if n == 0 else x))
                seen += [s1, s2]
        return cross_entropy(x.mean((1, 2)) @ p["head"], labels), seen

    def step(state: Tree, x: jax.Array, labels: jax.Array) -> tuple[Tree, jax.Array]:
        (value, seen), g = jax.value_and_grad(loss, has_aux=True)(state["params"], x, labels)
        kept = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["seen"], seen)
        v = jax.tree.map(lambda v, g: 0.9 * v + g, state["v"], g)
        params = jax.tree.map(lambda p, v: (p - 0.1 * v).astype(p.dtype), state["params"], v)
        return {"params": params, "v": v, "seen": kept}, value

    def residual(a: int, z: int, first: bool) -> Tree:
        n = shapes(F32, scale=(z,), shift=(z,))
        return shapes(w1=(3, 3, a, z), w2=(3, 3, z, z), skip=(1, 1, a, z) if first else (1,)) | {
            "n1": n,
            "n2": n,
        }

    widths = (64, 128, 256)
    stages = [[residual(a, 2 * a, True), residual(2 * a, 2 * a, False)] for a in widths]
    params = {"stages": stages, "head": array(2 * widths[-1], 1000)}
    seen = [(array(2 * a, dtype=F32),) * 2 for a in widths for _ in range(4)]
    state = {"params": params, "v": params, "seen": seen}
    return training(step, state, array(images, size, size, widths[0]), array(images, dtype=I32))


def contrastive(width: int = 768, rows: int = 2048) -> Case:
    """CLIP: an image and a text tower of one block, and the softmax over all pairs of the batch both ways; Adam."""

    def unit(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.sum(x.astype(F32) ** 2, -1, keepdims=True)).astype(x.dtype)

    def loss(p: Tree, patches: jax.Array, text: jax.Array) -> jax.Array:
        image = block(patches @ p["patch"], p["image"], 12, causal=False).mean(1) @ p["to"]
        words = block(p["embed"][text], p["text"], 12)[:, -1] @ p["to"]
        logits = unit(image) @ unit(words).T * jnp.exp(p["scale"])
        own = jnp.arange(rows)
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

    params = shapes(patch=(768, width), embed=(49_408, width), to=(width, 512), scale=())
    params |= {"image": block_shapes(width, 4 * width), "text": block_shapes(width, 4 * width)}
    batch = array(rows, 196, 768), array(rows, 77, dtype=I32)
    return training(adam(loss), adam_state(params), *batch)


def diffusion_unet(channels: int = 320, size: int = 64) -> Case:
    """A level of a latent diffusion U-Net: convolutions with the time, cross attention to a text, down, up, skip; SGD."""

    def residual(x: jax.Array, time: jax.Array, p: Tree) -> jax.Array:
        y = convolve(jax.nn.silu(group_norm(x, p["n1"])), p["w1"]) + (time @ p["time"])[:, None, None]
        y = convolve(jax.nn.silu(group_norm(y, p["n2"])), p["w2"])
        return y + x @ p["skip"]

    def attend(x: jax.Array, text: jax.Array, p: Tree) -> jax.Array:
        y = group_norm(x, p["norm"]).reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = (heads(a @ p[w], 8) for a, w in ((y, "q"), (text, "k"), (text, "v")))
        return x + (attention(q[:, :, :, None], k, v, causal=False).reshape(y.shape) @ p["o"]).reshape(
            x.shape
        )

    def loss(p: Tree, x: jax.Array, noise: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        high = attend(residual(x + noise, time, p["a"]), text, p["text"])
        low = residual(convolve(high, p["down"], 2), time, p["b"])
        up = jax.image.resize(low, (*high.shape[:-1], low.shape[-1]), "nearest")
        out = residual(jnp.concatenate([up, high], -1), time, p["c"])
        return jnp.mean((out - noise).astype(F32) ** 2)

    def one(a: int, z: int) -> Tree:
        return shapes(n1=(a,), n2=(z,), w1=(3, 3, a, z), w2=(3, 3, z, z), time=(1280, z), skip=(a, z))

    c = channels
    params = {"a": one(c, c), "b": one(2 * c, 2 * c), "c": one(3 * c, c), "down": array(3, 3, c, 2 * c)}
    params["text"] = shapes(norm=(c,), q=(c, c), k=(768, c), v=(768, c), o=(c, c))
    picture = array(64, size, size, c)
    return training(sgd(loss), params, picture, picture, array(64, 1280), array(64, 77, 768))


def autoencoder(width: int = 4096, latent: int = 256) -> Case:
    """A variational autoencoder of images of 64 x 64: drawn latents, squared error and divergence; Adam."""
    pixels = 3 * 64 * 64

    def loss(p: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.nn.gelu(jax.nn.gelu(x @ p["e1"]) @ p["e2"])
        mean, log_var = jnp.split((h @ p["e3"]).astype(F32), 2, -1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        h = jax.nn.gelu(jax.nn.gelu(z.astype(x.dtype) @ p["d1"]) @ p["d2"])
        error = jnp.sum((h @ p["d3"] - x).astype(F32) ** 2, -1)
        return jnp.mean(error - 0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1))

    params = shapes(
        e1=(pixels, width), e2=(width, width), e3=(width, 2 * latent), d1=(latent, width), d2=(width, width),
        d3=(width, pixels),
    )  # fmt: skip
    return Case(adam(loss), (adam_state(params), array(16_384, pixels), KEY), (None, (16, None), None), (0,))


def shifted_windows(width: int = 192, size: int = 56, window: int = 7) -> Case:
    """Two blocks of a Swin transformer: attention in windows, then in windows shifted by half with a mask; Adam."""
    n_heads, n = 6, size // window

    def into(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], n, window, n, window, width)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, n * n, window * window, width)

    def back(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], n, n, window, window, width)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size, size, width)

    def mask() -> jax.Array:
        part = jnp.zeros((size,), I32).at[-window:].set(1).at[-(window // 2) :].set(2)
        where = (3 * part[:, None] + part)[None, :, :, None] * jnp.ones((1, 1, 1, width), I32)
        where = into(where)[0, :, :, 0]
        return where[:, :, None] == where[:, None, :]

    def layer(x: jax.Array, p: Tree, shift: int) -> jax.Array:
        y = into(jnp.roll(layer_norm(x, p["n1"]), (-shift, -shift), (1, 2)))
        q, k, v = (heads(y @ p[w], n_heads) for w in "qkv")
        scores = jnp.einsum("bwqhd,bwkhd->bwhqk", q, k).astype(F32) + p["bias"].astype(F32)
        if shift:
            scores = jnp.where(mask()[None, :, None], scores, -1e9)
        o = jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        x = x + jnp.roll(back(o.reshape(y.shape) @ p["o"]), (shift, shift), (1, 2))
        return x + jax.nn.gelu(layer_norm(x, p["n2"]) @ p["up"]) @ p["down"]

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        for i, q in enumerate(p):
            x = layer(x, q, (window // 2) * i)
        return jnp.mean(x.astype(F32) ** 2)

    square = {w: (width, width) for w in "qkvo"}
    wide = {"up": (width, 4 * width), "down": (4 * width, width)}
    one = shapes(n1=(width,), n2=(width,), bias=(n_heads, window**2, window**2), **square, **wide)
    return training(adam(loss), adam_state([one, one]), array(256, size, size, width))


def policy_gradient(width: int = 512, actors: int = 4096, length: int = 256) -> Case:
    """PPO: advantages by a backward scan over the episode (GAE), a clipped ratio, value and entropy; Adam."""

    def act(p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"])
        return jax.nn.log_softmax((h @ p["policy"]).astype(F32)), (h @ p["value"])[..., 0].astype(F32)

    def loss(p: Tree, x: jax.Array, action: jax.Array, old: jax.Array, reward: jax.Array) -> jax.Array:
        log_probability, value = act(p, x)

        def back(gae: jax.Array, given: Tree) -> tuple[jax.Array, jax.Array]:
            reward, now, after = given
            gae = reward + 0.99 * after - now + 0.99 * 0.95 * gae
            return gae, gae

        now = lax.stop_gradient(value).T
        after = jnp.concatenate([now[1:], jnp.zeros_like(now[:1])])
        advantage = lax.scan(back, jnp.zeros_like(now[0]), (reward.T, now, after), reverse=True)[1].T
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(jnp.take_along_axis(log_probability, action[..., None], -1)[..., 0] - old)
        gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
        entropy = -jnp.sum(jnp.exp(log_probability) * log_probability, -1)
        error = (value - lax.stop_gradient(value) - advantage) ** 2
        return jnp.mean(-gain + 0.5 * error - 0.01 * entropy)

    params = shapes(w1=(128, width), w2=(width, width), policy=(width, 32), value=(width, 1))
    one = array(actors, length, dtype=F32)
    batch = (array(actors, length, 128), array(actors, length, dtype=I32), one, one)
    return training(adam(loss), adam_state(params), *batch)


def physics_informed(width: int = 512, points: int = 262_144) -> Case:
    """A network whose second derivatives solve Burgers' equation, by `jax.jacfwd` twice at every point; Adam."""

    def field(p: Tree, at: jax.Array) -> jax.Array:
        h = at @ p["first"]
        for w in p["hidden"]:
            h = jnp.tanh(h) @ w
        return (jnp.tanh(h) @ p["last"])[0]

    def loss(p: Tree, points: jax.Array) -> jax.Array:
        def residual(at: jax.Array) -> jax.Array:
            first = jax.jacfwd(field, 1)
            u, (u_t, u_x) = field(p, at), first(p, at)
            u_xx = jax.jacfwd(lambda a: first(p, a)[1])(at)[1]
            return u_t + u * u_x - 0.01 * u_xx

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    params: Tree = shapes(F32, first=(2, width), last=(width, 1))
    params["hidden"] = [array(width, width, dtype=F32) for _ in range(3)]
    return training(adam(loss), adam_state(params), array(points, 2, dtype=F32))


def long_convolution(width: int = 768, tokens: int = 8192) -> Case:
    """An operator of Hyena: gates around a convolution as long as the text, by FFT in float32; SGD."""

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(layer_norm(x, p["norm"]) @ p["in"], 3, -1)
        time = jnp.arange(tokens, dtype=F32)[:, None] / tokens
        filters = jnp.sin(time * p["rates"].astype(F32)) @ p["mix"].astype(F32) * jnp.exp(-4 * time)
        both = jnp.fft.rfft((k * v).astype(F32), 2 * tokens, axis=1) * jnp.fft.rfft(
            filters, 2 * tokens, axis=0
        )
        y = jnp.fft.irfft(both, 2 * tokens, axis=1)[:, :tokens].astype(x.dtype)
        return jnp.mean((x + (q * y) @ p["out"]).astype(F32) ** 2)

    params = shapes(norm=(width,), rates=(1, 64), mix=(64, width), out=(width, width))
    return training(sgd(loss), params | {"in": array(width, 3 * width)}, array(16, tokens, width))


def volumes(channels: int = 32, size: int = 64) -> Case:
    """A 3D U-Net's first level on volumes of 64 cubed, with instance norm and a Dice loss; SGD."""

    def twice(x: jax.Array, p: Tree) -> jax.Array:
        for w, n in ((p["w1"], p["n1"]), (p["w2"], p["n2"])):
            x = jax.nn.relu(group_norm(convolve(x, w), n, n.shape[0]))
        return x

    def loss(p: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        high = twice(x, p["a"])
        low = twice(convolve(high, p["down"], 2), p["b"])
        up = jax.image.resize(low, (*high.shape[:-1], low.shape[-1]), "nearest")
        guess = jax.nn.softmax((twice(jnp.concatenate([up, high], -1), p["c"]) @ p["head"]).astype(F32), -1)
        truth = jax.nn.one_hot(labels, guess.shape[-1])
        both, space = jnp.sum(guess * truth, (1, 2, 3)), (1, 2, 3)
        return 1 - jnp.mean((2 * both + 1) / (guess.sum(space) + truth.sum(space) + 1))

    def pair(a: int, z: int) -> Tree:
        return shapes(w1=(3, 3, 3, a, z), w2=(3, 3, 3, z, z), n1=(z,), n2=(z,))

    c = channels
    params: dict[str, Any] = {"a": pair(4, c), "b": pair(2 * c, 2 * c), "c": pair(3 * c, c)}
    params |= shapes(down=(3, 3, 3, c, 2 * c), head=(c, 4))
    return training(sgd(loss), params, array(32, size, size, size, 4), array(32, size, size, size, dtype=I32))


FIELDS: dict[str, Callable[[], Case]] = {
    "diffusion transformer": diffusion_transformer,
    "message passing": message_passing,
    "ResNet, batch norm": residual_batch_norm,
    "contrastive": contrastive,
    "diffusion U-Net": diffusion_unet,
    "autoencoder": autoencoder,
    "shifted windows": shifted_windows,
    "policy gradient": policy_gradient,
    "physics-informed": physics_informed,
    "long convolution": long_convolution,
    "volumes": volumes,
}
