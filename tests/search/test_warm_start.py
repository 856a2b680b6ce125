"""Messages survive the removal of states: the bound continues where it was, on tables of every kind."""

import numpy as np
import pytest

from jshard._search.bound_and_fix import PrimalSteps, fix_by_reduced_cost
from jshard._search.cost_network import build, evaluate
from jshard._search.dual.edge_batches import min_plus_columns
from jshard._search.dual.layer_folding import fold_layers
from jshard._search.dual.message_layout import build_message_layout
from jshard._search.dual.trws import DualBound, trws, trws_pass
from jshard._search.dual.warm_start import reparametrization_between, restore_messages, save_messages
from jshard._search.exact.reduce import reduce
from jshard._search.exact.working_network import Contradiction, working_network
from jshard._search.memory.price_cuts import PricedNetworks, priced_network
from jshard._search.search_state import SearchState
from jshard._search.solve import solve


def random_network(seed: int, variables: int = 14, states: int = 9, forbidden: float = 0.1):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, states + 1, variables).tolist()
    unary = [rng.integers(0, 40, k).astype(float) for k in sizes]
    edges = []
    for i in range(variables):
        for j in sorted(rng.choice(variables, 4, replace=False).tolist()):
            if i < j:
                table = rng.integers(0, 40, (sizes[i], sizes[j])).astype(float)
                table[rng.random(table.shape) < forbidden] = np.inf
                table[0, 0] = 50.0
                edges.append((i, j, table))
    return build(unary, edges)


@pytest.mark.parametrize("seed", range(20))
def test_bound_goes_on_where_it_stood(seed):
    graph = reduce(working_network(random_network(seed)))
    if not graph.core:
        pytest.skip("reduced to nothing")
    chain = build_message_layout(graph)
    passed = trws(graph, chain, target=np.inf, deadline=np.inf, max_rounds=20)
    every = np.sort(passed.reduced_costs)
    try:
        small, _, dropped = fix_by_reduced_cost(
            graph, passed.reduced_costs_by_variable(chain), float(every[len(every) * 3 // 4])
        )
    except Contradiction:
        pytest.skip("too few states have no answer")
    assert dropped
    fewer = build_message_layout(small)
    restore_messages(small, fewer, save_messages(graph, chain), before=graph)
    # Fewer states can only cost more, and what was moved into the unaries is no longer in the messages. The walk's
    # order may be another one, which shares costs a little differently.
    assert trws_pass(fewer, backwards=False) + small.offset >= passed.bound - 1e-3 * abs(passed.bound)
    fewer.messages[:] = 0.0
    assert trws_pass(fewer, backwards=False) + small.offset < 0.97 * passed.bound


@pytest.mark.parametrize("seed", range(30))
def test_moved_finds_what_was_taken_from_rows_and_columns(seed):
    rng = np.random.default_rng(seed)
    new = rng.integers(0, 30, (6, 8)).astype(float)
    new[rng.random(new.shape) < 0.3] = np.inf
    a, b = rng.integers(0, 30, 6).astype(float), rng.integers(0, 30, 8).astype(float)
    found = reparametrization_between(new + a[:, None] + b, new)
    assert found is not None
    finite = np.isfinite(new)
    assert np.array_equal((found[0][:, None] + found[1])[finite], (a[:, None] + b)[finite])
    other = new.copy()
    i, j = np.argwhere(finite & (finite.sum(axis=0) > 1) & (finite.sum(axis=1) > 1)[:, None])[0]
    other[i, j] += 1.0
    again = reparametrization_between(other + a[:, None] + b, new)
    if again is not None:  # the pair alone joined two parts of the table
        assert np.array_equal((again[0][:, None] + again[1])[finite], (other - new + a[:, None] + b)[finite])


@pytest.mark.parametrize("seed", range(8))
def test_light_passes_prove_no_more_than_there_is(seed, monkeypatch):
    """In single precision only messages are made: bound and slack come from passes in full precision."""
    monkeypatch.setattr("jshard._search.dual.message_layout.SINGLE_PRECISION_FROM", 0)
    monkeypatch.setattr("jshard._search.dual.edge_batches.STACKED_TABLE_MAX", 20)
    monkeypatch.setattr("jshard._search.dual.edge_batches.CACHE_ENTRIES", 100)
    network = random_network(seed, forbidden=0.05)
    graph = reduce(working_network(network))
    chain = build_message_layout(graph)
    assert chain.has_many_entries
    passed = trws(graph, chain, target=np.inf, deadline=np.inf, max_rounds=60)
    light = solve(network)
    monkeypatch.undo()
    best = solve(network)
    assert light.cost == best.cost and light.bound == best.bound == best.cost
    assert passed.bound <= best.cost * (1 + 1e-12)
    where = {v: chain.state_offsets[i] for i, v in enumerate(chain.variables)}
    for v in graph.core:  # no state of the best answer is ruled out
        at = graph.tables.subset_positions(graph.states[v]).get(int(best.assignment[v]))
        if at is not None:
            assert passed.reduced_cost_bound + passed.reduced_costs[where[v] + at] <= best.cost * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("distinct", [1, 3, 40])
def test_through_works_out_once_what_is_alike(distinct, dtype, monkeypatch):
    monkeypatch.setattr("jshard._search.dual.edge_batches.CACHE_ENTRIES", 500)
    rng = np.random.default_rng(distinct)
    table = rng.random((12, 15)).astype(dtype)
    table[rng.random(table.shape) < 0.1] = np.inf
    some = rng.random((12, distinct)).astype(dtype)
    given = np.ascontiguousarray(some[:, rng.integers(0, distinct, 40)])
    assert np.array_equal(min_plus_columns(table, given), (table[:, None] + given[:, :, None]).min(axis=0))


def layered(layers: int, width: int = 5, states: int = 6):
    """Equal layers in which two equal axes take turns: what is cheapest for one layer costs its neighbour."""
    rng = np.random.default_rng(3)
    inside = [rng.integers(0, 9, (states, states)).astype(float) for _ in range(width)]
    turns = 4.0 * np.eye(states) + rng.integers(0, 2, (states, states))
    unary = [rng.integers(0, 5, states).astype(float) for _ in range(width)]
    edges = []
    for layer in range(layers):
        for i in range(width):
            v = layer * width + i
            edges += [(v, layer * width + (i + d) % width, inside[i]) for d in (1, 2)]
            if layer:
                edges.append((v - width, v, turns))
    return build(unary * layers, edges)


def test_layers_are_walked_side_by_side_and_may_differ(monkeypatch):
    """The answer of a short core in which neighbours differ is found again in the whole, and it is the best."""
    network = layered(240)
    graph = reduce(working_network(network))
    assert len(graph.core) > 1000
    folded = fold_layers(graph)
    assert folded is not None
    chain = build_message_layout(graph, folded.layers)
    plain = build_message_layout(graph)
    assert sorted(chain.variables) == sorted(plain.variables)
    # In the middle a level holds the variable of every other layer at one place: neighbours there take turns.
    level = {v: k for k, (a, b) in enumerate(chain.waves) for v in chain.variables[a:b]}
    deep: dict[tuple[int, int], set[int]] = {}
    for v, (place, turn, layer) in folded.layers.items():
        if 40 < layer < 200:
            deep.setdefault((place, turn), set()).add(level[v])
    assert len(deep) == 10 and all(len(levels) == 1 for levels in deep.values())
    best = solve(network)
    assert best.cost == best.bound
    monkeypatch.setattr("jshard._search.branch_and_bound.fold_layers", lambda graph: None)
    assert solve(network).cost == best.cost


@pytest.mark.parametrize("gap", [0.0, 1e-6, 0.1])
def test_without_a_bound_nothing_is_closed(gap):
    search = SearchState(np.inf, gap, lambda _: None, 1, incumbent_cost=1.0)
    assert not search.gap_closed(-np.inf) and not search.gap_closed(0.5) and search.gap_closed(1.0)


def with_memory(seed: int, variables: int, more: int = 0):
    """A network whose variables are held for a while each; `more` others follow, next to some of the first."""
    rng = np.random.default_rng(seed)
    unary = [rng.integers(0, 40, 8).astype(float) for _ in range(variables)]
    usages = [rng.integers(1, 40, 8).astype(float) for _ in range(variables)]
    edges = [
        (i, j, rng.integers(0, 40, (8, 8)).astype(float))
        for i in range(variables)
        for j in sorted(rng.choice(variables, 4, replace=False).tolist())
        if i < j
    ]
    for k in range(more):
        unary.append(rng.integers(0, 40, 5).astype(float))
        usages.append(rng.integers(1, 40, 5).astype(float))
        edges += [(i, variables + k, rng.integers(0, 40, (8, 5)).astype(float)) for i in (k, k + 3, k + 5)]
    intervals = [[v % 5, v % 5 + 3] for v in range(len(unary))]
    return build(unary, edges, intervals=intervals, usages=usages, limit=60.0 * len(unary))


@pytest.mark.parametrize("seed", range(4))
def test_a_priced_network_begins_with_what_is_known_of_one_with_fewer_variables(seed, monkeypatch):
    """Its first bound is higher, also where the other network knows nothing of some variables, and what it finds holds."""
    bounds: list[float] = []
    look = PrimalSteps.__call__

    def noted(steps: PrimalSteps, dual: DualBound, stalled: bool):
        bounds.append(dual.bound)
        return look(steps, dual, stalled)

    monkeypatch.setattr(PrimalSteps, "__call__", noted)
    prices = np.array([4]), np.array([0.1])
    first = PricedNetworks(with_memory(seed, 40))
    first.solve(*prices, SearchState(np.inf, 0.0, lambda _: None, 40), 0.02)
    assert first.similar is not None
    larger = with_memory(seed, 40, more=4)
    assert larger.size == 44

    def solved(begun: PricedNetworks | None):
        bounds.clear()
        found = PricedNetworks(larger, begun=begun)
        assert (found.tables is first.tables) == (begun is not None)
        answer, bound = found.solve(*prices, SearchState(np.inf, 0.0, lambda _: None, 44), 0.02)
        priced = priced_network(larger, *prices)
        assert answer is not None and bound <= evaluate(priced, answer)
        return bounds[0], bound, evaluate(priced, answer)

    (warm_first, warm_bound, warm), (cold_first, cold_bound, cold) = solved(first), solved(None)
    assert warm_first > cold_first
    # Each bound holds for both answers.
    assert max(warm_bound, cold_bound) <= min(warm, cold)
