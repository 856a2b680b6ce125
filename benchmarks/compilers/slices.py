"""Bytes between slices, planned and emitted by the compilers, for two slices of v5e:4x4 and four hosts of eight H100.

    python benchmarks/compilers/slices.py

A step of training (two products and their gradients, SGD, bf16) is planned by jshard on a hybrid mesh of which only the
rows of the batch are given, and by hand as `jax.jit` takes it on the same mesh (batch over data axes, weights over
"model"). Both are compiled without a device, in the environment that `benchmarks/compilers/compilers.py` makes; counted is
what a device receives from other slices. With `--write` the table goes to `benchmarks/compilers/slices.md`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.compilers import ENVIRONMENT, environment  # noqa: E402


MACHINES = {
    "two slices of v5e:4x4": ("v5e:4x4", {"slice": 2, "data": 4, "model": 4}, 2),
    "four hosts of 8 H100": ("h100:8", {"host": 4, "model": 8}, 4),
}
BATCH, WIDTH, HIDDEN = 8192, 2048, 8192


def step(params: Any, x: Any, y: Any) -> Any:
    """One step of SGD on a network of two layers: (new parameters, loss)."""
    import jax
    import jax.numpy as jnp

    def loss(p: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ p["in"]) @ p["out"] - y).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def shapes() -> tuple[Any, Any, Any]:
    """Types of the arguments of `step`."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    return {"in": array(WIDTH, HIDDEN), "out": array(HIDDEN, WIDTH)}, array(BATCH, WIDTH), array(BATCH, WIDTH)


def emitted(compiled: Any, devices: int, slices: int) -> tuple[float, int]:
    """Bytes that a device receives from other slices, and how many collectives of more than 1 MB do that.

    The text of a TPU program is that of one slice, where transfers between slices are marked; on GPU the groups tell.
    """
    from jshard._report.crossing import crosses
    from jshard._verify import read_program
    from jshard._verify.replica_groups import read_groups, read_pairs

    total, large = 0.0, 0
    found = read_program(compiled)
    marked = [e for e in found.collectives if e.form == "between slices"]
    for e in marked or found.collectives:
        received = e.requested_total
        if not marked:
            group = (read_pairs(e.groups) if e.kind == "permute" else read_groups(e.groups, devices))[0]
            across = len({d // (devices // slices) for d in group})
            received = crosses(e.kind, len(group), across, received) if across > 1 else 0.0
        total += received
        large += received > 1e6
    return total, large


def rows(machine: str) -> list[str]:
    """The rows of one machine."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P

    import jshard
    from jshard._report.crossing import crossing

    name, axes, slices = MACHINES[machine]
    topology = jshard.topology(name, axes, num_slices=slices, compiles=True)
    data = tuple(a for a in axes if a != "model")
    mesh, devices, cut = topology.jax_mesh, topology.devices, P(data)
    f = jshard.shard(step, mesh=topology, in_strategy={"x": cut, "y": cut}, level=2)
    plan = f.plan(*shapes())
    planned = crossing(plan, topology.links)
    received, large = emitted(f.lower(*shapes()).compile(), devices, slices)
    out = [
        f"| {machine} | jshard | {planned.bytes:,.0f} | {received:,.0f} | {large} | {1e3 * plan.step_seconds:.2f} |"
    ]

    def on(spec: Any) -> Any:
        return NamedSharding(mesh, spec)

    params = {"in": on(P(None, "model")), "out": on(P("model", None))}
    hand = jax.jit(step, in_shardings=(params, on(cut), on(cut)), out_shardings=(params, on(P())))
    pins = {"params": {"in": P(None, "model"), "out": P("model", None)}, "x": cut, "y": cut}
    by_hand = jshard.shard(
        step, mesh=topology, in_strategy=pins, out_strategy=(pins["params"], None), level=2
    )
    priced = by_hand.plan(*shapes())
    received, large = emitted(hand.lower(*shapes()).compile(), devices, slices)
    same = crossing(priced, topology.links)
    seconds = f"{1e3 * priced.step_seconds:.2f}"
    return [*out, f"| {machine} | by hand | {same.bytes:,.0f} | {received:,.0f} | {large} | {seconds} |"]


def main() -> None:
    """Run every machine in the compilers' environment, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=list(MACHINES))
    args = parser.parse_args()
    if args.machine:
        print("\n".join(rows(args.machine)))
        return
    where = Path(os.environ.get("COMPILERS_VENV", ROOT / f".venv-compilers-3.{sys.version_info[1]}"))
    python = where / "bin" / "python" if "COMPILERS_VENV" in os.environ else environment(where)
    lines = [
        "| machine | layout | planned B | emitted B | collectives over 1 MB | step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for machine in MACHINES:
        run = subprocess.run(
            [str(python), __file__, "--machine", machine], cwd=ROOT, text=True, capture_output=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        lines += [line for line in run.stdout.splitlines() if line.startswith("|")] or [run.stderr[-2000:]]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
