"""Plans of equal cost: the one of lower peak memory is taken, with the same cost, bound and proof."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import jshard
from jshard._plan import level_search
from jshard._plan.memory_preference import prefer_memory
from jshard._plan.scheduled_solution import ScheduledSolution
from tests.laws import fuzz_programs
from tests.laws.law_costs import training


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


MESH = AbstractMesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
COLUMN = jshard.op(lambda a, b: a @ b, ((2, 1), (1, 4)))
ROW = jshard.op(lambda a, b: a @ b, ((2, 4), (4, 1)))


def megatron(params, x):
    for p in params:
        x = x + ROW(jax.nn.gelu(COLUMN(x, p["up"])), p["down"])
    return x


@pytest.mark.parametrize("level", [0, 2])
def test_weights_that_are_read_in_pieces_are_stored_in_pieces(level):
    params = [{"up": f32(256, 1024), "down": f32(1024, 256)} for _ in range(3)]
    plan = jshard.shard(megatron, mesh=MESH, level=level, hardware="gpu-h100").plan(params, f32(64, 256))
    assert plan.cost.optimal
    assert {str(r.layout) for r in plan.inputs[:-1]} == {"(m, -)", "(-, m)"}
    assert dict(plan.memory.held)["argument params"] == 3 * 2 * 256 * 1024 * 4 / 4


def decode(params, cache, x, at):
    """A step of a decoder on small batches: weights are read, and hardly anything is moved."""
    out = []
    for p, (keys, values) in zip(params, cache, strict=True):
        q, k, v = (jnp.einsum("bd,dhe->bhe", x, p[n]) for n in "qkv")
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[:, None], (0, at, 0, 0))
        w = jax.nn.softmax(jnp.einsum("bhe,bthe->bht", q, keys))
        x = x + jnp.einsum("bhe,hed->bd", jnp.einsum("bht,bthe->bhe", w, values), p["o"])
        out.append((keys, values))
    return x, out


@pytest.mark.parametrize("level", [0, 2])
def test_a_decoder_keeps_no_weight_whole_that_it_reads_in_pieces(level, monkeypatch):
    one = {n: f32(8192, 64, 128) for n in "qkv"} | {"o": f32(64, 128, 8192)}
    args = [one] * 3, [(f32(16, 4096, 64, 128),) * 2] * 3, f32(16, 8192), jax.ShapeDtypeStruct((), "int32")
    machine = jshard.topology("h100:1x8", {"x": 8}, compiles=False)
    f = jshard.shard(decode, mesh=machine, level=level, donate_argnums=1)
    plan = f.plan(*args)
    f.clear_cache()
    monkeypatch.setattr(level_search, "lower_peak_at_equal_cost", lambda solution: solution)
    before = f.plan(*args)
    assert plan.cost.objective == pytest.approx(before.cost.objective, rel=1e-9)
    assert plan.cost.optimal and before.cost.optimal
    assert plan.cost.peak_bytes < 0.5 * before.cost.peak_bytes
    read = [r for r in plan.operators if r.primitive == "dot_general"]
    assert read and all(r.layout.axes for r in plan.inputs if r.path.rpartition(".")[2] in "qkvo")


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_cost_the_same_and_hold_no_more(seed, monkeypatch):
    program = fuzz_programs.program(random.Random(93_001 + seed), high=30)
    made: list[tuple[ScheduledSolution, ScheduledSolution]] = []
    original = level_search.lower_peak_at_equal_cost

    def recorded(solution):
        made.append((solution, original(solution)))
        return made[-1][1]

    monkeypatch.setattr(level_search, "lower_peak_at_equal_cost", recorded)
    with jax.enable_x64(program.x64):
        for level in (0, 2):
            step, args = training(program, level=level)
            step.plan(*args)
    assert len(made) == 2
    for before, after in made:
        assert after.cost <= before.cost * (1 + 1e-9) and after.bound == before.bound
        assert after.peak <= before.peak


def test_values_are_those_of_the_function():
    mesh = jax.make_mesh((2, 4), ("d", "m"), devices=jax.devices()[:8])
    rng = np.random.default_rng(5)
    arrays = lambda *s: jnp.asarray(rng.normal(size=s) / 8, "float32")  # noqa: E731
    params = [{"up": arrays(16, 48), "down": arrays(48, 16)} for _ in range(2)]
    x = arrays(8, 16)
    f = jshard.shard(megatron, mesh=mesh, level=2)
    np.testing.assert_allclose(f(params, x), megatron(params, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slack", [0.001, 100])
def test_memory_may_be_preferred_for_a_share_of_the_time(slack):
    """Weights that are whole for the least time are gathered one by one, where that may cost something."""

    def forward(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    args = [f32(1024, 1024)] * 4, f32(16384, 1024)
    options = dict(in_strategy=(None, (8, 1)), mesh=MESH, level=2, hardware="tpu-v5e")
    free = jshard.shard(forward, **options).plan(*args)
    plan = jshard.shard(forward, **options, config={"prefer": f"memory:{slack}%"}).plan(*args)
    assert plan.cost.objective <= free.cost.objective * (1 + slack / 100) * (1 + 1e-9)
    assert plan.cost.peak_bytes <= free.cost.peak_bytes
    assert plan.cost.bound <= free.cost.objective * (1 + 1e-9)
    assert any("memory preferred" in s for s in plan.steps) == (slack == 100)
    if slack == 100:
        assert plan.cost.peak_bytes < 0.95 * free.cost.peak_bytes


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a preference for memory needs of a solution."""

    cost: float
    peak: float
    bound: float = 0.0
    network: str = "of a budget"
    steps: tuple[str, ...] = ()
    interrupted: bool = False


@pytest.mark.parametrize("slack", [0.0, 0.01, 0.3])
def test_the_least_peak_that_is_cheap_enough_is_found_by_budgets_above_what_every_plan_holds(slack):
    fastest = Tried(1.0, 100.0, bound=1.0, network="fastest")
    frontier = [fastest, Tried(1.005, 83.0), Tried(1.2, 61.0), Tried(1.9, 40.0)]
    budgets = []

    def plans_within(budget, most):
        budgets.append(budget)
        assert most == pytest.approx(1 + slack)
        return [p for p in frontier if p.peak <= budget][:1]

    best = prefer_memory(fastest, 38.0, plans_within, slack)
    least = min((p for p in frontier if p.cost <= 1 + slack), key=lambda p: p.peak)
    assert (best.peak, best.cost, best.bound, best.network) == (least.peak, least.cost, 1.0, "fastest")
    assert 0 < len(budgets) <= 5 and min(budgets) > 38.0
    assert prefer_memory(fastest, 99.0, plans_within, slack) is fastest  # nothing to gain
