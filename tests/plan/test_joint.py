"""`mesh="auto"`: the grids that the pins allow, the best of them, and the others in the plan."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jshard
from tests.helpers import training_steps


def told(plan: jshard.Plan) -> dict[str, float]:
    """Grid -> objective, from the plan's steps."""
    found = [re.fullmatch(r"mesh (.*): (\S+) \S+", s) for s in plan.steps]
    return {m[1]: float(m[2]) for m in found if m}


@pytest.mark.parametrize(("machine", "devices"), [("v5e:2x4", 8), ("v5e:4x4", 16)])
def test_the_best_grid_of_a_named_machine(machine, devices):
    w = training_steps.gpt(batch=8, context=64, width=256, heads=8, vocab=512)
    plan = jshard.shard(training_steps.step(w), mesh=f"auto:{machine}").plan(*w.arguments())
    grids = told(plan)
    assert plan.mesh.total == devices and len(grids) == {8: 3, 16: 4}[devices]
    assert str(plan.mesh) == next(iter(grids)) and list(grids.values()) == sorted(grids.values())
    assert plan.cost.objective == pytest.approx(min(grids.values()), rel=1e-3)
    axes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    same = jshard.shard(training_steps.step(w), mesh=jshard.topology(machine, axes)).plan(*w.arguments())
    assert same.cost == plan.cost


def test_pins_leave_fewer_grids():
    def dense(x, w):
        return x @ w

    x = jnp.ones((16, 16))
    f = jshard.shard(dense, ((2, None), None), mesh="auto:8")
    plan = f.plan(x, x)
    assert set(told(plan)) == {"x=2 x y=4", "x=2 x y=2 x z=2"}
    assert plan.inputs[0].layout.cuts(plan.mesh)[0] == 2
    assert (f(x, x) == x @ x).all()


def test_more_devices_than_there_are():
    n = jax.device_count()
    with pytest.raises(jshard.ShardError) as e:
        jshard.shard(jnp.sin, mesh="auto:4096").plan(jnp.ones(8))
    assert str(e.value) == (
        f"mesh='auto:4096' asks for 4096 devices, there are {n}\n"
        "  where: mesh\n"
        f'  write instead: "auto:{n}" or fewer, or a machine by name: "auto:v5e:4x4"'
    )
