"""Greedy construction: what it gives is an assignment, and no worse than each variable alone where nothing is forbidden."""

from __future__ import annotations

import numpy as np

from jshard._search import build, evaluate
from jshard._search.primal.greedy import greedy_assignment


def conditional_costs(found, v, unaries, tables):
    """The costs of a variable's states, the others as they are."""
    costs = unaries[v].copy()
    for (i, j), table in tables.items():
        if v == i:
            costs += table[:, found[j]]
        elif v == j:
            costs += table[found[i]]
    return costs


def test_each_variable_is_the_cheapest_beside_those_before_it():
    rng = np.random.default_rng(3)
    states = [2, 3, 4, 3, 2, 5]
    unaries = [rng.random(k) for k in states]
    ends = [(0, 1), (2, 1), (1, 3), (4, 3), (5, 0), (5, 4)]
    tables = {(i, j): rng.random((states[i], states[j])) for i, j in ends}
    network = build(unaries, [(i, j, table) for (i, j), table in tables.items()])
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        found = greedy_assignment(network, order)
        for at, v in enumerate(order):
            before = set(order[: at + 1])
            known = {pair: table for pair, table in tables.items() if before.issuperset(pair)}
            assert found[v] == conditional_costs(found, v, unaries, known).argmin()
        assert np.isfinite(evaluate(network, found))
