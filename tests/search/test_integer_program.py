"""Small cores that branching does not close soon are integer programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jshard._search import branch_and_bound
from jshard._search.cost_network import build, evaluate
from jshard._search.exact.working_network import working_network
from jshard._search.integer_program import local_polytope, num_columns, solve_integer_program
from jshard._search.primal.local_search import core_problem, energy
from jshard._search.solve import solve


def random_network(seed: int, n: int, states: int, edges: list[tuple[int, int]]):
    """Costs that no assignment has all of the least; a tenth of the pairs is forbidden."""
    rng = np.random.default_rng(seed)
    unary = [rng.random(states) for _ in range(n)]
    tables = [
        np.where(rng.random((states, states)) < 0.1, np.inf, rng.random((states, states))) for _ in edges
    ]
    return build(unary, [(i, j, t) for (i, j), t in zip(edges, tables, strict=True)])


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_is_that_of_all_assignments(seed):
    network = random_network(seed, 6, 3, list(itertools.combinations(range(6), 2)))
    all_costs = [evaluate(network, np.array(x)) for x in itertools.product(range(3), repeat=6)]
    core = core_problem(working_network(network))
    found = solve_integer_program(core, 0.0, np.inf)
    assert found.solved and found.states is not None
    assert energy(core, found.states) == pytest.approx(min(all_costs), abs=1e-12)
    assert min(all_costs) * (1 - 1e-5) <= found.bound <= min(all_costs)
    polytope = local_polytope(core)
    assert len(polytope.objective) == num_columns(core) < 6 * 3 + 15 * 9  # forbidden pairs have no column


def test_a_core_that_branching_leaves_open_is_solved(monkeypatch):
    """A clique of 10 variables, whose tables are too large to eliminate and whose messages prove little."""
    monkeypatch.setattr(branch_and_bound, "_BRANCHES_FIRST", 4)
    network = random_network(0, 10, 6, list(itertools.combinations(range(10), 2)))
    found = solve(network, seconds=60.0)
    assert any("integer program of" in step for step in found.steps)
    assert found.cost == pytest.approx(evaluate(network, found.assignment))
    assert found.cost * (1 - 1e-5) <= found.bound <= found.cost


def test_the_bound_is_said_as_branching_raises_it(monkeypatch):
    """An interruption between two branches keeps what the open ones prove."""
    monkeypatch.setattr(branch_and_bound, "_BRANCHES_FIRST", 10_000)
    bounds: list[float] = []

    def said(text: str, best: float, bound: float) -> None:
        if text.startswith(("branching:", "messages and blocks")):
            bounds.append(bound)

    network = random_network(0, 10, 6, list(itertools.combinations(range(10), 2)))
    found = solve(network, seconds=60.0, on_progress=said)
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] <= found.bound
