"""The network of the states that some of a few answers have, everything else fixed (fusion, Lempitsky et al. 2010).

Where the answers agree nothing is left to choose: those variables' costs and bytes are constants. Of the others each
has as few states as there are answers.

>>> from jshard._search.cost_network import build
>>> net = build([[0.0, 6.0, 7.0]] * 3, [(0, 1, np.ones((3, 3)))], intervals=[[0, 1]] * 3, usages=[[8.0, 2.0, 1.0]] * 3)
>>> fused = fused_network(net, [np.array([0, 0, 1]), np.array([0, 2, 1])])
>>> fused.network, fused.variables.tolist(), fused.lift(np.array([1, 0])).tolist()
(CostNetwork(2 variables, 0 edges; 2 unary and 0 pairwise tables), [1], [0, 2, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import ArrayPool, CostNetwork, Memory


@dataclass(frozen=True, eq=False)
class FusedNetwork:
    """A network of the variables in which answers differ and, last, one of one state for all others."""

    network: CostNetwork
    variables: Ints  # those that differ
    states: tuple[Ints, ...]  # of each, those that an answer has
    base: Ints  # an answer

    def lift(self, assignment: Ints) -> Ints:
        """The assignment of all variables of the network that was fused."""
        lifted = self.base.copy()
        for v, states, s in zip(self.variables.tolist(), self.states, assignment.tolist(), strict=False):
            lifted[v] = states[s]
        return lifted


def fused_network(network: CostNetwork, answers: Sequence[Ints]) -> FusedNetwork:
    """The network of the states of some answers, with the memory and limit of the whole one."""
    every = np.array(answers)
    base = every[0]
    variables = np.flatnonzero((every != base).any(axis=0))
    n = len(variables)
    place = np.full(network.size, -1)
    place[variables] = np.arange(n)
    states = tuple([np.unique(every[:, v]) for v in variables])
    own = [network.unary[network.node_table[v]][s] for v, s in zip(variables, states, strict=True)]
    edges: list[tuple[int, int, int]] = []
    pairwise = ArrayPool()
    at = place[network.edges] if len(network.edges) else np.zeros((0, 2), dtype=np.int64)
    for e in np.flatnonzero((at >= 0).any(axis=1)).tolist():
        (i, j), (v, w) = at[e].tolist(), network.edges[e].tolist()
        table = network.pairwise[network.edge_table[e]]
        if i >= 0 and j >= 0:
            edges.append((i, j, pairwise(table[np.ix_(states[i], states[j])])))
        elif i >= 0:
            own[i] = own[i] + table[states[i], base[w]]
        else:
            own[j] = own[j] + table[base[v], states[j]]
    columns = np.array(edges, dtype=np.int64).reshape(-1, 3)
    unary = ArrayPool()
    nodes = [unary(np.ascontiguousarray(t)) for t in [*own, np.zeros(1)]]
    return FusedNetwork(
        CostNetwork(
            tuple(unary.arrays), tuple(pairwise.arrays), np.array(nodes, dtype=np.int64), columns[:, :2],
            columns[:, 2], _fused_memory(network, base, place, states),
        ),
        variables,
        states,
        base,
    )  # fmt: skip


def _fused_memory(network: CostNetwork, base: Ints, place: Ints, states: Sequence[Ints]) -> Memory | None:
    """The memory of the states left; the last variable holds what does not vary."""
    memory = network.memory
    if memory is None:
        return None
    variable = place[memory.interval_variable]
    usage = ArrayPool()
    known: dict[tuple[int, ...], int] = {}
    tables = np.zeros(len(variable), dtype=np.int64)
    rows = zip(
        memory.interval_table.tolist(), memory.interval_variable.tolist(), variable.tolist(), strict=True
    )
    for h, (table, v, i) in enumerate(rows):
        kept = states[i] if i >= 0 else base[v : v + 1]
        key = (table, *kept.tolist())
        if key not in known:
            known[key] = usage(memory.usage_tables[table][kept])
        tables[h] = known[key]
    last = len(states)
    return Memory(
        memory.intervals, tuple(usage.arrays), np.where(variable < 0, last, variable), tables, memory.limit
    )
