"""The search over what is computed again: bounds of choices of which a budget proves nothing, effort, interruptions."""

from __future__ import annotations

import itertools
import math
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
    return Enumeration(recomputation, plan_of, lambda planned: planned, 10.0, **options)


class Enumeration(RecomputeSearch[Any]):
    """A search that predicts no peaks: words have none."""

    def _search(self) -> None:
        pass


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


SIX = [None, *map(str, range(6))]


def spending(peak: float, given: list[tuple[Any, float]]) -> Any:
    """Plans of one peak, each of which takes all the effort that it is given."""

    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        given.append((choice, effort.limit))
        effort.spend(effort.limit)
        return record(5.0, 4.0, peak)

    return plan_of


def test_all_choices_share_the_effort_and_others_are_planned_while_it_lasts() -> None:
    """From what keeps least on, as nothing fits at first; the bound is then of the choices that were planned."""
    given: list[tuple[Any, float]] = []
    found = search(spending(8.0, given), SIX, seconds=4.0)
    found.run(record(2.0, 2.0, 20.0))
    assert given == list(zip("54321", [2e8, 1e8, 0.5e8, 0.4e8, 0.4e8], strict=True))
    assert not found.complete and found.choices_planned == 6


def test_where_nothing_fits_the_choices_that_keep_least_come_first_and_have_four_times_the_effort() -> None:
    given: list[tuple[Any, float]] = []
    found = search(spending(12.0, given), [None, *map(str, range(40))], seconds=4.0)
    assert found.run(record(2.0, 2.0, 20.0)) is None
    assert given[0][0] == "39" and 16e8 <= sum(g for _, g in given) < 17e8 and not found.complete


def test_without_an_effort_all_are_planned_with_a_proof_unless_that_takes_long() -> None:
    """Where the program as it was traced took long, what need not be cheaper than what fits is not planned to the end."""
    for entries, useful in (1e6, {math.inf}), (1e11, {math.inf, 5.0}):
        most_useful: list[float] = []

        def plan_of(
            choice: Any,
            limited: bool,
            most: float,
            effort: Any,
            entries: float = entries,
            given: Any = most_useful,
        ) -> Any:
            given.append(most)
            effort.spend(entries)
            return record(5.0, 4.0, 8.0)

        found = search(plan_of, SIX)
        found.run(record(2.0, 2.0, 20.0))
        assert found.complete and len(most_useful) == 7 and set(most_useful) == useful


def test_a_choice_is_settled_by_its_plan_without_a_budget() -> None:
    """One that fits is that within the budget too; one whose bound is above what fits is of no use."""
    planned: list[tuple[Any, bool]] = []

    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        planned.append((choice, limited))
        return {"1": record(5.0, 4.0, 8.0), "2": record(7.0, 6.0, 20.0)}.get(choice, record(6.0, 3.0, 9.0))

    class Predicted(Enumeration):
        def _search(self) -> None:
            for choice in "12":
                self.plan(choice, limited=False)

    recomputation: Any = SimpleNamespace(every_choice=lambda: [None, "0", *"123"], rewrites_loops=False)
    found = Predicted(recomputation, plan_of, lambda planned: planned, 10.0, seconds=4.0)
    assert found.run(record(2.0, 2.0, 20.0)).choice == "1" and found.complete
    assert planned == [("1", False), ("2", False), (None, True), ("0", True), ("3", True)]


def test_with_an_effort_what_far_exceeds_the_budget_comes_last_by_its_peak() -> None:
    """What is near the budget comes first by its cost: other layouts mostly keep it. Without an effort cost decides."""
    peaks = {"far": 30.0, "farther": 40.0, "near": 12.0, "nearer": 11.0}
    cost = {"far": 2.0, "farther": 1.0, "near": 4.0, "nearer": 5.0}
    for seconds, wanted in (4.0, "near nearer far farther"), (None, "farther far near nearer"):
        planned: list[str] = []

        def plan_of(choice: Any, limited: bool, most: float, effort: Any, planned: Any = planned) -> Any:
            if not limited:
                return record(cost[choice], 0.5, peaks[choice])
            planned.append(choice)
            raise NoBetterPlan(0.5)

        for pair in itertools.combinations(peaks, 2):  # so many are planned within the budget
            found = search(plan_of, None, seconds=seconds)
            found._traced_may_fit = lambda: False
            for choice in pair:
                found.plan(choice, limited=False)
            planned.clear()
            found._within_budget(pair)
            assert planned == [c for c in wanted.split() if c in pair]


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
