"""What a search is counted to do is what its tables went through, and tables are told apart by content."""

from __future__ import annotations

import numpy as np
import pytest

from jshard._search import Effort, build, solve
from jshard._search.cost_network import SMALL_ARRAY_BYTES, ArrayPool
from jshard._search.exact.reduce import reduce
from jshard._search.exact.table_pool import PER_TABLE, TablePool
from jshard._search.exact.working_network import working_network


def path(variables: int, states: int, seed: int):
    """A path, which reductions solve alone."""
    rng = np.random.default_rng(seed)
    unary = [rng.random(states) for _ in range(variables)]
    return build(unary, [(i, i + 1, rng.random((states, states))) for i in range(variables - 1)])


@pytest.mark.parametrize("states", [4, 40])
def test_reductions_are_counted(states):
    effort = Effort()
    assert solve(path(30, states, 0), effort=effort).optimal
    # At least the tables of the network, and one message a variable.
    assert effort.spent >= PER_TABLE * (30 + 29 + 29)
    more = Effort()
    solve(path(30, 2 * states, 0), effort=more)
    assert more.spent > effort.spent  # larger tables count more


def test_work_is_counted_once():
    graph = working_network(path(10, 5, 1))
    first = graph.tables.take_work()
    assert first > 0 and graph.tables.take_work() == 0
    reduce(graph)
    assert graph.tables.copy().take_work() == 0  # the copy has done nothing yet
    assert graph.tables.take_work() > 0


@pytest.mark.parametrize("entries", [SMALL_ARRAY_BYTES // 8, SMALL_ARRAY_BYTES // 8 + 1, 5000])
def test_rearranged_tables_have_numbers_of_their_own(entries):
    rng = np.random.default_rng(entries)
    pool, table = ArrayPool(), rng.random(entries)
    table[rng.random(entries) < 0.5] = np.inf
    others = [rng.permutation(table) for _ in range(50)] + [np.roll(table, 1), table[::-1].copy()]
    swapped = table.copy()
    swapped[[0, -1]] = swapped[[-1, 0]] + [1.0, 2.0]
    numbers = [pool(t) for t in (table, *others, swapped)]
    assert len(set(numbers)) == len({t.tobytes() for t in (table, *others, swapped)})
    assert [pool(t.copy()) for t in (table, *others, swapped)] == numbers


def test_what_is_forbidden_in_both_states_adds_nothing_to_their_difference():
    """States 0 and 1 forbid the same partner; 0 dominates, and is all that is left beside 2, which forbids nothing."""
    inf = np.inf
    for copies in (1, 20):  # pairs of states are compared at once, or after a test
        edge = np.repeat(
            np.array([[inf, 0.0, 1.0], [inf, 0.0, 2.0], [0.0, 1.0, 9.0]]), [1, copies, copies], axis=0
        )
        tables = TablePool(2.0**-40)
        costs = np.concatenate([[0.0], np.full(copies, 0.5), np.full(copies, 5.0)])
        kept = tables.undominated_states(tables.table_id(costs), (tables.table_id(edge),))
        assert tables.subsets.arrays[kept].tolist() == [0, 1 + copies]
