"""First answers within a limit: they keep it where one is found, cost what the best of their states do, and take little."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jshard._search import Effort, evaluate, peak, solve
from jshard._search.memory.feasible_start import answers_within
from tests.search.test_price_cuts import deep


@pytest.mark.parametrize("seed", range(6))
def test_the_last_answer_keeps_the_limit_and_costs_no_more_than_those_before(seed):
    network = deep(40, seed)
    free = solve(network).assignment
    least = solve(network, objective="peak").cost
    limit = least + 0.3 * (peak(network, free) - least)
    limited = dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=limit))
    answers = answers_within(limited, free, Effort())
    assert 1 <= len(answers) <= 3 and peak(network, answers[-1]) <= limit
    fitting = [evaluate(network, x) for x in answers if peak(network, x) <= limit]
    assert fitting[-1] == min(fitting)
    best = solve(limited)
    assert best.bound * (1 - 1e-9) <= fitting[-1] <= 1.15 * best.cost


def test_nothing_is_combined_once_the_effort_is_spent():
    network = deep(40, 1, limit=0.0)
    assert len(answers_within(dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=1e9)),
                              np.zeros(network.size, dtype=np.int64), Effort(1.0))) <= 1  # fmt: skip
