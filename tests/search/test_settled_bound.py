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
