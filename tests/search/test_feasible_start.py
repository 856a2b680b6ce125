"""First answers within a limit: they keep it where one is found, cost what the best of their states do, and take little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jshard._search import Effort, Prices, build, evaluate, peak, solve
from jshard._search.memory.feasible_start import answers_within, first_answers, with_better_prices
from jshard._search.memory.price_cuts import PricedNetworks
from tests.laws.random_networks import brute_force, random_network
from tests.search.test_price_cuts import deep


@pytest.mark.parametrize("seed", range(4))
def test_the_last_answer_keeps_the_limit_and_costs_no_more_than_those_before(seed):
    network = deep(16, seed)
    free = solve(network).assignment
    least = solve(network, objective="peak").cost
    limit = least + 0.3 * (peak(network, free) - least)
    limited = network.within(limit)
    first = first_answers(PricedNetworks(limited), evaluate(network, free), effort=Effort())
    bound = first.prices.proved_cost(limit)
    answers = answers_within(limited, free, first.assignments, effort=Effort(), bound=bound)
    assert 1 <= len(answers) <= 4 and peak(network, answers[-1]) <= limit
    fitting = [evaluate(network, x) for x in answers if peak(network, x) <= limit]
    assert fitting[-1] == min(fitting)
    best = solve(limited)
    assert bound <= best.cost * (1 + 1e-9)
    assert best.bound * (1 - 1e-9) <= fitting[-1] <= 1.15 * best.cost


@pytest.mark.parametrize("seed", range(3))
def test_a_given_answer_is_combined_with_the_fastest_of_their_states_alone(seed):
    network = deep(40, seed)
    free, low = solve(network).assignment, solve(network, objective="peak").assignment
    limit = peak(network, low) + 0.3 * (peak(network, free) - peak(network, low))
    limited = network.within(limit)
    first, last = answers_within(limited, free, [low], effort=Effort())
    assert (first == low).all() and peak(network, last) <= limit
    assert evaluate(network, last) <= evaluate(network, low)
    assert all(s in pair for s, *pair in zip(last.tolist(), free.tolist(), low.tolist(), strict=True))


def test_nothing_is_combined_once_the_effort_is_spent():
    network = deep(40, 1, limit=1e9)
    fastest, spent = np.zeros(network.size, dtype=np.int64), Effort(1.0)
    given = first_answers(PricedNetworks(network), 1.0, effort=spent).assignments
    assert spent.exhausted and len(given) <= 1
    assert answers_within(network, fastest, given, effort=spent) == given


@pytest.mark.parametrize("seed", range(40))
def test_no_assignment_within_the_limit_costs_less_than_the_first_prices_prove(seed):
    network = random_network(seed, memory=True)
    limit = network.memory.limit
    free = brute_force(network)
    if not np.isfinite(free) or (network.memory.intervals[:, 0] >= network.memory.intervals[:, 1]).all():
        pytest.skip("nothing is possible, or nothing is held")
    least = brute_force(network, lambda x: peak(network, x) <= limit)
    solver = PricedNetworks(network)
    first = first_answers(solver, free, effort=Effort())
    fastest = solve(replace(network, memory=None)).assignment
    better = with_better_prices(solver, fastest, first, 0.0, effort=Effort())
    assert first.prices.proved_cost(limit) <= better.prices.proved_cost(limit) <= least + 1e-9 * abs(least)
    assert all(
        (x == y).all()
        for x, y in zip(first.assignments, better.assignments[: len(first.assignments)], strict=True)
    )


def test_prices_between_one_that_is_too_low_and_one_that_is_too_high_prove_more():
    """The first price is far too high; where its answer costs what the fastest does, a better one is found."""
    network = deep(8, 3)
    free, low = solve(network).assignment, solve(network, objective="peak").assignment
    limit = peak(network, low) + 0.6 * (peak(network, free) - peak(network, low))
    solver = PricedNetworks(network.within(limit))
    first = first_answers(solver, 20 * evaluate(network, free), effort=Effort())
    assert [peak(network, x) <= limit for x in first.assignments] == [True]
    better = with_better_prices(solver, free, first, 0.0, effort=Effort())
    best = solve(solver.network)
    assert 1 < len(better.assignments) <= 4
    assert first.prices.proved_cost(limit) < better.prices.proved_cost(limit) <= best.cost * (1 + 1e-9)
    # An answer that is near enough ends them at once.
    ended = with_better_prices(solver, free, better, 10.0, effort=Effort())
    assert better.prices.bound > 0 and len(ended.assignments) == len(better.assignments)
    # Nor are there any where no answer is within the limit.
    above = first._replace(assignments=[free])
    assert with_better_prices(solver, free, above, 0.0, effort=Effort()).assignments == [free]


def test_the_price_is_raised_at_the_time_at_which_an_answer_holds_most():
    """The least bytes make time 0 the fullest; the cheapest states hold more at time 1."""
    network = build(
        [[0.0, 3.0], [0.0, 10.0]], [], intervals=[[0, 1], [1, 2]], usages=[[9.0, 8.0], [20.0, 7.0]], limit=8.5
    )
    first = first_answers(
        PricedNetworks(network), 1.0, effort=Effort(), prices=Prices(np.array([0]), np.array([0.1]))
    )
    # 0.2 at time 1 is not enough (20 bytes cost 4, 7 and the other state 11.4); 1.6 is.
    assert [x.tolist() for x in first.assignments] == [[0, 0], [0, 0], [0, 1]]
    assert first.prices.times.tolist() == [1] and first.prices.per_byte.tolist() == pytest.approx([1.6])
    assert first.prices.proved_cost(8.5) == pytest.approx(10 + 1.6 * (7 - 8.5))


def test_prices_at_several_times_are_begun_with_and_raised_at_one():
    """A price of zero, and one at a time when this network holds nothing, count nothing."""
    network = build(
        [[0.0, 3.0], [0.0, 10.0]], [], intervals=[[0, 1], [1, 2]], usages=[[9.0, 8.0], [20.0, 7.0]], limit=9.0
    )
    given = Prices(np.array([0, 1, 5]), np.array([0.0, 0.5, 0.2]))
    first = first_answers(PricedNetworks(network), 1.0, effort=Effort(), prices=given)
    # 0.5 at time 1 is too little (20 bytes cost 10, 7 and the other state 13.5); twice of it is enough.
    assert [x.tolist() for x in first.assignments] == [[0, 0], [0, 1]]
    assert first.prices.times.tolist() == [1] and first.prices.per_byte.tolist() == pytest.approx([1.0])
    both = Prices(np.array([0, 1]), np.array([4.0, 2.0]))
    first = first_answers(PricedNetworks(network), 1.0, effort=Effort(), prices=both)
    assert [x.tolist() for x in first.assignments] == [[1, 1]] and first.prices.times.tolist() == [0, 1]
