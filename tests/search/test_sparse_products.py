"""Min-plus products, of tables whose columns or rows allow few states too, are those of the definition, to the bit."""

import numpy as np
import pytest

from jshard._search.cost_network import build
from jshard._search.exact import min_plus
from jshard._search.exact.min_plus import BOOLEAN_ENTRIES, BROADCAST_ENTRIES
from jshard._search.exact.reduce import reduce
from jshard._search.exact.table_pool import SPARSE_ENTRIES, TablePool
from jshard._search.exact.working_network import working_network
from jshard._search.solve import solve


def few_a_column(rng: np.random.Generator, rows: int, columns: int, most: int) -> np.ndarray:
    """A table with 0 to `most` finite entries a column."""
    table = np.full((rows, columns), np.inf)
    for j in range(columns):
        at = rng.choice(rows, int(rng.integers(0, most + 1)), replace=False)
        table[at, j] = rng.integers(0, 9, len(at))
    return table


@pytest.mark.parametrize("sparse", ["left", "right", "both", "neither"])
def test_a_product_is_the_least_sum(sparse: str) -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(0, 9, (50, 40)).astype(float)
    b = rng.integers(0, 9, (40, 60)).astype(float)
    b[rng.random(b.shape) < 0.2] = np.inf
    if sparse in ("left", "both"):
        a = few_a_column(rng, 40, 50, 3).T.copy()
    if sparse in ("right", "both"):
        b = few_a_column(rng, 40, 60, 3)
    u = rng.integers(0, 9, 40).astype(float)
    u[5] = np.inf
    assert a.size * b.shape[1] > BROADCAST_ENTRIES
    pool = TablePool(1.0)
    product = pool.min_plus_product(pool.table_id(a), pool.table_id(u), pool.table_id(b))
    expected = (a[:, :, None] + u[None, :, None] + b[None]).min(axis=1)
    assert np.array_equal(pool.arrays[product], expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("grid", [2.0**-40, 2.0**-47, 2.0**-48, 2.0**-52])
def test_a_full_product_is_the_least_sum_to_the_bit(monkeypatch, share: float, grid: float) -> None:
    """By distances, where their shift is exact on the grid of the costs, as it is not on the finest. `share`: forbidden."""
    rng, shifts = np.random.default_rng(6), []
    distances = min_plus._by_distances
    monkeypatch.setattr(min_plus, "_by_distances", lambda *g: (shifts.append(g[2]), distances(*g))[1])
    a, b = [np.floor(rng.random(shape) * 9.0 / grid) * grid for shape in ((61, 47), (47, 53))]
    for table in (a, b):
        table[rng.random(table.shape) < share] = np.inf
    a[3], b[:, 5] = (np.inf, np.inf) if share else (a[3], b[:, 5])
    assert a.size * b.shape[1] >= min_plus.DISTANCE_ENTRIES
    product = min_plus.min_plus(a, b, grid)
    assert np.array_equal(product, (a[:, :, None] + b[None]).min(axis=1))
    exact = (64.0 if share else 32.0) <= 2.0**53 * grid
    assert bool(shifts) == exact and all(s == (64.0 if share else 32.0) for s in shifts)


@pytest.mark.parametrize("costs", [[0.0], [7.0], [3.0, 1.0, np.inf, 2.0]])
def test_a_product_of_hard_constraints_is_the_least_sum(costs: list[float]) -> None:
    """Of zeros and inf, whatever the variable between the two costs; some of its states have no partner at all."""
    rng = np.random.default_rng(4)
    a, b = [np.where(rng.random(shape) < 0.9, np.inf, 0.0) for shape in ((90, 70), (70, 110))]
    u = rng.choice(costs, 70)
    assert a.size * b.shape[1] > BOOLEAN_ENTRIES
    pool = TablePool(1.0)
    product = pool.min_plus_product(pool.table_id(a), pool.table_id(u), pool.table_id(b))
    assert np.array_equal(pool.arrays[product], (a[:, :, None] + u[None, :, None] + b[None]).min(axis=1))
    assert np.isinf(pool.arrays[product]).any() and np.isfinite(pool.arrays[product]).any()


def test_what_is_cheap_to_eliminate_goes_first() -> None:
    """Of a cycle's variables, which all have degree two, the copies are eliminated before their readers."""
    rng = np.random.default_rng(5)
    states, layouts = 150, 150
    decides = np.full((2 * layouts, states), np.inf)
    for s in range(states):
        decides[[s % layouts, layouts + s % layouts], s] = 0.0
    made = rng.integers(1, 99, (states, 2 * layouts)).astype(float)
    assert decides.size > SPARSE_ENTRIES
    readers, copies = range(4), range(4, 8)
    edges = [(i, 4 + i, made) for i in readers] + [(4 + i, (i + 1) % 4, decides) for i in readers]
    unaries = [rng.integers(0, 50, states).astype(float) for _ in readers] + [
        np.zeros(2 * layouts) for _ in copies
    ]
    network = build(unaries, edges)
    graph = reduce(working_network(network))
    order = [v for v, *_ in graph.elimination_stack]
    assert set(order[:4]) == set(copies)
    # The same in dynamic programming along the cycle.
    step = np.minimum(made[:, :layouts], made[:, layouts:])
    best = np.inf
    for s in range(states):
        costs = unaries[0][s] + step[s]
        for i in (1, 2, 3):
            costs = (costs + unaries[i])[:, None] + step
            costs = costs.min(axis=0)
        best = min(best, float(costs[s]))
    assert solve(network).cost == best
