"""Equal cost is decided by memory: the plan of the same cost in which less is held at the peak.

Problem.  A tensor that is stored whole and sliced where it is read costs what one costs that is stored in pieces: a local
slice is free. The search sees no bytes and takes either.

Idea.  Only few tensors matter: those that are in memory at the peak in blocks larger than they could be. Around each, the
variables within a few edges are freed, all others keep their states, and the small network is solved exactly with a
price on the tensors' bytes that is far below any difference of costs. What is found is taken if the cost of the
schedule is the same, and its peak lower. Equal neighbourhoods, such as those of equal layers, are solved once.

Worked case.  A weight that is read cut in 8, stored whole: freed, its argument is cut in 8 too, and nothing is sliced.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from jshard._network.build import PlanningNetwork
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, schedule_solution
from jshard._search import CostNetwork, solve


_PRICE = 1e-10  # of the plan's cost: what all bytes of a neighbourhood together cost
_LEAST_SAVING = 1e-3  # of the peak: what equal tensors must be able to save
_RADIUS = 3  # edges around a tensor
_VARIABLES = 40  # of a neighbourhood at most
_NEIGHBOURHOODS = 64  # different ones that are solved at most
_PASSES = 2


def lower_peak_at_equal_cost(solution: ScheduledSolution) -> ScheduledSolution:
    """The solution, or one of the same cost and bound whose peak is lower."""
    for _ in range(_PASSES):
        other = _improved(solution)
        if other is None or other.cost > solution.cost * (1 + ROUNDING) or other.peak >= solution.peak:
            break
        solution = other
    return solution


def _improved(solution: ScheduledSolution) -> ScheduledSolution | None:
    """The solution after all moves that promise less memory at the same cost; None where there are none."""
    network, request = solution.network, solution.request
    places = _reducible(solution)
    if not places or solution.interrupted:
        return None
    assignment = assignment_of_solution(solution)
    changed = _Neighbourhoods(network, assignment, solution.cost).moved(places)
    if changed is None:
        return None
    return schedule_solution(network, request, changed, solution.bound, solution.steps, may_break_ties=False)


def assignment_of_solution(solution: ScheduledSolution) -> np.ndarray:
    """The states of all variables of the network: of the operators, then of the relays."""
    network, assignment = solution.network, solution.schedule.assignment
    states = np.zeros(network.cost_network.size, dtype=np.int64)
    states[: len(assignment.state)] = assignment.state
    for tensor, variable in network.relay_variable.items():
        layouts = network.relays[tensor]
        layout = assignment.relay[tensor]
        states[variable] = next(s for s in range(len(layouts.of_state)) if layouts.layout(s) == layout)
    return states


def _reducible(solution: ScheduledSolution) -> list[int]:
    """The variables whose tensors are held at the peak in larger blocks than need be, by what they could save."""
    network = solution.network
    program, mesh = network.program, network.topology.mesh
    states = solution.schedule.assignment.state
    producers = program.defs()
    saving: dict[int, float] = {}
    for tensor, nbytes, kind in solution.profile.held:
        if kind == "redistributed copies":
            continue
        op, k = producers[tensor]
        shards = network.candidates[op].results[k].num_shards(mesh)
        saving[op] = saving.get(op, 0.0) + nbytes * (1 - float(shards[states[op]] / shards.max()))
    by_class: dict[Hashable, float] = {}
    keys = {op: int(network.cost_network.node_table[op]) for op in saving}
    for op, nbytes in saving.items():
        by_class[keys[op]] = by_class.get(keys[op], 0.0) + nbytes
    least = _LEAST_SAVING * solution.peak
    found = [op for op, nbytes in saving.items() if nbytes > 0 and by_class[keys[op]] >= least]
    return sorted(found, key=lambda op: (-saving[op], op))


class _Neighbourhoods:
    """Moves of the variables around single ones; used once."""

    def __init__(self, network: PlanningNetwork, assignment: np.ndarray, cost: float):
        self.network, self.assignment, self.cost = network, assignment.copy(), cost
        base = network.cost_network
        self.ends = base.edges
        order = np.argsort(base.edges.reshape(-1), kind="stable")
        self.incident = order // 2
        self.begin = np.searchsorted(base.edges.reshape(-1)[order], np.arange(base.size + 1))
        self.known: dict[Hashable, tuple[int, ...]] = {}

    def moved(self, places: Sequence[int]) -> np.ndarray | None:
        """The assignment after the moves around some variables; None if there are none."""
        before = self.assignment.copy()
        for v in places:
            self.move(v)
        return None if np.array_equal(before, self.assignment) else self.assignment

    def edges_of(self, v: int) -> np.ndarray:
        """The edges of a variable."""
        return self.incident[self.begin[v] : self.begin[v + 1]]

    def around(self, v: int) -> list[int]:
        """The variables within some edges of one, nearest first."""
        found, shell = {v: None}, [v]
        for _ in range(_RADIUS):
            following: list[int] = []
            for u in shell:
                for w in self.ends[self.edges_of(u)].reshape(-1).tolist():
                    if w not in found and len(found) < _VARIABLES:
                        found[w] = None
                        following.append(w)
            shell = following
        return list(found)

    def move(self, v: int) -> None:
        """Solve the neighbourhood of a variable with a price on bytes."""
        variables = self.around(v)
        rank = {u: k for k, u in enumerate(variables)}
        edges = list(dict.fromkeys(e for u in variables for e in self.edges_of(u).tolist()))
        base, states = self.network.cost_network, self.assignment
        inner: list[tuple[int, int, int]] = []
        # Variable, table, state of the other, whether that has the rows.
        outer: list[tuple[int, int, int, bool]] = []
        for e in edges:
            i, j = base.edges[e].tolist()
            table = int(base.edge_table[e])
            if i in rank and j in rank:
                inner.append((rank[i], rank[j], table))
            elif i in rank:
                outer.append((rank[i], table, int(states[j]), False))
            else:
                outer.append((rank[j], table, int(states[i]), True))
        nodes = base.node_table[variables].tolist()
        key = (tuple(nodes), tuple(inner), tuple(outer), tuple(states[variables].tolist()))
        if key not in self.known:
            if len(self.known) >= _NEIGHBOURHOODS:
                return
            self.known[key] = self.solved(variables, inner, outer)
        self.assignment[variables] = self.known[key]

    def solved(
        self, variables: list[int], inner: list[tuple[int, int, int]], outer: list[tuple[int, int, int, bool]]
    ) -> tuple[int, ...]:
        """The states of the variables: as before, or others of the same cost that hold less."""
        base = self.network.cost_network
        now = tuple(self.assignment[variables].tolist())
        unary = [base.unary[t].copy() for t in base.node_table[variables].tolist()]
        for k, table, state, rows in outer:
            costs = base.pairwise[table]
            unary[k] += costs[state] if rows else costs[:, state]
        held = [self.held_bytes(u, len(costs)) for u, costs in zip(variables, unary, strict=True)]
        most = sum(float(h.max(initial=0.0)) for h in held)
        if not most:
            return now
        price = _PRICE * self.cost / most
        pairwise = sorted({t for _, _, t in inner})
        number = {t: k for k, t in enumerate(pairwise)}
        small = CostNetwork(
            unary=tuple(u + price * h for u, h in zip(unary, held, strict=True)),
            pairwise=tuple(base.pairwise[t] for t in pairwise),
            node_table=np.arange(len(variables)),
            edges=np.array([(i, j) for i, j, _ in inner], dtype=np.int64).reshape(-1, 2),
            edge_table=np.array([number[t] for *_, t in inner], dtype=np.int64),
        )
        found = tuple(solve(small).assignment.tolist())

        def cost(states: Sequence[int]) -> float:
            own = sum(float(u[s]) for u, s in zip(unary, states, strict=True))
            return own + sum(float(base.pairwise[t][states[i], states[j]]) for i, j, t in inner)

        def held_in(states: Sequence[int]) -> float:
            return sum(float(h[s]) for h, s in zip(held, states, strict=True))

        allowed = cost(now) + 1e-3 * ROUNDING * self.cost
        return found if cost(found) <= allowed and held_in(found) < held_in(now) else now

    def held_bytes(self, v: int, states: int) -> np.ndarray:
        """(states,) bytes of the materialized results of a variable."""
        network = self.network
        if v >= len(network.program.operators):
            return np.zeros(states)
        mesh, op = network.topology.mesh, network.program.operators[v]
        out = np.zeros(states)
        for k, t in enumerate(op.results):
            if network.liveness.materialized[t]:
                out += network.program.tensors[t].nbytes / network.candidates[v].results[k].num_shards(mesh)
        return out
