"""Plans before the search under a budget of a large program: within it where it may bind, and enough where they are near."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._plan import early_plans, level_search


def step(weights, x):
    def loss(weights):
        y = x
        for a, b in weights:
            y = y + jnp.tanh(y @ a) @ b
        return (y * y).sum()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


WEIGHT, INPUT = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((4096, 512), "float32")


def planned(layers, **options):
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4})
    f = jshard.shard(step, mesh=mesh, donate_argnums=0, **options)
    return f.plan([(WEIGHT, WEIGHT)] * layers, INPUT)


@pytest.fixture
def large(monkeypatch):
    """Programs of a few layers are searched as large ones are; their bytes cost little time, so that they are dearer."""
    monkeypatch.setattr(early_plans, "_PASSES", 300.0)
    monkeypatch.setattr(early_plans, "LARGE_NETWORK", 50)
    monkeypatch.setattr(level_search, "LARGE_NETWORK", 100)


def test_a_plan_within_the_budget_is_known_before_that_of_least_time(large, monkeypatch):
    budget = int(0.9 * planned(4).cost.peak_bytes)
    # Each device's share of all arrays is above half of the budget, so that a plan is searched for.
    monkeypatch.setattr(early_plans, "greedy_assignment", None)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(level_search, "solve", interrupt)
    plan = planned(4, memory_budget=budget)
    assert plan.steps[-1] == "interrupted" and plan.cost.peak_bytes <= budget and plan.cost.bound == 0


def test_a_plan_near_the_bound_without_a_budget_ends_the_search(large, monkeypatch):
    """Its gap is to the bound of every plan; no network with memory is built."""
    free = planned(4)
    budget = int(0.9 * free.cost.peak_bytes)
    monkeypatch.setattr(level_search, "_BUDGET_GAP", 10.0)  # every plan is near
    monkeypatch.setattr(level_search, "memory_network", None)
    plan = planned(4, memory_budget=budget)
    assert plan.cost.peak_bytes <= budget
    assert 0.9 * free.cost.bound <= plan.cost.bound <= free.cost.objective <= plan.cost.objective


def test_none_is_looked_for_where_even_each_devices_share_of_all_arrays_is_near_the_budget(
    large, monkeypatch
):
    least = planned(4, level=1).cost.peak_bytes
    monkeypatch.setattr(early_plans, "_TIGHT", 0.5)

    def early(*_, **__):
        raise AssertionError("a plan is looked for")

    monkeypatch.setattr(early_plans, "branch_and_bound", early)
    monkeypatch.setattr(early_plans, "greedy_assignment", early)
    plan = planned(4, memory_budget=int(1.1 * least))
    assert plan.cost.peak_bytes <= 1.1 * least


@pytest.mark.parametrize("options", [{}, {"level": 2}, {"memory_budget": "1 GiB"}])
def test_an_ordinary_plan_is_searched_in_networks_with_second_copies_alone(options, monkeypatch):
    """The network of single copies is for least memory, and for costs that no schedule has."""
    built, build = [], level_search.build_network

    def noted(*args, **kwargs):
        built.append(kwargs["second_copies"])
        return build(*args, **kwargs)

    monkeypatch.setattr(level_search, "build_network", noted)
    planned(2, **options)
    assert built and all(built)
