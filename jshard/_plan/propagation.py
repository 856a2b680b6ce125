"""Propagation: MindSpore's search. From the configured operators outwards, breadth first, never back.

Configured are the operators that the user pinned, and the inputs and results that the user pinned. In program
order, each floods the program in both directions until it meets what is decided or configured. An operator that
is reached takes the candidate with

1. the least communication to bring tensors between it and its decided neighbours,
2. the least local work for that (bytes sliced and joined),
3. the least communication of its own (summing what it leaves partial),
4. the most pieces,
5. the lexicographically largest strategy.

An operator reached from above waits until all its inputs are decided. Neither compute nor memory counts, a
local choice never reads a partial sum, and free inputs and weights steer nothing: they, their broadcasts and
transposes, and constants are decided last, by exact search, as serves their readers best.

So on devices 2 x 4, `x @ w1` pinned to `((2, 1), (1, 4))` makes the next product `((2, 4), (4, 1))`: reading what
is there costs no redistribution, and the sum afterwards counts only third. That is fast, and a person can follow
it; what it costs beside the optimum, `search="optimal"` says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from jshard._core.errors import SearchError
from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._cost.collectives import collective
from jshard._cost.reshard_steps import apply_step
from jshard._cost.resharding import bytes_table, cheapest_steps
from jshard._network.build import PlanningNetwork
from jshard._network.candidates import TensorLayouts
from jshard._program.graph import Literal, Tensor
from jshard._rules.rule import NONE, internal_collectives
from jshard._search import Contradiction, solve


def propagate(
    problem: PlanningNetwork, configured: Collection[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """An assignment, and one line on how it went."""
    flood = _Propagation(problem, configured)
    decided = flood.run()
    assignment = _complete_by_search(problem, decided)
    line = (
        f"propagation from {len(configured)} configured operators decided {len(decided)}, the rest by search"
    )
    return tuple(int(a) for a in assignment), (line,)


class _Propagation:
    """Decides operators one after the other; used once."""

    def __init__(self, problem: PlanningNetwork, configured: Collection[int]):
        self.problem, self.configured = problem, frozenset(configured)
        self.program, self.mesh = problem.program, problem.topology.mesh
        self.producers = self.program.defs()
        self.strategy_operators = self._find_strategy_operators()
        self.decided: dict[int, int] = {}
        self.visited: set[int] = set()
        self.pending: dict[int, None] = {}
        self.preferences: dict[int, tuple[np.ndarray, list[tuple[float, ...]]]] = {}

    def _find_strategy_operators(self) -> frozenset[int]:
        """Operators in MindSpore's sense. What only carries free inputs or constants to a reader is none."""
        found: set[int] = set()
        from_input: set[int] = set()
        for op in self.program.operators:
            producers_of = {self.producers[a][0] for a in op.operands if not isinstance(a, Literal)}
            if op.kind in ("input", "const") or producers_of & from_input:
                from_input.add(op.id)
            moves = self.problem.candidates[op.id].rule.work == 0 or op.id not in from_input
            helper = op.primitive == "broadcast_in_dim" or (moves and not producers_of & found)
            if op.id in self.configured or (op.kind not in ("input", "const", "output") and not helper):
                found.add(op.id)
        return frozenset(found)

    def run(self) -> dict[int, int]:
        """The state of every steering operator."""
        for start in sorted(self.configured):
            self.decide(start)
        # A pinned result is a demand on the operator that makes it, so it is seen from the start.
        self.visited |= self.configured & set(self.program.outputs)
        for start in sorted(self.configured):
            self.propagate_from(start)
        while self.pending:
            self.decide_and_propagate(next(iter(self.pending)))
        for start in sorted(self.strategy_operators):
            self.decide_and_propagate(start)
            while self.pending:
                self.decide_and_propagate(next(iter(self.pending)))
        return self.decided

    def decide_and_propagate(self, op: int) -> None:
        """Decide an operator from what there is, and flood from it."""
        self.pending.pop(op, None)
        if op not in self.decided:
            self.decide(op)
            self.propagate_from(op)

    def propagate_from(self, start: int) -> None:
        self.visited.add(start)
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for v in self.consumers_of(u):
                if v in self.decided:
                    continue
                if all(m in self.decided for m, *_ in self.makers(v)):
                    self.visit(v, queue)
                else:
                    self.pending[v] = None
            for v, *_ in self.makers(u):
                if v not in self.decided:
                    self.visit(v, queue)

    def visit(self, op: int, queue: deque[int]) -> None:
        self.pending.pop(op, None)
        self.decide(op)
        self.visited.add(op)
        queue.append(op)

    def makers(self, op: int) -> list[tuple[int, int, int, Tensor]]:
        """Steering makers of an operator's operands: (operator, its result, operand, tensor)."""
        out = []
        for i, a in enumerate(self.program.operators[op].operands):
            if not isinstance(a, Literal) and self.producers[a][0] in self.strategy_operators:
                out.append((*self.producers[a], i, self.program.tensors[a]))
        return out

    def consumers_of(self, op: int) -> list[int]:
        """Steering readers of an operator's results, in program order."""
        found = {u for r in self.program.operators[op].results for u, _ in self.problem.readers[r]}
        return sorted(found & self.strategy_operators)

    def decide(self, op: int) -> None:
        s = self.problem.candidates[op]
        communication, work = np.zeros(len(s)), np.zeros(len(s))
        for m, k, i, t in self.makers(op):
            if m in self.decided:
                made = self.problem.candidates[m].results[k].layout(self.decided[m])
                self.add_reshard(communication, work, s.operands[i], made, t, reading=True)
        for k, r in enumerate(self.program.operators[op].results):
            for u, i in self.problem.readers[r]:
                if u in self.visited:
                    needed = self.problem.candidates[u].operands[i].layout(self.decided[u])
                    self.add_reshard(
                        communication, work, s.results[k], needed, self.program.tensors[r], reading=False
                    )
        allowed, preference = self.preference(op)
        communication = np.where(allowed, communication, np.inf)
        if not np.isfinite(communication.min()):
            raise _no_candidate_left(self.program.operators[op].primitive, self.program.operators[op].source)
        near = [k for k in np.flatnonzero(_is_minimal(communication))]
        near = [k for k in near if _is_minimal(work[near])[near.index(k)]]
        self.decided[op] = int(min(near, key=lambda k: preference[k]))

    def add_reshard(
        self,
        communication: np.ndarray,
        work: np.ndarray,
        own_communication: TensorLayouts,
        other: Layout,
        t: Tensor,
        reading: bool,
    ) -> None:
        """Add what it takes to bring a tensor between each state's layout and a neighbour's, sums done."""
        topology, there = self.problem.topology, (other.without_partial(),)
        here = tuple(lay.without_partial() for lay in own_communication.layouts)
        if reading:
            received = bytes_table(there, here, t.shape, t.itemsize, topology)[0]
        else:
            received = bytes_table(here, there, t.shape, t.itemsize, topology)[:, 0]
        touched = np.array([
            (_elements_written(there[0], lay, t.shape, topology) if reading else _elements_written(lay, there[0], t.shape, topology))
            if math.isfinite(b) else math.inf
            for lay, b in zip(here, received, strict=True)
        ]) * t.itemsize  # fmt: skip
        communication += received[own_communication.of_state]
        work += touched[own_communication.of_state]

    def preference(self, op: int) -> tuple[np.ndarray, list[tuple[float, ...]]]:
        """States that may be chosen, and for each the keys 3 to 5: least first."""
        s, mesh = self.problem.candidates[op], self.mesh
        if id(s) not in self.preferences:
            finite = np.isfinite(self.problem.cost_network.unary[self.problem.cost_network.node_table[op]])
            partial = np.array(
                [any(c.layout(k).partial for c in s.operands) for k in range(len(s))], dtype=bool
            )
            keys: list[tuple[float, ...]] = []
            for k, c in enumerate(s.candidates):
                tensors = [ch.layout(k) for ch in (*s.operands, *s.results)]
                if c is None:
                    used = tensors[0].pieces(mesh)
                else:
                    used = math.prod(n for f, n in zip(c.axis_codes, mesh.sizes, strict=True) if f != NONE)
                strategy = [-cut for lay in tensors for cut in lay.cuts(mesh)]
                keys.append((self.own(op, k), -used, *strategy, k))
            self.preferences[id(s)] = (finite & ~partial if (finite & ~partial).any() else finite, keys)
        return self.preferences[id(s)]

    def own(self, op: int, k: int) -> float:
        """Bytes received to finish an operator's sums, and reductions that it does itself."""
        s, mesh = self.problem.candidates[op], self.mesh
        total, c, topology = 0.0, s.candidates[k], self.problem.topology
        if c is not None and s.op is not None:
            for sent in internal_collectives(s.rule, c, mesh, s.op.outs):
                total += collective(sent.kind, sent.axes, sent.local_bytes, topology).bytes
        for r, choices in zip(self.program.operators[op].results, s.results, strict=True):
            lay = choices.layout(k)
            if mesh.size(*lay.partial) > 1:
                block = self.program.tensors[r].nbytes / lay.pieces(mesh)
                total += collective("all_reduce", lay.partial, block, topology).bytes
        return total


def _is_minimal(values: np.ndarray) -> np.ndarray:
    """Which values are the least, up to rounding."""
    least = values.min()
    return values <= least * (1 + 1e-9) + 1e-9


@functools.lru_cache(maxsize=65536)
def _elements_written(a: Layout, b: Layout, shape: tuple[int, ...], topology: Topology) -> float:
    """Elements a device writes while a tensor goes from one layout to another."""
    here, total = a, 0.0
    for step in cheapest_steps(a, b, shape, topology):
        here = apply_step(step, here)
        total += math.prod(shape) / here.pieces(topology.mesh)
    return total


def _complete_by_search(problem: PlanningNetwork, decided: dict[int, int]) -> Sequence[int]:
    """The best assignment in which the decided operators keep their states."""
    net = problem.cost_network
    unary, nodes, known = list(net.unary), net.node_table.copy(), {}
    for op, k in decided.items():
        key = (int(nodes[op]), k)
        if key not in known:
            table = np.full(len(net.unary[nodes[op]]), np.inf)
            table[k] = net.unary[nodes[op]][k]
            known[key] = len(unary)
            unary.append(table)
        nodes[op] = known[key]
    fixed = dataclasses.replace(net, unary=tuple(unary), node_table=nodes, memory=None)
    try:
        return [int(a) for a in solve(fixed).assignment]
    except Contradiction as error:
        raise _no_candidate_left("the rest of the program", "") from error


def _no_candidate_left(what: str, where: str) -> SearchError:
    return SearchError(
        f"propagation came to {what}, which fits none of its decided neighbours",
        where=where,
        fix="search='optimal', which goes back on its choices",
    )
