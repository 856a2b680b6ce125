"""Training steps cut along space or time, where neighbours exchange the edges that windows read.

    python benchmarks/quality/space.py                     every network on 16 and 64 devices of v5e
    python benchmarks/quality/space.py --only unet --devices 16
    python benchmarks/quality/space.py --check             small ones in float64 on 8 CPU devices, beside plain JAX

Two images of 4096 x 4096 leave 16 devices nothing to cut but space. `convolutions` is also written by hand, as
`shard_map` with `ppermute` of one row of pixels. Steps are predicted for v5e at level 2.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jshard


IMAGES = ("NHWC", "HWIO", "NHWC")
SEQUENCES = ("NHC", "HIO", "NHC")
PAGE = pathlib.Path(__file__).with_suffix(".md")
Network = Callable[["Weights", jax.Array], jax.Array]


class Weights:
    """The weights of a network in the order of their use; without arrays, a record of the shapes."""

    def __init__(self, dtype: Any, arrays: list[Any] | None = None):
        self.dtype, self.arrays, self.shapes, self.next = dtype, arrays, [], 0

    def __call__(self, *shape: int) -> Any:
        """The next weight."""
        if self.arrays is None:
            self.shapes.append(shape)
            return jnp.zeros(shape, self.dtype)
        self.next += 1
        return self.arrays[self.next - 1]


def conv(
    w: Weights, x: Any, out: int, size: int = 3, stride: int = 1, groups: int = 1, padding: str = "SAME"
) -> Any:
    """A convolution over two dimensions."""
    kernel = w(size, size, x.shape[-1] // groups, out)
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=IMAGES, feature_group_count=groups
    )


def norm(w: Weights, x: Any, axes: tuple[int, ...] = (1, 2)) -> Any:
    """Normalisation over some dimensions (instance, batch or layer)."""
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * w(x.shape[-1])


def convolutions(w: Weights, x: Any, width: int = 64) -> Any:
    """Five convolutions of 3 x 3."""
    for _ in range(4):
        x = jax.nn.relu(conv(w, x, width))
    return conv(w, x, 3)


def unet(w: Weights, x: Any, width: int = 32) -> Any:
    """A U-Net of four levels."""
    skips = []
    for depth in range(4):
        for _ in range(2):
            x = jax.nn.relu(norm(w, conv(w, x, width << depth)))
        if depth < 3:
            skips.append(x)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    for depth in (2, 1, 0):
        kernel = w(2, 2, x.shape[-1], width << depth)
        x = lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=IMAGES)
        x = jnp.concatenate([x, skips[depth]], -1)
        for _ in range(2):
            x = jax.nn.relu(norm(w, conv(w, x, width << depth)))
    return conv(w, x, 3, 1)


def resnet50(w: Weights, x: Any) -> Any:
    """ResNet-50 with the statistics of the batch."""
    batch = (0, 1, 2)
    x = jax.nn.relu(norm(w, conv(w, x, 64, 7, 2), batch))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if block == 0 and stage else 1
            y = jax.nn.relu(norm(w, conv(w, x, width, 1), batch))
            y = jax.nn.relu(norm(w, conv(w, y, width, 3, stride), batch))
            y = norm(w, conv(w, y, 4 * width, 1), batch)
            if block == 0:
                x = norm(w, conv(w, x, 4 * width, 1, stride), batch)
            x = jax.nn.relu(x + y)
    return x.mean((1, 2)) @ w(2048, 1000)


def convnext(w: Weights, x: Any) -> Any:
    """ConvNeXt-T."""
    x = conv(w, x, 96, 4, 4, padding="VALID")
    for stage, (width, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            x = conv(w, norm(w, x, (3,)), width, 2, 2, padding="VALID")
        for _ in range(blocks):
            y = norm(w, conv(w, x, width, 7, 1, width), (3,))
            x = x + jax.nn.gelu(y @ w(width, 4 * width)) @ w(4 * width, width)
    return x.mean((1, 2)) @ w(768, 1000)


def _causal(w: Weights, x: Any, size: int = 4) -> Any:
    kernel, features = w(size, 1, x.shape[-1]), x.shape[-1]
    return lax.conv_general_dilated(
        x, kernel, (1,), [(size - 1, 0)], dimension_numbers=SEQUENCES, feature_group_count=features
    )


def mamba2(w: Weights, x: Any, heads: int = 16, head: int = 64, states: int = 128, chunk: int = 256) -> Any:
    """A block like Mamba-2's: causal convolutions, and a state space in chunks (the SSD form, arXiv 2405.21060)."""
    batch, length, features = x.shape
    n, q = length // chunk, chunk
    values = jax.nn.silu(_causal(w, x @ w(features, heads * head))).reshape(batch, n, q, heads, head)
    b = jax.nn.silu(_causal(w, x @ w(features, states))).reshape(batch, n, q, states)
    c = jax.nn.silu(_causal(w, x @ w(features, states))).reshape(batch, n, q, states)
    rates = -jax.nn.softplus((x @ w(features, heads)).astype(jnp.promote_types(x.dtype, "float32")))
    total = jnp.cumsum(rates.reshape(batch, n, q, heads), 2)
    within = jnp.tril(jnp.ones((q, q), bool))[None, None, :, :, None]
    decay = jnp.exp(jnp.where(within, total[:, :, :, None] - total[:, :, None], -jnp.inf)).astype(x.dtype)
    y = jnp.einsum("zcls,zclsh,zcshp->zclhp", jnp.einsum("zcln,zcsn->zcls", c, b), decay, values)
    to_end = jnp.exp(total[:, :, -1:] - total).astype(x.dtype)
    states_of_chunks = jnp.einsum("zcsn,zcsh,zcshp->zchpn", b, to_end, values)
    ends = jnp.cumsum(total[:, :, -1], 1)
    earlier = jnp.tril(jnp.ones((n, n), bool), -1)[None, :, :, None]
    between = (ends - total[:, :, -1])[:, :, None] - ends[:, None]
    between = jnp.exp(jnp.where(earlier, between, -jnp.inf)).astype(x.dtype)
    states_of_chunks = jnp.einsum("zcdh,zdhpn->zchpn", between, states_of_chunks)
    y = y + jnp.einsum("zcln,zchpn,zclh->zclhp", c, states_of_chunks, jnp.exp(total).astype(x.dtype))
    return x + y.reshape(batch, length, heads * head) @ w(heads * head, features)


def rg_lru(w: Weights, x: Any, width: int = 1024) -> Any:
    """A block like Griffin's: a causal window of four, and a real-gated linear recurrence (arXiv 2402.19427)."""
    features = x.shape[-1]
    gate, y = jax.nn.gelu(x @ w(features, width)), x @ w(features, width)
    kernel, padded = w(4, width), jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
    y = sum(padded[:, k : k + x.shape[1]] * kernel[k] for k in range(4))
    forget, enter = jax.nn.sigmoid(y * w(width) + w(width)), jax.nn.sigmoid(y * w(width) + w(width))
    decay = jnp.exp(-8 * forget * jax.nn.softplus(w(width)))
    entering = jnp.sqrt(1 - decay**2 + 1e-6) * enter * y

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    state = lax.associative_scan(combine, (decay, entering), axis=1)[1]
    return x + (gate * state) @ w(width, features)


def rwkv(w: Weights, x: Any, width: int = 1024) -> Any:
    """A channel-mixing block like RWKV's: each token mixed with the one before (arXiv 2305.13048)."""
    features = x.shape[-1]
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    mixed = [x * m + before * (1 - m) for m in (w(features), w(features))]
    key = jnp.square(jax.nn.relu(mixed[0] @ w(features, 4 * width)))
    return x + jax.nn.sigmoid(mixed[1] @ w(features, features)) * (key @ w(4 * width, features))


def next_token(w: Weights, x: Any, vocabulary: int = 50257) -> Any:
    """A head with GPT-2's vocabulary, whose loss compares each position with the next one."""
    embedding = w(vocabulary, x.shape[-1])
    logits = x[:, :-1] @ embedding.T
    targets = jnp.clip(jnp.abs(x[:, 1:, 0] * 1000).astype("int32"), 0, vocabulary - 1)
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits.astype(jnp.promote_types(x.dtype, "float32")), -1) - own


def vit(w: Weights, x: Any, heads: int = 4) -> Any:
    """Two layers of a vision transformer: a class token before the patches, so 197 tokens for 14 x 14."""
    b, t, features = *x.shape[:2], x.shape[2]
    y = jnp.concatenate([jnp.broadcast_to(w(1, 1, features), (b, 1, features)), x], 1) + w(t + 1, features)
    for _ in range(2):
        z = norm(w, y, (2,))
        q, k, v = ((z @ w(features, features)).reshape(b, t + 1, heads, -1) for _ in range(3))
        y = y + jax.nn.dot_product_attention(q, k, v).reshape(b, t + 1, features) @ w(features, features)
        z = norm(w, y, (2,))
        y = y + jax.nn.gelu(z @ w(features, 4 * features)) @ w(4 * features, features)
    return y[:, 0] @ w(features, 1000)


NETWORKS: dict[str, tuple[Network, tuple[int, ...], tuple[int, ...]]] = {
    "convolutions": (convolutions, (2, 4096, 4096, 3), (2, 32, 32, 3)),
    "unet": (unet, (2, 4096, 4096, 3), (2, 64, 64, 3)),
    "resnet50": (resnet50, (2, 4096, 4096, 3), (2, 64, 64, 3)),
    "convnext": (convnext, (2, 4096, 4096, 3), (2, 64, 64, 3)),
    "mamba2": (mamba2, (1, 65536, 1024), (1, 1024, 16)),
    "rg_lru": (rg_lru, (1, 65536, 1024), (1, 256, 16)),
    "rwkv": (rwkv, (1, 65536, 1024), (1, 256, 16)),
    "next_token": (next_token, (2, 8192, 768), (2, 129, 16)),
    "vit": (vit, (8, 196, 768), (2, 48, 16)),
}
"""Network, shape of its input, and a small one for `--check`."""


def training(
    network: Network, shape: tuple[int, ...], dtype: Any
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A step of gradient descent, with the shapes of its arguments."""
    record, x = Weights(dtype), jax.ShapeDtypeStruct(shape, dtype)
    jax.eval_shape(lambda x: network(record, x), x)

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            y = network(Weights(dtype, weights), x)
            return (y.astype(jnp.promote_types(dtype, "float32")) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step, ([jax.ShapeDtypeStruct(s, dtype) for s in record.shapes], x)


def by_hand(mesh: Any, size: int) -> Callable[..., Any]:
    """The step of `convolutions` with `shard_map`: height cut over all axes, a row of pixels from each side."""
    axes, n = mesh.axis_names, mesh.size

    def with_edges(x: Any) -> Any:
        above = lax.ppermute(x[:, -1:], axes, [(i, i + 1) for i in range(n - 1)])
        below = lax.ppermute(x[:, :1], axes, [(i + 1, i) for i in range(n - 1)])
        return jnp.concatenate([above, x, below], 1)

    def body(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            y = x
            for k, w in enumerate(weights):
                y = lax.conv_general_dilated(
                    with_edges(y), w, (1, 1), ((0, 0), (1, 1)), dimension_numbers=IMAGES
                )
                y = jax.nn.relu(y) if k + 1 < len(weights) else y
            return (y.astype("float32") ** 2).sum() / (2 * size * size * 3)

        value, grads = jax.value_and_grad(loss)(weights)
        grads = jax.tree.map(lambda g: lax.psum(g, axes), grads)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), lax.psum(value, axes)

    spec = jax.P(None, axes)
    return jax.shard_map(
        body, mesh=mesh, in_specs=(jax.P(), spec), out_specs=(jax.P(), jax.P()), check_vma=False
    )


def row(name: str, step: Callable[..., Any], args: Any, machine: Any) -> str:
    """A row of the page."""
    began = time.process_time()
    plan = jshard.shard(step, mesh=machine, level=2).plan(*args)
    seconds = time.process_time() - began
    moved = sum(c.bytes * c.count for c in plan.collectives)
    gap = "proved" if plan.cost.gap == 0 else f"{plan.cost.gap:.1%}"
    figures = f"{plan.step_seconds * 1e3:.2f} | {moved / 1e6:.1f} | {plan.cost.peak_bytes / 2**30:.2f}"
    return f"| {name} | {plan.mesh.total} | {figures} | {gap} | {seconds:.0f} |"


def check(name: str) -> None:
    """Compare a small step with plain JAX in float64, and the bytes that are planned with those of the compiled program.

    The error is relative to the change of a weight: of weights that hardly change it would not show. That of `vit` is 4e-8,
    as of plain JAX compiled or not: `jax.nn.dot_product_attention` has its softmax in float32.
    """
    network, _, small = NETWORKS[name]
    with jax.enable_x64(True):
        step, (weights, x) = training(network, small, jnp.float64)
        rng = np.random.default_rng(0)
        drawn = [rng.standard_normal(a.shape) / np.sqrt(np.prod(a.shape[:-1])) for a in weights]
        args = drawn, rng.standard_normal(x.shape)
        f = jshard.shard(step, mesh="auto:8", level=2, config={"pad": True})
        plan = f.plan(*args, verify=True)
        (new, value), (plain, loss) = f(*args), step(*args)
        errors = [
            jnp.abs(a - b).max() / jnp.abs(b - w).max() for a, b, w in zip(new, plain, drawn, strict=True)
        ]
        errors.append(jnp.abs(value - loss) / jnp.abs(loss))
        print(
            f"{name}: largest error {max(map(float, errors)):.1e}, verified {plan.verification.ok}",
            flush=True,
        )


def main() -> None:
    """Print the rows asked for; write the page where all were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--devices", type=int, choices=(16, 64))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    names = [given.only] if given.only else list(NETWORKS)
    if given.check:
        for name in names:
            check(name)
        return
    head = "network | devices | step, ms | moved a device, MB | peak, GiB | gap | planning, CPU s"
    lines = [f"| {head} |", "|---" * 7 + "|"]
    for devices in [given.devices] if given.devices else [16, 64]:
        side = int(devices**0.5)
        machine = jshard.topology(f"v5e:{side}x{side}", {"x": side, "y": side})
        for name in names:
            network, shape, _ = NETWORKS[name]
            lines.append(row(name, *training(network, shape, jnp.bfloat16), machine))
            print(lines[-1], flush=True)
            if name == "convolutions":
                _, args = training(network, shape, jnp.bfloat16)
                lines.append(row("convolutions by hand", by_hand(machine.jax_mesh, shape[1]), args, machine))
                print(lines[-1], flush=True)
    if not given.only and not given.devices:
        made = f"Written on {time.strftime('%Y-%m-%d')} with JAX {jax.__version__}.\n\n"
        PAGE.write_text("# Cuts along space and time\n\n" + _FOOT + made + "\n".join(lines) + "\n")


_FOOT = """Written by `benchmarks/quality/space.py`: training steps in bfloat16, predicted for v5e at level 2, images of
2 x 4096 x 4096, sequences of 65,536. "By hand" is `shard_map` with `ppermute` of one row of pixels to each side; its peak
leaves out what lies inside the `shard_map`.

"""


if __name__ == "__main__":
    main()
