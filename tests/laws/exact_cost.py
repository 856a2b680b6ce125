"""What an assignment costs exactly, copies that several operators share counted once.

Problem.  The network charges each reader of a copy, or a share of it (`_network/reshard_edges.py`). A schedule reshards a
tensor into a layout once in each scope, and not at all where it was produced in it.

Idea.  Two computations of one number. This one adds up the seconds between layouts over an assignment, each copy
once; the other (`_plan/schedule_cost.py`) adds up the collectives of the schedule. Tests hold them equal for random
assignments.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._core.layout import Layout
from jshard._core.row_codes import row_codes
from jshard._network.build import PlanningNetwork
from jshard._network.cost_tables import zero_duplicate_reads


@dataclasses.dataclass(frozen=True, eq=False)
class Readings:
    """What each edge does under an assignment; layouts are numbers that are equal for equal layouts."""

    charged: Floats  # (edges,) what the network charges
    full: Floats  # (edges,) what the copy costs, made from the one layout that is kept
    layout: Ints  # (edges,) of the copy
    at_hand: Bools  # (edges,) whether it is there as it was made
    copy: Ints  # (edges,) number of the copy: of tensor, scope and layout
    needed: Bools  # (edges,) of relays: whether any reader needs what is kept; true for all others
    layouts: tuple[Layout, ...]


def readings(problem: PlanningNetwork, assignment: np.ndarray) -> Readings:
    """The edges that carry tensors, under an assignment of the problem's network."""
    e, network = problem.tensor_edges, problem.cost_network
    n = len(e)
    state = np.asarray(assignment, dtype=np.int64)
    i, j, table = state[e.source_variable], state[e.target_variable], network.edge_table[:n]
    # The states in which the same layouts are kept, and no second copy.
    alone = state.copy()
    for t, v in problem.relay_variable.items():
        alone[v] = problem.relays[t].of_state[state[v]]
    charged, full = np.zeros(n), np.zeros(n)
    for t in np.unique(table).tolist():
        at = np.flatnonzero(table == t)
        charged[at] = network.pairwise[t][i[at], j[at]]
        full[at] = _seconds(problem, int(at[0]))[alone[e.source_variable[at]], alone[e.target_variable[at]]]
    numbers: dict[Layout, int] = {}
    source, target = (
        _layouts(problem, numbers, which, s) for which, s in ((e.source_layouts, i), (e.target_layouts, j))
    )
    made = np.full(len(problem.program.tensors), -1)
    relay = e.reader < 0
    made[e.tensor[relay]] = source[relay]
    relayed = made[e.tensor] >= 0
    at_hand = ~relay & relayed & e.original_available & (target == made[e.tensor])
    needed = np.bincount(e.tensor, ~relay & ~at_hand, len(made)) > 0
    needed |= problem.program.scopes.is_captured
    copy = np.unique(row_codes(e.tensor, e.scope, target, relay.astype(np.int64)), return_inverse=True)[1]
    return Readings(charged, full, target, at_hand, copy, needed[e.tensor] | ~relay, tuple(numbers))


def _seconds(problem: PlanningNetwork, edge: int) -> np.ndarray:
    """Seconds of what an edge reshards, in all states of its ends, if it is shared with no other."""
    (e,) = problem.tensor_edges.rows([edge])
    tensor = problem.program.tensors[e.tensor]
    seconds = problem.cost_tables.seconds(e.source, e.target, tensor, e.returned_sum, e.combined_with)
    table = seconds[np.ix_(e.source.of_state, e.target.of_state)] * e.repeats
    return zero_duplicate_reads(table, e.target, e.duplicates)


def _layouts(problem: PlanningNetwork, numbers: dict[Layout, int], which: Ints, state: Ints) -> Ints:
    """Numbers of the layouts that some choices mean in the given states."""
    out = np.zeros(len(which), dtype=np.int64)
    for c in np.unique(which).tolist():
        choices = problem.tensor_edges.layouts[c]
        own = np.array([numbers.setdefault(lay, len(numbers)) for lay in choices.layouts], dtype=np.int64)
        at = np.flatnonzero(which == c)
        out[at] = own[choices.of_state[state[at]]]
    return out


def exact_cost(problem: PlanningNetwork, assignment: np.ndarray) -> float:
    """Seconds of an assignment by the network's tables, each copy counted once."""
    network, state = problem.cost_network, np.asarray(assignment, dtype=np.int64)[: problem.cost_network.size]
    own = sum(
        float(network.unary[t][s]) for t, s in zip(network.node_table.tolist(), state.tolist(), strict=True)
    )
    for (a, b), t in zip(
        network.edges[len(problem.tensor_edges) :].tolist(),
        network.edge_table[len(problem.tensor_edges) :].tolist(),
        strict=True,
    ):
        own += float(network.pairwise[t][state[a], state[b]])  # ties: nothing, or infinite
    e = problem.tensor_edges
    for edge, charged in problem.epilogue_charges.items():
        i, j = int(state[e.source_variable[edge]]), int(state[e.target_variable[edge]])
        source, target = e.layouts[e.source_layouts[edge]], e.layouts[e.target_layouts[edge]]
        for one in charged:
            seconds = problem.cost_tables.charge_seconds(one.charge, source, target)
            own += float(seconds.table(problem.level, source, target)[i, j])
    r = readings(problem, state)
    paid = np.where(r.at_hand | ~r.needed, 0.0, r.full)
    once = np.zeros(1 + int(r.copy.max(initial=-1)))
    np.maximum.at(once, r.copy, paid)
    return own + float(once.sum())
