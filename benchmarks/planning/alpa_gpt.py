"""`python -m benchmarks.planning.alpa_gpt`: Alpa's published pipelines of GPT on V100s beside what jshard chooses.

Training steps of GPT 2.6B, 6.7B, 15B and 39B (batch of 1,024 sequences of 1,024 tokens, 51,200 words, Adam, layers
recomputed) on 8, 16, 32 and 64 V100s, with stages, submeshes and microbatches of `benchmark/alpa/suite_auto_gpt.py` of
alpa-projects/alpa (`perf_test_suite`; sizes: `suite_manual_gpt.py`). Its stages are those of a submesh each; of 2.6B it has
three of 2, 2 and 4 GPUs, for which stand four equal ones of 2, as many layers times examples a GPU. Its submeshes' logical
shape (a, b) is data a x model b. Both sides are priced by jshard's model on a V100-like chip, level 2:

- Alpa: its stages and microbatches, the batch pinned to its axis (`force_batch_dim_to_mesh_dim: 0`), matrices of a layer cut
  over `model` where it has more than one device there (columns, then rows), the rest free. No memory limit: its schedule
  is 1F1B, of which jshard runs the GPipe form, as idle and with more microbatches held.
- jshard: the least of the same stages and microbatches with all else free, and of `pipeline="auto"`, on the same mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks.planning.pipeline_choice import norm


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
BATCH, LENGTH, WORDS = 1024, 1024, 51200


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and Alpa's choice: layers, width, heads; hosts of up to eight GPUs; stages, data, model, microbatches."""

    layers: int
    width: int
    heads: int
    gpus: int
    stages: int
    data: int
    model: int
    microbatches: int
    said: str


CASES = {
    "2.6B": Case(32, 2560, 32, 8, 4, 2, 1, 128, "3 stages of (1,2), (1,2), (1,4), logical (2,1), (2,1), (4,1), M 128"),
    "6.7B": Case(32, 4096, 32, 16, 2, 2, 4, 64, "2 stages of (1,8), logical (2,4), M 64"),
    "15B": Case(48, 5120, 40, 32, 4, 2, 4, 128, "4 stages of (1,8), logical (2,4), M 128"),
    "39B": Case(48, 8192, 64, 64, 16, 1, 4, 1024, "16 stages of (1,4), logical (1,4), M 1024"),
}  # fmt: skip


def v100() -> jshard.hardware.Chip:
    """A V100 of 16 GB in a host of eight with 25 Gb/s, as Alpa's p3.16xlarge; tensor cores at their peak."""
    return dataclasses.replace(
        jshard.hardware.get("a100"), name="gpu-v100-like", bf16_flops=1.25e14, f32_flops=1.57e13, int8_flops=6.2e13,
        hbm_bytes=16e9, hbm_bandwidth=9e11, links=6, link_bandwidth=2.5e10, nic_bandwidth=25e9 / 8 / 8, curves=(),
    )  # fmt: skip


def gpt(case: Case) -> tuple[Callable, Any, Any]:
    """A decoder with tied embeddings: (loss, weights, tokens)."""
    d, heads = case.width, case.heads

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def layer(h: Any, p: Any) -> tuple[Any, None]:
        b, n, _ = h.shape
        q, k, v = (
            jnp.einsum("bnd,dhe->bnhe", norm(h, p["n1"]), p[w].reshape(d, heads, d // heads)) for w in "qkv"
        )
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / jnp.sqrt(d // heads).astype(h.dtype)
        scores = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(n), scores, -1e30)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(h.dtype)
        h = h + jnp.einsum("bhts,bshe->bthe", weights, v).reshape(b, n, d) @ p["o"]
        return h + jax.nn.gelu(norm(h, p["n2"]) @ p["up"]) @ p["down"], None

    def loss(w: Any, tokens: Any) -> jax.Array:
        h, _ = lax.scan(jax.checkpoint(layer), w["embedding"][tokens] + w["positions"], w["layers"])
        logits = jax.nn.log_softmax((norm(h) @ w["embedding"].T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))

    of = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    of |= {"n1": (d,), "n2": (d,)}
    w = {"layers": {n: array(case.layers, *s) for n, s in of.items()}}
    w |= {"embedding": array(WORDS, d), "positions": array(LENGTH, d)}
    return loss, w, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


def row(name: str, which: str) -> dict[str, Any]:
    """One plan: `which` is "alpa" (pinned), "same" (its stages and microbatches, else free) or "auto"."""
    case = CASES[name]
    loss, w, tokens = gpt(case)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), w)

    def step(w: Any, m: Any, v: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), m, gradient)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g.astype(jnp.float32) ** 2, v, gradient)
        new = jax.tree.map(lambda w, m, v: w - (1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype), w, m, v)
        return new, m, v, value

    axes = {"stage": case.stages, "data": case.data, "model": case.model}
    axes = {a: n for a, n in axes.items() if n > 1}
    mesh = jshard.topology(
        f"v100-like:{case.gpus // 8}x8" if case.gpus > 8 else "v100-like:8", axes, compiles=False
    )
    pipeline: Any = {"axis": "stage", "microbatches": case.microbatches}
    pins: dict[str, Any] = {}
    if which == "alpa":
        pins["x"] = P("data" if case.data > 1 else None)
        if case.model > 1:
            cuts = dict.fromkeys(("q", "k", "v", "up"), P("stage", None, "model"))
            cuts |= dict.fromkeys(("o", "down"), P("stage", "model", None))
            pins["w"] = {"layers": cuts}
    config = {"pipeline": "auto" if which == "auto" else pipeline}
    f = jshard.shard(
        step, mesh=mesh, level=2, donate_argnums=(0, 1, 2), config=config, memory_budget=10**15,
        in_strategy=pins or None,
    )  # fmt: skip
    begin = time.process_time()
    plan = f.plan(w, state, state, tokens)
    p = plan.pipeline
    return {
        "cpu": time.process_time() - begin, "step": plan.step_seconds, "objective": plan.cost.objective,
        "bound": plan.cost.bound, "peak": plan.cost.peak_bytes,
        "chosen": f"{p.stages} stages over {p.axis}, M {p.microbatches}, R {p.rounds}" if p else "no pipeline",
    }  # fmt: skip


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as a page."""
    doc = (__doc__ or "").split("\n\n", 1)[1].strip()
    lines = [
        "# Alpa's pipelines of GPT beside jshard's", "", f"`python -m benchmarks.planning.alpa_gpt`. {doc}", "",
        "Costs are seconds of a step by jshard's model, not measured ones.", "",
        "| model, GPUs | Alpa's choice | as pins, s | same stages, free, s | auto, s | chosen by auto | least / Alpa's | "
        "peak of Alpa's and of the least, GiB | CPU, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in CASES.items():
        found = {w: rows[f"{name} {w}"] for w in ("alpa", "same", "auto") if f"{name} {w}" in rows}
        if "alpa" not in found or len(found) < 2:
            continue
        alpa = found["alpa"]
        least = min((r for w, r in found.items() if w != "alpa"), key=lambda r: r["objective"])
        cell = {w: f"{found[w]['objective']:.2f}" if w in found else "not run" for w in ("same", "auto")}
        seconds = ", ".join(format(r["cpu"], ".0f") for r in found.values())
        chosen = found["auto"]["chosen"] if "auto" in found else "not run"
        lines.append(
            f"| {name}, {case.gpus} | {case.said} | {alpa['objective']:.2f} | {cell['same']} | {cell['auto']} | {chosen} | "
            f"{least['objective'] / alpa['objective']:.3f} | {alpa['peak'] / 2**30:.1f}, {least['peak'] / 2**30:.1f} | "
            f"{seconds} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the rows and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    jshard.hardware.register(v100())
    kept = {r["name"]: r for r in map(json.loads, ROWS.read_text().splitlines())} if ROWS.exists() else {}
    for which in ("alpa", "same", "auto"):
        for name in CASES:
            title = f"{name} {which}"
            if args.only in title:
                kept[title] = {"name": title, **row(name, which)}
                ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept.values()))
                PAGE.write_text(page(kept))
                print(kept[title], flush=True)


if __name__ == "__main__":
    main()
