"""A BERT-like classifier trained on real texts on 1, 2, 4 and 8 devices: accuracy, F1 and loss are equal.

    python benchmarks/correctness/convergence.py [--float64]

ShardFormer's README has such a table for BERT on 1, 2 and 4 GPUs, where accuracy falls from 0.845 to 0.830. Here: docstrings
of Python's standard library by package (`docstrings.py`), three epochs, batches of 64 in 8 microbatches, dropout, AdamW.
Every run has the same parameters, batches and random keys; the first row is plain JAX without microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from benchmarks.correctness.docstrings import PADDING, Texts, docstrings


PAGE = pathlib.Path(__file__).with_suffix(".md")
Params = Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model and of its training."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    classes: int = 6
    batch: int = 64
    epochs: int = 3
    accumulation: int = 8
    dropout: float = 0.1
    rate: float = 2e-3


def parameters(s: Setting, texts: Texts, dtype: str) -> Params:
    """The parameters at the start, of standard deviation 0.02 as BERT's."""
    rng, d = np.random.default_rng(0), s.width

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.02, dtype)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(d, dtype), "bias": jnp.zeros(d, dtype)}

    def layer() -> Params:
        return {
            "q": normal(d, d), "k": normal(d, d), "v": normal(d, d), "o": normal(d, d), "up": normal(d, 4 * d),
            "down": normal(4 * d, d), "attention_norm": norm(), "mlp_norm": norm(),
        }  # fmt: skip

    return {
        "words": normal(texts.words, d), "positions": normal(texts.tokens.shape[1], d), "norm": norm(),
        "layers": [layer() for _ in range(s.layers)], "pool": normal(d, d), "classes": normal(d, s.classes),
    }  # fmt: skip


def scores(s: Setting, p: Params, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
    """Scores of the classes; with a key, dropout."""
    keys = iter(() if key is None else jax.random.split(key, 2 * s.layers + 1))

    def drop(x: jax.Array) -> jax.Array:
        if key is None:
            return x
        kept = jax.random.bernoulli(next(keys), 1 - s.dropout, x.shape)
        return jnp.where(kept, x / (1 - s.dropout), 0)

    def norm(x: jax.Array, n: Params) -> jax.Array:
        return jshard.ops.layer_norm(x, n["scale"], n["bias"], epsilon=1e-12)

    here = tokens != PADDING
    x = drop(norm(p["words"][tokens] + p["positions"], p["norm"]))
    for layer in p["layers"]:
        q, k, v = ((x @ layer[n]).reshape(*x.shape[:2], s.heads, -1) for n in "qkv")
        y = jshard.ops.attention(q, k, v, mask=here[:, None, None, :])
        x = norm(x + drop(y.reshape(x.shape) @ layer["o"]), layer["attention_norm"])
        x = norm(x + drop(jshard.ops.activated_product(x @ layer["up"], layer["down"])), layer["mlp_norm"])
    return jnp.tanh(x[:, 0] @ p["pool"]) @ p["classes"]


def training_step(s: Setting) -> Callable[..., tuple[Any, jax.Array]]:
    """The step from (state, tokens, labels, key) to (state, loss): AdamW, with weight decay."""

    def step(state: Any, tokens: jax.Array, labels: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        def loss(p: Params) -> jax.Array:
            logarithms = jax.nn.log_softmax(scores(s, p, tokens, key))
            return -jnp.take_along_axis(logarithms, labels[:, None], 1).mean()

        p, m, v, t = state
        value, g = jax.value_and_grad(loss)(p)
        t = t + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            direction = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-6)
            return p - s.rate * (direction + 0.01 * p)

        return (jax.tree.map(updated, p, m, v), m, v, t), value

    return step


def batches(s: Setting, texts: Texts) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of every epoch, in an order of its own; what is left over is dropped."""
    tokens, labels = texts.part(tests=False)
    for epoch in range(s.epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))
        for i in range(0, len(order) - s.batch + 1, s.batch):
            chosen = order[i : i + s.batch]
            yield tokens[chosen], labels[chosen]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training gives: losses of the steps; of the tests the loss, predictions, accuracy and macro F1."""

    losses: np.ndarray
    test_loss: float
    predictions: np.ndarray
    accuracy: float
    f1: float


def train(
    s: Setting, texts: Texts, dtype: str, shard: Callable[..., Any], step_options: dict[str, Any]
) -> Run:
    """One training; `shard(function, **options)` makes what runs."""
    p = parameters(s, texts, dtype)
    zeros = jax.tree.map(jnp.zeros_like, p)
    state, losses = (p, zeros, zeros, jnp.zeros((), dtype)), []
    step = shard(training_step(s), **step_options)
    for i, (tokens, labels) in enumerate(batches(s, texts)):
        state, loss = step(state, tokens, labels, jax.random.key(i))
        losses.append(float(loss))
    tokens, labels = texts.part(tests=True)
    of_tests = np.asarray(shard(functools.partial(scores, s, key=None))(jax.device_get(state[0]), tokens))
    chances = of_tests - np.logaddexp.reduce(of_tests, axis=1, keepdims=True)
    predictions = of_tests.argmax(1)
    return Run(
        np.array(losses), float(-chances[np.arange(len(labels)), labels].mean()), predictions,
        float((predictions == labels).mean()), macro_f1(predictions, labels, s.classes),
    )  # fmt: skip


def macro_f1(predictions: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """The mean over classes of 2 * right / (predicted + there).

    >>> macro_f1(np.array([0, 1, 1]), np.array([0, 1, 0]), 2)
    0.6666666666666666
    """
    out = []
    for c in range(classes):
        right = ((predictions == c) & (labels == c)).sum()
        out.append(2 * right / max(1, (predictions == c).sum() + (labels == c).sum()))
    return float(np.mean(out))


def runs(
    s: Setting, texts: Texts, dtype: str, machines: dict[str, tuple[dict[str, int], str | None]]
) -> dict[str, Run]:
    """The plain run, and one on each machine: a mesh by axes, and a recipe (None: the batch is cut, the search decides)."""
    out = {"plain JAX": train(s, texts, dtype, jax.jit, {})}
    for name, (axes, recipe) in machines.items():
        types = (jax.sharding.AxisType.Auto,) * len(axes)
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)

        def shard(fn: Any, mesh: Any = mesh, recipe: str | None = recipe, **options: Any) -> Any:
            rows = jax.P("data")
            pins = {"in_strategy": (None, rows, rows, None)} if options and recipe is None else {}
            return jshard.shard(fn, mesh=mesh, **pins, **options)

        options: dict[str, Any] = {"microbatches": s.accumulation}
        out[name] = train(s, texts, dtype, shard, options | ({"config": recipe} if recipe else {}))
    return out


MACHINES: dict[str, tuple[dict[str, int], str | None]] = {
    "1 device": ({"data": 1}, None),
    "2 devices": ({"data": 2}, None),
    "4 devices": ({"data": 4}, None),
    "8 devices": ({"data": 8}, None),
    "8 devices, fsdp+megatron": ({"data": 2, "model": 4}, "fsdp+megatron"),
}


def page(s: Setting, texts: Texts, dtype: str, found: dict[str, Run]) -> str:
    """The table in Markdown."""
    base = found["plain JAX"]
    lines = [
        f"| {name} | {r.accuracy:.4f} | {r.f1:.4f} | {r.test_loss:.6f} | {r.losses[-1]:.6f} | "
        f"{np.abs(r.losses - base.losses).max():.1e} | {int((r.predictions != base.predictions).sum())} |"
        for name, r in found.items()
    ]
    intro, (tokens, _), (tests, _) = (__doc__ or "").split("\n\n"), texts.part(False), texts.part(True)
    return "\n".join([
        "# Training on 1 to 8 devices", "", *intro[2:],
        f"Python {platform.python_version()}: {len(tokens)} pieces of docstrings of {s.classes} packages to learn from, "
        f"{len(tests)} to test with, {s.epochs} epochs ({len(base.losses)} steps) in {dtype}.",
        "The last column: predictions on the tests that are not those of the first row.", "",
        "| run | accuracy | F1 | loss on the tests | loss of the last step | largest difference of a step's loss | "
        "other predictions |", "|---|---|---|---|---|---|---|", *lines, "",
    ])  # fmt: skip


def main() -> int:
    """Run all, write the page; 1 where a run differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--float64", action="store_true", help="in float64; prints the table only")
    wide = parser.parse_args().float64
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", wide)
    s, texts, dtype = Setting(), docstrings(), "float64" if wide else "float32"
    found = runs(s, texts, dtype, MACHINES)
    text = page(s, texts, dtype, found)
    print(text)
    if not wide:
        PAGE.write_text(text)
    base = found["plain JAX"]
    return int(any((r.predictions != base.predictions).any() for r in found.values()))


if __name__ == "__main__":
    sys.exit(main())
