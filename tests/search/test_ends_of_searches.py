"""When searches end: a spent effort, prices that raise no bound, and the error where nothing is found."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext

import numpy as np
import pytest

from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._search import Effort, build, cost_network, solve
from jshard._search.memory import lagrangian, minimax_peak, price_cuts
from jshard._search.search_state import SearchState
from tests.search.test_price_cuts import deep


def every_network_is(monkeypatch, large: bool) -> None:
    """Large, or not for its number of variables."""
    for module in (cost_network, price_cuts):
        monkeypatch.setattr(module, "LARGE_NETWORK", 0 if large else np.inf)


@pytest.mark.parametrize(
    ("large", "limit", "known"),
    [(False, 1e12, np.inf), (True, 1e12, 1e9), (False, 10.0, np.inf), (False, 10.0, 1e9)],
)
def test_while_no_answer_is_known_a_round_has_an_effort_of_its_own(monkeypatch, large, limit, known):
    """Networks that are hardly solved give no answer under any prices. Once one is known, what was given is all.

    `large`: whether the rounds take it for a large network, which is solved to the end. So is one over whose tables an
    effort of `limit` entries allows few passes, unless a plan is known, by its cost.
    """
    for module in (lagrangian, minimax_peak):
        monkeypatch.setattr(module, "PRICE_CUTS_FROM", 0)
    every_network_is(monkeypatch, large)
    monkeypatch.setattr(cost_network, "_LARGE_TABLES", 0)
    least = solve(deep(20, 0), objective="peak", layers_repeat=True, break_ties_by_cost=False)
    limited, left = deep(20, 0, limit=1.02 * least.cost), []
    solved = price_cuts.branch_and_bound

    def recorded(search, *arguments, **options):
        left.append(search.effort.limit - search.effort.spent)
        solved(search, *arguments, **options)

    monkeypatch.setattr(price_cuts, "branch_and_bound", recorded)
    effort, whole = Effort(limit, spent=limit), large or limit == 10.0 and known == np.inf
    with (
        nullcontext()
        if large or limit > 10
        else pytest.raises(MemoryBudgetError, match="none is known to exist")
    ):
        found = solve(limited, layers_repeat=True, effort=effort, only="answer", known_cost=known)
    assert left[0] == (np.inf if whole else price_cuts.EFFORT_WITHOUT_ANSWER) and effort.spent > limit
    if large or limit > 10:
        left.clear()
        solve(limited, layers_repeat=True, effort=Effort(limit, spent=limit), known=[found.assignment])
        assert left and max(left) <= 0


@pytest.mark.parametrize(
    ("effort", "what", "fix"),
    [
        (Effort(), "in 5 s", "time (seconds=...)"),
        (Effort(0.0), "in the given effort", "effort (search_seconds=...)"),
    ],
)
def test_the_error_where_nothing_is_found_says_what_ended_the_search(monkeypatch, effort, what, fix):
    monkeypatch.setattr(importlib.import_module("jshard._search.solve"), "branch_and_bound", lambda *_: None)
    with pytest.raises(SearchError) as caught:
        solve(build([[0.0, 1.0]], []), seconds=5, effort=effort)
    assert f"no feasible assignment found {what}" in str(caught.value)
    assert f"write instead: more {fix}, or a larger memory limit" in str(caught.value)


@pytest.mark.parametrize(
    ("large", "effort", "rises", "rounds"),
    [
        (False, Effort(), False, 6),
        (True, Effort(), False, 10),
        (False, Effort(), True, 10),
        (False, Effort(1e12, spent=1e12), True, price_cuts.OVERDUE),
        (False, Effort(10.0, spent=10.0), True, price_cuts.OVERDUE),
        (True, Effort(10.0, spent=10.0), True, 10),
    ],
)
def test_rounds_end_where_the_bound_stays_and_no_answer_is_found(monkeypatch, large, effort, rises, rounds):
    """Those of a small network, which other searches follow: else they end where prices count for more than all costs.

    Though the bound `rises` they end some rounds after an effort that allows few passes over the tables.
    """
    network, said = deep(3, 0), []
    limit = 0.99 * solve(network, objective="peak").cost
    exceeds = solve(network).assignment
    every_network_is(monkeypatch, large)
    monkeypatch.setattr(cost_network, "_LARGE_TABLES", 0)
    monkeypatch.setattr(price_cuts.PriceCuts, "_nothing_fits", lambda *_: False)
    proved = itertools.count(1) if rises else itertools.repeat(1)
    monkeypatch.setattr(
        price_cuts.PricedNetworks,
        "solve",
        lambda s, times, prices, *_: (exceeds, next(proved) + limit * prices.sum()),
    )
    search = SearchState(np.inf, 1e-6, said.append, network.size, effort=effort)
    price_cuts.PriceCuts(network.within(limit), search, limit, lambda _: None).run()
    assert not search.has_answer and (rises or search.bound == pytest.approx(1))
    assert [s.split("round ")[1] for s in said if "prices on" in s][-1] == str(rounds)
