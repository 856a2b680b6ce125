"""Predicted and measured seconds, and planned and allocated memory, of the unseen steps on one device at hand.

    python benchmarks/runtime/device_steps.py [NAME ...]     # all steps, or those whose name contains a NAME

Each step of `benchmarks/compilers/unseen_steps.py`, whole, is planned at level 2 for one device (a mesh of one), with the
table's chip and with a calibrated one (`--chip`, as `calibration.py --save` writes it), and run as planned (`plan.measure`:
the median of its calls). A step that is planned to hold more than 85% of the device is named and left out. On one device
there is no communication: what is compared is the compute of the plan, and its peak.

Rows are appended to `device_steps.jsonl`, and `device_steps.md` is written anew with the last row of each step on each kind
of device. Programs are compiled side by side before the first is measured (`--ahead` threads), through JAX's cache of
compiled programs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jshard  # noqa: E402
from benchmarks.compilers.live_bytes import allocated_bytes  # noqa: E402
from benchmarks.compilers.unseen_steps import cases  # noqa: E402


ROWS, PAGE = pathlib.Path(__file__).with_suffix(".jsonl"), pathlib.Path(__file__).with_suffix(".md")
MOST = 0.85


def filled(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """An array of this shape: small random numbers, or integers below 1,000."""
    key = jax.random.key(seed)
    if shape.dtype == jnp.uint32:
        return jnp.arange(shape.size, dtype=jnp.uint32).reshape(shape.shape)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, 0, 1000, shape.dtype)
    if jnp.issubdtype(shape.dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, shape.shape)
    return jax.random.uniform(key, shape.shape, shape.dtype, 0.001, 0.05)


def planned(name: str, hardware: str | None) -> tuple[Any, Any, tuple[Any, ...]]:
    """The step for one device, its plan and the shapes of its arguments."""
    case = cases()[name]()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jshard.shard(case.step, mesh=mesh, level=2, donate_argnums=case.donated, hardware=hardware)
    return f, f.plan(*case.args), case.args


def row(name: str, found: tuple[Any, Any, tuple[Any, ...]], calibrated: float | None) -> dict[str, Any]:
    """One step, measured."""
    f, plan, shapes = found
    args = jax.tree.map(lambda s: filled(s, 1), shapes)
    measured = plan.measure(f, *args)
    return {
        "name": name, "predicted": measured.predicted, "calibrated": calibrated, "measured": measured.measured,
        "spread": measured.spread, "peak": plan.cost.peak_bytes, "allocated": allocated_bytes(f.lower(*args).compile()),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines about the rows of one kind of device."""
    lines = []
    for what, key in (("the table's chip", "predicted"), ("the calibrated chip", "calibrated")):
        errors = [abs(r[key] / r["measured"] - 1) for r in rows if r.get(key)]
        if errors:
            lines.append(f"- {what}: median error {statistics.median(errors):.0%} of {len(errors)} steps")
    near = sum(abs(r["peak"] / r["allocated"] - 1) <= 0.1 for r in rows)
    lines += [
        f"- memory: {near} of {len(rows)} planned within 10% of what the compiled program allocates",
        "",
        "| step | measured | quartiles | table's chip | error | calibrated | error | planned MiB | allocated MiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: r["name"]):
        figures = "".join(
            f"| {1e3 * r[k]:.3g} ms | {r[k] / r['measured'] - 1:+.0%} " if r.get(k) else "| | "
            for k in ("predicted", "calibrated")
        )
        lines.append(
            f"| {r['name']} | {1e3 * r['measured']:.3g} ms | {r['spread']:.0%} {figures}| {r['peak'] / 2**20:,.0f} "
            f"| {r['allocated'] / 2**20:,.0f} | {r['peak'] / r['allocated']:.2f} |"
        )
    return [*lines, ""]


def write_page() -> None:
    """The page, of the last row of each step on each kind of device."""
    rows = {(r["device"], r["name"]): r for r in map(json.loads, ROWS.read_text().splitlines())}
    lines = [
        "# Unseen steps on one device, predicted and measured", "",
        "Written by `python benchmarks/runtime/device_steps.py`. Each step of",
        "[unseen_steps](../compilers/unseen_steps.md) is planned whole for one device and run as planned. \"Allocated\" is",
        "what the compiled program needs by its `memory_analysis()`: arguments, results and its arena, gaps included. Plans",
        "count what the TPU's compiler fuses; the GPU's writes operands of products that the TPU's computes inside of them.",
        "",
    ]  # fmt: skip
    for device in sorted({d for d, _ in rows}):
        kept = [r for (d, _), r in rows.items() if d == device]
        left = [r for r in kept if "left_out" in r]
        done = [r for r in kept if "measured" in r]
        lines += [f"## {device}, {max(r['date'] for r in kept)}, JAX {kept[-1]['jax']}", "", *table(done)]
        lines += [
            f"- {r['name']}: not measured: {r['left_out']}" for r in sorted(left, key=lambda r: r["name"])
        ]
        lines += [""] if left else []
    PAGE.write_text("\n".join(lines))


def main() -> int:
    """Plan all, compile side by side, measure one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--chip", help="a calibrated chip's file")
    parser.add_argument("--ahead", type=int, default=8, help="threads that compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no measurement after so long")
    parser.add_argument(
        "--memory", type=float, help="bytes of the device, where the chip's table says otherwise"
    )
    parser.add_argument(
        "--only-plan", action="store_true", help="print planned peaks and seconds, run nothing"
    )
    a = parser.parse_args()
    begun, device = time.perf_counter(), jax.devices()[0]
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    chip = jshard.hardware.for_device(device)
    about = {"device": device.device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
    found: dict[str, tuple[Any, float | None]] = {}
    out: list[dict[str, Any]] = []
    for name in cases():
        if a.names and not any(n in name for n in a.names):
            continue
        try:
            made = planned(name, None)
            calibrated = planned(name, a.chip)[1] if a.chip else None
        except Exception as error:
            traceback.print_exc()
            out.append({**about, "name": name, "left_out": str(error).splitlines()[0]})
            continue
        peak, seconds = made[1].cost.peak_bytes, made[1].step_seconds
        print(
            f"{time.perf_counter() - begun:5.0f} s  {name}: planned {peak / 2**30:.1f} GiB, {1e3 * seconds:.3g} ms",
            flush=True,
        )
        if peak > MOST * (a.memory or chip.hbm_bytes or float("inf")):
            out.append({**about, "name": name, "left_out": f"it is planned to hold {peak / 2**30:.0f} GiB"})
        elif not a.only_plan:
            start = jshard.hardware.get(calibrated.chip).call_seconds if calibrated else 0.0
            found[name] = made, calibrated.step_seconds + start if calibrated else None
    with concurrent.futures.ThreadPoolExecutor(a.ahead) as pool:
        for made, _ in found.values():
            pool.submit(lambda made: made[0].lower(*made[2]).compile(), made)
        pool.shutdown(wait=True)
    print(f"{time.perf_counter() - begun:5.0f} s  compiled", flush=True)
    for name, (made, calibrated) in found.items():
        if time.perf_counter() - begun > a.seconds:
            break
        try:
            out.append({**about, **row(name, made, calibrated)})
        except Exception as error:  # of whatever the runtime raises where memory is short
            out.append({**about, "name": name, "left_out": str(error).splitlines()[0][:200]})
        print(f"{time.perf_counter() - begun:5.0f} s  {json.dumps(out[-1])}", flush=True)
    if out:
        with ROWS.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in out)
        write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
