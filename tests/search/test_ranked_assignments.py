"""Assignments in the order of cost: all of them, each once, on random networks with forbidden states and parallel edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jshard._search import build, evaluate
from jshard._search.exact import ranked_assignments
from jshard._search.exact.ranked_assignments import assignments_by_cost


@pytest.mark.parametrize("seed", range(6))
def test_every_assignment_comes_once_and_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, int(rng.integers(1, 6))).tolist()
    unary = [rng.choice([0.0, 1.0, 2.5, np.inf], s, p=[0.4, 0.3, 0.2, 0.1]) for s in sizes]
    pairs = [(i, j) for i, j in itertools.combinations(range(len(sizes)), 2) if rng.random() < 0.6]
    pairs += pairs[:1]
    edges = [
        (i, j, rng.choice([0.0, 0.5, 3.0, np.inf], (sizes[i], sizes[j]), p=[0.4, 0.3, 0.2, 0.1]))
        for i, j in pairs
    ]
    network = build(unary, edges)
    want = [(evaluate(network, states), states) for states in itertools.product(*map(range, sizes))]
    listed = assignments_by_cost(network)
    assert listed is not None
    got = [(cost, tuple(states.tolist())) for cost, states in listed]
    assert sorted(got) == sorted((c, s) for c, s in want if np.isfinite(c))
    assert [c for c, _ in got] == sorted(c for c, _ in got)


def test_a_network_with_large_joint_tables_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build([[0.0, 1.0]] * 4, [(i, j, np.eye(2)) for i, j in itertools.combinations(range(4), 2)])
    assert assignments_by_cost(network) is not None
    monkeypatch.setattr(ranked_assignments, "TABLE_LIMIT", 8)
    assert assignments_by_cost(network) is None
