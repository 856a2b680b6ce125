"""Where the bound has settled far below a poor answer, a better one is looked for."""

import importlib

import numpy as np

from jshard._search.bound_and_fix import bound_and_fix
from jshard._search.cost_network import build, evaluate
from jshard._search.exact.working_network import working_network
from jshard._search.search_state import SearchState
from jshard._search.solve import solve


trws = importlib.import_module("jshard._search.dual.trws")  # its function has the module's name


def test_a_poor_answer_is_replaced_when_the_bound_has_settled(monkeypatch) -> None:
    rng = np.random.default_rng(1)
    n, states = 60, 6
    edges = [(i, j) for i in range(n) for j in (i + 1, i + 2, i + 7) if j < n]
    network = build(
        [rng.random(states) for _ in range(n)],
        [(i, j, 0.1 * rng.random((states, states))) for i, j in edges],
    )
    least = solve(network).cost
    poor = np.array([int(network.unary[t].argmax()) for t in network.node_table])
    passes, one_pass = [], trws.trws_pass
    monkeypatch.setattr(
        trws, "trws_pass", lambda *args, **kwargs: passes.append(1) or one_pass(*args, **kwargs)
    )
    search = SearchState(np.inf, 0.0, lambda _: None, n)
    search.incumbent_cost, search.assignment = evaluate(network, poor), poor
    core = working_network(network)
    # A start of other messages, here none at all: answers are not looked for after every step.
    bounded = bound_and_fix(search, (), core, 15, start=lambda core, layout: None)
    assert search.incumbent_cost <= least * (1 + 1e-9)
    assert bounded.bound <= least * (1 + 1e-9)
    assert 0 < len(passes) <= 2 * 10  # forwards and backwards


def test_an_answer_far_above_a_settled_bound_is_improved_by_moves_on_forests(monkeypatch) -> None:
    """Not only once the bound has stalled, which takes twenty rounds and more."""
    module = importlib.import_module("jshard._search.bound_and_fix")
    rng = np.random.default_rng(3)
    n, states = 80, 4
    pairs = sorted({tuple(sorted(p)) for p in rng.integers(0, n, (240, 2)).tolist() if p[0] != p[1]})
    network = build(
        [0.1 * rng.random(states) for _ in range(n)],
        [(i, j, rng.random((states, states))) for i, j in pairs],
    )
    moves, search_forests = [], module.forest_search

    def recorded(*args, **kwargs):
        moves.append(kwargs["moves"])
        return search_forests(*args, **kwargs)

    monkeypatch.setattr(module, "forest_search", recorded)
    search = SearchState(np.inf, 0.0, lambda _: None, n)
    bounded = bound_and_fix(search, (), working_network(network), 60)
    assert search.incumbent_cost > bounded.bound * (1 + module.GAP_FOR_MOVES)
    few, many = search.forest_moves // 4, search.forest_moves
    assert few in moves[: moves.index(many)]
    assert moves[0] == 0  # the bound rises
