"""Laws of the search under a memory limit, and of the least peak."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jshard._core.errors import MemoryBudgetError
from jshard._search import Contradiction, CostNetwork, build, evaluate, peak, solve
from jshard._search.memory import ilp
from jshard._search.memory.lagrangian import effort
from tests.laws.random_networks import brute_force, random_network


@pytest.mark.parametrize("block", range(6))
def test_limited_cost(block):
    exact = total = 0
    for seed in range(block * 30, block * 30 + 30):
        network = random_network(seed, memory=True, most=6)
        limit = network.memory.limit
        truth = brute_force(network, lambda x, n=network, m=limit: peak(n, x) <= m)
        if truth == np.inf:
            with pytest.raises((Contradiction, MemoryBudgetError)):
                solve(network, seconds=60)
            continue
        found = solve(network, seconds=60)
        total += 1
        exact += found.cost == pytest.approx(truth, rel=1e-9)
        assert peak(network, found.assignment) <= limit
        assert found.peak == peak(network, found.assignment)
        assert found.cost == evaluate(network, found.assignment) >= truth - 1e-9
        assert found.bound <= truth + 1e-9 * abs(truth), seed
        # Small networks are solved to the end.
        assert found.bound >= found.cost - 1e-5 * abs(found.cost), seed
    assert exact == total


@pytest.mark.parametrize("block", range(4))
def test_least_peak(block):
    exact = total = 0
    for seed in range(500 + block * 30, 530 + block * 30):
        network = random_network(seed, memory=True, most=6)
        every = itertools.product(*(range(network.num_states(v)) for v in range(network.size)))
        truth = min(
            ((peak(network, x), evaluate(network, x)) for x in every if evaluate(network, x) < np.inf),
            default=None,
        )
        if truth is None:
            with pytest.raises(Contradiction):
                solve(network, objective="peak", seconds=60)
            continue
        found = solve(network, objective="peak", seconds=60)
        total += 1
        assert found.cost == found.peak == peak(network, found.assignment)
        assert found.cost >= truth[0] and found.bound <= truth[0] * (1 + 1e-9)
        cost = evaluate(network, found.assignment)
        assert cost < np.inf
        assert found.cost <= truth[0] * (1 + 1e-9), seed
        exact += cost == pytest.approx(truth[1], rel=1e-9)
    assert exact >= 0.9 * total  # ties are broken by counted effort


def test_a_limit_below_the_floor_names_the_least():
    network = build([[0.0, 1.0]], [], intervals=[[0, 2]], usages=[[8.0, 6.0]], limit=5.0)
    with pytest.raises(MemoryBudgetError, match="6 bytes or more"):
        solve(network)


def test_worked_case_of_memory():
    network = build([[0.0, 6.0]], [], intervals=[[0, 1]], usages=[[8.0, 2.0]], limit=5.0)
    assert solve(network).cost == 6.0
    assert solve(network, objective="peak").cost == 2.0


def chained(seed: int, length: int = 30) -> CostNetwork:
    """A ring of variables with chords, too wide for exact elimination, under a limit that binds."""
    rng = np.random.default_rng(seed)
    unary = [rng.integers(0, 50, 3).astype(float) for _ in range(length)]
    ends = [(i, (i + d) % length) for i in range(length) for d in (1, 7)]
    pairs = [(min(e), max(e), rng.integers(0, 30, (3, 3)).astype(float)) for e in ends]
    usages = [np.sort(rng.integers(1, 100, 3))[::-1].astype(float) for _ in range(length)]
    intervals = [[i, i + 6] for i in range(length)]
    return build(unary, pairs, intervals=intervals, usages=usages, limit=260.0)


class Clock:
    """A machine that is slower: every look at the clock costs so many seconds more."""

    def __init__(self, seconds: float):
        self.seconds, self.looks = seconds, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.looks * self.seconds


def test_a_slow_machine_finds_what_a_fast_one_does(monkeypatch):
    network = chained(0)
    found = []
    for seconds in (1e-9, 1e-3):
        clock = Clock(seconds)
        monkeypatch.setattr("time.monotonic", clock.monotonic)
        found.append(solve(network, seconds=1e6))
        assert clock.looks > 100
    assert np.array_equal(found[0].assignment, found[1].assignment)
    assert (found[0].cost, found[0].bound) == (found[1].cost, found[1].bound)


def test_a_limit_in_seconds_ends_the_search(monkeypatch):
    network = chained(1)
    looks = []
    for seconds in (1e9, 300.0):
        clock = Clock(1.0)
        monkeypatch.setattr("time.monotonic", clock.monotonic)
        result = solve(network, seconds=seconds)
        assert peak(network, result.assignment) <= network.memory.limit
        looks.append(clock.looks)
    assert looks[1] < looks[0]


def test_effort_is_less_a_variable_on_larger_cores():
    counts = [effort(n) for n in (1, 10, 100, 1_000, 10_000, 1_000_000)]
    assert all(
        a >= b for before, after in itertools.pairwise(counts) for a, b in zip(before, after, strict=True)
    )
    assert min(counts[-1]) >= 20


def test_times_that_are_added_as_they_are_exceeded_lead_to_the_same_answer(monkeypatch):
    """Programs with all times and with those that answers exceed: the same cost and peak, proved."""
    solved = 0
    for seed in range(900, 940):
        network = random_network(seed, memory=True, most=6)
        for objective in ("cost", "peak"):
            found = []
            for entries in (ilp.MAX_ENTRIES, 0):
                monkeypatch.setattr(ilp, "MAX_ENTRIES", entries)
                try:
                    found.append(solve(network, objective=objective, seconds=60).cost)
                except (Contradiction, MemoryBudgetError) as error:
                    found.append(type(error))
            assert found[0] == found[1] or found[0] == pytest.approx(found[1], rel=1e-6), seed
            solved += isinstance(found[0], float)
    assert solved > 20


def test_a_limit_below_everything_names_variables_whatever_they_hold():
    """Variable 0 holds two things at time 1, variable 1 one that is larger than either."""
    network = build([[0.0], [0.0]], [], intervals=[[0, 2], [0, 2]], usages=[[4.0], [5.0]], limit=8.0)
    memory = network.memory
    assert memory is not None
    more = dataclasses.replace(
        memory,
        intervals=np.concatenate([memory.intervals, [[1, 2]]]),
        usage_tables=(*memory.usage_tables, np.array([3.0])),
        interval_variable=np.array([0, 1, 0]),
        interval_table=np.array([0, 1, 2]),
    )
    with pytest.raises(MemoryBudgetError, match="any assignment holds 12 bytes") as error:
        solve(dataclasses.replace(network, memory=more))
    assert error.value.where == "time 1; the largest there are variables 0, 1"
