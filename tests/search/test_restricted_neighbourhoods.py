"""Restricted problems of `bound_and_fix`: what they may take grows with the core, else those of deep programs stay open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jshard._search import bound_and_fix
from jshard._search.cost_network import build, evaluate
from jshard._search.exact.working_network import working_network
from jshard._search.search_state import SearchState


@pytest.mark.parametrize(
    ("variables", "entries"), [(100, 2_000_000), (2_000, 2_000_000), (16_000, 11_200_000)]
)
def test_the_entries_grow_with_the_variables(variables: int, entries: int, monkeypatch: Any) -> None:
    given = []

    def solve_restricted(*args: Any) -> Any:
        given.append(args[-1])
        return SimpleNamespace(core=[1])

    monkeypatch.setattr(bound_and_fix, "solve_restricted", solve_restricted)
    search: Any = SimpleNamespace(gap_closed=lambda bound: False)
    costs = {v: np.arange(4.0) for v in range(variables)}
    bound_and_fix.solve_restricted_neighbourhoods(search, (), None, costs, 0.0)  # type: ignore[arg-type]
    assert given == [entries]


def test_a_wide_core_is_solved_that_the_least_entries_do_not_suffice_for(monkeypatch: Any) -> None:
    """A strip of 300 by 6 variables takes 3 ** 7 entries a variable: 3.9 million in all."""
    monkeypatch.setattr(bound_and_fix, "RESTRICTED_WORK", 2_000)
    rng, long, wide = np.random.default_rng(7), 300, 6
    number = np.arange(long * wide).reshape(long, wide)
    ends = [(number[:-1], number[1:]), (number[:, :-1], number[:, 1:])]
    pairs = [pair for a, b in ends for pair in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)]
    net = build(rng.uniform(0, 1, (long * wide, 3)), [(*pair, rng.uniform(0, 1, (3, 3))) for pair in pairs])

    def answer(entries_per_variable: int) -> Any:
        monkeypatch.setattr(bound_and_fix, "RESTRICTED_WORK_PER_VARIABLE", entries_per_variable)
        search = SearchState(np.inf, 0.0, lambda _: None, net.size)
        every = {v: np.zeros(3) for v in range(net.size)}
        bound_and_fix.solve_restricted_neighbourhoods(search, (), working_network(net), every, 0.0)
        return search

    solved = answer(3**8)
    assert solved.assignment is not None
    assert evaluate(net, solved.assignment) == pytest.approx(solved.incumbent_cost, rel=1e-9)
    assert not answer(3**3).has_answer
