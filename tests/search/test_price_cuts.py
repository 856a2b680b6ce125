"""Prices on few times: what they prove holds, what they find fits, and repeated layers are searched to a small gap."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import numpy as np
import pytest

from jshard._core.errors import MemoryBudgetError
from jshard._search import Contradiction, CostNetwork, Effort, build, cost_network, evaluate, peak, solve
from jshard._search.cost_network import interval_bytes, live_bytes
from jshard._search.integer_program import num_columns
from jshard._search.memory import ilp, price_cuts
from jshard._search.memory.answer_fusion import fused_network
from jshard._search.memory.price_cuts import Cut, best_prices, priced_network
from jshard._search.primal.local_search import energy
from tests.laws.random_networks import brute_force, random_network


@pytest.fixture
def every_network_is_large(monkeypatch):
    # Both are imported before one is changed: the second takes its constants from the first.
    names = [f"jshard._search.memory.{module}" for module in ("lagrangian", "minimax_peak")]
    for module in [importlib.import_module(name) for name in names]:
        monkeypatch.setattr(module, "PRICE_CUTS_FROM", 0)
    monkeypatch.setattr(cost_network, "LARGE_NETWORK", 0)


def deep(layers: int, seed: int, limit: float | None = None) -> CostNetwork:
    """Layers of a block that is kept until the way back comes to its layer, as in training, and of one that is not.

    State 0 is fast and large, state 2 small and slow; neighbours pay for the distance of their states.
    """
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(3), np.arange(3))).astype(float)
    costs = [np.sort(rng.uniform(0, 4, 3)) for _ in range(3)]
    sizes = [np.sort(rng.uniform(1, 9, 3))[::-1] for _ in range(3)]
    along, across = distance * rng.uniform(0.2, 1), distance * rng.uniform(0.2, 1)
    unary, usages, intervals, edges = [], [], [], []
    for k in range(layers):
        v = 3 * k
        back = 2 * layers - k
        intervals += [[k, back + 1], [k, k + 1], [back, back + 1]]
        unary += costs
        usages += sizes
        edges += [(v, v + 1, along), (v, v + 2, along), (v + 1, v + 2, across)]
        if k:
            edges += [(v - 3, v, across), (v - 2, v + 1, along), (v - 1, v + 2, along)]
    return build(unary, edges, intervals=intervals, usages=usages, limit=limit)


@pytest.mark.parametrize("block", range(2))
def test_what_is_proved_holds_and_what_is_found_fits(block, every_network_is_large):
    missed = total = 0
    for seed in range(9000 + block * 40, 9040 + block * 40):
        network = random_network(seed, memory=True, most=6)
        limit = network.memory.limit
        truth = brute_force(network, lambda x, n=network, m=limit: peak(n, x) <= m)
        if truth == np.inf:
            with pytest.raises((Contradiction, MemoryBudgetError)):
                solve(network, layers_repeat=True)
            continue
        total += 1
        try:
            found = solve(network, layers_repeat=True)
        except MemoryBudgetError:
            missed += 1
            continue
        assert found.peak == peak(network, found.assignment) <= limit
        assert found.cost == evaluate(network, found.assignment) >= truth - 1e-9
        assert found.bound <= truth + 1e-9 * abs(truth), seed
    assert total > 20 and missed <= 0.1 * total


def test_with_what_comes_after_them_small_networks_are_solved_to_the_end(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jshard._search.memory.lagrangian"), "PRICE_CUTS_FROM", 0)
    for seed in range(9200, 9220):
        network = random_network(seed, memory=True, most=6)
        limit = network.memory.limit
        truth = brute_force(network, lambda x, n=network, m=limit: peak(n, x) <= m)
        if truth < np.inf:
            found = solve(network, layers_repeat=True)
            assert found.cost == pytest.approx(truth, rel=1e-9), seed
            assert peak(network, found.assignment) <= limit


def test_what_comes_after_them_begins_with_their_prices_and_answer(monkeypatch):
    """The first round of the ascent proves as much as they did, and it begins with their answer."""
    lagrangian = importlib.import_module("jshard._search.memory.lagrangian")
    monkeypatch.setattr(lagrangian, "PRICE_CUTS_FROM", 0)
    monkeypatch.setattr(lagrangian, "solve_small_core", lambda *_: None)
    monkeypatch.setattr(lagrangian, "effort", lambda _: (5, 5))
    rounds, ascend = [], lagrangian._LimitedSearch.ascend

    def ascended(self, *args, **kwargs):
        before = self.search.bound, self.search.incumbent_cost, float(self.ascent.prices.sum())
        own = np.inf if self.states is None else energy(self.problem.core, self.states)
        ascend(self, *args, **kwargs)
        rounds.append((*before, own, self.ascent.bound))

    monkeypatch.setattr(lagrangian._LimitedSearch, "ascend", ascended)
    for seed in range(6):
        network = deep(5, seed)
        free = solve(network)
        limit = 0.6 * peak(network, free.assignment)
        found = solve(network.within(limit), layers_repeat=True)
        assert found.peak <= limit and found.bound <= found.cost
    assert any(cost < np.inf for _, cost, *_ in rounds)
    for bound, cost, prices, own, proved in rounds:
        if cost < np.inf:
            assert prices > 0 and own <= cost * (1 + 1e-9)
            assert proved >= bound - 1e-6 * abs(bound)


def test_answers_under_prices_are_repaired_until_one_fits(monkeypatch):
    """Near the least peak no answer under prices fits for some rounds; one near it that does is known after fewer."""
    lagrangian = importlib.import_module("jshard._search.memory.lagrangian")
    networks = [deep(5, seed) for seed in range(8)]
    limits = [1.02 * solve(n, objective="peak").cost for n in networks]
    firsts = []  # answers until the first that fits, of every search

    class Counted(price_cuts.PriceCuts):
        def run(self):
            super().run()
            fits = [cut.profile.max() <= self.limit for cut in self.cuts]
            firsts.append(fits.index(True) if any(fits) else len(fits))

    monkeypatch.setattr(lagrangian, "PRICE_CUTS_FROM", 0)
    monkeypatch.setattr(lagrangian, "PriceCuts", Counted)
    for network, limit in zip(networks, limits, strict=True):
        found = solve(network.within(limit), layers_repeat=True)
        assert found.peak <= limit and found.bound <= found.cost
    repaired = sum(firsts)
    firsts.clear()
    monkeypatch.setattr(lagrangian._LimitedSearch, "repaired", lambda *_: None)
    for network, limit in zip(networks, limits, strict=True):
        solve(network.within(limit), layers_repeat=True)
    assert repaired < 0.7 * sum(firsts), (repaired, firsts)


def test_an_integer_program_is_left_out_where_the_effort_does_not_suffice(monkeypatch):
    lagrangian = importlib.import_module("jshard._search.memory.lagrangian")
    monkeypatch.setattr(lagrangian, "PRICE_CUTS_FROM", 0)
    network = deep(5, 0)
    limited = network.within(0.6 * peak(network, solve(network).assignment))
    columns, solved, solve_ilp = [], [], ilp.solve_ilp
    monkeypatch.setattr(ilp, "num_columns", lambda core: columns.append(num_columns(core)) or columns[-1])
    monkeypatch.setattr(ilp, "solve_ilp", lambda *given: solved.append(1) or solve_ilp(*given))
    effort = Effort()
    found = solve(limited, layers_repeat=True, effort=effort)
    assert solved and effort.spent >= ilp._ENTRIES_PER_PAIR * columns[0] ** 2
    begun = len(solved)
    monkeypatch.setattr(ilp, "_ENTRIES_PER_PAIR", 1e12)
    rough = solve(limited, layers_repeat=True, effort=Effort(1e9))
    assert len(solved) == begun and rough.peak <= limited.memory.limit
    assert rough.bound <= found.cost * (1 + 1e-9) and rough.cost >= found.bound * (1 - 1e-9)


def test_least_peaks(every_network_is_large):
    close = total = 0
    for seed in range(9300, 9340):
        network = random_network(seed, memory=True, most=6)
        every = itertools.product(*(range(network.num_states(v)) for v in range(network.size)))
        peaks = [peak(network, x) for x in every if evaluate(network, x) < np.inf]
        if not peaks:
            with pytest.raises(Contradiction):
                solve(network, objective="peak", layers_repeat=True)
            continue
        found = solve(network, objective="peak", layers_repeat=True)
        assert found.cost == found.peak >= min(peaks) - 1e-9
        assert found.bound <= min(peaks) * (1 + 1e-9), seed
        assert evaluate(network, found.assignment) < np.inf
        total += 1
        close += found.cost <= min(peaks) * 1.01
    assert total > 20 and close >= 0.9 * total


@pytest.mark.parametrize("seed", range(3))
def test_the_priced_network_charges_for_the_bytes(seed):
    rng = np.random.default_rng(seed)
    network = random_network(700 + seed, memory=True)
    times = np.unique(rng.integers(0, 9, 3))
    prices = rng.random(len(times))
    priced = priced_network(network, times, prices)
    assert priced.memory is None
    first = int(network.memory.intervals[:, 0].min())
    for _ in range(20):
        x = [int(rng.integers(network.num_states(v))) for v in range(network.size)]
        profile = live_bytes(network.memory, interval_bytes(network.memory, x))
        held = [profile[t - first] if 0 <= t - first < len(profile) else 0.0 for t in times.tolist()]
        assert evaluate(priced, x) == pytest.approx(evaluate(network, x) + float(prices @ held), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_best_prices_are_the_best_of_a_grid(seed):
    rng = np.random.default_rng(seed)
    cuts = [Cut(float(rng.uniform(1, 5)), rng.uniform(2, 12, 3), np.array([k])) for k in range(5)]

    def value(prices, times):
        return min(c.cost + float(prices @ (c.profile[times] - 6.0)) for c in cuts)

    for times in (np.array([1]), np.array([0, 2])):
        prices, best = best_prices(cuts, times, 6.0, 3.0)
        assert value(prices, times) == pytest.approx(best)
        assert (prices >= 0).all() and 6.0 * prices.sum() <= 3.0 * (1 + 1e-9)
        grid = itertools.product(np.linspace(0, 0.5, 26), repeat=len(times))
        assert best >= max(value(np.array(p), times) for p in grid if 6.0 * sum(p) <= 3.0) - 1e-9


def answer_states(fused, k):
    """The states of a fused network that stand for an answer."""
    place = {v: n for n, v in enumerate(fused.variables.tolist())}
    members = {joined: v for joined, v in zip(fused.joined.tolist(), fused.variables.tolist(), strict=True)}
    assert len(place) == len(fused.joined)
    same = [
        next(s for s, a in enumerate(answers) if fused.every[a, members[c]] == fused.every[k, members[c]])
        for c, answers in enumerate(fused.answers)
    ]
    return np.array([*same, 0])


@pytest.mark.parametrize("seed", range(15))
def test_fused_answers_cost_and_hold_what_they_did(seed):
    rng = np.random.default_rng(seed)
    network = random_network(400 + seed, memory=True, most=9)
    answers = [
        np.array([int(rng.integers(network.num_states(v))) for v in range(network.size)]) for _ in range(3)
    ]
    fused = fused_network(network, answers)
    for k, x in enumerate(answers):
        small = answer_states(fused, k)
        assert np.array_equal(fused.lift(small), x)
        assert peak(fused.network, small) == pytest.approx(peak(network, x))
        assert evaluate(fused.network, small) == pytest.approx(evaluate(network, x))


@pytest.mark.parametrize("seed", range(15))
def test_every_assignment_of_fused_answers_costs_and_holds_what_the_whole_does(seed):
    """Variables in pairs of which each decides the other are joined; no assignment of finite cost is lost by that."""
    rng = np.random.default_rng(seed)
    n, states = 8, 3
    equal = np.where(np.eye(states), 0.0, np.inf)[rng.permutation(states)]
    edges = [(i, i + 1, equal if i % 2 == 0 else rng.uniform(0, 1, (states, states))) for i in range(n - 1)]
    edges += [(0, 5, rng.uniform(0, 1, (states, states))), (1, 4, rng.uniform(0, 1, (states, states)))]
    usages = rng.uniform(1, 9, (n, states))
    spans = np.sort(rng.integers(0, 6, (n, 2)), axis=1) + [0, 1]
    network = build(rng.uniform(0, 5, (n, states)), edges, intervals=spans, usages=list(usages))
    answers = [solve(build(rng.uniform(0, 5, (n, states)), edges)).assignment for _ in range(3)]
    fused = fused_network(network, answers)
    assert fused.network.size <= n // 2 + 1
    kept = [sorted({int(x[v]) for x in answers}) for v in range(n)]
    whole = sorted(
        evaluate(network, x) for x in itertools.product(*kept) if np.isfinite(evaluate(network, x))
    )
    costs = []
    for small in itertools.product(*[range(fused.network.num_states(v)) for v in range(fused.network.size)]):
        lifted = fused.lift(np.array(small))
        cost = evaluate(network, lifted)
        assert evaluate(fused.network, small) == pytest.approx(cost)
        assert peak(fused.network, small) == pytest.approx(peak(network, lifted))
        costs.append(cost)
    assert sorted(c for c in costs if np.isfinite(c)) == pytest.approx(whole)


@pytest.mark.parametrize(("seed", "share"), ((11, 0.1), (12, 0.6)))
def test_repeated_layers_are_searched_to_a_small_gap(seed, share, every_network_is_large):
    free = deep(90, seed)
    fast = solve(free, gap=1e-6)
    least = solve(free, objective="peak", layers_repeat=True)
    assert least.gap <= 0.02
    fast_peak = peak(free, fast.assignment)
    limit = least.peak + share * (fast_peak - least.peak)
    network = deep(90, seed, limit)
    found = solve(network, gap=0.005, layers_repeat=True, unlimited=(fast.cost, fast_peak))
    assert found.peak <= limit
    assert fast.cost * (1 - 1e-6) <= found.cost
    assert found.gap <= 0.02


def test_a_spent_effort_ends_with_an_answer_that_fits(every_network_is_large):
    fast = solve(deep(90, 14))
    least = solve(deep(90, 14), objective="peak", layers_repeat=True)
    network = deep(90, 14, 1.2 * least.peak)
    bounds, costs = [], []
    for entries in (0.0, 1e7, 1e12):
        effort = Effort(entries)
        found = solve(network, gap=0.001, layers_repeat=True, effort=effort, unlimited=(fast.cost, fast.peak))
        assert found.peak <= network.memory.limit and effort.spent > 0
        costs.append(found.cost)
        bounds.append(found.bound)
    assert max(bounds) <= min(costs)
    assert costs[-1] == min(costs)


def test_an_effort_ends_a_search_without_memory_too():
    network = dataclasses.replace(deep(60, 15), memory=None)
    best = solve(network)
    found = solve(network, effort=Effort(0.0))
    assert found.bound <= best.cost <= found.cost
    again = solve(network, effort=Effort(0.0))
    assert np.array_equal(found.assignment, again.assignment) and found.bound == again.bound


def test_answers_and_prices_of_one_limit_start_the_search_of_another(every_network_is_large):
    """Their bound holds for every limit, as far as the bytes charged for reach."""
    seen = 0
    for seed in range(9300, 9360):
        network = random_network(seed, memory=True, most=6)
        try:
            found = solve(network, layers_repeat=True)
        except (Contradiction, MemoryBudgetError):
            continue
        limit = 0.5 * (found.peak + network.memory.limit) if seed % 2 else 0.93 * found.peak
        other = network.within(limit)
        truth = brute_force(other, lambda x, n=other, m=limit: peak(n, x) <= m)
        try:
            again = solve(other, layers_repeat=True, prices=found.prices, known=found.answers)
        except (Contradiction, MemoryBudgetError):
            continue
        assert again.peak <= limit and again.cost >= truth - 1e-9
        assert again.bound <= truth + 1e-9 * abs(truth), seed
        seen += 1
    assert seen > 20


def test_prices_with_a_bound_and_no_answer_begin_the_search_too(every_network_is_large):
    network = deep(12, 4)
    least, fastest = solve(network, objective="peak"), solve(network)
    limit = least.peak + 0.4 * (peak(network, fastest.assignment) - least.peak)
    alone = solve(network.within(limit), layers_repeat=True)
    assert alone.prices is not None and alone.prices.bound > -np.inf
    for prices in (alone.prices, alone.prices.of_another_network()):
        again = solve(network.within(limit), layers_repeat=True, prices=prices, only="bound")
        assert peak(network, again.assignment) <= limit
        assert alone.bound * (1 - 1e-9) <= again.bound <= again.cost * (1 + 1e-9)


def test_better_answers_within_the_limit_are_told_of(every_network_is_large):
    network, told = deep(8, 5, limit=60.0), []
    found = solve(network, layers_repeat=True, on_answer=told.append)
    costs = [evaluate(network, x) for x in told]
    assert all(peak(network, x) <= 60.0 for x in told)
    assert costs == sorted(costs, reverse=True) and costs[-1] == found.cost


@pytest.mark.parametrize("large", [False, True])
def test_a_cost_that_is_of_no_use_ends_the_search(large, request):
    """What no answer can cost is proved by prices; one that may is searched to the same answer as before."""
    if large:
        request.getfixturevalue("every_network_is_large")
    network = deep(4, 31)
    free = peak(network, solve(network).assignment)
    limited = deep(4, 31, 0.75 * free)
    whole = solve(limited, layers_repeat=large)
    assert solve(limited, layers_repeat=large, most=1.01 * whole.cost).cost == pytest.approx(whole.cost)
    few = Effort()
    with pytest.raises(MemoryBudgetError):
        solve(limited, layers_repeat=large, most=0.5 * (solve(network).cost + whole.bound), effort=few)
    every = Effort()
    solve(limited, layers_repeat=large, effort=every)
    assert few.spent <= every.spent


def test_bytes_at_any_time_have_a_price_where_they_are_held_briefly():
    """An assignment costs what its brief intervals hold too, each in proportion to its length; the others pay nothing."""
    network = deep(80, 3)
    memory = network.memory
    times, prices = np.array([100]), np.array([2.0])
    rng = np.random.default_rng(0)
    lengths = memory.intervals[:, 1] - memory.intervals[:, 0]
    longest = 0.01 * (memory.intervals[:, 1].max() - memory.intervals[:, 0].min())
    brief = lengths <= longest
    assert 0 < brief.sum() < len(brief)
    for _ in range(5):
        x = np.array([rng.integers(len(network.unary[t])) for t in network.node_table.tolist()])
        before = evaluate(priced_network(network, times, prices), x)
        charged = 3.0 * (interval_bytes(memory, x) * lengths / longest)[brief].sum()
        assert evaluate(priced_network(network, times, prices, 3.0), x) == pytest.approx(before + charged)


def test_a_price_at_any_time_lowers_equal_layers_at_once(every_network_is_large, monkeypatch):
    """With prices at few times alone, layers without one hold anything: the peak moves from one of them to the next."""
    module = importlib.import_module("jshard._search.memory.minimax_peak")
    networks = [deep(layers, seed) for layers, seed in ((60, 0), (60, 1), (120, 2), (300, 0), (300, 6))]

    def found() -> list:
        return [solve(n, objective="peak", layers_repeat=True, break_ties_by_cost=False) for n in networks]

    with_price = found()
    monkeypatch.setattr(module, "_lower_everywhere", lambda *_: False)
    for s, without in zip(with_price, found(), strict=True):
        assert s.cost == pytest.approx(s.bound, rel=1e-9)
        assert s.cost < without.cost * (1 - 1e-3) and len(s.steps) < len(without.steps)


def test_answers_are_combined_once_more_when_the_effort_is_spent(every_network_is_large, monkeypatch):
    """The first answer within the limit lowers every layer alike; combined with that of few prices it costs less."""
    combine = price_cuts.PriceCuts._fuse

    def found() -> list:
        out = []
        for layers, seed in ((60, 0), (60, 2), (120, 3), (120, 4)):
            least = solve(deep(layers, seed), objective="peak", layers_repeat=True, break_ties_by_cost=False)
            limited = deep(layers, seed, limit=1.05 * least.cost)
            out.append(solve(limited, layers_repeat=True, effort=Effort(1e3)))
            assert peak(limited, out[-1].assignment) <= limited.memory.limit
        return out

    combined = found()
    monkeypatch.setattr(price_cuts.PriceCuts, "_fuse", lambda s, last=False: None if last else combine(s))
    for s, without in zip(combined, found(), strict=True):
        assert s.bound <= s.cost < without.cost


def test_prices_prove_of_a_limit_that_nothing_keeps_it(every_network_is_large, monkeypatch):
    """By bytes alone, and not by prices that rise until the costs hardly count."""
    solved, solve_priced = [], price_cuts.PricedNetworks.solve

    def counted(*arguments):
        solved.append(1)
        return solve_priced(*arguments)

    monkeypatch.setattr(price_cuts.PricedNetworks, "solve", counted)
    for seed in (5, 31, 7):
        least = solve(deep(8, seed), objective="peak", layers_repeat=True).bound
        rounds = []
        for proves in (True, False):
            solved.clear()
            with monkeypatch.context() as patch, pytest.raises(MemoryBudgetError):
                if not proves:
                    patch.setattr(price_cuts.PriceCuts, "_nothing_fits", lambda *_: False)
                solve(deep(8, seed, limit=0.9 * least), layers_repeat=True)
            rounds.append(len(solved))
        assert rounds[0] < 0.5 * rounds[1]
        found = solve(deep(8, seed, limit=1.02 * least), layers_repeat=True)
        assert peak(deep(8, seed), found.assignment) <= 1.02 * least
