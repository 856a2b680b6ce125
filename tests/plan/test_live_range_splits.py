"""Copies made again for a later reader: which, within what limit, and what that costs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from benchmarks.planning.budgets import Config, transformer
from jshard._plan import live_range_splits, scheduled_solution
from jshard._plan.live_range_gaps import splits_of_arrays
from jshard._plan.live_range_splits import split_live_ranges
from jshard._plan.request import PlanRequest
from jshard._plan.schedule_cost import schedule_cost
from jshard._plan.scheduled_solution import schedule_solution
from jshard._schedule.peak import peak_bytes
from jshard._schedule.peak_vectorized import live_ranges
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import evaluate
from tests.helpers.memory_networks import network_of, random_plans
from tests.schedule.test_vectorized import descent


STEP = [(jax.ShapeDtypeStruct((1024, 4096), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32"))] * 3
CUT: Any = [((8, 1), (8, 1))] * 3  # weights that both passes gather


def plans(count: int) -> Any:
    """A network, and schedules of some plans of it without splits."""
    args, mesh = (
        (STEP, jax.ShapeDtypeStruct((4096, 1024), "float32")),
        jax.sharding.AbstractMesh((8,), ("x",)),
    )
    options: Any = dict(in_strategy=(CUT, (8, 1)), out_strategy=CUT, donate_argnums=(0,))
    network = network_of(descent, args, mesh, **options)
    made = [
        schedule(assignment_of(network, tuple(x.tolist()))) for x in random_plans(network.cost_network, count)
    ]
    return network, made


def cost(made: Any, network: Any) -> float:
    return schedule_cost(made, network).objective(network.level)


def ranges(made: Any, network: Any) -> Any:
    return live_ranges(made.arrays, network.liveness, frozenset(network.donated))


def test_a_limit_is_kept_at_the_cost_of_as_few_copies_as_it_needs():
    """From the peak of all copies kept to the least: never above the limit, and never cheaper under a lower one."""
    network, schedules = plans(4)
    splits = 0
    for made in schedules:
        kept = peak_bytes(made, network.liveness, network.donated)
        lowest = split_live_ranges(made, network.liveness, network.donated, 0.0)
        if lowest is None or lowest.profile.peak >= kept:
            continue
        costs = [cost(made, network)]
        for limit in np.linspace(kept - 1, lowest.profile.peak, 5).tolist():
            found = split_live_ranges(made, network.liveness, network.donated, limit)
            assert found is not None and found.profile.peak <= limit
            assert found.profile.peak == peak_bytes(found.schedule, network.liveness, network.donated)
            costs.append(cost(found.schedule, network))
            splits += 1
        assert costs == sorted(costs) and costs[0] < costs[-1]
        below = split_live_ranges(made, network.liveness, network.donated, lowest.profile.peak / 2)
        assert (
            below is not None and below.profile.peak > lowest.profile.peak / 2
        )  # no limit can be kept by it
    assert splits >= 10


def test_what_is_split_costs_what_the_network_says_at_most():
    """With a copy of its own for every reader a plan costs what the network charges, and what is kept costs less."""
    network, _ = plans(0)
    for states in random_plans(network.cost_network, 4):
        request = PlanRequest((), level=1, donated=network.donated)
        found = schedule_solution(network, request, states, 0.0, ())
        assert found.cost <= evaluate(network.cost_network, states) * (1 + 1e-9)


@pytest.mark.parametrize(("layers", "vocabulary"), [(4, 32_000), (2, 64_000)])
def test_the_live_range_of_a_copy_held_at_the_peak_of_a_large_program_is_split(
    layers, vocabulary, monkeypatch
):
    """The gathered weights of the last product wait for their derivative while the loss is computed, uncounted."""
    step, args = transformer(Config(layers, 1024, 8, 4, 128, 2816, vocabulary, batch=64, length=1024))
    mesh = jax.sharding.AbstractMesh((4, 8), ("x", "y"))
    sharded = jshard.shard(step, mesh=mesh, hardware="tpu-v5e", level=1, donate_argnums=(0, 1))
    after = sharded.plan(*args)
    sharded.clear_cache()
    monkeypatch.setattr(scheduled_solution, "split_live_ranges", lambda *_: None)
    before = sharded.plan(*args)
    assert len(after.operators) > 1000
    assert after.cost.bound == before.cost.bound <= after.cost.objective < 0.97 * before.cost.objective
    assert after.cost.gap < 0.02


def test_a_budget_near_the_least_peak_of_a_large_program_is_planned():
    """Only plans with a split live range keep it; they are as good as proved."""
    step, args = transformer(Config(6, 1024, 8, 4, 128, 2816, 32_000, batch=64, length=1024))
    options = dict(
        mesh=jax.sharding.AbstractMesh((4, 8), ("x", "y")), hardware="tpu-v5e", donate_argnums=(0, 1)
    )
    least = jshard.shard(step, level=1, **options).plan(*args)
    budget = int(1.02 * least.cost.peak_bytes)
    plan = jshard.shard(step, memory_budget=budget, **options).plan(*args)
    assert len(plan.operators) > 2000
    assert plan.cost.peak_bytes <= budget and plan.cost.gap < 0.02 and plan.decision.regather


def head_step(ws: Any, x: Any) -> Any:
    """A step of gradient descent of two products, the second with as many results as a vocabulary has words."""

    def loss(ws: Any) -> Any:
        return jnp.square(jax.nn.log_softmax(x @ ws[0] @ ws[1])).mean()

    return [w - 0.1 * d for w, d in zip(ws, jax.grad(loss)(ws), strict=True)]


def test_a_copy_that_is_made_again_waits_for_the_product_before_where_both_are_the_peak(monkeypatch):
    """The weights of the last product, gathered for the derivative of its operand, and their own derivative."""
    weights = [jax.ShapeDtypeStruct(s, "float32") for s in ((1024, 1024), (1024, 16384))]
    args, mesh = (
        (weights, jax.ShapeDtypeStruct((8192, 1024), "float32")),
        jax.sharding.AbstractMesh((8,), ("x",)),
    )
    options: Any = dict(in_strategy=([(8, 1)] * 2, (8, 1)), out_strategy=[(8, 1)] * 2, donate_argnums=(0,))
    network = network_of(head_step, args, mesh, **options)
    lowered, wait = [], live_range_splits._after_products
    for x in random_plans(network.cost_network, 160):
        made = schedule(assignment_of(network, tuple(x.tolist())))
        monkeypatch.setattr(live_range_splits, "_after_products", lambda split, *_: split)
        before = split_live_ranges(made, network.liveness, network.donated, 0.0)
        monkeypatch.setattr(live_range_splits, "_after_products", wait)
        after = split_live_ranges(made, network.liveness, network.donated, 0.0)
        if after is None or before is None:
            continue
        rank = [(s.profile.peak, cost(s.schedule, network)) for s in (after, before)]
        assert rank[0] <= rank[1]
        assert after.profile.peak == peak_bytes(after.schedule, network.liveness, network.donated)
        if after.schedule.assignment.regather_after:
            lowered.append(after.profile.peak / before.profile.peak)
    assert len(lowered) > 4 and min(lowered) < 0.9


def test_every_copy_that_is_early_above_the_limit_waits_for_the_product_before():
    """Not those at the peak alone: what else is above the limit would be the next peak."""
    network, schedules = plans(6)
    waiting = 0
    for made in schedules:
        everywhere = splits_of_arrays(made.arrays, ranges(made, network))
        split = live_range_splits._with_splits(made, everywhere, network.liveness, network.donated)
        for limit in np.linspace(0.5, 0.99, 4) * split.profile.peak:
            later = live_range_splits._after_products(split, network.liveness, network.donated, float(limit))
            after = later.schedule.assignment.regather_after
            arrays, found = later.schedule.arrays, ranges(later.schedule, network)
            assert live_range_splits._early_above(arrays, network.liveness, found, float(limit)) <= after
            waiting += len(after)
    assert waiting
