"""Pipelines compiled by libtpu and by XLA for GPU, without a device: permutes, other collectives, peak memory.

    python benchmarks/compilers/pipelines.py                 # every machine, in the compilers' environment
    python benchmarks/compilers/pipelines.py --only v5e:4x8 --width 4096

A step of SGD with momentum of a residual network of gated layers in a scan with `jax.checkpoint`, bf16, weights and
momentum donated. For every pipeline: permutes of the stages, planned, emitted and 2 (R M + S - 1); other collectives
that run more than once a step (a reduction of weight gradients only where that is cheaper); bytes, planned and emitted;
peak, planned and compiled; weights of a device times stages over all weights. Rows are kept in `pipelines.jsonl`, from which
`pipelines.md` is written.

Two figures of `memory_analysis()` are called a peak. `peak_memory_in_bytes` is what is in use at once, and what a program
must not exceed: of this step with M = 4, R = 1 and a width of 4096 on v5e:4x8 (15.75 GiB), 32 layers compile, with 13.57 GB
in use and 18.04 GB of arguments, results and temporaries (`temp_size_in_bytes`, with gaps between them); 40 layers are
refused with "15.79G" (`--one '["v5e:4x8", 4, 1, 4096, 32]'`, libtpu 0.0.42.1). So the plan is held against what is in use.
At a width of 1024 a tick's values are small enough for the 128 MiB on a v5e's chip, which are no part of it. So the bytes of
all values that live at once are also read from libtpu's own buffer assignment, in the memory and on the chip
(`live_bytes.py`): of these the plan is an estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.compilers import ENVIRONMENT, environment  # noqa: E402
from benchmarks.compilers.live_bytes import allocated_bytes, compiled_with_live_bytes  # noqa: E402


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
MACHINES = {  # topology, axes, slices
    "v5e:4x8": ("v5e:4x8", {"stage": 4, "data": 8}, 1),
    "two slices of v5e:4x4": ("v5e:4x4", {"stage": 2, "data": 16}, 2),
    "h100:2x8": ("h100:8", {"stage": 2, "data": 8}, 2),
}
SHAPES = ((4, 1), (16, 1), (4, 2), (16, 2))  # microbatches, rounds
LAYERS, BATCH = 16, 65536
SIZES = {1024: 4096, 4096: 14336}  # width, hidden


def step(params: Any, momentum: Any, x: Any) -> Any:
    """One step: (new parameters, new momentum, loss)."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def layer(h: Any, w: Any) -> Any:
        y = h / jnp.sqrt(jnp.mean(h.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(h.dtype)
        return h + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(w: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, value


def shapes(width: int = 1024, layers: int = LAYERS) -> tuple[Any, Any, Any]:
    """Types of the arguments of `step`."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    hidden = SIZES[width]
    w = {n: array(layers, width, hidden) for n in ("gate", "up")} | {"down": array(layers, hidden, width)}
    return w, w, array(BATCH, width)


def row(
    machine: str, microbatches: int, rounds: int, width: int = 1024, layers: int = LAYERS
) -> dict[str, Any]:
    """One pipeline, planned and compiled; bytes are those of a device. More layers are planned without a budget."""
    import jax
    import numpy as np

    import jshard
    from jshard._verify.verify_plan import verify_plan

    name, axes, slices = MACHINES[machine]
    topology = jshard.topology(name, axes, num_slices=slices, compiles=True)
    pipeline = {"axis": "stage", "microbatches": microbatches, "rounds": rounds}
    f = jshard.shard(
        step, mesh=topology, level=2, donate_argnums=(0, 1), config={"pipeline": pipeline},
        memory_budget=2**40 if layers > LAYERS else None,
        in_strategy={"x": jax.sharding.PartitionSpec("data")},
    )  # fmt: skip
    plan = f.plan(*shapes(width, layers))
    lowered = f.lower(*shapes(width, layers))
    live: tuple[int, ...] = ()
    if "v5e" in machine:
        compiled, live = compiled_with_live_bytes(lowered)
    else:
        compiled = lowered.compile()
    found = verify_plan(plan, compiled, slices=slices)
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    ids = {c.id for c in shifts}
    others = [c for c in plan.collectives if c.count > 1 and c not in shifts]
    repeated = ", ".join(f"{c.kind} of {c.local} {c.count:.0f} x" for c in others)
    emitted = sum(e.count for r in found.rows if any(p.id in ids for p in r.predicted) for e in r.emitted)
    stats, peak = compiled.memory_analysis(), allocated_bytes(compiled)
    stages = axes["stage"]
    held = sum(
        int(np.prod(i.layout.local_shape(i.shape, plan.mesh))) for i in plan.inputs if "params" in i.path
    )
    whole = sum(int(np.prod(i.shape)) for i in plan.inputs if "params" in i.path)
    return {
        "machine": machine, "microbatches": microbatches, "rounds": rounds, "width": width,
        "formula": 2 * (rounds * microbatches + stages - 1), "planned_permutes": sum(c.count for c in shifts),
        "emitted_permutes": emitted, "repeated": repeated, "verified": found.ok,
        "planned_bytes": found.predicted, "emitted_bytes": found.emitted, "planned_peak": plan.cost.peak_bytes,
        "compiled_peak": peak, "heap_peak": stats.peak_memory_in_bytes, "live": live, "weights": held * stages / whole,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    lines = [
        "# Pipelines compiled for TPU and GPU", "",
        "`python benchmarks/compilers/pipelines.py`, compiled without a device. Permutes of the stages: planned / "
        "emitted / 2 (R M + S - 1). Others: planned runs of other collectives inside loops. Weights: bytes of a "
        "device times stages, of all weights: 1 if they are cut over the stages only, less if over other axes too. "
        "Peaks in MB of a device: `in use` is the compiler's peak, `peak_memory_in_bytes`, which must not exceed the "
        "chip's memory; `allocated` is arguments, results and temporaries with the gaps between them, which may; the "
        "plan over each. `on the chip`: what lies in the 128 MiB on a v5e's chip when most bytes live at once, by "
        "libtpu's own buffer assignment (`live_bytes.py`): weights gathered for a loop, gradients of a tick. `with "
        "it`: the plan over that and what is in use at that time; blank in rows compiled before it was read.",
        "",
        "At a width of 1024 the plans are 88 to 125 MB above what is in use: as much lies on the chip, which no plan "
        "counts on. With it they are within 2%. At 4096 they are within 7%, of what is in use and with what lies on the "
        "chip.",
        "",
        "No row reduces weight gradients in its ticks (the reduce-scatters at 4096 are of activations). Sums of ticks are "
        "rounded from float32 to the gradients' bfloat16 on each device, and then added over the data axis, as parts of a "
        "product are without a pipeline. Where they were added in float32, two slices with M = 4, R = 2 at a width of 1024 "
        "reduced them in each of its 9 ticks. `python -m benchmarks.compilers.reduced_once` compiles both (27 November "
        "2026): once, planned 61.7, compiled 79.2 ms (59.4 of compute, 900 MB in use); in each tick, planned 63.0, "
        "compiled 77.3 ms (51.5 of compute, 497 MB in use: no unreduced sums, 403 MB in float32). The 79.2 are 77.6 ms "
        "with `gate` and `up` cut by 16 along 4096 in place of 1024, which costs the plan the same: blocks of 64 are less "
        "than the 128 lanes of a register, and the compiler makes the reduce-scatter an all-reduce.",
        "",
        "| machine | width | M | R | permutes | others | planned B | emitted B | equal | planned peak | allocated | / "
        "| in use | / | on the chip | with it / | weights |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        if "failed" in r:
            lines.append(
                f"| {r['machine']} | {r['width']} | {r['microbatches']} | {r['rounds']} | {r['failed']} |"
                + " |" * 12
            )
            continue
        lines.append(
            f"| {r['machine']} | {r['width']} | {r['microbatches']} | {r['rounds']} "
            f"| {r['planned_permutes']:.0f} / {r['emitted_permutes']:.0f} / {r['formula']} | {r['repeated'] or 'none'} "
            f"| {r['planned_bytes']:,.0f} | {r['emitted_bytes']:,.0f} | {'yes' if r['verified'] else 'no'} "
            f"| {r['planned_peak'] / 1e6:,.1f} | {r['compiled_peak'] / 1e6:,.1f} "
            f"| {r['planned_peak'] / r['compiled_peak']:.3f} | {r['heap_peak'] / 1e6:,.1f} "
            f"| {r['planned_peak'] / r['heap_peak']:.3f} | {_live(r)} | {r['weights']:.3f} |"
        )
    return "\n".join([*lines, ""])


def _live(r: dict[str, Any]) -> str:
    if not r.get("live"):
        return " | "
    return f"{r['live'][1] / 1e6:,.1f} | {r['planned_peak'] / sum(r['live']):.3f}"


def main() -> None:
    """Run the rows in the compilers' environment, one process each, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--width", type=int, default=1024, choices=SIZES)
    parser.add_argument("--rounds", type=int, default=0, help="only rows of so many rounds")
    parser.add_argument("--one", help="a row as JSON; runs here")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(row(*json.loads(args.one))))
        return
    where = Path(os.environ.get("COMPILERS_VENV", ROOT / f".venv-compilers-3.{sys.version_info[1]}"))
    python = where / "bin" / "python" if "COMPILERS_VENV" in os.environ else environment(where)
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for one in [
        (machine, *shape, args.width)
        for machine in MACHINES
        if args.only in machine
        for shape in SHAPES
        if args.rounds in (0, shape[1])
    ]:
        run = subprocess.run(
            [str(python), __file__, "--one", json.dumps(one)], cwd=ROOT, text=True, capture_output=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        found = [line for line in run.stdout.splitlines() if line.startswith("{")]
        new = (
            json.loads(found[-1])
            if found
            else {"failed": (run.stderr.splitlines() or ["no output"])[-1][:200]}
        )
        new = dict(zip(("machine", "microbatches", "rounds", "width"), one, strict=True)) | new
        kept = [r for r in kept if (r["machine"], r["microbatches"], r["rounds"], r["width"]) != one] + [new]
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept))
        PAGE.write_text(page(kept))
        print(new, flush=True)


if __name__ == "__main__":
    main()
