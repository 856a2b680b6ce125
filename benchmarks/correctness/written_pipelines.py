"""`python -m benchmarks.correctness.written_pipelines`: training steps as users write them in pipelines, beside plain JAX.

`unseen_pipelines.py` draws the sizes and options of one family of models; here are seventy-odd steps that differ in what
the layers and the update do: optimizers, kinds of layers, several loops, skips, caches, experts, keys, checkpoints, frozen
parts, Flax modules, objectives (`tests/helpers/pipeline_*.py`). Each runs on `SHAPES` drawn by a seed. In float64 on eight
CPU devices all results equal those of plain JAX to 1e-12, emitted bytes are the planned ones, and the stages' permutes are
R M + S - 1 for every value that a loop carries per example. A refusal is a row with its text. Rows are kept in
`written_pipelines.jsonl`, from which `written_pipelines.md` is written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jshard  # noqa: E402
from benchmarks.correctness.pipeline_laws import LIMIT, mesh_of  # noqa: E402
from benchmarks.correctness.unseen_pipelines import compared  # noqa: E402
from tests.helpers import pipeline_networks, pipeline_objectives, pipeline_steps, pipeline_updates  # noqa: E402


ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
SHAPES = [  # stages, data, model, microbatches, rounds, layers more than stages x rounds
    (2, 4, 1, 4, 1, 2),
    (2, 2, 2, 8, 2, 0),
    (4, 2, 1, 8, 1, 0),
    (4, 1, 2, 4, 2, 0),
    (8, 1, 1, 4, 1, 0),
    (2, 4, 1, 2, 1, 1),
    (4, 2, 1, 4, 1, 1),
    (4, 1, 2, 16, 1, 4),
]
STEPS: dict[str, Callable[[int], pipeline_steps.Step]] = {
    name: f
    for module in (pipeline_updates, pipeline_steps, pipeline_networks, pipeline_objectives)
    for name, f in vars(module).items()
    if getattr(f, "__annotations__", {}).get("return") == "Step" and f.__module__ == module.__name__
    and list(f.__annotations__) == ["layers", "return"]
}  # fmt: skip


def check(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The laws of a step on a shape."""
    stages, data, model, m, r, more = shape
    layers = stages * r + more
    step, args = STEPS[name](layers)
    pipeline = {"axis": "stage", "microbatches": m, "rounds": r, "uneven": bool(layers % (stages * r))}
    mesh = mesh_of(stage=stages, data=data, model=model)
    f = jshard.shard(step, mesh=mesh, level=2, config={"pipeline": pipeline})
    found = compared(f, step, *args)
    plan = f.plan(*args, verify=True)
    assert plan.pipeline is not None and plan.verification is not None
    assert plan.verification.ok, str(plan.verification).splitlines()[0]
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    permutes, ticks = sum(c.count for c in shifts), r * m + stages - 1
    assert permutes == len(shifts) * ticks, permutes
    repeated = sum(c.count > 1 for c in plan.collectives) - len(shifts)
    return {
        **found,
        "permutes": permutes,
        "loops": len(plan.pipeline.layers),
        "ticks": ticks,
        "repeated": repeated,
    }


def title(name: str, shape: tuple[int, ...]) -> str:
    """The words of a case."""
    stages, data, model, m, r, more = shape
    return f"{name}: {stages * r + more} layers, stage {stages} x data {data} x model {model}, M {m}, R {r}"


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    errors = [r["error"] for r in rows if "error" in r]
    refused, failed = ([r for r in rows if k in r] for k in ("refused", "failed"))
    lines = [
        "# Steps as users write them, in pipelines", "",
        f"`python -m benchmarks.correctness.written_pipelines`: {len(rows)} cases, {len(errors)} equal to plain JAX "
        f"(largest relative error {max(errors, default=0):.1e}, limit {LIMIT:.0e}), {len(refused)} refused with a reason, "
        f"{len(failed)} failed. Float64, 8 CPU devices, JAX {' and '.join(sorted({r['jax'] for r in rows}))}.", "",
        "Permutes: of the stages, planned and emitted, beside loops times (R M + S - 1). A loop whose layers carry several "
        "values per example that layers read has one permute a tick for each; to the gradient of an encoder's output layers "
        "only add, and no permute passes it on. Repeated: other collectives that run in each tick.", "",
        "| step and where it runs | relative error, or why not | permutes | loops x ticks | repeated |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        reason = r.get("refused") or r.get("skipped") or f"**failed**: {r.get('failed', '')}"
        result = f"{r['error']:.1e}" if "error" in r else " ".join(reason.split())
        loops = f"{r['loops'] * r['ticks']}" if "loops" in r else ""
        lines.append(
            f"| {r['case']} | {result} | {r.get('permutes', '')} | {loops} | {r.get('repeated', '')} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the cases that are not kept, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--shapes", type=int, default=1, help="of every step")
    parser.add_argument("--anew", action="store_true", help="cases that are kept as well")
    args = parser.parse_args()
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for name in STEPS:
        if args.only and name not in args.only.split(","):
            continue
        for shape in random.Random(f"{args.seed} {name}").sample(SHAPES, args.shapes):
            case = title(name, shape)
            if not args.anew and any(row["case"] == case for row in kept):
                continue
            try:
                row = check(name, shape)
            except jshard.ShardError as error:
                row = {"refused": str(error).replace(f"{ROOT}/", "")}
            except Exception as error:  # a row says which case failed, and the others run
                row = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            row = {"case": case, "jax": jax.__version__, **row}
            kept = [r for r in kept if r["case"] != case] + [row]
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept))
            PAGE.write_text(page(kept))
            print(row, flush=True)


if __name__ == "__main__":
    main()
