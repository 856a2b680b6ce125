"""Bytes between slices, planned and emitted by the compilers, for two slices of v5e:4x4 and four hosts of eight H100.

    python benchmarks/compilers/slices.py

A step of training (two products and their gradients, SGD, bf16) is planned by jshard on a hybrid mesh of which only the
rows of the batch are given, and by hand as `jax.jit` takes it on the same mesh (batch over data axes, weights over
"model"). Both are compiled without a device, in the environment that `benchmarks/compilers/compilers.py` makes; counted is
what a device receives from other slices, in small batches (activations are cheaper to move) and large ones (weights and
their gradients are). Below the table: the planned collectives that cross. `benchmarks/compilers/slices.md` has the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
BATCHES = (8192, 262144)
WIDTH, HIDDEN = 2048, 8192


def step(params: Any, x: Any, y: Any) -> Any:
    """One step of SGD on a network of two layers: (new parameters, loss)."""
    import jax
    import jax.numpy as jnp

    def loss(p: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ p["in"]) @ p["out"] - y).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def shapes(batch: int) -> tuple[Any, Any, Any]:
    """Types of the arguments of `step`."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    return {"in": array(WIDTH, HIDDEN), "out": array(HIDDEN, WIDTH)}, array(batch, WIDTH), array(batch, WIDTH)


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


def crossing_list(plan: Any, links: Any) -> str:
    """The collectives of a plan that cross slices, with their planned bytes; without scalars."""
    from jshard._report.crossing import Crossing, crossing

    found = []
    for c in plan.collectives:
        of: Crossing = crossing(dataclasses.replace(plan, collectives=(c,)), links)
        if of.bytes > 1e3:
            found.append(f"{c.kind} of {c.tensor} ({c.local}) {of.bytes:,.0f} B")
    return "; ".join(found)


def rows(machine: str, batch: int) -> list[str]:
    """The rows of one machine, for a batch of so many rows."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P

    import jshard
    from jshard._report.crossing import crossing

    name, axes, slices = MACHINES[machine]
    topology = jshard.topology(name, axes, num_slices=slices, compiles=True)
    data = tuple(a for a in axes if a != "model")
    mesh, devices, cut = topology.jax_mesh, topology.devices, P(data)
    f = jshard.shard(step, mesh=topology, in_strategy={"x": cut, "y": cut}, level=2)
    plan = f.plan(*shapes(batch))
    planned = crossing(plan, topology.links)
    received, large = emitted(f.lower(*shapes(batch)).compile(), devices, slices)
    out = [_row(machine, batch, "jshard", planned.bytes, received, large, plan)]
    lists = [f"- {machine}, {batch:,} rows, jshard: {crossing_list(plan, topology.links)}"]

    def on(spec: Any) -> Any:
        return NamedSharding(mesh, spec)

    params = {"in": on(P(None, "model")), "out": on(P("model", None))}
    hand = jax.jit(step, in_shardings=(params, on(cut), on(cut)), out_shardings=(params, on(P())))
    pins = {"params": {"in": P(None, "model"), "out": P("model", None)}, "x": cut, "y": cut}
    by_hand = jshard.shard(
        step, mesh=topology, in_strategy=pins, out_strategy=(pins["params"], None), level=2
    )
    priced = by_hand.plan(*shapes(batch))
    received, large = emitted(hand.lower(*shapes(batch)).compile(), devices, slices)
    planned = crossing(priced, topology.links)
    out.append(_row(machine, batch, "by hand", planned.bytes, received, large, priced))
    lists.append(f"- {machine}, {batch:,} rows, by hand: {crossing_list(priced, topology.links)}")
    return [*lists, *out]


def _row(
    machine: str, batch: int, layout: str, planned: float, received: float, large: int, plan: Any
) -> str:
    cells = [machine, f"{batch:,}", layout, f"{planned:,.0f}", f"{received:,.0f}", str(large)]
    return f"| {' | '.join([*cells, f'{1e3 * plan.step_seconds:.2f}'])} |"


def main() -> None:
    """Run every machine in the compilers' environment, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=list(MACHINES))
    parser.add_argument("--batch", type=int, default=BATCHES[0])
    args = parser.parse_args()
    if args.machine:
        print("\n".join(rows(args.machine, args.batch)))
        return
    where = Path(os.environ.get("COMPILERS_VENV", ROOT / f".venv-compilers-3.{sys.version_info[1]}"))
    python = where / "bin" / "python" if "COMPILERS_VENV" in os.environ else environment(where)
    lines = [
        "| machine | rows | layout | planned B | emitted B | collectives over 1 MB | step, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lists: list[str] = []
    for machine, batch in itertools.product(MACHINES, BATCHES):
        run = subprocess.run(
            [str(python), __file__, "--machine", machine, "--batch", str(batch)], cwd=ROOT, text=True, capture_output=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        found = run.stdout.splitlines()
        lines += [line for line in found if line.startswith("|")] or [run.stderr[-2000:]]
        lists += [line for line in found if line.startswith("-")]
    print("\n".join([*lines, "", *lists]))


if __name__ == "__main__":
    main()
