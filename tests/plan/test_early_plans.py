"""Plans before the search under a budget of a large program: within it where it may bind, and enough where they are near."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._core.errors import MemoryBudgetError
from jshard._plan import early_plans, level_search
from jshard._search import cost_network
from jshard._search.memory import feasible_start


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
    monkeypatch.setattr(cost_network, "LARGE_NETWORK", 100)


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


def test_where_all_plans_hold_more_than_the_budget_none_of_least_time_is_looked_for(large, monkeypatch):
    def searched(*_, **__):
        raise AssertionError("a plan of least time is looked for")

    monkeypatch.setattr(level_search, "solve", searched)
    with pytest.raises(MemoryBudgetError, match="no plan fits 3,145,728 bytes a device") as refused:
        planned(4, memory_budget="3 MiB")
    weights, kept = 8 * 2**20, 4 * 2 * 8 * 2**20  # of each layer its input and the tanh
    assert 3 * 2**20 < refused.value.proved_least <= refused.value.least_found
    assert (weights + kept) / 8 <= refused.value.least_found <= 2 * (weights + kept) / 8


@pytest.mark.parametrize("near", [False, True])
def test_better_prices_are_looked_for_only_where_the_first_answers_combined_are_far_from_the_bound(
    near, large, monkeypatch
):
    class LookedFor(Exception):
        pass

    def looked(*_, **__):
        raise LookedFor

    budget = int(0.8 * planned(4).cost.peak_bytes)
    monkeypatch.setattr(feasible_start, "with_better_prices", looked)
    monkeypatch.setattr(level_search, "early_plan", lambda *_: None)
    # The plan of least time exceeds the budget by a quarter.
    monkeypatch.setattr(level_search, "_FAR_ABOVE", 0.0)
    monkeypatch.setattr(level_search, "_BUDGET_GAP", 10.0 if near else 0.0)
    if near:
        assert planned(4, memory_budget=budget).cost.peak_bytes <= budget
    else:
        with pytest.raises(LookedFor):
            planned(4, memory_budget=budget)


def test_without_a_plan_lower_limits_are_tried_however_far_a_schedule_exceeds_the_budget(large, monkeypatch):
    class Seen(Exception):
        pass

    furthest, budget = [], int(0.8 * planned(4).cost.peak_bytes)

    class NoAnswer:
        def __init__(self, limit, *given):
            furthest.append(given[3] / limit)
            if len(furthest) == 2:  # the lower-bound network comes first
                raise Seen

        def run(self, *_):
            return [], None

    monkeypatch.setattr(level_search, "LimitSearch", NoAnswer)
    monkeypatch.setattr(level_search, "early_plan", lambda *_: None)
    monkeypatch.setattr(level_search, "budget_start", lambda *_: early_plans.BudgetStart())
    monkeypatch.setattr(level_search, "_FAR_ABOVE", 0.0)
    with pytest.raises(Seen):
        planned(4, memory_budget=budget)
    assert furthest == pytest.approx([1.01, float("inf")])


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_bound_within_the_budget_is_kept_where_only_the_search_for_the_least_peak_finds_a_plan(
    share, large, monkeypatch
):
    """But where that plan costs less: then the bound of all plans is left."""
    budget, bounds, fits = int(0.9 * planned(4).cost.peak_bytes), [], []
    early_plan, search = level_search.early_plan, level_search.LevelSearch

    def none_within(_, __, fastest):
        bounds.extend((fastest.bound + share * (fits[0].cost - fastest.bound), fastest.bound))
        return dataclasses.replace(fastest, bound=bounds[0])

    monkeypatch.setattr(level_search, "early_plan", lambda *given: fits.append(early_plan(*given)))
    monkeypatch.setattr(search, "minimize_time_under_budget", none_within)
    monkeypatch.setattr(search, "minimize_peak", lambda *_: fits[0])
    monkeypatch.setattr(level_search, "_FAR_ABOVE", 0.0)
    plan = planned(4, memory_budget=budget)
    assert plan.cost.peak_bytes <= budget and plan.cost.objective > bounds[1]
    assert plan.cost.bound == pytest.approx(bounds[0] if share < 1 else bounds[1])
