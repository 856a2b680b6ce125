"""`python -m benchmarks.planning.pipeline_choice`: how long `pipeline="auto"` plans, beside the same step without.

Training steps (SGD with momentum, bf16, donated, `jax.checkpoint`, level 2) on machines that are described, not here; each
row in a process of its own, in CPU seconds with the trace. Ended: pipelines whose search ended at a bound above the best
plan known. `--only NAME` runs the rows with this in their names; finished rows are kept in `pipeline_choice.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jshard


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
ROOT = Path(__file__).parents[2]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    """A type in bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def norm(x: jax.Array, g: Any = 1) -> jax.Array:
    """The root-mean-square norm."""
    return (x / jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)) * g


def gated(layers: int, d: int, f: int) -> tuple[Callable, Any, Any]:
    """A residual network of gated layers: (loss, weights, data)."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        y = norm(h)
        return h + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(w: Any, x: Any) -> jax.Array:
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2)

    w = {"gate": array(layers, d, f), "up": array(layers, d, f), "down": array(layers, f, d)}
    return loss, w, array(65536, d)


def llama(
    layers: int, d: int, f: int, heads: int, kv: int, batch: int, checkpoint: bool = True
) -> tuple[Callable, Any, Any]:
    """A decoder with grouped-query attention on 4,096 tokens, without rotated positions: (loss, weights, tokens)."""
    size, vocabulary = d // heads, 128256

    def layer(h: Any, p: Any) -> tuple[Any, None]:
        b, n, _ = h.shape
        x = norm(h, p["n1"])
        q = (x @ p["q"]).reshape(b, n, kv, heads // kv, size)
        k, v = (x @ p["k"]).reshape(b, n, kv, size), (x @ p["v"]).reshape(b, n, kv, size)
        scores = jnp.einsum("btgnd,bsgd->bgnts", q, k) / jnp.sqrt(size).astype(h.dtype)
        scores = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(n), scores, -1e30)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(h.dtype)
        h = h + jnp.einsum("bgnts,bsgd->btgnd", weights, v).reshape(b, n, d) @ p["o"]
        x = norm(h, p["n2"])
        return h + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"], None

    def loss(w: Any, tokens: Any) -> jax.Array:
        h, _ = lax.scan(jax.checkpoint(layer) if checkpoint else layer, w["embedding"][tokens], w["layers"])
        logits = jax.nn.log_softmax((h @ w["head"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))

    of = {"q": (d, d), "k": (d, kv * size), "v": (d, kv * size), "o": (d, d), "gate": (d, f), "up": (d, f)}
    of |= {"down": (f, d), "n1": (d,), "n2": (d,)}
    w = {"layers": {n: array(layers, *s) for n, s in of.items()}}
    w |= {"embedding": array(vocabulary, d), "head": array(d, vocabulary)}
    return loss, w, jax.ShapeDtypeStruct((batch, 4096), jnp.int32)


CASES: dict[str, tuple[Callable[[], tuple[Callable, Any, Any]], str, dict[str, int], int]] = {
    "126 gated layers, two slices of v5e:4x4": (
        lambda: gated(126, 1024, 4096), "v5e:4x4", {"slice": 2, "data": 16}, 2),
    "126 layers of Llama-8B, two slices of v5p:4x4x4": (
        lambda: llama(126, 4096, 14336, 32, 8, 128), "v5p:4x4x4", {"slice": 2, "data": 16, "model": 4}, 2),
    "Llama-70B, two slices of v5p:4x4x8": (
        lambda: llama(80, 8192, 28672, 64, 8, 256), "v5p:4x4x8", {"slice": 2, "data": 8, "model": 16}, 2),
    "Llama-70B of 64 sequences, two slices of v5p:4x4x8": (
        lambda: llama(80, 8192, 28672, 64, 8, 64), "v5p:4x4x8", {"slice": 2, "data": 8, "model": 16}, 2),
    "Llama-70B, one slice of v5p:4x4x8": (
        lambda: llama(80, 8192, 28672, 64, 8, 128), "v5p:4x4x8", {"data": 8, "model": 16}, 1),
}  # fmt: skip


def row(name: str, auto: bool) -> dict[str, Any]:
    """One step planned."""
    make, machine, axes, slices = CASES[name]
    loss, w, x = make()

    def step(w: Any, m: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradient)
        return jax.tree.map(lambda w, m: w - 0.01 * m, w, m), m, value

    mesh = jshard.topology(machine, axes, num_slices=slices)
    config = {"pipeline": "auto"} if auto else None
    begin = time.process_time()
    plan = jshard.shard(step, mesh=mesh, level=2, donate_argnums=(0, 1), config=config).plan(w, w, x)
    found = {"cpu": time.process_time() - begin, "step": plan.step_seconds, "bound": plan.cost.bound}
    if auto:
        p = plan.pipeline
        found["chosen"] = (
            f"{p.stages} stages over {p.axis}, M {p.microbatches}, R {p.rounds}" if p else "no pipeline"
        )
        found["ended"] = sum(s.endswith("so its search ended") for s in plan.steps)
        found["space"] = plan.cost.space
        found["steps"] = [s for s in plan.steps if "pipeline" in s]
    return found


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    lines = [
        '# Planning with `pipeline="auto"`', "",
        "`python -m benchmarks.planning.pipeline_choice`. CPU seconds of a plan, the trace in them, without a pipeline "
        "and with all of them compared; ended: those whose search ended at a bound above the best plan known.", "",
        "| step | without, CPU s | auto, CPU s | ratio | ended | chosen | step, ms | bound, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['name']} | {r['without']['cpu']:.1f} | {r['auto']['cpu']:.1f} | {r['auto']['cpu'] / r['without']['cpu']:.1f} "
        f"| {r['auto']['ended']} of {sum(s.startswith('pipeline') for s in r['auto']['steps'])} | {r['auto']['chosen']} "
        f"| {r['auto']['step'] * 1e3:,.1f} | {r['auto']['bound'] * 1e3:,.1f} |"
        for r in rows
    ]  # fmt: skip
    for r in rows:
        lines += ["", f"## {r['name']}", "", "```text", *r["auto"]["steps"], "```"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the rows, each in two processes, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--one", help="a row as JSON; runs here")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(row(*json.loads(args.one))))
        return
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for name in CASES:
        if args.only not in name:
            continue
        new: dict[str, Any] = {"name": name}
        for auto in (False, True):
            command = [
                sys.executable,
                "-m",
                "benchmarks.planning.pipeline_choice",
                "--one",
                json.dumps([name, auto]),
            ]
            out = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
            new["auto" if auto else "without"] = json.loads(out.splitlines()[-1])
        kept = [r for r in kept if r["name"] != name] + [new]
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept))
        PAGE.write_text(page(kept))
        print(new, flush=True)


if __name__ == "__main__":
    main()
