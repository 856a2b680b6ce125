"""Peaks of choices predicted from their programs as traced, and what the search over choices plans because of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import jshard
from jshard._core import hardware
from jshard._plan import recompute_search
from jshard._plan.recomputation import Recomputation
from jshard._plan.recompute_peaks import WITHIN_REACH, PeakPrediction


MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
OPTIONS: Any = dict(mesh=MESH, hardware="tpu-v5e", donate_argnums=(0,))


def training(layers: int, batch: int, width: int) -> tuple[Any, tuple[Any, ...]]:
    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = x + jax.nn.gelu(x @ p["a"]) @ p["b"]
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    one = {"a": (width, 4 * width), "b": (4 * width, width)}
    shapes = [{k: jax.ShapeDtypeStruct(s, "float32") for k, s in one.items()} for _ in range(layers)]
    return step, (shapes, jax.ShapeDtypeStruct((batch, width), jnp.float32))


STEP, ARGS = training(4, 36_000, 72)


def prediction(share: float) -> PeakPrediction:
    free = jshard.shard(STEP, memory_budget="1TB", **OPTIONS).plan(*ARGS).cost.peak_bytes
    closed = jax.jit(STEP).trace(*ARGS).jaxpr
    choices = Recomputation(closed, hardware.get("tpu-v5e"), tuple(range(8)))
    return PeakPrediction(choices, share * free, None, free)


def test_the_peak_of_a_plan_is_near_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, planned, planned_within = prediction(0.7), [], []
    record = recompute_search.RecomputeSearch._planned

    def noted(self: Any, choice: Any, limited: bool) -> Any:
        trial = record(self, choice, limited)
        (planned_within if limited else planned).append(trial)
        return trial

    monkeypatch.setattr(recompute_search.RecomputeSearch, "_planned", noted)
    plan = jshard.shard(STEP, memory_budget=int(predicted.limit), remat="auto", **OPTIONS).plan(*ARGS)
    assert plan.kept is not None and plan.cost.peak_bytes <= predicted.limit
    assert planned and len(planned) + len(planned_within) <= 7
    for trial in planned:
        assert predicted.of(trial.choice) == pytest.approx(trial.peak, rel=0.25)
    # A choice that is planned within the budget has to beat what fits, else its search ends with a bound.
    assert all(t.planned is not None or t.bound >= 0 for t in planned_within)


def test_what_keeps_more_than_is_in_reach_is_left_out_of_the_hull() -> None:
    predicted = prediction(0.7)
    near, every = predicted.hull(), predicted.recomputation.hull()
    assert 0 < len(near) < len(every) and set(near) <= set(every)
    share = predicted.of(None) / predicted.recomputation.traced_peak(predicted.recomputation.everything())
    assert all(share * c.bytes <= WITHIN_REACH * predicted.limit for c in near)
    fitting = [near[k - 1] for k in predicted.fitting([None, *near])]
    assert fitting and all(predicted.of(c) <= predicted.limit for c in fitting)
    assert [c.seconds for c in fitting] == sorted(c.seconds for c in fitting)


def test_between_two_choices_the_one_that_is_predicted_to_fit_keeps_more() -> None:
    predicted = prediction(0.8)
    choices = predicted.recomputation
    hull = predicted.hull()
    least = next(hull[k - 1] for k in predicted.fitting([None, *hull]))
    kept = choices.between(choices.everything(), least)
    found = predicted.last_between(kept, -1, len(kept), least)
    assert found is not None and predicted.of(found) <= predicted.limit
    assert found.bytes > least.bytes and found.seconds < least.seconds
    assert predicted.last_between(kept, -1, 0, least) is None  # nothing is between


def test_a_plan_corrects_the_prediction() -> None:
    predicted = prediction(0.8)
    before = predicted.of(None)
    predicted.correct(None, 2 * before)
    assert predicted.of(None) == pytest.approx(2 * before)


def test_within_the_budget_the_choice_of_least_cost_without_it_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it finds ends the searches of the others, which have to beat it."""
    planned = []
    search = recompute_search.RecomputeSearch
    monkeypatch.setattr(search, "_first_that_fits", lambda *_: 0)

    def recorded(self: Any, choice: Any, limited: bool) -> Any:
        if limited:
            planned.append(self.planned[choice, False].cost)
        return record(self, choice, limited)

    record = search._planned
    monkeypatch.setattr(search, "_planned", recorded)

    def in_turn(self: Any, hull: Any) -> Any:
        trials = [self.plan(choice, limited=False) for choice in hull[1:]]
        lowest = sorted(trials, key=lambda t: t.peak)[:2]
        return [t.choice for t in sorted(lowest, key=lambda t: -t.cost)]

    monkeypatch.setattr(search, "_lowest_peaks", in_turn)
    limit = prediction(0.7).limit
    plan = jshard.shard(STEP, memory_budget=int(limit), remat="auto", **OPTIONS).plan(*ARGS)
    # The program as it was traced is one of the three, and costs least without a budget.
    assert len(planned) == 3 and planned == sorted(planned) and plan.cost.peak_bytes <= limit
