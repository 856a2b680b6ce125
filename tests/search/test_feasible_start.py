"""First answers within a limit: they keep it where one is found, cost what the best of their states do, and take little."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jshard._search import Effort, evaluate, peak, solve
from jshard._search.memory.feasible_start import answers_within
from jshard._search.memory.price_cuts import PricedNetworks
from tests.search.test_price_cuts import deep


@pytest.mark.parametrize("seed", range(6))
def test_the_last_answer_keeps_the_limit_and_costs_no_more_than_those_before(seed):
    network = deep(40, seed)
    free = solve(network).assignment
    least = solve(network, objective="peak").cost
    limit = least + 0.3 * (peak(network, free) - least)
    limited = dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=limit))
    answers = answers_within(limited, free, effort=Effort()).assignments
    assert 1 <= len(answers) <= 4 and peak(network, answers[-1]) <= limit
    fitting = [evaluate(network, x) for x in answers if peak(network, x) <= limit]
    assert fitting[-1] == min(fitting)
    best = solve(limited)
    assert best.bound * (1 - 1e-9) <= fitting[-1] <= 1.15 * best.cost


@pytest.mark.parametrize("seed", range(3))
def test_a_known_answer_within_the_limit_is_combined_with_the_fastest_and_no_other_is_looked_for(
    seed, monkeypatch
):
    network = deep(40, seed)
    free, low = solve(network).assignment, solve(network, objective="peak").assignment
    limit = peak(network, low) + 0.3 * (peak(network, free) - peak(network, low))
    limited = dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=limit))

    def no_search(*_):
        raise AssertionError("a priced network is solved")

    monkeypatch.setattr(PricedNetworks, "solve", no_search)
    first, last = answers_within(limited, free, low, effort=Effort()).assignments
    assert (first == low).all() and peak(network, last) <= limit
    assert evaluate(network, last) <= evaluate(network, low)
    assert all(s in pair for s, *pair in zip(last.tolist(), free.tolist(), low.tolist(), strict=True))


def test_nothing_is_combined_once_the_effort_is_spent():
    network = deep(40, 1, limit=0.0)
    limited = dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=1e9))
    fastest = np.zeros(network.size, dtype=np.int64)
    assert len(answers_within(limited, fastest, effort=Effort(1.0)).assignments) <= 1
