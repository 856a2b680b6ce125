"""`python -m benchmarks.planning.fewest_pieces`: the fewest microbatches of a step that does not fit, or why none fits.

A training step (SGD with momentum, bf16, donated, level 2) of the shape of Llama-8B on 32 v5e, without `jax.checkpoint`,
planned with `microbatches="auto"`, and with `jax.checkpoint` beside it; CPU seconds with the trace. Rows are kept in
`fewest_pieces.jsonl`, from which `fewest_pieces.md` is written. `--only WORD` runs the rows with this in their names.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

import jshard
from benchmarks.planning import pipeline_choice


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
CASES = {  # batch of 4,096 tokens each, whether layers are checkpointed, microbatches
    "without jax.checkpoint, 32 sequences, auto": (32, False, "auto"),
    "without jax.checkpoint, 64 sequences, auto": (64, False, "auto"),
    "with jax.checkpoint, 32 sequences": (32, True, None),
}


def row(batch: int, checkpoint: bool, microbatches: Any) -> dict[str, Any]:
    """One step planned, or refused."""
    loss, w, tokens = pipeline_choice.llama(32, 4096, 14336, 32, 8, batch, checkpoint)

    def step(w: Any, m: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradient)
        return jax.tree.map(lambda w, m: w - 0.01 * m, w, m), m, value

    mesh = jshard.topology("v5e:4x8", {"data": 4, "model": 8})
    f = jshard.shard(step, mesh=mesh, level=2, donate_argnums=(0, 1), microbatches=microbatches)
    begin = time.process_time()
    try:
        plan = f.plan(w, w, tokens)
    except jshard.ShardError as error:
        return {"cpu": time.process_time() - begin, "refused": str(error)}
    steps = [s for s in plan.steps if s.startswith("microbatches")]
    return {
        "cpu": time.process_time() - begin, "pieces": plan.microbatches, "step": plan.step_seconds,
        "peak": plan.cost.peak_bytes, "budget": plan.memory_budget, "steps": steps,
        "gap": plan.cost.objective / plan.cost.bound - 1,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    lines = [
        "# The fewest microbatches of a step that does not fit", "",
        "`python -m benchmarks.planning.fewest_pieces`: a training step of the shape of Llama-8B (32 layers in a scan, "
        "4,096 tokens a sequence, SGD with momentum in bf16) on v5e:4x8, data 4 x model 8, level 2. CPU seconds with the "
        "trace.",
        "",
        "| step | microbatches | step, ms | peak, GiB | of, GiB | above the bound | CPU, s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    texts = []
    for r in rows:
        if "refused" in r:
            lines.append(f"| {r['name']} | refused | | | | | {r['cpu']:.1f} |")
        else:
            lines.append(
                f"| {r['name']} | {r['pieces']} | {r['step'] * 1e3:,.0f} | {r['peak'] / 2**30:.2f} | "
                f"{r['budget'] / 2**30:.2f} | {r['gap']:.1%} | {r['cpu']:.1f} |"
            )
        said = r.get("steps") or [r["refused"]] if "refused" in r or r.get("steps") else []
        texts += ["", f"## {r['name']}", "", "```text", *said, "```"] if said else []
    return "\n".join([*lines, *texts, ""])


def main() -> None:
    """Run the rows and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for name, case in CASES.items():
        if args.only in name:
            new = {"name": name, **row(*case)}
            kept = [r for r in kept if r["name"] != name] + [new]
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept))
            PAGE.write_text(page(kept))
            print(new, flush=True)


if __name__ == "__main__":
    main()
