"""Predicted and measured steps of programs on the devices at hand, before and after `jshard.calibrate`.

`python benchmarks/runtime/calibration.py` calibrates the machine, measures the programs of `step_programs.py` on it with
`plan.measure`, appends a line of JSON to `benchmarks/runtime/calibration.jsonl` and writes `calibration.md` anew with the
last run on each kind of devices. Without a GPU it runs on eight virtual CPU devices; on a machine with GPUs (JAX with
CUDA, `pip install '.[gpu]'`) it takes those, one or several: the same command, some minutes, nothing else to set. Sizes
grow with the device (`--scale`); `--save my-cluster.json` keeps the chip. A program that cannot be cut over so many
devices, or does not fit on them, is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jshard  # noqa: E402


sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.runtime.step_programs import Program, further_programs, programs  # noqa: E402


HERE = pathlib.Path(__file__).parent
RESULTS, TABLE = HERE / "calibration.jsonl", HERE / "calibration.md"


def measured(p: Program, n: int, hardware: str | None) -> Any:
    """The measurement of a program that is planned for a chip (None: the table's)."""
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jshard.shard(p.run, in_strategy=p.cut, mesh=mesh, hardware=hardware, level=2)
    args = [
        jnp.asarray(np.random.default_rng(k).standard_normal(s), jnp.float32) * 0.1
        for k, s in enumerate(p.shapes)
    ]
    return f.plan(*args).measure(f, *args)


def row(p: Program, n: int, calibrated: str) -> dict[str, Any] | None:
    """Predicted and measured seconds of a program; None, and why is printed, where it cannot be measured here."""
    try:
        before, after = measured(p, n, None), measured(p, n, calibrated)
    except Exception as error:  # of whatever the runtime raises where memory is short
        print(f"{p.name}: not measured: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return None
    print(p.name, after, flush=True)
    return {
        "name": p.name, "before": before.predicted, "after": after.predicted, "measured": after.measured,
        "spread": after.spread,
    }  # fmt: skip


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(np.array(v))).astype(float) for v in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def section(run: dict[str, Any]) -> list[str]:
    """The lines about one run."""
    lines = [f"## {run['devices']}, {run['date']}", ""]
    if run.get("other_work"):
        lines += [f"Other work on the machine: {run['other_work']}.", ""]
    lines += table_of_rows(run["rows"])
    if run.get("further"):
        lines += ["Programs that were written after what calibration measures had been chosen:", ""]
        lines += table_of_rows(run["further"])
    return [*lines, "```", run["calibration"], "```", ""]


def table_of_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Errors in all, and of each program."""
    if len(rows) < 2:
        return [f"{len(rows)} of the programs measured.", ""]
    lines = []
    for what, key in (("the table's chip", "before"), ("the calibrated chip", "after")):
        errors = [abs(r[key] / r["measured"] - 1) for r in rows]
        order = rank_correlation([r[key] for r in rows], [r["measured"] for r in rows])
        lines.append(f"- {what}: median error {statistics.median(errors):.0%}, rank correlation {order:.2f}")
    lines += [
        "",
        "| program | measured | quartiles | table's chip | error | calibrated | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        figures = "".join(
            f"| {1e3 * r[k]:.3g} ms | {r[k] / r['measured'] - 1:+.0%} " for k in ("before", "after")
        )
        lines.append(f"| {r['name']} | {1e3 * r['measured']:.3g} ms | {r['spread']:.0%} {figures}|")
    return [*lines, ""]


def write_page() -> None:
    """The Markdown page, of the last run on each kind of devices."""
    runs = {r["devices"]: r for r in map(json.loads, RESULTS.read_text().splitlines())}
    lines = [
        "# Predicted and measured steps",
        "",
        "Written by `make bench-calibration`. Each program is planned at level 2 from the cut of its arguments, with the",
        "table's chip and with the calibrated one, and run as planned (`plan.measure`: the median of its calls). The eight",
        "devices of the CPU runs are threads of two cores. Larger steps are in [device_steps](device_steps.md).",
        "",
    ]
    TABLE.write_text("\n".join([*lines, *(line for r in runs.values() for line in section(r))]))


def main() -> int:
    """Calibrate, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--scale", type=int, default=0, help="rows of the programs; default: by the kind of device"
    )
    parser.add_argument("--programs", type=int, default=12, help="measure so many of them")
    parser.add_argument("--further", action="store_true", help="measure ten more programs beside")
    parser.add_argument("--other-work", default="", help="what else the machine did, for the page")
    parser.add_argument("--save", help="a file for the calibrated chip")
    a = parser.parse_args()
    devices = jax.devices()
    scale = a.scale or (1 if devices[0].platform == "cpu" else 64)
    base = jshard.hardware.for_device(devices[0]).name
    found = jshard.calibrate(devices, save=a.save, name=f"{base}-here")
    print(found, flush=True)
    chosen = programs(len(devices), scale)[: a.programs]
    rows, more = (
        [r for p in some if (r := row(p, len(devices), found.chip.name)) is not None]
        for some in (chosen, further_programs(len(devices), scale) if a.further else [])
    )
    run = {
        "devices": found.devices,
        "date": found.date,
        "jax": jax.__version__,
        "calibration": str(found),
        "rows": rows,
        "further": more,
        "other_work": a.other_work,
    }
    with RESULTS.open("a") as f:
        f.write(json.dumps(run) + "\n")
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
