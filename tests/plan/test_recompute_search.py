"""The search over what is computed again: bounds of choices of which a budget proves nothing, effort, interruptions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jshard._plan.recompute_search import RecomputeSearch
from jshard._plan.request import NoBetterPlan


def record(objective: float, bound: float, peak: float, interrupted: bool = False) -> Any:
    cost = SimpleNamespace(objective=objective, bound=bound, peak_bytes=peak, compute=0.0, redundant=0.0)
    return SimpleNamespace(cost=cost, level=2, interrupted=interrupted, step_seconds=objective)


def search(plan_of: Any, choices: Any = ("traced", "one", "two"), **options: Any) -> Any:
    """A search over a few choices, each a word, with a budget of 10 bytes."""
    recomputation: Any = SimpleNamespace(every_choice=lambda: choices, rewrites_loops=False)
    return RecomputeSearch(recomputation, plan_of, lambda planned: planned, 10.0, **options)


def test_a_choice_of_which_the_budget_proves_nothing_has_the_bound_of_its_plan_without_it() -> None:
    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        if choice == "one":
            return record(5.0, 4.0, 8.0)
        if limited:
            raise NoBetterPlan(0.0)
        return record(6.0, 3.0, 12.0)

    found = search(plan_of)
    best = found.run(record(2.0, 3.5, 20.0))
    assert best.choice == "one" and found.bound == 3.0


def test_all_choices_share_the_effort_and_each_has_some() -> None:
    given: list[float] = []

    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        given.append(effort.limit)
        effort.spend(effort.limit)
        return record(5.0, 4.0, 8.0)

    search(plan_of, [None, *map(str, range(6))], seconds=4.0).run(record(2.0, 2.0, 20.0))
    assert given[:2] == [2e8, 1e8] and min(given) == 0.1 * 4e8 and len(given) == 7
    given.clear()
    search(plan_of).run(record(2.0, 2.0, 20.0))
    assert set(given) == {float("inf")}


@pytest.mark.parametrize("raised", [False, True])
def test_an_interruption_ends_it_with_the_best_that_fits(raised: bool) -> None:
    tried: list[Any] = []

    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        tried.append(choice)
        if choice is None:
            return record(7.0, 4.0, 8.0)
        if raised:
            raise KeyboardInterrupt
        return record(5.0, 4.0, 8.0, interrupted=True)

    found = search(plan_of)
    best = found.run(record(2.0, 2.0, 20.0))
    assert tried == [None, "one"] and found.interrupted and not found.complete
    assert best.cost == (7.0 if raised else 5.0)


def test_an_interruption_before_anything_fits_is_raised_again() -> None:
    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        return record(5.0, 4.0, 12.0, interrupted=True)

    with pytest.raises(KeyboardInterrupt):
        search(plan_of).run(record(2.0, 2.0, 20.0))
    with pytest.raises(KeyboardInterrupt):
        search(plan_of).run(record(2.0, 2.0, 20.0, interrupted=True))
