"""`python -m benchmarks.quality.audit`: shardings that others publish, priced on full-size shapes beside the search's plan.

Each row is a rule list of `tests/helpers/foreign_rules.py` (MaxText, EasyLM, Keras, tunix) or a file of
`examples/configs` on a Llama or a Qwen3-MoE of full width with a few layers, on two machines. Printed and written to
`audit.md`: predicted step, peak memory and the bytes that every device holds whole, of the file and of the search. A row
that is there already is not run again; `--only NAME` runs one, `--layers N` sets the depth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jshard
from jshard._report.format_units import format_bytes, format_seconds
from tests.helpers import foreign_rules as rules


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
MACHINES = {"v5p:4x4x4": 64, "h100:8x8": 64}
BATCH, LENGTH = 64, 4096


def shapes(tree: Any) -> Any:
    """Shapes in bfloat16 as `ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention over (batch, sequence, heads, width)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def easylm_llama(layers: int) -> tuple[Callable[..., Any], Any]:
    """A training loss of a Llama of 8B width with EasyLM's names, and its parameters."""
    d, ff, heads = 4096, 14336, 32
    block = {
        "attention": {n: {"kernel": (d, d)} for n in ("wq", "wk", "wv", "wo")},
        "feed_forward": {"w1": {"kernel": (d, ff)}, "w2": {"kernel": (ff, d)}, "w3": {"kernel": (d, ff)}},
    }
    tree = {"transformer": {"wte": {"embedding": (128256, d)}, "h": {str(i): block for i in range(layers)}}}
    tree["lm_head"] = {"kernel": (d, 128256)}

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["transformer"]["wte"]["embedding"][tokens]
        for i in range(layers):
            w = p["transformer"]["h"][str(i)]
            a = w["attention"]
            q, k, v = ((x @ a[n]["kernel"]).reshape(*x.shape[:2], heads, -1) for n in ("wq", "wk", "wv"))
            x = x + attend(q, k, v).reshape(x.shape) @ a["wo"]["kernel"]
            f = w["feed_forward"]
            x = x + (jax.nn.silu(x @ f["w1"]["kernel"]) * (x @ f["w3"]["kernel"])) @ f["w2"]["kernel"]
        return jnp.mean((x @ p["lm_head"]["kernel"]) ** 2)

    return loss, shapes(tree)


def keras_qwen3_moe(layers: int) -> tuple[Callable[..., Any], Any]:
    """A training loss of Qwen3-30B-A3B's width with keras-hub's names, and its parameters; every expert runs."""
    d, ff, experts, heads, width = 2048, 768, 128, 32, 128

    def block() -> Any:
        attention = {n: {"kernel": (d, heads, width)} for n in ("query", "key", "value")}
        return {
            "self_attention": attention | {"attention_output": {"kernel": (heads, width, d)}},
            "experts": {
                "expert_feedforward_gate_dense": (experts, d, 2 * ff),
                "expert_feedforward_output_dense": (experts, ff, d),
            },
            "sparse_feedforward_gate_dense": {"kernel": (d, experts)},
        }

    tree = {f"transformer_layer_{i}": block() for i in range(layers)}
    tree["token_embedding"] = {"embeddings": (151936, d), "reverse_embeddings": (d, 151936)}

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["token_embedding"]["embeddings"][tokens]
        for i in range(layers):
            w = p[f"transformer_layer_{i}"]
            a = w["self_attention"]
            q, k, v = (jnp.einsum("bsd,dhw->bshw", x, a[n]["kernel"]) for n in ("query", "key", "value"))
            x = x + jnp.einsum("bshw,hwd->bsd", attend(q, k, v), a["attention_output"]["kernel"])
            share = jax.nn.softmax(x @ w["sparse_feedforward_gate_dense"]["kernel"])
            slots = jnp.einsum("bsd,bse->ebd", x, share)  # one slot an example and expert
            both = jnp.einsum("ebd,edf->ebf", slots, w["experts"]["expert_feedforward_gate_dense"])
            gate, up = jnp.split(both, 2, axis=-1)
            out = jnp.einsum(
                "ebf,efd->ebd", jax.nn.silu(gate) * up, w["experts"]["expert_feedforward_output_dense"]
            )
            x = x + jnp.einsum("ebd,bse->bsd", out, share)
        return jnp.mean((x @ p["token_embedding"]["reverse_embeddings"]) ** 2)

    return loss, shapes(tree)


def cases() -> dict[
    str, tuple[Callable[[int], tuple[Callable[..., Any], Any]], jshard.Config, dict[str, int]]
]:
    """Name -> (model, configuration, sizes of its mesh axes on 64 devices)."""
    llama = jshard.Config.from_regexes(rules.EASYLM_LLAMA)
    names = {  # MaxText's logical axes for the same parameters
        "transformer.wte.embedding": ("vocab", "embed"), "lm_head.kernel": ("embed", "vocab"),
        **{f"transformer.h.{i}.attention.{n}.kernel": ("embed", "q_heads") for i in range(8) for n in ("wq", "wk", "wv")},
        **{f"transformer.h.{i}.attention.wo.kernel": ("heads", "embed") for i in range(8)},
        **{f"transformer.h.{i}.feed_forward.{n}.kernel": ("embed", "mlp") for i in range(8) for n in ("w1", "w3")},
        **{f"transformer.h.{i}.feed_forward.w2.kernel": ("mlp", "embed") for i in range(8)},
    }  # fmt: skip
    maxtext = jshard.Config.from_logical_rules(
        rules.MAXTEXT_RULES, names, {"data": 1, "fsdp": 16, "tensor": 4}
    )
    qwen = jshard.Config.from_layout_map(rules.KERAS_QWEN3_MOE)
    return {
        "EasyLM Llama": (easylm_llama, llama, {"dp": 1, "fsdp": 16, "mp": 4}),
        "MaxText base": (easylm_llama, maxtext, {"data": 1, "fsdp": 16, "tensor": 4}),
        "Keras Qwen3-MoE": (keras_qwen3_moe, qwen, {"batch": 16, "model": 4}),
    }


def run(name: str, machine: str, layers: int) -> dict[str, Any]:
    """One row: the file and the search on a machine."""
    make, config, mesh = cases()[name]
    loss, params = make(layers)
    axes = list(mesh)
    batch = [a for a in axes if a in ("dp", "data", "fsdp", "batch")]
    entry = ", ".join(batch)
    sizes = ", ".join(f"{a}: {n}" for a, n in mesh.items())
    config = config.override(
        f"mesh={{machine: '{machine}', axes: {{{sizes}}}}}", f"inputs.tokens=[[{entry}], null]"
    )

    def step(params: Any, tokens: jax.Array) -> Any:
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    begin = time.process_time()
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    report = jshard.audit(step, config.override("memory_budget=10TiB"), params, tokens)
    return {
        "name": name, "machine": machine, "layers": layers, "cpu": round(time.process_time() - begin, 1),
        "file": [report.file.step, report.file.peak_bytes], "search": [report.search.step, report.search.peak_bytes],
        "whole": report.whole_bytes, "largest": report.whole[0].path if report.whole else "",
        "problems": sorted({p.kind for p in report.problems}), "proof": report.proof,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The page of all rows."""
    lines = [
        "# Shardings that others publish, beside the search",
        "",
        f"Written by `python -m benchmarks.quality.audit`: SGD steps in bfloat16 on {BATCH} x {LENGTH} tokens, no"
        " rematerialisation, no memory limit; full width, few layers. Predictions of the model, not measurements.",
        "",
        "| rules | machine | layers | step: file, search | peak: file, search | whole on every device | in the check |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        (a, m), (b, n) = r["file"], r["search"]
        whole = f"{format_bytes(r['whole'])}{', ' + r['largest'] if r['largest'] else ''}"
        lines.append(
            f"| {r['name']} | {r['machine']} | {r['layers']} | {format_seconds(a)}, {format_seconds(b)} ({a / b:.2f} x)"
            f" | {format_bytes(m)}, {format_bytes(n)} | {whole} | {', '.join(r['problems']) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rows that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(r["name"], r["machine"], r["layers"]) for r in rows}
    for name in cases():
        for machine in MACHINES:
            if (name, machine, options.layers) in done or options.only not in name:
                continue
            rows.append(run(name, machine, options.layers))
            print(json.dumps(rows[-1]), flush=True)
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
