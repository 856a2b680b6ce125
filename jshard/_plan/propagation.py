"""Propagation: MindSpore's strategy propagation, breadth first from the configured operators, without backtracking.

Configured are the operators, inputs and results that the user pinned. In program order, the search expands from each in
both directions up to decided or configured operators. An operator that it reaches takes the candidate with

1. the least communication to reshard tensors between it and its decided neighbours,
2. the least local work for that (bytes sliced and joined),
3. the least communication of its own (completing its partial sums),
4. the most shards,
5. the lexicographically largest strategy.

An operator reached from a producer waits until all its inputs are decided. Neither compute nor memory counts, and no
operator is decided to read a partial sum. Free inputs and weights do not propagate: they, their broadcasts and
transposes, and constants are decided last, by exact search.

On devices 2 x 4, `x @ w1` pinned to `((2, 1), (1, 4))` makes the next product `((2, 4), (4, 1))`: reading the layout
produced costs no resharding, and the sum afterwards counts only third. This is fast and easy to follow by hand;
`search="optimal"` shows what it costs beside the optimum.
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
from jshard._network.operator_cost import costed_internal_collectives
from jshard._program.graph import Literal, Tensor
from jshard._rules.rule import NONE
from jshard._search import Contradiction, solve


def propagate(
    problem: PlanningNetwork, configured: Collection[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """An assignment, and one line for the steps of the plan."""
    decided = _Propagation(problem, configured).run()
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
        """The operators that MindSpore gives a strategy: not those that only pass free inputs or constants to a reader."""
        strategy_operators: set[int] = set()
        from_input: set[int] = set()
        for op in self.program.operators:
            producers = {self.producers[a][0] for a in op.operands if not isinstance(a, Literal)}
            if op.kind in ("input", "const") or producers & from_input:
                from_input.add(op.id)
            trivial = self.problem.candidates[op.id].rule.work == 0 or op.id not in from_input
            helper = op.primitive == "broadcast_in_dim" or (trivial and not producers & strategy_operators)
            if op.id in self.configured or (op.kind not in ("input", "const", "output") and not helper):
                strategy_operators.add(op.id)
        return frozenset(strategy_operators)

    def run(self) -> dict[int, int]:
        """The state of every strategy operator."""
        for start in sorted(self.configured):
            self.decide(start)
        # A pinned result constrains the operator that produces it, so it counts as visited from the start.
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
        """Decide an operator from its decided neighbours, and propagate from it."""
        self.pending.pop(op, None)
        if op not in self.decided:
            self.decide(op)
            self.propagate_from(op)

    def propagate_from(self, start: int) -> None:
        """Breadth-first search in both directions from a decided operator, deciding what it reaches."""
        self.visited.add(start)
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for v in self.consumers_of(u):
                if v in self.decided:
                    continue
                if all(m in self.decided for m, *_ in self.producers_of(v)):
                    self.visit(v, queue)
                else:
                    self.pending[v] = None
            for v, *_ in self.producers_of(u):
                if v not in self.decided:
                    self.visit(v, queue)

    def visit(self, op: int, queue: deque[int]) -> None:
        """Decide an operator that the search reached."""
        self.pending.pop(op, None)
        self.decide(op)
        self.visited.add(op)
        queue.append(op)

    def producers_of(self, op: int) -> list[tuple[int, int, int, Tensor]]:
        """Strategy operators that produce the operands: (operator, its result, operand, tensor)."""
        out = []
        for i, a in enumerate(self.program.operators[op].operands):
            if not isinstance(a, Literal) and self.producers[a][0] in self.strategy_operators:
                out.append((*self.producers[a], i, self.program.tensors[a]))
        return out

    def consumers_of(self, op: int) -> list[int]:
        """Strategy operators that read the results, in program order."""
        readers = {u for r in self.program.operators[op].results for u, _ in self.problem.readers[r]}
        return sorted(readers & self.strategy_operators)

    def decide(self, op: int) -> None:
        """Choose the candidate of an operator by the five criteria of the module."""
        candidates = self.problem.candidates[op]
        communication, written = np.zeros(len(candidates)), np.zeros(len(candidates))
        for producer, k, i, t in self.producers_of(op):
            if producer in self.decided:
                made = self.problem.candidates[producer].results[k].layout(self.decided[producer])
                received, moved = self.reshard_bytes(candidates.operands[i], made, t, reads=True)
                communication, written = communication + received, written + moved
        for k, r in enumerate(self.program.operators[op].results):
            for u, i in self.problem.readers[r]:
                if u in self.visited:
                    needed = self.problem.candidates[u].operands[i].layout(self.decided[u])
                    t = self.program.tensors[r]
                    received, moved = self.reshard_bytes(candidates.results[k], needed, t, reads=False)
                    communication, written = communication + received, written + moved
        allowed, preference = self.preference(op)
        communication = np.where(allowed, communication, np.inf)
        if not np.isfinite(communication.min()):
            raise _no_candidate_left(self.program.operators[op].primitive, self.program.operators[op].source)
        best = np.flatnonzero(_is_minimal(communication))
        best = best[_is_minimal(written[best])]
        self.decided[op] = min(best.tolist(), key=lambda k: preference[k])

    def reshard_bytes(
        self, tensor: TensorLayouts, neighbour: Layout, t: Tensor, reads: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(states,) bytes received and bytes written to reshard a tensor between each state and a neighbour's layout.

        From the neighbour where the operator `reads` it, else to the neighbour; partial sums are completed.
        """
        topology, other = self.problem.topology, neighbour.without_partial()
        own = tuple(layout.without_partial() for layout in tensor.layouts)
        if reads:
            received = bytes_table((other,), own, t.shape, t.itemsize, topology)[0]
        else:
            received = bytes_table(own, (other,), t.shape, t.itemsize, topology)[:, 0]
        ends = [(other, layout) if reads else (layout, other) for layout in own]
        elements = [
            _elements_written(a, b, t.shape, topology) if math.isfinite(n) else math.inf
            for (a, b), n in zip(ends, received, strict=True)
        ]
        return received[tensor.of_state], (np.array(elements) * t.itemsize)[tensor.of_state]

    def preference(self, op: int) -> tuple[np.ndarray, list[tuple[float, ...]]]:
        """(states,) which may be chosen, and for each the criteria 3 to 5 as a key; the least key is best."""
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
                keys.append((self.own_communication(op, k), -used, *strategy, k))
            self.preferences[id(s)] = (finite & ~partial if (finite & ~partial).any() else finite, keys)
        return self.preferences[id(s)]

    def own_communication(self, op: int, k: int) -> float:
        """Bytes received to complete an operator's sums and in its internal collectives."""
        s, mesh = self.problem.candidates[op], self.mesh
        total, c, topology = 0.0, s.candidates[k], self.problem.topology
        if c is not None and s.op is not None:
            for sent, cost in costed_internal_collectives(s.rule, c, s.op, topology):
                total += cost.bytes * sent.count
        for r, choices in zip(self.program.operators[op].results, s.results, strict=True):
            lay = choices.layout(k)
            if mesh.size(*lay.partial) > 1:
                block = self.program.tensors[r].nbytes / lay.pieces(mesh)
                total += collective("all_reduce", lay.partial, block, topology).bytes
        return total


def _is_minimal(values: np.ndarray) -> np.ndarray:
    """Which values are minimal, up to rounding."""
    least = values.min()
    return values <= least * (1 + 1e-9) + 1e-9


@functools.lru_cache(maxsize=65536)
def _elements_written(a: Layout, b: Layout, shape: tuple[int, ...], topology: Topology) -> float:
    """Elements a device writes while a tensor goes from one layout to another."""
    layout, total = a, 0.0
    for step in cheapest_steps(a, b, shape, topology):
        layout = apply_step(step, layout)
        total += math.prod(shape) / layout.pieces(topology.mesh)
    return total


def _complete_by_search(problem: PlanningNetwork, decided: dict[int, int]) -> Sequence[int]:
    """The best assignment in which the decided operators keep their states."""
    net = problem.cost_network
    fixed_tables: dict[tuple[int, int], int] = {}
    unary, nodes = list(net.unary), net.node_table.copy()
    for op, k in decided.items():
        key = (int(nodes[op]), k)
        if key not in fixed_tables:
            table = np.full(len(net.unary[nodes[op]]), np.inf)
            table[k] = net.unary[nodes[op]][k]
            fixed_tables[key] = len(unary)
            unary.append(table)
        nodes[op] = fixed_tables[key]
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
