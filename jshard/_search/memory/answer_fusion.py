"""The network of the states that some of a few answers have, everything else fixed (fusion, Lempitsky et al. 2010).

Where the answers agree nothing is left to choose: those variables' costs and bytes are constants. Of the others each
has as few states as there are answers, and most of them decide their neighbours' states: a product's layout those of its
operands, say. Variables joined by edges on which each end's state decides the other's are one variable, whose states are
the answers: found by connected components, before any reduction.

>>> from jshard._search.cost_network import build
>>> net = build([[0.0, 6.0, 7.0]] * 3, [(0, 1, np.ones((3, 3)))], intervals=[[0, 1]] * 3, usages=[[8.0, 2.0, 1.0]] * 3)
>>> fused = fused_network(net, [np.array([0, 0, 1]), np.array([0, 2, 1])])
>>> fused.network, fused.variables.tolist(), fused.lift(np.array([1, 0])).tolist()
(CostNetwork(2 variables, 0 edges; 2 unary and 0 pairwise tables), [1], [0, 2, 1])
>>> equal = np.where(np.eye(3), 0.0, np.inf)
>>> net = build([[0.0, 6.0, 7.0]] * 3, [(0, 1, equal), (1, 2, np.ones((3, 3)))])
>>> fused_network(net, [np.array([0, 0, 1]), np.array([2, 2, 0])]).network  # of (0, 1), 2 and the constants
CostNetwork(3 variables, 1 edges; 3 unary and 1 pairwise tables)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._search.cost_network import ArrayPool, CostNetwork, Memory, concat_tables


@dataclass(frozen=True, eq=False)
class FusedNetwork:
    """A network of the variables in which answers differ, some joined, and, last, one of one state for all others."""

    network: CostNetwork
    variables: Ints  # (n,) those that differ
    joined: Ints  # (n,) of each, its variable in `network`
    answers: tuple[
        Ints, ...
    ]  # of each variable of `network` but the last, the answers that its states stand for
    every: Ints  # (answers, variables of the network that was fused)

    def lift(self, assignment: Ints) -> Ints:
        """The assignment of all variables of the network that was fused."""
        chosen = [answers[s] for answers, s in zip(self.answers, assignment.tolist(), strict=False)]
        lifted = self.every[0].copy()
        lifted[self.variables] = self.every[np.array(chosen, dtype=np.int64)[self.joined], self.variables]
        return lifted


def fused_network(network: CostNetwork, answers: Sequence[Ints]) -> FusedNetwork:
    """The network of the states of some answers, with the memory and limit of the whole one.

    Its costs are those of the whole network: the last variable has what does not vary.
    """
    every = np.array(answers)
    varies = (every != every[0]).any(axis=0)
    variables = np.flatnonzero(varies)
    n, several = len(variables), len(every)
    place = np.full(network.size, -1)
    place[variables] = np.arange(n)
    first = _first_equal(every[:, variables])
    costs = _unary_costs(network, every)
    constant = float(costs[0, ~varies].sum())
    ends = place[network.edges] if len(network.edges) else np.zeros((0, 2), dtype=np.int64)
    at = np.flatnonzero((ends >= 0).any(axis=1))
    tables = _edge_tables(network, at, every)  # (edges, answers, answers)
    constant += _fixed_cost(network, np.flatnonzero((ends < 0).all(axis=1)), every[0])
    ends = ends[at]
    joined = _components(n, ends, tables, first)
    count = int(joined.max(initial=-1)) + 1
    member = np.zeros(count, dtype=np.int64)
    member[joined] = np.arange(n)
    states = tuple([np.flatnonzero(first[:, v] == np.arange(several)) for v in member.tolist()])
    own = np.zeros((count, several))
    np.add.at(own, joined, costs[:, variables].T)
    ends = np.where(ends >= 0, joined[ends], -1) if n else ends
    inside = (ends[:, 0] == ends[:, 1]) | (ends < 0).any(axis=1)
    np.add.at(own, ends[inside].max(axis=1), np.einsum("eaa->ea", tables[inside]))
    unary, pairwise, columns = ArrayPool(), ArrayPool(), []
    ends, tables = _summed(ends[~inside], tables[~inside])
    for e, (i, j) in enumerate(ends.tolist()):
        columns.append((i, j, pairwise(np.ascontiguousarray(tables[e][np.ix_(states[i], states[j])]))))
    edges = np.array(columns, dtype=np.int64).reshape(-1, 3)
    nodes = [unary(np.ascontiguousarray(t[s])) for t, s in zip(own, states, strict=True)]
    nodes.append(unary(np.array([constant])))
    variable = np.append(joined, count)[place]  # of each variable of the whole network
    return FusedNetwork(
        CostNetwork(
            tuple(unary.arrays), tuple(pairwise.arrays), np.array(nodes, dtype=np.int64), edges[:, :2], edges[:, 2],
            _fused_memory(network, every, variable, states),
        ),
        variables,
        joined,
        states,
        every,
    )  # fmt: skip


def _first_equal(every: Ints) -> Ints:
    """(answers, variables) the first answer that has the state that an answer has."""
    return (every[:, None] == every[None]).argmax(axis=1)


def _unary_costs(network: CostNetwork, every: Ints) -> Floats:
    """(answers, variables) costs of the variables alone."""
    values, starts = concat_tables(network.unary)
    return values[starts[network.node_table] + every]


def _edge_tables(network: CostNetwork, at: Ints, every: Ints) -> Floats:
    """(edges, answers, answers) costs of some edges, where either end has the state that an answer has."""
    several = len(every)
    found = np.empty((len(at), several, several))
    order = np.argsort(network.edge_table[at], kind="stable")
    starts = np.flatnonzero(np.diff(network.edge_table[at[order]], prepend=-1))
    for group in np.split(order, starts[1:]) if len(starts) else ():
        rows, columns = every[:, network.edges[at[group]]].transpose(2, 1, 0)
        table = network.pairwise[network.edge_table[at[group[0]]]]
        found[group] = table[rows[:, :, None], columns[:, None, :]]
    return found


def _fixed_cost(network: CostNetwork, at: Ints, states: Ints) -> float:
    """The cost of some edges."""
    return float(_edge_tables(network, at, states[None]).sum())


def _components(n: int, ends: Ints, tables: Floats, first: Ints) -> Ints:
    """(n,) variables joined by edges on which each end's state decides the other's, all answers being possible."""
    from scipy.sparse import coo_array  # here, so that `import jshard` stays light
    from scipy.sparse.csgraph import connected_components

    between = np.flatnonzero((ends >= 0).all(axis=1))
    i, j = ends[between].T
    same = first[:, None] == first[None]  # (answers, answers, variables)
    alike = (same[:, :, i] & same[:, :, j]).transpose(2, 0, 1)
    decided = (np.isfinite(tables[between]) == alike).all(axis=(1, 2))
    pairs = np.ones(int(decided.sum())), (i[decided], j[decided])
    return connected_components(coo_array(pairs, shape=(n, n)), directed=False)[1].astype(np.int64)


def _summed(ends: Ints, tables: Floats) -> tuple[Ints, Floats]:
    """Edges and their tables with those between the same two variables as one, ends in ascending order."""
    turned = ends[:, 0] > ends[:, 1]
    tables = np.where(turned[:, None, None], tables.transpose(0, 2, 1), tables)
    ends = np.sort(ends, axis=1)
    _, index, inverse = np.unique(row_codes(*ends.T), return_index=True, return_inverse=True)
    total = np.zeros((len(index), *tables.shape[1:]))
    np.add.at(total, inverse, tables)
    return ends[index], total


def _fused_memory(network: CostNetwork, every: Ints, variable: Ints, states: Sequence[Ints]) -> Memory | None:
    """The memory of the states left; the last variable holds what does not vary."""
    memory = network.memory
    if memory is None:
        return None
    of_interval, variable = every[:, memory.interval_variable], variable[memory.interval_variable]
    ids: dict[Hashable, int] = {}
    kinds = np.array([ids.setdefault(tuple(s.tolist()), len(ids)) for s in (*states, np.zeros(1, np.int64))])
    # Intervals that have the same amounts in the answers, of variables with the same states left, share a table.
    columns = memory.interval_table, *of_interval, kinds[variable]
    codes, distinct = first_occurrence_codes(row_codes(*columns))
    values, starts = concat_tables(memory.usage_tables)
    amounts = values[starts[memory.interval_table[distinct]] + of_interval[:, distinct]].T
    usage = ArrayPool()
    last, only = len(states), np.zeros(1, dtype=np.int64)
    tables = [
        usage(np.ascontiguousarray(row[only if v == last else states[v]]))
        for row, v in zip(amounts, variable[distinct].tolist(), strict=True)
    ]
    return Memory(
        memory.intervals, tuple(usage.arrays), variable, np.array(tables, dtype=np.int64)[codes], memory.limit
    )
