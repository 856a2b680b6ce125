"""Overlap: what hides under products, each second of a product used once; the step between the longer part and the sum."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy.optimize import linprog

import jshard
from benchmarks import workloads
from jshard._core import hardware
from jshard._core.errors import ShardError
from jshard._cost.collectives import reordering_seconds
from jshard._schedule.hidden_seconds import Transfer, hide
from jshard._schedule.overlap_windows import overlap_windows
from jshard._schedule.schedule import Schedule


MACHINES = {"v5e:2x4": {"x": 2, "y": 4}, "h100:1x8": {"x": 2, "y": 4}, "v5p:2x2x2": {"x": 8}}


def random_transfers(rng: random.Random) -> tuple[list[float], list[Transfer]]:
    products = [rng.choice((0.0, rng.random(), 3 * rng.random())) for _ in range(rng.randint(1, 7))]
    transfers = []
    for _ in range(rng.randint(0, 7)):
        begin = rng.randint(0, len(products))
        end = rng.randint(begin, len(products))
        transfers.append(Transfer(2 * rng.random(), begin, end, float(rng.randint(1, 4))))
    return products, transfers


def most_hidden(products: list[float], transfers: list[Transfer]) -> float:
    """The same as a linear program: seconds of each transfer beside each product of its window."""
    pairs = [(i, k) for i, t in enumerate(transfers) for k in range(t.begin, t.end)]
    if not pairs:
        return 0.0
    limits = np.zeros((len(transfers) + len(products), len(pairs)))
    for column, (i, k) in enumerate(pairs):
        limits[i, column] = limits[len(transfers) + k, column] = 1
    most = [t.seconds for t in transfers] + products
    return -linprog(-np.ones(len(pairs)), A_ub=limits, b_ub=most).fun


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_of_the_windows_hides_more(seed):
    products, transfers = random_transfers(random.Random(seed))
    found = hide(products, transfers)
    assert all(0 <= h <= t.seconds for h, t in zip(found, transfers, strict=True))
    assert sum(found) == pytest.approx(most_hidden(products, transfers), abs=1e-9)
    room = [float(random.Random(seed + 1000).randint(0, 6)) for _ in products]
    assert sum(hide(products, transfers, room)) <= sum(found) + 1e-12
    assert sum(hide(products, transfers, [0.0] * len(products))) == 0


def random_step(rng: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """A training step of random layers in random types, some in a loop, some computed again."""
    types = [rng.choice((jnp.float32, jnp.bfloat16)) for _ in range(rng.randint(2, 5))]
    wide = rng.choice((96, 512, 1000, 2048))
    ws = [jax.ShapeDtypeStruct((wide, wide), t) for t in types]
    kinds = [rng.choice(("plain", "skip", "remat", "loop")) for _ in ws]
    batch = rng.choice((4, 24, 256, 4096))

    def layer(w, x):
        return jnp.tanh(x @ w.astype(x.dtype))

    def loss(ws, x):
        for kind, w in zip(kinds, ws, strict=True):
            if kind == "loop":
                x = jax.lax.scan(lambda c, _, w=w: (layer(w, c), None), x, length=3)[0]
            elif kind == "remat":
                x = jax.checkpoint(layer)(w, x)
            else:
                x = layer(w, x) + (x if kind == "skip" else 0)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return [w - 0.1 * g.astype(w.dtype) for w, g in zip(ws, grads, strict=True)], value

    return step, (ws, jax.ShapeDtypeStruct((batch, wide), rng.choice(types)))


@pytest.mark.parametrize("seed", range(12))
def test_a_step_lies_between_the_longer_part_and_the_sum(seed):
    rng = random.Random(seed)
    step, args = random_step(rng)
    machine = rng.choice(("v5e:2x4", "v5e:2x4", "h100:1x8"))
    devices = 8 if args[1].shape[0] % 8 == 0 else 4
    mesh = jshard.topology(machine, MACHINES[machine])
    level = rng.choice((0, 2, 2))
    given: dict[str, Any] = {"in_strategy": (None, (devices, 1)), "level": level, "mesh": mesh}
    plan = jshard.shard(step, **given).plan(*args)
    c, slack = plan.cost, 1e-9 * plan.serial_seconds
    assert max(c.compute, c.communication) - slack <= plan.step_seconds <= plan.serial_seconds + slack
    assert plan.step_seconds == pytest.approx(c.compute + c.exposed)
    assert c.hidden == pytest.approx(sum(r.hidden * r.count for r in plan.collectives))
    kinds = jshard.hardware.get(plan.chip).async_kinds
    assert all(0 <= r.hidden <= r.seconds and (r.kind in kinds or not r.hidden) for r in plan.collectives)
    assert jshard.Plan.from_json(plan.to_json()) == plan
    without = jshard.shard(step, **given, config={"overlap": False}).plan(*args)
    assert without.cost.hidden == 0 and without.step_seconds == without.serial_seconds


@pytest.mark.parametrize("seed", (2, 14, 17, 19, 20, 23, 39, 42))
def test_a_search_for_what_hides_gives_no_longer_step(seed):
    """In these programs something hides, so that there is a second search."""
    step, args = random_step(random.Random(seed))
    mesh = jshard.topology("v5e:2x4", MACHINES["v5e:2x4"])
    given: dict[str, Any] = {"in_strategy": (None, (4, 1)), "level": 2, "mesh": mesh}
    least, found = (
        jshard.shard(step, **given, config={"overlap": way}).plan(*args) for way in (True, "search")
    )
    assert found.step_seconds <= least.step_seconds
    assert found.cost.gap >= 0 and found.serial_seconds >= least.serial_seconds * (1 - 1e-9)


def test_a_vision_transformer_whose_gathers_hide_is_found():
    """It communicates for longer in all, beside products; the bound stays that of the sum."""
    mesh = jshard.topology("v5e:2x4", MACHINES["v5e:2x4"])
    w = workloads.get("vit", devices=8)
    given: dict[str, Any] = {
        "in_strategy": w.in_strategy(8), "level": 2, "mesh": mesh, "donate_argnums": (0,),
    }  # fmt: skip
    least, found = (
        jshard.shard(w.step, **given, config={"overlap": way}).plan(*w.args) for way in (True, "search")
    )
    assert least.cost.gap == 0 and found.cost.gap > 0
    assert found.step_seconds < 0.99 * least.step_seconds and found.serial_seconds > least.serial_seconds
    assert found.cost.hidden > least.cost.hidden
    assert "overlap: a step of" in str(found.steps[-1]) and not any("overlap:" in s for s in least.steps)


def two_layers(ws, x):
    def loss(ws):
        return ((x @ ws[0]) @ ws[1]).astype(jnp.float32).mean()

    return [w - g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]


def two_layers_plan(machine: str, **options: Any) -> Any:
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    mesh = jshard.topology(machine, MACHINES[machine])
    cut = [(8, 1), (8, 1)]
    f = jshard.shard(
        two_layers, in_strategy=(cut, (8, 1)), out_strategy=tuple(cut), level=2, mesh=mesh,
        donate_argnums=(0,), **options,
    )  # fmt: skip
    return f.plan([w, w], jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16))


def test_on_v5e_the_gather_of_the_second_weight_hides_under_the_first_product():
    plan = two_layers_plan("v5e:2x4")
    gathers = [r for r in plan.collectives if r.kind == "all_gather"]
    assert [(r.tensor, r.hidden > 0) for r in gathers] == [("ws.0", False), ("ws.1", True)]
    assert all(r.hidden == 0 for r in plan.collectives if r.kind != "all_gather")
    assert f"{jshard.Plan.from_json(plan.to_json()).cost.hidden:.6g}" == f"{gathers[1].hidden:.6g}"
    assert "of it hidden), step" in str(plan) and "as far as collectives hide" in str(plan.figures())


def test_on_v5p_nothing_hides():
    plan = two_layers_plan("v5p:2x2x2")
    assert plan.cost.communication > 0 and plan.cost.hidden == 0 and plan.step_seconds == plan.serial_seconds
    assert "of it hidden" not in str(plan)


def test_a_result_that_has_no_room_is_waited_for():
    free = two_layers_plan("v5e:2x4")
    tight = two_layers_plan("v5e:2x4", memory_budget=int(free.cost.peak_bytes) + 1)
    assert free.cost.hidden > 0 and tight.decision == free.decision and tight.cost.hidden == 0


def test_the_switch_takes_true_false_or_search():
    with pytest.raises(ShardError, match="overlap is a str, 'no'") as e:
        two_layers_plan("v5e:2x4", config={"overlap": "no"})
    assert 'overlap: true, false, or "search"' in str(e.value)
    assert two_layers_plan("v5e:2x4", config={"overlap": "search"}).cost.hidden > 0
    with pytest.raises((ShardError, TypeError), match="overlap"):
        two_layers_plan("v5e:2x4", overlap=False)


@pytest.mark.parametrize("seed", range(4))
def test_windows_of_arrays_are_those_of_the_written_schedule(seed, monkeypatch):
    from jshard._plan import planner

    made: list[Schedule] = []
    summarize = planner.summarize

    def noting(solution, *args):
        made.append(solution.schedule)
        return summarize(solution, *args)

    monkeypatch.setattr(planner, "summarize", noting)
    rng = random.Random(seed)
    step, args = random_step(rng)
    mesh = jshard.topology("h100:1x8", MACHINES["h100:1x8"])
    jshard.shard(step, in_strategy=(None, (4, 1)), level=2, mesh=mesh).plan(*args)
    two_layers_plan("v5e:2x4")
    for schedule in made:
        written = dataclasses.replace(schedule)
        written.__dict__["arrays"] = None
        one, other = overlap_windows(schedule), overlap_windows(written)
        assert one.products == other.products and one.segments == other.segments
        key = [
            (m.reshard.tensor, m.reshard.target, m.reshard.collective_ids, m.begin, m.end) for m in one.moves
        ]
        assert key == [
            (m.reshard.tensor, m.reshard.target, m.reshard.collective_ids, m.begin, m.end)
            for m in other.moves
        ]


def test_the_transfer_of_an_all_to_all_that_is_sent_as_permutes_hides():
    """A product on which the result does not wait: on v5e it hides the transfer, not the kernels that slice and select."""

    def step(x, a, b):
        return jnp.sin(x) * 2, a @ b

    def plan_on(machine: str, rows: int) -> jshard.Plan:
        mesh = jshard.topology(machine, {"x": 4, "y": 4})
        args = [jax.ShapeDtypeStruct(n, jnp.bfloat16) for n in ((rows, 4096), (16384, 16384), (16384, 16384))]
        pins = (P("y", "x"), None, None)
        f = jshard.shard(step, mesh=mesh, level=2, in_strategy=pins, out_strategy=(P(None, ("x", "y")), None))
        return f.plan(*args)

    def all_to_all(plan: jshard.Plan) -> Any:
        (found,) = [c for c in plan.collectives if c.kind == "all_to_all"]
        return found

    large, v5p, small = (
        all_to_all(plan_on(*of)) for of in (("v5e:4x4", 8192), ("v5p:2x2x4", 8192), ("v5e:4x4", 256))
    )
    operand = 8192 * 4096 * 2 / 16
    local = reordering_seconds(operand, hardware.get("v5e"))
    assert large.hidden == pytest.approx(large.seconds - local) and 0 < large.hidden < large.seconds
    assert v5p.hidden == small.hidden == 0


def test_a_permute_of_a_reshard_hides_on_v5e_alone():
    def step(x, a, b):
        return jnp.sin(x) * 2, a @ b

    hidden = {}
    for machine in ("v5e:4x4", "v5p:2x2x4", "v6e:4x4"):
        mesh = jshard.topology(machine, {"x": 4, "y": 4})
        args = [jax.ShapeDtypeStruct((n, n), jnp.bfloat16) for n in (4096, 16384, 16384)]
        pins = (P("x", "y"), None, None)
        f = jshard.shard(step, mesh=mesh, level=2, in_strategy=pins, out_strategy=(P("y", "x"), None))
        (moved,) = [c for c in f.plan(*args).collectives if c.kind == "permute"]
        hidden[machine] = moved.hidden / moved.seconds
    assert hidden == {"v5e:4x4": 1.0, "v5p:2x2x4": 0.0, "v6e:4x4": 0.0}
