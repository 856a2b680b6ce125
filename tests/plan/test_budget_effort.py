"""What a budget costs to keep or to refuse: schedules that are not made, programs that are not planned, last resorts."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._api import batch_of_call
from jshard._core.errors import MemoryBudgetError, ShardError
from jshard._plan import ranked_search
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import fitting_or_lowest
from jshard._search import Effort, solve
from tests.helpers.memory_networks import MESH, network_of
from tests.laws.program_bytes import without_latency


SMALL = jax.sharding.AbstractMesh((2, 2), ("x", "y"))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def forward(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def test_a_list_of_plans_schedules_only_what_may_hold_less(monkeypatch):
    """What is found is what scheduling every plan of the list finds, or lower where that ends before."""
    monkeypatch.setattr(ranked_search, "OPERATORS_SCHEDULED", 600)
    finished, made, schedules, least = [], [], ranked_search.schedule_solution, ranked_search.least_peak
    monkeypatch.setattr(
        ranked_search, "schedule_solution", lambda *a, **k: made.append(1) or schedules(*a, **k)
    )
    for rows, share in ((96, 0.5), (96, 0.95), (1024, 0.95), (4096, 0.7)):
        network = network_of(forward, ([f32(256, 256)], f32(rows, 256)), SMALL, in_strategy=(None, (4, 1)))
        free = schedules(network, PlanRequest((), level=0), solve(network.cost_network).assignment, 0.0, ())
        request = PlanRequest((), level=0, memory_limit=share * free.peak)
        made.clear()
        monkeypatch.setattr(ranked_search, "least_peak", least)
        pruned, few = ranked_search.cheapest_by_rank(network, request, Effort()), len(made)
        monkeypatch.setattr(ranked_search, "least_peak", lambda *_: 0.0)
        full = ranked_search.cheapest_by_rank(network, request, Effort())
        assert pruned.best is not None and full.best is not None and few <= len(made) - few
        assert pruned.best.peak <= full.best.peak
        if full.finished:
            assert (pruned.best.cost, pruned.best.peak) == (full.best.cost, full.best.peak)
        finished.append(full.finished)
    assert any(finished)


def test_a_budget_below_the_fastest_plan_of_a_forward_pass():
    """Found, proved the cheapest, at both levels; before, 2,500 schedules were made and proved nothing."""
    args = [f32(1024, 1024)] * 3, f32(4096, 1024)
    for level in (0, 2):
        options: Any = dict(mesh=MESH, hardware="tpu-v5e", level=level, in_strategy=(None, (8, 1)))
        free = jshard.shard(forward, **options).plan(*args)
        plan = jshard.shard(forward, **options, memory_budget=int(0.64 * free.cost.peak_bytes)).plan(*args)
        assert plan.cost.optimal and plan.cost.peak_bytes <= 0.64 * free.cost.peak_bytes
        assert plan.cost.objective > free.cost.objective


@dataclasses.dataclass(frozen=True)
class Solved:
    """What the choice among plans needs of one."""

    peak: float
    cost: float


def test_of_plans_the_cheapest_within_a_budget_else_that_of_lowest_peak():
    plans: Any = [Solved(12.0, 1.0), Solved(9.0, 3.0), Solved(9.9, 2.0), Solved(11.0, 9.0)]
    assert fitting_or_lowest(plans, 10.0) is plans[2]
    assert fitting_or_lowest(plans, 8.0) is plans[1]


def microbatches(counts, needs, limit=10.0, fails_from=1 << 30):
    """The number that is chosen and those that were tried, for a step of some needs by number of pieces."""
    tried = []

    def plan_in(count):
        tried.append(count)
        if count >= fails_from:
            raise ShardError("cannot be cut", where="there")
        peak, cost = needs(count)
        if peak > limit:
            raise MemoryBudgetError("too much", refusal=None)
        return SimpleNamespace(
            count=count,
            memory_budget=limit,
            interrupted=False,
            cost=SimpleNamespace(peak_bytes=peak, objective=cost),
        )

    batch: Any = SimpleNamespace(counts=counts, examples=counts[-1])
    same: Any = lambda plan: plan  # noqa: E731
    call, steps = batch_of_call.fewest_microbatches(batch, plan_in, same)
    others = [int(s.split()[1]) for s in steps[1:]]
    assert others == sorted(set(others)) and call.count not in others and set(others) <= set(tried)
    return call.count, tried, steps[0]


def test_fewest_microbatches_are_looked_for_where_they_should_fit(monkeypatch):
    counts = (1, 2, 4, 8, 16, 32, 64)

    def needs(count):
        return 2 + 200 / count, 1.0 + count / 64

    for factor, tries in ((25.0, [1, 32, 16]), (13.0, [1, 16, 32]), (50.0, [1, 64, 32, 16])):
        monkeypatch.setattr(batch_of_call, "_excess", lambda error, factor=factor: factor)
        chosen, tried, text = microbatches(counts, needs)
        assert chosen == 32 and [t for t in tried if t <= 32] == [t for t in tries if t <= 32]
        assert "since 1, 16 exceed the budget" in text
    monkeypatch.setattr(batch_of_call, "_excess", lambda error: 0.0)
    assert microbatches(counts, needs)[1][:6] == [1, 2, 4, 8, 16, 32]


def test_more_pieces_that_cost_less_than_the_fewest_that_fit(monkeypatch):
    """A plan that fills its budget may cost more than one in more pieces; the steps name both numbers."""
    needs = {1: (40.0, 1.0), 2: (20.0, 1.0), 4: (9.0, 3.0), 8: (8.5, 2.0), 16: (5.0, 2.5)}
    monkeypatch.setattr(batch_of_call, "_excess", lambda error: 0.0)
    chosen, tried, text = microbatches((1, 2, 4, 8, 16), needs.__getitem__)
    assert chosen == 8 and tried == [1, 2, 4, 8, 16]
    assert "at less cost than 4, the least number that was found to fit, since 1, 2 exceed the budget" in text
    needs[8] = 8.5, 4.0
    chosen, _, text = microbatches((1, 2, 4, 8, 16), needs.__getitem__)
    assert chosen == 4 and "at less cost" not in text


def test_the_last_piece_need_not_be_the_one_that_fits(monkeypatch):
    """Fewer examples than devices are cut less: the most pieces may hold more."""

    def needs(count):
        return (12.0, 2.0) if count == 8 else (3 + 20 / count, 1.0)

    monkeypatch.setattr(batch_of_call, "_excess", lambda error: 100.0)
    assert microbatches((1, 2, 4, 8), needs)[0] == 4
    monkeypatch.setattr(batch_of_call, "_excess", lambda error: 0.0)
    chosen, _, text = microbatches((1, 2, 4, 8), needs, fails_from=8)
    assert chosen == 4 and "since 1, 2 exceed the budget" in text
    with pytest.raises(ShardError, match="exceed the budget too: cannot be cut"):
        microbatches((1, 2, 4, 8), lambda count: (11.0, 1.0), fails_from=8)


def weighted_averages(p: Any, x: Any) -> Any:
    """RWKV's time mixing: exponentially weighted averages of values by a stable recurrence."""
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    mix = jax.nn.sigmoid(p["mix"])
    mixed = x * mix + before * (1 - mix)
    keys, values, gate = mixed @ p["k"], mixed @ p["v"], jax.nn.sigmoid(mixed @ p["r"])

    def step(carry, kv):
        (a, b, o), (k, v) = carry, kv
        q = jnp.maximum(o, p["u"] + k)
        e1, e2 = jnp.exp(o - q), jnp.exp(p["u"] + k - q)
        out = (e1 * a + e2 * v) / (e1 * b + e2)
        w = o - jnp.exp(p["w"])
        q = jnp.maximum(w, k)
        e1, e2 = jnp.exp(w - q), jnp.exp(k - q)
        return (e1 * a + e2 * v, e1 * b + e2, q), out

    zero = jnp.zeros((x.shape[0], x.shape[2]))
    out = jax.lax.scan(step, (zero, zero, zero - 1e9), (keys.swapaxes(0, 1), values.swapaxes(0, 1)))[1]
    return ((out.swapaxes(0, 1) * gate) ** 2).mean()


def test_a_budget_is_not_refused_before_single_operators_are_changed():
    """A search of little effort refused this budget and then the one that its own refusal advised."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    p = {"w": f32(24), "u": f32(24), "mix": f32(24), "k": f32(24, 24), "v": f32(24, 24), "r": f32(24, 24)}

    def peak_within(budget: int) -> float:
        step = jshard.shard(
            jax.value_and_grad(weighted_averages), in_strategy={"x": (1, 1, 8)}, mesh=mesh, hardware=without_latency(),
            memory_budget=budget, config={"search_seconds": 1.0},
        )  # fmt: skip
        return step.plan(p, f32(4, 20, 24)).cost.peak_bytes

    budget = 23_547  # kept with the equations of JAX 0.10; those of 0.12 are others, and what is advised instead is kept
    try:
        assert peak_within(budget) <= budget
    except MemoryBudgetError as error:
        advised = re.search(r"memory_budget=(\d+)", error.fix)
        assert advised is not None and budget < int(advised[1]) < 1.06 * budget
        assert peak_within(int(advised[1])) <= int(advised[1])
