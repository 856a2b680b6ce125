"""Sequences of 256 to 131,072 tokens on the TPU compiler: speed of a layer on 2, 4 and 8 devices, memory of long attention.

    python benchmarks/compilers/sequences.py [--plans] [NAME ...]        # all rows, or those whose name contains a NAME

Each row is a training step, planned at level 2 and compiled for v5e in a process of its own (`make test-compilers` makes the
environment), kept in `sequences.jsonl`; the page is written anew after each. `--plans` compiles nothing: such rows have no
figure of the compiler's.

- `layer-T`: one layer of Llama-7B's sizes (width 4096, 32 heads, gated MLP of 11,008) on 16,384 tokens in sequences of T,
  the batch cut: the table of ShardFormer's README (N_CTX 256 to 4096 on 2 and 4 GPUs) as ratios to one device. Two devices
  are half of a host's chips: no slice is as small, but libtpu compiles for them. The step is estimated as in
  `benchmarks/quality/quality.py`: the compiler's cycles, and the collectives on the links that they can use. In brackets
  the ratio to one device.
- `attention-T`: projections and causal attention of 8 heads of 128, sequences cut, 8,192 to 131,072 tokens: bytes received
  as planned and as compiled, and the memory of a device.
- `ring-T`: the same by the recipe `ring`. On 16 devices, which 8 heads do not divide, the search gathers keys and values for
  8,192 tokens since that is faster (1.40 against 4.37 ms planned), and a limit of memory or this recipe keeps them cut: then
  a device's memory is 27.3 MB, for weights and their gradients, and 55.3 kB a token of its own, so it falls as 1 / devices.
- Since 24 November 2026 the blocks of a ring are splash attention's kernels too; the last column counts their calls in the
  compiled program. The compiler's cycles do not contain kernels, so compiled seconds of `layer-T` are without attention.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ROWS, PAGE = pathlib.Path(__file__).with_suffix(".jsonl"), pathlib.Path(__file__).with_suffix(".md")
GRID = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4"}
TOKENS, WIDTH, HEADS, HIDDEN = 16_384, 4096, 32, 11_008
SPEED = [(f"layer-{t}", n) for t in (256, 512, 1024, 2048, 4096) for n in (1, 2, 4, 8) if TOKENS // t >= n]
LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
MEMORY = [(f"attention-{t}", n) for t in LENGTHS for n in (1, 4, 8, 16)]
MEMORY += [(f"ring-{t}", n) for t in LENGTHS for n in (4, 8, 16)]


def layer(length: int) -> tuple[Any, tuple[Any, ...], Any]:
    """A training step of one layer, its arguments and its strategy."""
    import jax
    import jax.numpy as jnp

    import jshard

    def loss(p: Any, x: Any) -> Any:
        y = jshard.ops.rms_norm(x, p["n1"])
        q, k, v = ((y @ p[n]).reshape(*x.shape[:2], HEADS, -1) for n in "qkv")
        x = x + jshard.ops.attention(q, k, v, causal=True).reshape(x.shape) @ p["o"]
        y = jshard.ops.rms_norm(x, p["n2"])
        x = x + jshard.ops.activated_product(
            y @ p["gate"], p["down"], activation=jax.nn.silu, times=y @ p["up"]
        )
        return (x.astype("float32") ** 2).mean()

    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {
        "n1": (WIDTH,), "n2": (WIDTH,), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)
    }  # fmt: skip
    p = {n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in shapes.items()}

    def step(p: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, x)
        return value, jax.tree.map(lambda w, d: (w - jnp.asarray(1e-3, w.dtype) * d).astype(w.dtype), p, g)

    x = jax.ShapeDtypeStruct((TOKENS // length, length, WIDTH), "bfloat16")
    return step, (p, x), (None, jax.P("x"))


def attention(length: int) -> tuple[Any, tuple[Any, ...], Any]:
    """A training step of projections and attention, its arguments and its strategy."""
    import jax

    from tests.rules.test_attention import layer as projections

    fn, args = projections(1, length, 8, 8, 128)
    return fn, args, (None, jax.P(None, "x"))


def two_chips() -> Any:
    """Two of a v5e host's four chips: no slice, so `jshard.topology` has none of that shape, but libtpu compiles for it."""
    import jax
    from jax.experimental import topologies

    import jshard
    from jshard._core.named_topology import TopologyMesh

    whole = jshard.topology("v5e:1x1", {"x": 1}, compiles=False)
    found = topologies.get_topology_desc("v5e:1x2", platform="tpu", chips_per_host_bounds=(1, 2, 1))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=found.devices)
    return TopologyMesh("v5e:1x2", whole.hardware, (1, 2), 1, mesh, True)


def one(name: str, devices: int, compiles: bool) -> dict[str, Any]:
    """Plan and, if wanted, compile a row here."""
    import jshard
    from benchmarks.quality.quality import measures

    kind, _, length = name.partition("-")
    fn, args, strategy = {"layer": layer, "attention": attention, "ring": attention}[kind](int(length))
    mesh = (
        two_chips()
        if devices == 2
        else jshard.topology(f"v5e:{GRID[devices]}", {"x": devices}, compiles=compiles)
    )
    pins: dict[str, Any] = {"config": "ring"} if kind == "ring" else {"in_strategy": strategy}
    f = jshard.shard(fn, **pins, mesh=mesh, level=2)
    begun = time.monotonic()
    plan = f.plan(*args)
    planned = time.monotonic() - begun
    cut = next((str(o.operands[0]) for o in plan.operators if o.primitive == "jshard_attention"), "")
    row = {
        "queries": cut, "step": plan.cost.compute + plan.cost.communication, "gap": plan.cost.gap,
        "planned_bytes": sum(c.bytes * c.count for c in plan.collectives),
        "planned_peak": plan.cost.peak_bytes, "plan_seconds": round(planned, 1),
    }  # fmt: skip
    if not compiles:
        return row
    compiled = f.lower(*args).compile()
    checked = plan.verify(compiled)
    found = measures(compiled, mesh, plan.model_flops.flops)
    return row | {
        "planned_bytes": checked.predicted, "emitted_bytes": checked.emitted, "verified": checked.ok,
        "compiled_peak": found["off_chip"], "seconds": found["by_links"],
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "compile_seconds": round(time.monotonic() - begun - planned, 1),
    }  # fmt: skip


def spawn(name: str, devices: int, compiles: bool) -> dict[str, Any]:
    """A row, made in a process of its own, since compilers abort."""
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1",
               ALLOW_MULTIPLE_LIBTPU_LOAD="1")  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps([name, devices, compiles])],
        env=env,
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    row = json.loads(found[-1]) if found else {"failed": (done.stderr.splitlines() or ["no output"])[-1]}
    return {"name": name, "devices": devices} | row


def page(rows: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The two tables in Markdown."""

    def cells(name: str, n: int) -> str:
        row, whole = rows.get((name, n), {}), rows.get((name, 1), {})
        if "step" not in row:
            return row.get("failed", "not run")[:60]
        text = []
        for key, what in (("seconds", "compiled"), ("step", "planned")):
            if key in row:
                ratio = f" ({row[key] / whole[key]:.3f})" if n > 1 and key in whole else ""
                text.append(f"{what} {1e3 * row[key]:.1f} ms{ratio}")
        return ", ".join(text)

    title, intro = (__doc__ or "").split("\n\n", 1)
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += ["| sequences | 1 device | 2 devices | 4 devices | 8 devices |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(name for name, _ in SPEED):
        if any((name, n) in rows for n in (1, 2, 4, 8)):
            out.append(f"| {name} | " + " | ".join(cells(name, n) for n in (1, 2, 4, 8)) + " |")
    heads = "tokens", "devices", "queries", "received, MB", "compiled", "memory, GB", "compiled, off chip"
    last = "times devices, over one device's | planned, ms | kernels"
    out += ["", f"| {' | '.join(heads)} | {last} |", "|---" * 10 + "|"]
    for name, n in MEMORY:
        row = rows.get((name, n))
        if row is None:
            continue
        if "failed" in row:
            out.append(f"| {name} | {n} | {row['failed'][:60]} | | | | | | | |")
            continue
        whole = rows.get((name.replace("ring", "attention"), 1), {}).get("planned_peak")
        share = f"{row['planned_peak'] * n / whole:.2f}" if whole else ""
        emitted, peak = row.get("emitted_bytes"), row.get("compiled_peak")
        note = "" if row.get("verified", True) else " (not as planned)"
        out.append(
            f"| {name} | {n} | {row['queries']} | {row['planned_bytes'] / 1e6:,.1f} | "
            f"{'' if emitted is None else f'{emitted / 1e6:,.1f}{note}'} | {row['planned_peak'] / 1e9:.3f} | "
            f"{'' if peak is None else f'{peak / 1e9:.3f}'} | {share} | {1e3 * row['step']:.2f} | {row.get('kernels', '')} |"
        )
    return "\n".join([*out, ""])


def main() -> None:
    """Make the rows that are asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: every row")
    parser.add_argument("--plans", action="store_true", help="plan only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*json.loads(options.one))))
        return
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    rows = {(r["name"], r["devices"]): r for r in map(json.loads, lines)}
    for name, devices in (*SPEED, *MEMORY):
        if options.names and not any(part in f"{name}:{devices}" for part in options.names):
            continue
        row = rows[name, devices] = spawn(name, devices, not options.plans)
        print(json.dumps(row), flush=True)
        kept = [rows[key] for key in (*SPEED, *MEMORY) if key in rows]
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in kept))
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
