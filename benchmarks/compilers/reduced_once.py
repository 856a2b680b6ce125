"""`python -m benchmarks.compilers.reduced_once`: a pipeline that reduces weight gradients in each tick, and the same once.

Here the row of `pipelines.py` of two slices with M = 4, R = 2 at a width of 1024 is compiled for the same machine as it is
planned, with weight gradients reduced once; with those of `gate` and `up` cut along 4096 in place of 1024, which the plan
counts the same; and reduced in each tick. The last is planned with links of the data axis 1.5 times as fast and replayed;
of its planned and compiled seconds, those on that axis are multiplied by 1.5 again.

Runs in the compilers' environment (`compilers.py`). The figures are on `pipelines.md`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax

import jshard
from benchmarks.compilers.pipelines import MACHINES, shapes, step


FASTER = 1.5
PIPELINE = {"axis": "stage", "microbatches": 4, "rounds": 2}


def with_fast_axis(mesh: Any, axis: str) -> Any:
    """The machine with links of one axis `FASTER` times faster, to plan on."""
    fast, links = copy.copy(mesh), mesh.links
    each = [
        dataclasses.replace(
            link,
            wires=tuple(dataclasses.replace(w, bandwidth=w.bandwidth * FASTER) for w in link.wires),
        )
        if name == axis
        else link
        for name, link in zip(links.mesh.names, links.links, strict=True)
    ]
    fast.__dict__["links"] = dataclasses.replace(links, links=tuple(each))  # a cached property
    return fast


def report(name: str, f: Any, plan: Any, divide: float) -> None:
    """Compile, and print the step's planned and compiled milliseconds and the bytes in use."""
    compiled = f.lower(*shapes()).compile()
    timeline = plan.verify(compiled).timeline
    planned = plan.cost.objective
    for c in plan.collectives:
        if c.axes == ("data",):
            planned -= c.seconds * c.count * (1 - 1 / divide)
    own = {c.operator for c in plan.collectives if c.axes == ("data",)}
    on_axis = [i for i in timeline.collectives if i.planned and i.operator in own and not i.asynchronous]
    seconds = timeline.step - sum(i.seconds * (1 - 1 / divide) for i in on_axis)
    in_use = compiled.memory_analysis().peak_memory_in_bytes
    print(
        f"{name}: planned {1e3 * planned:.1f} ms, compiled {1e3 * seconds:.1f} ms, of which compute "
        f"{1e3 * timeline.compute:.1f} ms; {in_use / 1e6:.0f} MB in use"
    )


def main() -> None:
    """Plan and compile all three."""
    machine, axes, slices = MACHINES["two slices of v5e:4x4"]
    mesh = jshard.topology(machine, axes, num_slices=slices, compiles=True)
    common = {"level": 2, "donate_argnums": (0, 1), "config": {"pipeline": PIPELINE}}
    rows = {"x": jax.P("data")}
    cuts = {
        "gate": jax.P("stage", None, "data"),
        "up": jax.P("stage", None, "data"),
        "down": jax.P("stage", "data"),
    }
    pinned = rows | {"params": cuts, "momentum": cuts}
    for name, pins in (("once", rows), ("once, cut along 4096", pinned)):
        f = jshard.shard(step, mesh=mesh, in_strategy=pins, **common)
        report(name, f, f.plan(*shapes()), 1.0)
    fast = jshard.shard(step, mesh=with_fast_axis(mesh, "data"), in_strategy=pinned, **common)
    plan = fast.plan(*shapes())
    report("in each tick", jshard.shard(step, mesh=mesh, donate_argnums=(0, 1), plan=plan), plan, 1 / FASTER)


if __name__ == "__main__":
    main()
