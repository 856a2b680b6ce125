"""The physical needs of plans: never above what a plan does, equal where a plan attains them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import Config, gpt_step
from test_brute_force import random_program

import jshard
from jshard._doors import TopologyMesh
from jshard._plan.physics import even_footprint


S = jax.ShapeDtypeStruct
MACHINES = {
    "v5e": ("v5e:2x4", {"x": 2, "y": 4}),
    "7x": ("7x:2x2x1", {"x": 2, "y": 4}),
    "h100": ("h100:1x8", {"x": 2, "y": 4}),
    "cpu": ("cpu:4", {"x": 4}),
}


def machine(name: str) -> TopologyMesh:
    shape, axes = MACHINES[name]
    return jshard.topology(shape, axes, compiles=False)


def below(plan: jshard.Plan) -> bool:
    """The law; True where there was something to say."""
    least, moved = plan.physics, sum(plan.bytes_by_kind.values())
    assert least.bytes == pytest.approx(sum(n.bytes * n.count for n in least.products))
    assert least.bytes <= moved * (1 + 1e-9)
    assert least.seconds <= (plan.cost.compute + plan.cost.communication) * (1 + 1e-9)
    assert least.space_gap(plan.cost.compute + plan.cost.communication) >= 0
    return least.bytes > 0


@pytest.mark.parametrize("name", MACHINES)
def test_no_plan_beats_physics(name):
    told = 0
    for seed in range(40):
        fn, shapes = random_program(seed)
        rng = np.random.default_rng(seed)
        pins = [
            P(*(("x", None), (None, "x"))[int(rng.integers(2))]) if rng.random() < 0.7 else None
            for _ in shapes
        ]
        wanted = {i: p for i, p in enumerate(pins) if p is not None}
        n = MACHINES[name][1]["x"]
        fits = all(
            s % n == 0 for i, p in wanted.items() for s, a in zip(shapes[i].shape, p, strict=True) if a
        )
        strategy = tuple(pins) if fits else None
        for level in (0, 2):
            plan = jshard.shard(fn, strategy, level=level, mesh=machine(name)).plan(*shapes)
            told += below(plan)
    assert told >= 2


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("search", ["optimal", "propagation"])
def test_nor_does_one_of_a_training_step(scan, search):
    step, args = gpt_step(Config(layers=2, width=32, heads=2, context=16, batch=16, scan=scan, remat=scan))
    below(jshard.shard(step, {"batch": P("x")}, mesh=machine("v5e"), search=search).plan(*args))
    cut = {
        "params": {**jax.tree.map(lambda x: None, args[0]), "head": P("x"), "embed": P("x")},
        "batch": P("x"),
    }
    assert below(jshard.shard(step, cut, mesh=machine("cpu"), search=search).plan(*args))


def test_a_cut_weight_is_gathered_at_its_bound():
    """Many rows and a cut weight (ZeRO-3): physics asks for the rest of the weight, and that is what moves."""
    every = P(("x", "y"))
    f = jshard.shard(lambda x, w: x @ w, (every, every), out_strategy=every, mesh=machine("v5e"))
    plan = f.plan(S((4096, 64), "float32"), S((64, 128), "float32"))
    assert plan.physics.bytes == pytest.approx(64 * 128 * 4 * 7 / 8) == sum(plan.bytes_by_kind.values())
    assert [n.regime for n in plan.physics.products] == ["1D"]


def test_a_contracted_cut_is_summed_at_its_bound():
    """Few rows, the contraction cut: each device ends with its share of the sum, and nothing else moves."""
    f = jshard.shard(lambda x, w: x @ w, (P(None, "x"), P("x")), out_strategy=P("x"), mesh=machine("cpu"))
    plan = f.plan(S((64, 4096), "float32"), S((4096, 64), "float32"))
    assert plan.bytes_by_kind == {"reduce_scatter": 64 * 64 * 4 * 3 / 4}
    assert plan.physics.bytes == pytest.approx(64 * 64 * 4 * 3 / 4)


def test_whole_copies_and_batches_need_nothing():
    plan = jshard.shard(lambda x, w: x @ w, (P("x"), P()), mesh=machine("cpu")).plan(S((64, 8), "float32"),
                                                                                   S((8, 8), "float32"))  # fmt: skip
    assert plan.physics.bytes == 0 and "space gap" not in str(plan)
    many = jshard.shard(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (P("x"), P("x")), mesh=machine("cpu"))
    assert many.plan(S((16, 8, 8), "float32"), S((16, 8, 8), "float32")).physics.products == ()


def test_batches_are_done_whole_first():
    one = 3 * 64 * 64
    assert even_footprint(8, 64, 64, 64, 8) == one and even_footprint(16, 64, 64, 64, 8) == 2 * one
    assert even_footprint(4, 64, 64, 64, 8) == even_footprint(1, 64, 64, 64, 2)
    assert even_footprint(1, 64, 64, 64, 8) == pytest.approx(3 * 32 * 32)


def test_it_is_told_and_kept():
    f = jshard.shard(lambda x, w: x @ w, (P(None, "x"), P("x")), mesh=machine("cpu"))
    plan = f.plan(S((64, 4096), "float32"), S((4096, 64), "float32"))
    assert "space gap" in str(plan).splitlines()[2] and "space gap" in plan.to_markdown()
    assert jshard.Plan.from_json(plan.to_json()).physics == plan.physics != type(plan.physics)()
