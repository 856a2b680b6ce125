"""Bytes, FLOPs and peak memory that plans predict, against those of the compiled programs, for workloads and machines.

`python benchmarks/compilers/fidelity.py [--only WORKLOAD ...] [--on MACHINE ...] [--seconds 600]` plans every
workload from the cut of its batch alone, compiles it, reads the compiled program and appends one line of JSON a run
to `benchmarks/compilers/fidelity.jsonl`; `benchmarks/compilers/fidelity.md` is written anew from all lines after
each. A run that is there already is left out (`--again` repeats it, `--changed` if its plan moves other bytes or has
another peak than the stored one). Cheap compiles come first.

A process a run, since the compilers may abort it and take memory that they do not give back. The TPU and GPU
compilers are found in the environment that `benchmarks/compilers/compilers.py` makes (or `COMPILERS_VENV`).
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import (  # noqa: E402
    arguments,
    compilers_python,
    in_process,
    kept_rows,
)


RESULTS, TABLE = HERE / "fidelity.jsonl", HERE / "fidelity.md"
MACHINES: dict[str, dict[str, int]] = {
    "cpu:8": {"x": 2, "y": 4},
    "h100:1x8": {"x": 2, "y": 4},
    "h100:4x8": {"x": 4, "y": 8},
    "v5e:2x4": {"x": 2, "y": 4},
    "v5e:4x8": {"x": 4, "y": 8},
    "v5p:4x4x4": {"x": 8, "y": 8},
}
LARGE: dict[str, dict[str, int]] = {"h100:64x8": {"x": 64, "y": 8}, "v5p:8x8x8": {"x": 8, "y": 64}}
# By what they take to compile, least first.
WORKLOADS = ("mlp-512", "mlp-64k", "moe", "lm-head", "conv", "lora", "llama", "gpt-scan", "vit", "gpt")
WITHIN, AT_MOST = 0.02, 0.10
# What the TPU compiler is told where `--quick` is asked for: it spends four fifths less time on the order and the
# tiling of instructions. Eight programs compiled both ways had the same bytes on the wire (fidelity.md).
QUICK = {"exec_time_optimization_effort": -1.0}


def run_one(name: str, machine: str, quick: bool = False, known: Sequence[float] = ()) -> dict[str, Any]:
    """Plan, compile and read one workload; the machine "cpu:8" gets the scaled-down sizes.

    `known`: bytes and peak of the stored plan, which is not compiled again if today's plan has the same.
    """
    import jax

    import jshard
    from benchmarks import workloads

    axes = {**MACHINES, **LARGE}[machine]
    mesh = jshard.topology(machine, axes, compiles=True)
    w = workloads.get(name, small=machine.startswith("cpu"), devices=mesh.devices)
    f = jshard.shard(w.step, in_strategy=w.in_strategy(mesh.devices), level=2, mesh=mesh, donate_argnums=(0,))
    times, cpu = [time.perf_counter()], [time.process_time()]
    plan = f.plan(*w.args)
    if known and same_plan(plan, *known):
        return {"unchanged": True}
    times.append(time.perf_counter())
    lowered = f.lower(*w.args)
    times.append(time.perf_counter())
    cpu.append(time.process_time())
    compiled = lowered.compile(compiler_options=QUICK if quick else None)
    times.append(time.perf_counter())
    cpu.append(time.process_time())
    v = plan.verify(compiled)
    lines = str(v).splitlines()
    return {
        "workload": name,
        "machine": machine,
        "axes": axes,
        "jax": jax.__version__,
        "predicted": v.predicted,
        "emitted": v.emitted,
        "wire": v.wire,
        "error": v.error,
        "complete": v.program.complete,
        "gap": plan.cost.gap,
        "flops_ratio": v.program.flops / (w.flops / mesh.devices),
        "peak": v.program.peak_bytes,
        "predicted_peak": plan.cost.peak_bytes,
        "plan_s": times[1] - times[0],
        "lower_s": times[2] - times[1],
        "compile_s": times[3] - times[2],
        "compile_cpu_s": cpu[2] - cpu[1],
        "quick": quick,
        "explained": [
            s.strip() for s in lines if s.startswith("  not") or "by the compiler" in s or "for a part" in s
        ],
    }


def same_plan(plan: Any, predicted: float, peak: float) -> bool:
    """Whether a plan moves the bytes, and has the peak, of a stored one."""
    from jshard._report.totals import received_bytes

    today = (received_bytes(plan), plan.cost.peak_bytes)
    return all(abs(a - b) <= 1e-9 * max(a, b) for a, b in zip(today, (predicted, peak), strict=True))


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each run."""
    return kept_rows(RESULTS, "workload", "machine")


def known_plan(result: dict[str, Any] | None, *keys: str) -> list[str]:
    """Options that name the bytes and the peak of a stored plan, for `--changed`."""
    if result is None or any(k not in result for k in keys):
        return []
    return ["--known", *(repr(float(result[k])) for k in keys)]


def measured(result: dict[str, Any] | None) -> bool:
    """Whether a run need not be repeated: one that only ran out of time may have more of it now."""
    return result is not None and not result.get("failed", "").startswith("not done in")


def write_table(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The Markdown table of all results, with a verdict over them."""
    good = [r for r in results.values() if "failed" not in r]
    near = sum(r["error"] <= WITHIN and r["complete"] for r in good)
    worst = max((r["error"] for r in good), default=0.0)
    exact = sum(r["wire"] <= r["predicted"] * (1 + WITHIN) for r in good)
    lines = [
        "# Predicted and emitted bytes",
        "",
        "Written by `make bench-fidelity`. Each row is a training step of `benchmarks/workloads.py`, planned at",
        "level 2 from the cut of its batch alone and compiled by the machine's own compiler, with no device. Bytes are",
        "received per device and step. `off` sums the differences kind by kind, over the predicted bytes. `FLOPs` is over",
        "the program's FLOPs / devices; `peak` is the compiled one, with the predicted one over it in brackets.",
        "",
        f"{near} of {len(good)} compiled runs are within {WITHIN:.0%}, the worst is off by {worst:.2%}; "
        f"{len(results) - len(good)} did not compile.",
        "",
        "`emitted` counts a reduce-scatter that a compiler writes as an all-reduce and a slice as what it amounts to.",
        "`wire` is what is really received, over the prediction: TPUs write some reduce-scatters so, the CPU sends bf16",
        f"as f32. By that measure {exact} of {len(good)} are within {WITHIN:.0%}.",
        "",
        "Where seconds have a star, the TPU compiler was told to spend little time on the order and tiling of",
        "instructions (`--quick`: `exec_time_optimization_effort=-1`). Eight programs compiled both ways (mlp-512, mlp-64k,",
        "moe on v5e:2x4 and others) had the same bytes on the wire; `peak` can differ from that of a full compile on v5e.",
        "",
        "`FLOPs` are those of the compiled program. On v5p:4x4x4 a device has few images of `conv`, and the TPU compiler",
        "cuts them into more images of three columns (space to batch), whose overlaps it computes again: 434 for 277 MFLOPs",
        "a convolution, 1.21 in all. The plan's own products and convolutions are at 1.015 there.",
        "",
        "| workload | machine | JAX | predicted B | emitted B | off | wire | FLOPs | peak | plan s | lower + compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = [(w, m) for m in (*MACHINES, *LARGE) for w in WORKLOADS]
    for key in sorted(results, key=order.index):
        r = results[key]
        if "failed" in r:
            lines.append(f"| {key[0]} | {key[1]} | | | | {r['failed']} | | | | | |")
            continue
        peak = f"{r['peak'] / 1e6:,.0f} MB ({r['predicted_peak'] / r['peak']:.2f})" if r["peak"] else ""
        wire = r["wire"] / max(1.0, r["predicted"])
        seconds = f"{r['lower_s'] + r['compile_s']:.1f}{'*' * r.get('quick', False)}"
        lines.append(
            f"| {key[0]} | {key[1]} | {r['jax']} | {r['predicted']:,.0f} | {r['emitted']:,.0f} | {r['error']:.2%} "
            f"| {wire:.2f} | {r['flops_ratio']:.3f} | {peak} | {r['plan_s']:.1f} | {seconds} |"
        )
    notes = [f"- {k[0]} on {k[1]}: {s}" for k, r in results.items() for s in r.get("explained", ())]
    if notes:
        lines += ["", "What the compilers did besides, in the words of `plan.verify`:", "", *notes]
    return "\n".join(lines) + "\n"


def main() -> int:
    """All runs, cheap ones first."""
    parser = arguments(__doc__, WORKLOADS, MACHINES, nargs=2, metavar=("WORKLOAD", "MACHINE"))
    parser.add_argument("--quick", action="store_true", help="TPU programs compiled with little effort")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(run_one(*a.one, quick=a.quick, known=a.known)))
        return 0
    python = compilers_python()
    for name in a.only:
        for machine in a.on:
            last = stored().get((name, machine))
            if measured(last) and not (a.again or a.changed):
                continue
            known = known_plan(last, "predicted", "predicted_peak") if a.changed else []
            quick = ["--quick"] * (a.quick and machine.startswith("v"))
            r = in_process(python, __file__, ["--one", name, machine, *quick, *known], a.seconds)
            if r.get("unchanged"):
                print(name, machine, "the stored plan", flush=True)
                continue
            r = {"workload": name, "machine": machine, **r}
            with RESULTS.open("a") as f:
                f.write(json.dumps(r) + "\n")
            TABLE.write_text(write_table(stored()))
            print(
                name,
                machine,
                r.get("failed") or f"off by {r['error']:.2%}, {r['compile_s']:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
