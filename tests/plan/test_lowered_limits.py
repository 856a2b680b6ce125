"""Limits that are lowered by what schedules exceed: which are tried, and whose bound is given."""

import dataclasses
import types

import numpy as np
import pytest

from jshard._plan.lowered_limits import LimitSearch, last_above, least_counted
from jshard._search import Effort, Solution, build


def network(least):
    """A network whose plans cost what they are short of 1,000 bytes; none below `least`; and the limits it was given."""
    tried = []

    def solve(limit, prices, answers):
        tried.append((limit, prices, len(answers)))
        if limit < least:
            return None
        assignment = np.array([len(tried)])
        return Solution(assignment, 1000 - limit, 1000 - limit, limit, 0.0, (), None, (assignment,))

    return solve, tried


def schedules(excess):
    """The plans of solutions, whose schedules hold more than is counted."""

    def scheduled(s):
        return types.SimpleNamespace(peak=s.peak + excess(s.peak), cost=s.cost, interrupted=False)

    return scheduled


def test_the_limit_falls_by_the_excess_and_the_bound_is_that_of_the_budget():
    solve, tried = network(0)
    plans, last = LimitSearch(100.0, solve, schedules(lambda b: 4.0)).run()
    assert [limit for limit, *_ in tried] == pytest.approx([100.0, 95.8])
    assert [p.peak for p in plans] == pytest.approx([104.0, 99.8])
    assert last.bound == 900.0 and last.cost == pytest.approx(904.2)  # of the budget; of the last limit


def test_where_nothing_is_found_half_of_the_way_back_is_tried():
    solve, tried = network(90.0)
    plans, last = LimitSearch(100.0, solve, schedules(lambda b: 15.0 if b > 92 else 5.0)).run()
    assert [limit for limit, *_ in tried] == pytest.approx(
        [100.0, 84.25, 92.125, 84.64375, 88.384375, 90.2546875]
    )
    assert [p.peak for p in plans] == pytest.approx([115.0, 107.125, 95.2546875]) and last.bound == 900.0


def costly(plan_of):
    """Solutions of limits, and their plans: `plan_of(limit)` gives (bytes counted, bytes of the schedule, cost)."""
    tried = []

    def solve(limit, prices, answers):
        tried.append(limit)
        counted, _, cost = plan_of(limit)
        return Solution(np.array([len(tried)]), cost, 1.0, counted, 0.0, (), None, ())

    def scheduled(s):
        return types.SimpleNamespace(peak=plan_of(tried[-1])[1], cost=s.cost, interrupted=False)

    return solve, scheduled, tried


def test_where_a_plan_leaves_room_and_costs_far_more_the_limit_is_raised_again():
    """The case of the module: 98 bytes counted of 104, then 88 held within a limit of 93.8, then 99 within 96.95."""

    def plan_of(limit):
        return (98.0, 104.0, 1.0) if limit > 98 else (limit, 99.0, 1.1) if limit > 95 else (limit, 88.0, 2.0)

    solve, scheduled, tried = costly(plan_of)
    plans, last = LimitSearch(100.0, solve, scheduled).run()
    assert tried == pytest.approx([100.0, 93.8, 96.95])
    assert [p.cost for p in plans] == [1.0, 2.0, 1.1] and last.bound == 1.0


@pytest.mark.parametrize(("room", "cost"), [(1.0, 2.0), (12.0, 1.01)])
def test_little_room_and_little_cost_are_not_worth_another_limit(room, cost):
    solve, scheduled, tried = costly(
        lambda limit: (98.0, 104.0, 1.0) if limit > 98 else (limit, 100.0 - room, cost)
    )
    LimitSearch(100.0, solve, scheduled).run()
    assert tried == pytest.approx([100.0, 93.8])


def test_a_limit_is_raised_twice_at_most_and_below_one_whose_plan_exceeds_the_budget():
    solve, scheduled, tried = costly(
        lambda limit: (limit, 130.0 if limit > 80 else 70.0, 1.0 if limit > 80 else 2.0)
    )
    plans, _ = LimitSearch(100.0, solve, scheduled).run()
    low = 100 - 1.05 * 30
    higher = (100 + low) / 2  # exceeds the budget too
    assert tried == pytest.approx([100.0, low, higher, (low + higher) / 2])
    assert [p.peak for p in plans] == [130.0, 70.0, 130.0, 70.0]


def test_a_search_after_another_begins_with_the_limit_that_that_one_would_have_lowered():
    """By what its last plan exceeded; a bound of the budget is not found then. Half of the way back where nothing is."""
    solve, tried = network(90.0)
    search = LimitSearch(100.0, solve, schedules(lambda b: 2.0))
    plan = types.SimpleNamespace(peak=104.0, cost=900.0, interrupted=False)
    plans, last = dataclasses.replace(search, above=(98.0, plan)).run()
    assert [limit for limit, *_ in tried] == pytest.approx([98 - 1.05 * 4]) and last.bound == -float("inf")
    assert [p.peak for p in plans] == pytest.approx([95.8])
    tried.clear()
    higher = types.SimpleNamespace(peak=112.0, cost=900.0, interrupted=False)
    plans, last = dataclasses.replace(search, above=(98.0, higher)).run()
    assert [limit for limit, *_ in tried] == pytest.approx([98 - 1.05 * 12, 98 - 1.05 * 6])
    assert [p.peak for p in plans] == pytest.approx([93.7])


def test_what_was_found_last_above_the_budget():
    solve, _ = network(0)
    found = LimitSearch(100.0, solve, schedules(lambda b: 4.0), ends=lambda: True).run()
    counted, plan = last_above(*found, 100.0)
    assert (counted, plan.peak) == (100.0, 104.0)
    assert last_above(*found, 104.0) is None and last_above([], None, 1.0) is None


def test_it_ends_at_once_where_schedules_are_too_far():
    solve, tried = network(0)
    plans, _ = LimitSearch(100.0, solve, schedules(lambda b: 4.0), furthest=101.0).run()
    assert len(plans) == len(tried) == 1


def test_prices_and_answers_to_begin_with_are_used_and_prove_nothing():
    solve, tried = network(0)
    plans, last = LimitSearch(100.0, solve, schedules(lambda b: 0.0)).run("prices", [np.array([0])] * 3)
    assert tried == [(100.0, "prices", 3)] and len(plans) == 1 and last.bound == 900.0


def test_nothing_found_and_nothing_that_may_fit():
    solve, tried = network(200.0)
    assert LimitSearch(100.0, solve, schedules(lambda b: 0.0)).run() == ([], None)
    solve, tried = network(0)
    search = LimitSearch(100.0, solve, schedules(lambda b: 9.0))
    assert len(dataclasses.replace(search, may_fit=lambda: False).run()[0]) == len(tried) == 1
    assert len(search.run()[0]) == 2


def test_no_limit_is_tried_that_nothing_keeps():
    solve, tried = network(90.0)
    search = LimitSearch(100.0, solve, schedules(lambda b: 15.0 if b > 96 else 2.0), least=lambda: 90.0)
    plans, last = search.run()
    assert [limit for limit, *_ in tried] == pytest.approx([100.0, 95.0]) and last.bound == 900.0
    assert [p.peak for p in plans] == pytest.approx([115.0, 97.0])
    solve, tried = network(99.0)  # too near what the plan holds to be worth a search
    assert len(dataclasses.replace(search, solve=solve, least=lambda: 99.0).run()[0]) == len(tried) == 1


def test_no_lower_limit_is_tried_once_the_effort_is_spent():
    """Neither after a plan that exceeds the budget nor after a limit within which nothing was found."""
    solve, tried = network(90.0)
    search = LimitSearch(100.0, solve, schedules(lambda b: 15.0), ends=lambda: True)
    plans, last = search.run()
    assert (
        [limit for limit, *_ in tried] == [100.0]
        and [p.peak for p in plans] == [115.0]
        and last.bound == 900.0
    )
    tried.clear()
    plans, _ = dataclasses.replace(search, ends=lambda: len(tried) > 1).run()
    assert [limit for limit, *_ in tried] == pytest.approx([100.0, 84.25]) and len(plans) == 1


def test_what_a_large_network_counts_of_every_assignment():
    sizes = [np.array([8.0, 4.0]), np.array([6.0, 3.0])]
    small = build([[0.0, 1.0]] * 2, [], intervals=[[0, 2], [1, 3]], usages=sizes)
    assert least_counted(small, Effort()) == 0.0
    n = 2000
    large = build([[0.0, 1.0]] * (2 * n), [], intervals=[[0, 2], [1, 3]] * n, usages=sizes * n)
    assert least_counted(large, Effort()) == pytest.approx(7.0 * n)
    assert least_counted(large, Effort(0.0)) == 0.0
