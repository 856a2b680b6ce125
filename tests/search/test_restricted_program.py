"""Integer programs of some states of a core with memory: bounds by state, restriction, and what a search does with them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import numpy as np
import pytest

from jshard._core.errors import MemoryBudgetError
from jshard._search import Contradiction, CostNetwork, Effort, build, evaluate, peak, solve
from jshard._search.integer_program import num_columns
from jshard._search.memory import ilp, restricted_program
from jshard._search.memory.budget_repair import BudgetedCore, budgeted_core
from jshard._search.memory.key_times import key_times_above
from jshard._search.memory.reduced_problem import ReducedProblem, reduced_problem
from jshard._search.memory.restricted_program import (
    StateBounds,
    largest_restriction,
    restricted_core,
    state_bounds,
)
from jshard._search.primal.local_search import energy
from jshard._search.search_state import SearchState
from tests.laws.random_networks import brute_force


def network_with_limit(seed: int) -> CostNetwork:
    """A complete graph of five variables of three or four states, each live for a while, and a limit that binds."""
    rng = np.random.default_rng(seed)
    sizes, start = rng.integers(3, 5, 5), rng.integers(0, 3, 5)
    usages = [rng.uniform(1, 9, k) for k in sizes]
    return build(
        [rng.random(k) for k in sizes],
        [(i, j, 3 * rng.random((sizes[i], sizes[j]))) for i in range(5) for j in range(i)],
        intervals=np.stack([start, start + rng.integers(2, 4, 5)], axis=1),
        usages=usages,
        limit=1.3 * sum(float(u.min()) for u in usages),
    )


def least_within(network: CostNetwork) -> tuple[float, float]:
    """The limit, and the least cost of the assignments within it."""
    memory = network.memory
    assert memory is not None and memory.limit is not None
    limit = memory.limit
    return limit, brute_force(network, lambda x: peak(network, x) <= limit)


def problems(seeds):
    """Reduced problems with a limit and a core of several variables."""
    for seed in seeds:
        network = network_with_limit(seed)
        memory = network.memory
        assert memory is not None and memory.limit is not None
        limit = memory.limit
        try:
            problem = reduced_problem(network, key_times_above(memory, limit), limit)
        except (MemoryBudgetError, Contradiction):
            continue
        core = problem.core
        if len(core.unary) > 1 and problem.memory.num_times:
            yield problem, budgeted_core(core, problem.memory, limit)


def assignments(core: BudgetedCore):
    """(states, cost) of every assignment within the limit."""
    for states in itertools.product(*(range(len(u)) for u in core.core.unary)):
        if (core.memory.live_bytes(list(states)) <= core.limit).all():
            cost = energy(core.core, list(states))
            if cost < core.core.offset + core.core.infeasibility_penalty:
                yield states, cost


def bounds_of(problem: ReducedProblem, core: BudgetedCore, price: float) -> tuple[StateBounds, float]:
    search = SearchState(np.inf, 0.0, lambda _: None, len(core.core.variables))
    return state_bounds(problem, np.full(problem.memory.num_times, price), core.limit, search)


def test_no_assignment_within_the_limit_costs_less_than_the_bound_of_its_states():
    checked = raised = 0
    for problem, core in problems(range(9400, 9430)):
        for price in (0.0, 0.3, 2.0):
            bounds, proved = bounds_of(problem, core, price)
            for states, cost in assignments(core):
                reduced = [costs[s] for costs, s in zip(bounds.reduced_costs, states, strict=True)]
                assert cost >= bounds.base + max(reduced) - 1e-9 * abs(cost)
                assert cost >= proved - 1e-9 * abs(cost)
                checked += 1
                raised += max(reduced) > 0
    assert checked > 500 and raised > 0.5 * checked


def test_a_restricted_core_costs_and_holds_what_the_whole_one_does():
    smaller = 0
    for problem, core in problems(range(9430, 9450)):
        bounds, _ = bounds_of(problem, core, 0.3)
        answer = [len(u) - 1 for u in core.core.unary]
        kept = largest_restriction(core, bounds, answer, np.inf, columns=num_columns(core.core) // 2)
        restricted = restricted_core(core, kept)
        smaller += num_columns(restricted.core) < num_columns(core.core)
        for states in itertools.product(*(range(len(k)) for k in kept)):
            whole = [int(k[s]) for k, s in zip(kept, states, strict=True)]
            np.testing.assert_allclose(
                restricted.memory.live_bytes(list(states)), core.memory.live_bytes(whole)
            )
            assert energy(restricted.core, list(states)) == pytest.approx(energy(core.core, whole))
        assert all(s in k for s, k in zip(answer, kept, strict=True))
        others = [
            cost
            for states, cost in assignments(core)
            if any(s not in k for s, k in zip(states, kept, strict=True))
        ]
        assert bounds.least_of_others(kept) <= min(others, default=np.inf) * (1 + 1e-9)
    assert smaller > 3


def test_as_many_states_as_the_columns_allow():
    for problem, core in problems(range(9450, 9460)):
        bounds, _ = bounds_of(problem, core, 0.3)
        answer = [0] * len(core.core.unary)
        sizes = []
        for columns in (0, 30, 80, 10_000):
            kept = largest_restriction(core, bounds, answer, np.inf, columns)
            sizes.append(num_columns(restricted_core(core, kept).core))
            least = num_columns(restricted_core(core, [np.array([0])] * len(answer)).core)
            assert sizes[-1] <= max(columns, least)
        assert sizes == sorted(sizes) and sizes[-1] == num_columns(core.core)
        none = largest_restriction(core, bounds, answer, -1.0, 10_000)
        assert [k.tolist() for k in none] == [[0]] * len(answer)  # states that cost too much are left out


@pytest.mark.parametrize("only", [None, "answer", "bound"])
def test_a_search_with_them_is_within_the_truth(monkeypatch, only):
    """Every core is a large one here; with the whole program after them the answer is the truth."""
    lagrangian = importlib.import_module("jshard._search.memory.lagrangian")
    monkeypatch.setattr(lagrangian, "RESTRICTED_COLUMNS", 40)
    monkeypatch.setattr(lagrangian, "_MANY_COLUMNS", 40)
    monkeypatch.setattr(lagrangian, "effort", lambda _: (3, 3))  # few prices and moves: gaps are left
    solved, programs = [], restricted_program.restricted_core
    monkeypatch.setattr(lagrangian, "restricted_core", lambda *a: solved.append(1) or programs(*a))
    total = exact = 0
    for seed in range(9500, 9540):
        network = network_with_limit(seed)
        limit, truth = least_within(network)
        if truth == np.inf:
            continue
        try:
            found = solve(network, layers_repeat=True, only=only)
        except MemoryBudgetError:
            continue
        assert peak(network, found.assignment) <= limit
        assert found.cost == evaluate(network, found.assignment) >= truth - 1e-9
        assert found.bound <= truth + 1e-6 * abs(truth), seed
        total += 1
        exact += found.cost <= truth + 1e-9
    assert total > 15 and solved and exact >= (total if only is None else 0.8 * total)


@pytest.fixture
def whole_programs(monkeypatch) -> list[int]:
    """One entry for each whole core whose integer program is solved, where every core is a large one."""
    lagrangian = importlib.import_module("jshard._search.memory.lagrangian")
    monkeypatch.setattr(lagrangian, "RESTRICTED_COLUMNS", 40)
    monkeypatch.setattr(lagrangian, "_MANY_COLUMNS", 40)
    monkeypatch.setattr(lagrangian, "effort", lambda _: (3, 3))
    whole, solve_whole = [], lagrangian._LimitedSearch.solve_integer_program

    def solved(self) -> bool:
        done = solve_whole(self)
        whole.extend([1] * done)
        return done

    monkeypatch.setattr(lagrangian._LimitedSearch, "solve_integer_program", solved)
    return whole


def count(whole: list[int], **options) -> int:
    """How many whole programs some networks' searches solve."""
    whole.clear()
    for seed in range(9500, 9540):
        network = network_with_limit(seed)
        given = {k: v(network) for k, v in options.items()}
        try:
            solve(network, layers_repeat=True, **given)
        except (MemoryBudgetError, Contradiction):
            continue
    return len(whole)


def test_the_whole_program_follows_where_it_can_close_much_of_the_gap(whole_programs):
    """Of a plan that costs far more than the network's own answer no proof is looked for."""
    near, far = [
        count(whole_programs, only=lambda _: "bound", known_cost=lambda n, t=t: t * abs(solve(n).cost))
        for t in (1.0, 100.0)
    ]
    assert near > far


def test_the_whole_program_follows_where_a_given_effort_suffices(whole_programs):
    """Without one the answer among some states suffices where no bound is of use."""
    only = dict(only=lambda _: "answer")
    without = count(whole_programs, **only)
    assert count(whole_programs, effort=lambda _: Effort(1e12), **only) > without
    assert count(whole_programs, effort=lambda _: Effort(5e5), **only) <= without


def test_a_known_peak_is_found_again_or_a_lower_one_and_below_the_least_there_is_none(monkeypatch):
    """The program of least peak with no peak above a known one; the bound is then that one, where nothing is below it."""
    seen, solve_program = [], ilp.mixed_integer_program
    monkeypatch.setattr(
        ilp, "mixed_integer_program", lambda *given: seen.append(given[2][-1]) or solve_program(*given)
    )
    checked = 0
    for _, core in problems(range(9450, 9470)):
        free = dataclasses.replace(core, limit=np.inf)
        peaks = [float(free.memory.live_bytes(list(states)).max()) for states, _ in assignments(free)]
        least, most = min(peaks), max(peaks)
        for known in (np.inf, most, least):
            found = ilp.solve_ilp(free, 0.0, 10.0, most=known)
            assert found.solved and found.states is not None
            assert float(free.memory.live_bytes(found.states).max()) == pytest.approx(least, rel=1e-5)
            assert found.bound <= least * (1 + 1e-9)
        none = ilp.solve_ilp(free, 0.0, 10.0, most=0.9 * least)
        assert none.states is None and none.solved and none.bound == 0.9 * least
        checked += 1
    assert checked > 5 and min(seen) < max(u for u in seen if np.isfinite(u)) and np.inf in seen
