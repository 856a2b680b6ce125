"""Batched reductions keep the least cost, and states of eliminated variables are reconstructed."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from jshard._search import Contradiction, build, evaluate, solve
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.exact.reduce_batched import reduce_batched
from jshard._search.exact.table_pool import TablePool, quantum
from jshard._search.exact.working_network import working_network
from jshard._search.search_state import SearchState
from tests.laws.random_networks import brute_force, random_network


def layered(seed: int, layers: int, forbid: float = 0.2):
    """A network of equal layers: forbidden states, parallel edges, loops, and one variable that all layers read."""
    rng = np.random.default_rng(seed)
    wide = int(rng.integers(3, 7))
    sizes = rng.integers(2, 5, wide)

    def table(*shape):
        t = rng.integers(0, 9, shape).astype(float)
        t[rng.random(shape) < forbid] = np.inf
        t.flat[0] = 0.0
        return t

    unary = [table(k) for k in sizes]
    inner = [tuple(rng.integers(0, wide, 2).tolist()) for _ in range(wide + 1)]
    tables = [table(sizes[i], sizes[j]) for i, j in inner]
    on, all_read = table(sizes[-1], sizes[0]), table(3, sizes[1])
    edges = [
        (w * wide + i, w * wide + j, t)
        for w in range(layers)
        for (i, j), t in zip(inner, tables, strict=True)
    ]
    edges += [(w * wide + wide - 1, (w + 1) * wide, on) for w in range(layers - 1)]
    edges += [(layers * wide, w * wide + 1, all_read) for w in range(0, layers, 2)]
    return build(unary * layers + [np.zeros(3)], edges)


def least(network, graph) -> tuple[float, np.ndarray]:
    search = SearchState(np.inf, 0.0, lambda _: None, network.size)
    branch_and_bound(search, graph)
    assert search.assignment is not None
    return search.incumbent_cost, search.assignment


@pytest.mark.parametrize("block", range(8))
def test_small_networks_keep_their_least_cost(block):
    for seed in range(block * 40, block * 40 + 40):
        network = random_network(seed)
        truth = brute_force(network)
        try:
            graph = reduce_batched(network, TablePool(quantum(network)), min_round=1)
            cost, assignment = least(network, graph)
        except Contradiction:
            assert truth == np.inf, seed
            continue
        assert cost == pytest.approx(truth, rel=1e-9), seed
        assert evaluate(network, assignment) == pytest.approx(truth, rel=1e-9), seed


@pytest.mark.parametrize("seed", range(40))
def test_layers_are_reduced_as_one_by_one(seed):
    network = layered(seed, 12)
    graph = reduce_batched(network, TablePool(quantum(network)), min_round=4)
    cost, assignment = least(network, graph)
    want, _ = least(network, working_network(network))
    assert cost == pytest.approx(want, rel=1e-9)
    assert evaluate(network, assignment) == pytest.approx(want, rel=1e-9)


def test_most_of_a_deep_network_goes_in_rounds():
    gone = []
    for seed in range(40):
        network = layered(seed, 200)
        graph = reduce_batched(network, TablePool(quantum(network)))
        gone.append(sum(len(r.variables) for r in graph.elimination_rounds) / network.size)
        assert len(graph.core) + sum(len(r.variables) for r in graph.elimination_rounds) == network.size
        assert graph.original_size == (network.size, sum(network.num_states(v) for v in range(network.size)))
    assert np.median(gone) > 0.5


def test_what_is_impossible_is_told_as_one_by_one(monkeypatch):
    network = build([np.zeros(2)] * 3 + [np.array([0.0, np.inf])] * 2, [
        (0, 1, [[0, np.inf], [np.inf, 0]]), (1, 2, [[np.inf, 0], [0, np.inf]]), (3, 4, [[np.inf, 0], [0, 0]]),
    ])  # fmt: skip
    with pytest.raises(Contradiction) as one:
        solve(network)
    monkeypatch.setattr(importlib.import_module("jshard._search.exact.reduce_batched"), "LARGE_NETWORK", 0)
    with pytest.raises(Contradiction) as many:
        solve(network)
    assert str(one.value) == str(many.value)
