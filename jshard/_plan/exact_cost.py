"""What an assignment costs exactly, copies that several operators share counted once.

Problem.  The network charges each reader (`reshard_edges.py`): all of a copy where sharing cannot make a plan
cheapest, a share of it where it can. A schedule moves a tensor into a layout once in each scope, and not at all where
it lies so as it was made.

Idea.  Two computations of one number. This one adds up the network's tables over an assignment, each copy once; the
other (`schedule_cost.py`) adds up the collectives of the schedule. Tests hold them equal for random assignments.
Where the network charged less than a copy costs, `copy_variables` adds a variable for just that copy: whether it is
made. With it the network is exact there, and the search goes on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._layout import Layout
from jshard._numbers import Ints, packed
from jshard._plan.network import Problem
from jshard._program.arrays import Bools, Floats
from jshard._search import CostNetwork


@dataclasses.dataclass(frozen=True, eq=False)
class Readings:
    """What each edge does under an assignment; layouts are numbers that are equal for equal layouts."""

    charged: Floats  # (edges,) what the network charges
    full: Floats  # (edges,) what the copy costs
    layout: Ints  # (edges,) of the copy
    at_hand: Bools  # (edges,) whether it is there as it was made
    copy: Ints  # (edges,) number of the copy: of tensor, scope and layout
    needed: Bools  # (edges,) of relays: whether any reader needs what is kept; true for all others
    layouts: tuple[Layout, ...]


def readings(problem: Problem, assignment: np.ndarray) -> Readings:
    """The edges that carry tensors, under an assignment of the problem's network."""
    e, network = problem.edges, problem.network
    n = len(e)
    state = np.asarray(assignment, dtype=np.int64)
    i, j, table = state[e.head], state[e.tail], network.edge_table[:n]
    charged, full = np.zeros(n), np.zeros(n)
    for t in np.unique(table).tolist():
        at = np.flatnonzero(table == t)
        charged[at] = network.pairwise[t][i[at], j[at]]
        divided = problem.tables.divided.get(t)
        more = 1 if divided is None else np.where(divided[i[at], j[at]], e.sharers[at], 1)
        full[at] = charged[at] * more
    numbers: dict[Layout, int] = {}
    source, target = (_layouts(problem, numbers, which, s) for which, s in ((e.source, i), (e.target, j)))
    made = np.full(len(problem.program.tensors), -1)
    relay = e.reader < 0
    made[e.tensor[relay]] = source[relay]
    relayed = made[e.tensor] >= 0
    at_hand = ~relay & relayed & e.at_hand & (target == made[e.tensor])
    needed = np.bincount(e.tensor, ~relay & ~at_hand, len(made)) > 0
    needed |= problem.program.scopes.everywhere
    copy = np.unique(packed(e.tensor, e.scope, target, relay.astype(np.int64)), return_inverse=True)[1]
    return Readings(charged, full, target, at_hand, copy, needed[e.tensor] | ~relay, tuple(numbers))


def _layouts(problem: Problem, numbers: dict[Layout, int], which: Ints, state: Ints) -> Ints:
    """Numbers of the layouts that some choices mean in the given states."""
    out = np.zeros(len(which), dtype=np.int64)
    for c in np.unique(which).tolist():
        choices = problem.edges.choices[c]
        own = np.array([numbers.setdefault(lay, len(numbers)) for lay in choices.layouts], dtype=np.int64)
        at = np.flatnonzero(which == c)
        out[at] = own[choices.index[state[at]]]
    return out


def exact_cost(problem: Problem, assignment: np.ndarray) -> float:
    """Seconds of an assignment by the network's tables, each copy counted once."""
    network, state = problem.network, np.asarray(assignment, dtype=np.int64)[: problem.network.size]
    own = sum(
        float(network.unary[t][s]) for t, s in zip(network.node_table.tolist(), state.tolist(), strict=True)
    )
    for (a, b), t in zip(
        network.edges[len(problem.edges) :].tolist(),
        network.edge_table[len(problem.edges) :].tolist(),
        strict=True,
    ):
        own += float(network.pairwise[t][state[a], state[b]])  # ties: nothing, or infinite
    r = readings(problem, state)
    paid = np.where(r.at_hand | ~r.needed, 0.0, r.full)
    once = np.zeros(1 + int(r.copy.max(initial=-1)))
    np.maximum.at(once, r.copy, paid)
    return own + float(once.sum())


def copy_variables(problem: Problem, network: CostNetwork, assignment: np.ndarray) -> CostNetwork | None:
    """The network with a variable for each copy of which readers together pay less than it costs; None if there is none.

    A copy of tensor t in layout X for one scope has the states: not made; made from what is kept, at its cost; there
    as t was made. An operator of that scope that reads X needs it made or there, and pays nothing for it any more.
    Variables come after those of `network`, which is the problem's or one with variables from here.
    """
    r, e = readings(problem, assignment), problem.edges
    paid = np.bincount(r.copy, np.where(r.at_hand, 0.0, r.charged))
    cost = np.zeros_like(paid)
    np.maximum.at(cost, r.copy, np.where(r.at_hand, 0.0, r.full))
    short = np.flatnonzero(cost > paid * (1 + 1e-9))
    if not len(short):
        return None
    unary, pairwise = list(network.unary), list(network.pairwise)
    nodes, edges, tables = network.node_table.tolist(), network.edges.tolist(), network.edge_table.tolist()
    unary.append(np.zeros(3))
    for copy in short.tolist():
        first = int(np.flatnonzero(r.copy == copy)[0])
        tensor, scope, layout = int(e.tensor[first]), int(e.scope[first]), r.layouts[int(r.layout[first])]
        variable = len(nodes)
        nodes.append(len(unary) - 1)
        relay = int(np.flatnonzero((e.tensor == tensor) & (e.reader < 0))[0])
        readers = np.flatnonzero((e.tensor == tensor) & (e.scope == scope) & (e.reader >= 0)).tolist()
        made, kept = e.choices[e.source[relay]], e.choices[e.target[relay]]
        lies = np.array([lay == layout for lay in made.layouts])[made.index] & bool(e.at_hand[readers[0]])
        seconds = np.full(len(kept.index), np.inf)
        for k in readers:
            read = e.choices[e.target[k]]
            here = np.array([lay == layout for lay in read.layouts])[read.index]
            if not here.any():
                continue
            s = int(np.flatnonzero(here)[0])
            divided = problem.tables.divided.get(int(network_table(problem, k)))
            full = problem.network.pairwise[network_table(problem, k)][:, s]
            seconds = np.minimum(
                seconds, full * (np.where(divided[:, s], e.sharers[k], 1) if divided is not None else 1)
            )
            table = pairwise[tables[k]].copy()
            table[:, here] = np.where(np.isfinite(table[:, here]), 0.0, np.inf)
            tables[k] = len(pairwise)
            pairwise.append(table)
            edges.append([variable, int(e.tail[k])])
            tables.append(len(pairwise))
            pairwise.append(np.stack([np.where(here, np.inf, 0.0), np.zeros(len(here)), np.zeros(len(here))]))
        edges += [[int(e.tail[relay]), variable], [int(e.head[relay]), variable]]
        tables += [len(pairwise), len(pairwise) + 1]
        free = np.zeros(len(seconds))
        pairwise += [
            np.stack([free, seconds, free], axis=1),
            np.stack([0.0 * lies, 0.0 * lies, np.where(lies, 0.0, np.inf)], axis=1),
        ]
    return dataclasses.replace(
        network, unary=tuple(unary), pairwise=tuple(pairwise), node_table=np.array(nodes, dtype=np.int64),
        edges=np.array(edges, dtype=np.int64), edge_table=np.array(tables, dtype=np.int64),
    )  # fmt: skip


def network_table(problem: Problem, edge: int) -> int:
    """The table of an edge in the problem's own network."""
    return int(problem.network.edge_table[edge])
