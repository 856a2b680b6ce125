"""What a plan claims where nothing could be proved of a padded program, or of the program as traced."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jshard
from jshard._api import plan_padded
from jshard._plan import planner
from jshard._plan.request import NoBetterPlan


SHAPES = (
    *(jax.ShapeDtypeStruct((1024, 50_257), "float32"),) * 2,
    jax.ShapeDtypeStruct((4096, 1024), "float32"),
)


def step(w, m, x):
    """One step with momentum; the vocabulary does not divide."""
    g = jax.grad(lambda w: jax.nn.logsumexp(x @ w, -1).mean())(w)
    m = 0.9 * m + g
    return w - 0.1 * m - 0.01 * w, m


def plan(monkeypatch: pytest.MonkeyPatch, proved: tuple[bool, ...], **options) -> jshard.Plan:
    """The plan where a bound is known of some programs only: as traced, then padded."""
    real, calls = planner._with_valid_bound, iter(proved)

    def some(solution):
        return real(solution) if next(calls, proved[-1]) else dataclasses.replace(solution, bound=0.0)

    monkeypatch.setattr(planner, "_with_valid_bound", some)
    mesh = AbstractMesh((2, 4), ("x", "y"))
    return jshard.shard(step, mesh=mesh, hardware="tpu-v5p", donate_argnums=(0, 1), **options).plan(*SHAPES)


def test_a_bound_on_plans_without_padding_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        unpadded = plan(m, (True,), config={"pad": False})
    with monkeypatch.context() as m:
        both = plan(m, (True,))
    with monkeypatch.context() as m:
        found = plan(m, (True, False))
    assert both.padding and both.cost.space == ""
    assert found.cost.space == "plans without padding" and "of plans without padding" in str(found)
    assert found.cost.bound == min(unpadded.cost.bound, found.cost.objective) > 0


def test_a_plan_of_which_nothing_is_proved_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(monkeypatch, (False,))
    assert found.cost.bound == 0 and found.cost.space == ""
    for text in (str(found), repr(found)):
        assert "nothing proved" in text and "inf" not in text and "optimal" not in text
    assert jnp.isinf(found.cost.gap)


def test_a_search_ends_where_its_bound_is_above_a_known_plan() -> None:
    mesh = AbstractMesh((2, 4), ("x", "y"))
    found = jshard.shard(step, mesh=mesh, hardware="tpu-v5p", donate_argnums=(0, 1)).plan(*SHAPES)
    again = found.search_again
    assert found.padding and again is not None and again.request.ends_above == math.inf

    def searched(ends_above: float) -> float:
        request = dataclasses.replace(again.request, ends_above=ends_above)
        return planner.make_plan(again.program, again.topology, request)[0].cost.objective

    least = found.cost.objective
    assert searched(least * 1.001) == pytest.approx(least)
    with pytest.raises(NoBetterPlan) as ended:
        searched(least * 0.9)
    assert least * 0.9 < ended.value.bound <= least * (1 + 1e-9)


def test_padding_that_cannot_win_says_what_it_costs_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as traced is made to cost nothing, so no padded program is searched to its end."""
    real = plan_padded._ends_above
    monkeypatch.setattr(plan_padded, "_ends_above", lambda *args: 1e-3 * real(*args))
    mesh = AbstractMesh((2, 4), ("x", "y"))
    found = jshard.shard(step, mesh=mesh, hardware="tpu-v5p", donate_argnums=(0, 1)).plan(*SHAPES)
    assert not found.padding and found.cost.gap == 0
    assert "to 50,264: no plan costs less than" in str(found.why("w"))


@pytest.mark.parametrize(
    "words, width, rows, whose",
    [
        (1025, 512, 64, ""),
        (2051, 256, 24, ""),
        (4099, 128, 48, ""),
        (4099, 130, 48, " that pads all 2 sizes tried"),
    ],
)
def test_the_least_cost_told_of_padding_is_not_above_that_of_its_plan(
    words: int, width: int, rows: int, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same padded program searched to its end costs no less than what a search that ended early proved of it."""
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((width, words), (rows, width))]
    real, trials = plan_padded.Padded, []

    def recorded(planned, jaxpr, sizes):
        trials.append((len(sizes), planned.plan.cost.objective))
        return real(planned, jaxpr, sizes)

    def planned() -> tuple[jshard.Plan, str]:
        function = jshard.shard(
            lambda w, x: jax.nn.logsumexp(x @ w), mesh=AbstractMesh((8,), ("x",)), level=2
        )
        found = function.plan(*shapes)
        return found, str(found.why("w"))

    found, text = planned()
    to = f"{-(-words // 8) * 8:,}"
    least = re.search(f"padding to {to}: no plan{whose} costs less than ([\\d.]+) us", text)
    assert not found.padding and least is not None and float(least[1]) > 1e6 * found.cost.objective
    monkeypatch.setattr(plan_padded, "Padded", recorded)
    monkeypatch.setattr(plan_padded, "_ends_above", lambda *args: math.inf)
    planned()
    assert max(trials)[0] == (2 if whose else 1)
    assert float(least[1]) <= 1.01e6 * max(trials)[1]  # printed with three digits
