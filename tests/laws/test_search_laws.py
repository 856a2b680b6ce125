"""Laws of the search, checked by enumeration on random small networks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jshard._search import Contradiction, build, evaluate, load, peak, save, solve
from jshard._search.exact.bucket_elimination import (
    components,
    eliminate_in_order,
    elimination_order,
    reconstruct_component,
)
from jshard._search.exact.reduce import backtrack, reduce
from jshard._search.exact.working_network import working_network
from tests.laws.random_networks import brute_force, hard_core, layers, random_network


@pytest.mark.parametrize("block", range(25))
def test_cost_equals_brute_force(block):
    """A thousand networks in all; no bound that is told on the way is above the least cost."""
    for seed in range(block * 40, block * 40 + 40):
        network = random_network(seed)
        truth = brute_force(network)
        if truth == np.inf:
            with pytest.raises(Contradiction) as caught:
                solve(network)
            assert caught.value.variables
            continue
        told: list[float] = []
        found = solve(network, on_progress=lambda stage, cost, bound, told=told: told.append(bound))
        assert found.cost == pytest.approx(truth, rel=1e-9), seed
        assert found.cost == evaluate(network, found.assignment)
        assert found.optimal and found.bound <= found.cost
        assert told and max(told) <= truth + 1e-9 * abs(truth), seed


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_a_search_cut_short_has_a_true_bound(seconds, monkeypatch):
    from jshard._search.exact import bucket_elimination

    monkeypatch.setattr(bucket_elimination, "TABLE_LIMIT", 0)
    left_open = 0
    for seed in range(30):
        network = hard_core(seed, n=5)
        truth = brute_force(network)
        found = solve(network, seconds=seconds)
        assert found.bound <= truth * (1 + 1e-9) <= found.cost * (1 + 2e-9), seed
        left_open += not found.optimal
    assert seconds > 0 or left_open


def test_reductions_preserve_the_optimum():
    for seed in range(1000, 1120):
        network = random_network(seed)
        truth = brute_force(network)
        if truth == np.inf:
            continue
        graph = reduce(working_network(network))
        assignment = np.zeros(network.size, dtype=np.int64)
        total = graph.offset
        for part in components(graph):
            order = elimination_order(graph, part)
            assert order is not None
            finished = eliminate_in_order(graph, order)
            total += finished.minimum
            reconstruct_component(graph, finished, assignment)
        backtrack(graph, assignment)
        assert total == pytest.approx(truth, rel=1e-9)
        assert evaluate(network, assignment) == pytest.approx(truth, rel=1e-9)


def test_later_rungs_agree_with_elimination(monkeypatch):
    from jshard._search.exact import bucket_elimination

    for seed in range(12):
        network = hard_core(seed)
        exact = solve(network)
        assert exact.optimal
        with monkeypatch.context() as patch:
            # Forbid elimination: messages, blocks, fixing and branching do it all.
            patch.setattr(bucket_elimination, "TABLE_LIMIT", 0)
            climbed = solve(network)
        assert climbed.optimal
        assert climbed.cost == pytest.approx(exact.cost, rel=1e-9)


@pytest.mark.parametrize("ring", [False, True])
def test_equal_layers_share_products(ring):
    products = []
    for count in (50, 1000):
        graph = reduce(working_network(layers(count, ring=ring)))
        assert not graph.core
        products.append(graph.tables.num_products)
    if ring:  # a cycle is halved round by round
        assert products[1] <= products[0] + 40
    else:
        assert products[1] <= products[0] + 5


def test_two_runs_agree():
    for network in [layers(40), hard_core(3), random_network(5)]:
        one, two = solve(network), solve(network)
        assert np.array_equal(one.assignment, two.assignment)
        assert (one.cost, one.bound) == (two.cost, two.bound)


def test_save_load(tmp_path):
    for seed in (2, 3, 4):
        network = random_network(seed, memory=seed % 2 == 0)
        save(network, tmp_path / "network.npz")
        again = load(tmp_path / "network.npz")
        for name in ("unary", "pairwise"):
            mine, theirs = getattr(network, name), getattr(again, name)
            assert len(mine) == len(theirs)
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for name in ("node_table", "edges", "edge_table"):
            assert np.array_equal(getattr(network, name), getattr(again, name))
        assert (network.memory is None) == (again.memory is None)
        if network.memory is not None and again.memory is not None:
            for name in ("intervals", "interval_variable", "interval_table"):
                assert np.array_equal(getattr(network.memory, name), getattr(again.memory, name))
            assert network.memory.limit == again.memory.limit
            zeros = np.zeros(network.size, dtype=int)
            assert peak(network, zeros) == peak(again, zeros)


def test_empty_and_tiny():
    assert solve(build([], [])).cost == 0.0
    assert solve(build([[3.0, 2.0]], [])).cost == 2.0
    found = solve(build([[0.0, 0.0]], [(0, 0, [[5.0, 0.0], [0.0, 4.0]])]))
    assert found.cost == 4.0 and list(found.assignment) == [1]


def test_hash_seed_does_not_matter():
    code = (
        "from jshard._search import solve\n"
        "from tests.laws.random_networks import hard_core, layers, random_network\n"
        "for n in [layers(30), hard_core(3, 8), random_network(6, True)]:\n"
        "    s = solve(n); print(s.assignment.tolist(), s.cost, s.bound)\n"
    )
    outputs = set()
    for seed in ("1", "2"):
        paths = os.pathsep.join([str(pathlib.Path(__file__).parents[2]), *sys.path])
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_interrupt_returns_the_best_so_far():
    network = hard_core(1, 30, 8)
    calls = []

    def stop(stage, cost, bound):
        calls.append(stage)
        if cost < np.inf:
            raise KeyboardInterrupt

    found = solve(network, on_progress=stop)
    assert calls and found.bound <= found.cost == evaluate(network, found.assignment)
    assert found.cost < np.inf and not found.optimal

    def at_once(stage, cost, bound):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(network, on_progress=at_once)
