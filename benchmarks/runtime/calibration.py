"""Predicted and measured steps of programs on the devices at hand, before and after `jshard.calibrate`.

`python benchmarks/runtime/calibration.py` calibrates the machine, measures the programs below on it with
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
from collections.abc import Callable
from typing import Any, NamedTuple


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import jshard  # noqa: E402


HERE = pathlib.Path(__file__).parent
RESULTS, TABLE = HERE / "calibration.jsonl", HERE / "calibration.md"


class Program(NamedTuple):
    """A function with its arguments' shapes and how they are cut over the axes of a mesh, by number of pieces."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    cut: tuple[tuple[int, ...] | None, ...]


def mlp(w1: Any, w2: Any, x: Any) -> Any:
    """Two products with a nonlinearity."""
    return jnp.tanh(x @ w1) @ w2


def training_step(w1: Any, w2: Any, x: Any) -> Any:
    """One step of gradient descent of `mlp`."""
    g = jax.grad(lambda w: (mlp(w[0], w[1], x) ** 2).mean())((w1, w2))
    return w1 - 0.1 * g[0], w2 - 0.1 * g[1]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention over the last two dimensions."""
    s = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(s), v)


def layers(ws: Any, x: Any) -> Any:
    """Scanned layers, each a product and a normalisation."""

    def layer(h: Any, w: Any) -> Any:
        h = jnp.tanh(h @ w)
        return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6), None

    return lax.scan(layer, x, ws)[0].sum()


def programs(n: int, scale: int) -> list[Program]:
    """Twelve programs for n devices; `scale` multiplies the rows of what is cut by the batch."""
    r, d = 1024 * scale, 512
    return [
        Program("products of a cut batch", mlp, ((d, 2 * d), (2 * d, d), (r, d)), (None, None, (n, 1))),
        Program("gathered weights", mlp, ((d, 2 * d), (2 * d, d), (r, d)), ((n, 1), (n, 1), (n, 1))),
        Program("columns then rows", mlp, ((d, 2 * d), (2 * d, d), (r, d)), ((1, n), (n, 1), (1, 1))),
        Program("training, copies of weights", training_step, ((d, 2 * d), (2 * d, d), (r, d)), ((1, 1), (1, 1), (n, 1))),
        Program("training, gathered weights", training_step, ((d, 2 * d), (2 * d, d), (r, d)), ((n, 1), (n, 1), (n, 1))),
        Program("a small product", lambda x, w: x @ w, ((256, 256), (256, 256)), ((n, 1), None)),
        Program("attention, heads", attention, ((16, 256 * scale, 64),) * 3, ((8 if n % 8 == 0 else n, 1, 1),) * 3),
        Program("scanned layers", layers, ((4, d, d), (r, d)), ((1, n, 1), (n, 1))),
        Program("light operators", lambda x: jnp.tanh(x * 2 + 1) * x - x.mean(-1, keepdims=True), ((4 * r, d),), ((n, 1),)),
        Program("transpose of a cut matrix", lambda x: x.T * 2, ((2 * r, 1024),), ((n, 1),)),
        Program("sum to one copy", lambda x: x.sum(0) + 1, ((4 * r, d),), ((n, 1),)),
        Program("contracted dimension cut", lambda x, w: x @ w, ((512, 4 * r), (4 * r, 512)), ((1, n), (n, 1))),
    ]  # fmt: skip


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
    rows = run["rows"]
    lines = [f"## {run['devices']}, {run['date']}", ""]
    if len(rows) < 2:
        return [*lines, f"{len(rows)} of the programs measured.", "", "```", run["calibration"], "```", ""]
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
    return [*lines, "", "```", run["calibration"], "```", ""]


def write_page() -> None:
    """The Markdown page, of the last run on each kind of devices."""
    runs = {r["devices"]: r for r in map(json.loads, RESULTS.read_text().splitlines())}
    lines = [
        "# Predicted and measured steps",
        "",
        "Written by `make bench-calibration`. Each program is planned at level 2 from the cut of its arguments, with the",
        "table's chip and with the calibrated one, and run as planned (`plan.measure`: the median of its calls). The two",
        "cores of the CPU runs here were shared with other work, of which there was more or less at different times.",
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
    parser.add_argument("--save", help="a file for the calibrated chip")
    a = parser.parse_args()
    devices = jax.devices()
    scale = a.scale or (1 if devices[0].platform == "cpu" else 64)
    base = jshard.hardware.for_device(devices[0]).name
    found = jshard.calibrate(devices, save=a.save, name=f"{base}-here")
    print(found, flush=True)
    chosen = programs(len(devices), scale)[: a.programs]
    rows = [r for p in chosen if (r := row(p, len(devices), found.chip.name)) is not None]
    run = {
        "devices": found.devices,
        "date": found.date,
        "jax": jax.__version__,
        "calibration": str(found),
        "rows": rows,
    }
    with RESULTS.open("a") as f:
        f.write(json.dumps(run) + "\n")
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
