"""The cost network with memory: what every choice holds, and when, copies in other layouts among it.

Problem.  A state of an operator says how large its results' blocks are. But a reader that wants another layout
has a copy made, and whether there is one depends on two variables at once.

Idea.  Where a copy can be large, put a *copy variable* between the two: its states are (same, L) and (moved, L)
for each layout L of one end. The edge to one end says which L it is, the edge to the other end lets "same" only
pass equal layouts and charges the move to "moved"; so every answer of the first network is exactly one answer
of this one, at the same cost, and the copy's bytes are the copy variable's own.

What is held: an argument throughout, unless it is donated; any other value from its making until its relay or
its last reader has it; a relay from its first reader to its last; a copy from its reader until that is done. What is
handed to a loop is held until the loop ends.
A bound on this is a bound on the peak of the schedule, which never holds less (`peak.py` counts that one exactly).

Worked case.  A weight cut 8 ways, gathered for one product: the argument holds 1/8 all the time, the copy
variable 1 while the product runs, and nothing if the product takes it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard._cost import redistribute
from jshard._cost.memory import is_heavy
from jshard._cost.residency import is_light, residency, reuses
from jshard._layout import Layout
from jshard._plan.network import Carry, Problem
from jshard._plan.states import Choices
from jshard._program.graph import Block, Literal, Operator, Program, operators_of
from jshard._search import CostNetwork, Memory


# Tensors below this share of the largest one get no copy variable: their copies hardly show in the peak.
_SMALL = 1 / 512


def limited(problem: Problem) -> CostNetwork:
    """The network of a problem with copy variables and memory (and no limit yet)."""
    return _Writer(problem).network()


class _Writer:
    """Collects the arrays of one network; used once."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.program = problem.program
        self.mesh = problem.topology.mesh
        self.life = residency(problem.program, problem.donated)
        self.first = _first_times(problem.program)
        self.until = _loop_ends(problem.program)
        self.producers, self.consumers = problem.program.producers(), problem.program.consumers()
        self.needed = list(self.life.needed)
        for op, (_, end) in self.until.items():
            for a in problem.program.operators[op].operands[:1]:
                if not isinstance(a, Literal):
                    self.needed[a] = max(self.needed[a], end)
        base = problem.network
        self.unary, self.pairwise = list(base.unary), list(base.pairwise)
        self.nodes = base.node_table.tolist()
        self.edges = base.edges.tolist()
        self.edge_tables = base.edge_table.tolist()
        self.intervals: list[tuple[int, int]] = []
        self.usage: list[np.ndarray] = []
        self.holds: list[int] = []
        self.ids: dict[Any, int] = {}

    def network(self) -> CostNetwork:
        self.operators()
        self.relays()
        carries = self.problem.carries
        largest = max((self.program.tensors[c.tensor].nbytes for c in carries), default=0)
        for c in carries:
            if self.program.tensors[c.tensor].nbytes >= largest * _SMALL:
                self.copy(c)
        memory = Memory(
            intervals=np.array(self.intervals, dtype=np.int64).reshape(-1, 2),
            usage=tuple(self.usage),
            node_usage=np.array(self.holds, dtype=np.int64),
            limit=None,
        )
        return CostNetwork(
            unary=tuple(self.unary),
            pairwise=tuple(self.pairwise),
            node_table=np.array(self.nodes, dtype=np.int64),
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            edge_table=np.array(self.edge_tables, dtype=np.int64),
            memory=memory,
        )

    def hold(self, start: int, end: int, key: Any, table: Any) -> None:
        """The next variable's bytes by state, and when it holds them; `table` makes the bytes if they are new.

        Operator i has two times: 2 i, when its operands are moved, and 2 i + 1, when it runs.
        """
        if key not in self.ids:
            self.ids[key] = len(self.usage)
            self.usage.append(table())
        self.intervals.append((start, end))
        self.holds.append(self.ids[key])

    def nothing(self, n: int) -> None:
        self.hold(0, 0, ("nothing", n), lambda: np.zeros(n))

    def bytes_of(self, layouts: Sequence[Layout], nbytes: float) -> np.ndarray:
        return np.array([nbytes / lay.pieces(self.mesh) for lay in layouts], dtype=np.float64)

    def is_given(self, tensor: int) -> bool:
        """Whether a tensor's own room is counted elsewhere or throughout: an argument, or what a loop hands its body."""
        op, _ = self.producers[tensor]
        kind = self.program.operators[op].kind
        return kind in ("input", "const") or (kind != "eqn" and tensor not in self.first)

    def operators(self) -> None:
        """Results in the layout they are made in."""
        program, life, relays = self.program, self.life, self.problem.relays
        consumers = self.consumers
        for op in program.operators:
            s = self.problem.states[op.id]
            parts: list[tuple[Choices, int]] = []
            start, end = self.start(op.id, op.results), op.id
            for k, r in enumerate(op.results):
                if not life.held[r] or (op.kind not in ("input", "const", "eqn") and r not in self.first):
                    continue  # what a loop's boundary hands to its body is part of what it was handed
                parts.append((s.results[k], program.tensors[r].nbytes))
                if r in relays and not self.is_given(r):
                    end = max(end, min(u for u, _ in consumers[r]))
                else:
                    end = max(end, self.needed[r] + 1)
            written = [(s.results[k], life.written[r]) for k, r in enumerate(op.results) if life.written[r]]
            if not parts and written:
                key = (tuple((id(c), b) for c, b in written), len(s))
                self.hold(2 * op.id + 1, 2 * op.id + 2, key, lambda parts=written: self.sum(parts))
                continue
            if not parts:
                self.nothing(len(s))
                continue
            if op.kind in ("input", "const"):
                start = 0
            key = (tuple((id(c), b) for c, b in parts), len(s))
            self.hold(start, 2 * end, key, lambda parts=parts: self.sum(parts))

    def sum(self, parts: Sequence[tuple[Choices, float]]) -> np.ndarray:
        return np.sum([self.bytes_of(c.layouts, b)[c.index] for c, b in parts], axis=0)

    def start(self, op: int, results: Sequence[int]) -> int:
        """When results begin to take room: after an operand whose room they take over."""
        operator = self.program.operators[op]
        if operator.kind != "eqn":
            return 2 * min((self.first[r] for r in results if r in self.first), default=op)
        if reuses(operator) and all(self.life.needed[r] > op for r in results):
            if any(not isinstance(a, Literal) and self.life.needed[a] == op for a in operator.operands):
                return 2 * op + 2
        return 2 * op + 1

    def relays(self) -> None:
        """Values in the layout they are kept in; an argument's relay is a copy, counted there."""
        for t in self.problem.relay_variable:
            relay = self.problem.relays[t]
            if not self.life.held[t] or self.is_given(t):
                self.nothing(len(relay.index))
                continue
            nbytes = self.program.tensors[t].nbytes
            start = min(u for u, _ in self.consumers[t])
            parts = [(relay, nbytes)]
            end = 2 * self.needed[t] + 2
            self.hold(2 * start, end, (id(relay), nbytes), lambda parts=parts: self.sum(parts))

    def copy(self, c: Carry) -> None:
        """Split an edge by a copy variable."""
        tensor = self.program.tensors[c.tensor]
        fluid = not self.life.held[c.tensor]
        # Into the relay of a computed value, what is extra while it moves is the old block; elsewhere the new one.
        # A product that its reader absorbs is written out when it moves, and a partial sum is large before it does.
        product = fluid and is_heavy(self.program.operators[self.producers[c.tensor][0]])
        by_source = product or (c.reader < 0 and not self.is_given(c.tensor) and not fluid)
        layouts = c.source.layouts if by_source else c.target.layouts
        n = len(layouts) * (3 if fluid else 2)
        key = (
            "copy",
            id(c.source),
            id(c.target),
            tensor.shape,
            tensor.itemsize,
            c.times,
            c.whole,
            c.together,
            by_source,
            fluid,
        )
        if key not in self.ids:
            self.ids[key] = len(self.pairwise)
            self.pairwise += self.tables(c, by_source, fluid)
        if ("free", n) not in self.ids:
            self.ids["free", n] = len(self.unary)
            self.unary.append(np.zeros(n))
        i, j = self.edges[c.edge]
        v = len(self.nodes)
        self.nodes.append(self.ids["free", n])
        self.edges[c.edge], self.edge_tables[c.edge] = [i, v], self.ids[key]
        self.edges.append([v, j])
        self.edge_tables.append(self.ids[key] + 1)
        start, end = self.copied(c, by_source)
        # A value that is not stored is written out to be moved: at least an even share of it, for that moment.
        even = tensor.nbytes / self.mesh.total if fluid else 0.0
        self.hold_copy(start, end, layouts, tensor.nbytes, n, even if product else 0.0)
        if even and not product:
            self.nodes.append(self.ids["free", n])
            if ("twin", n) not in self.ids:
                self.ids["twin", n] = len(self.pairwise)
                self.pairwise.append(np.where(np.eye(n, dtype=bool), 0.0, np.inf))
            self.edges.append([v, v + 1])
            self.edge_tables.append(self.ids["twin", n])
            self.hold_copy(start, start + 1, layouts, 0.0, n, even)

    def hold_copy(
        self, start: int, end: int, layouts: Sequence[Layout], nbytes: float, n: int, more: float
    ) -> None:
        """Bytes of the states that move: the block in their layout and `more`."""

        def table() -> np.ndarray:
            out = np.zeros(n)
            out[len(layouts) : 2 * len(layouts)] = self.bytes_of(layouts, nbytes) + more
            return out

        self.hold(start, end, ("copy", layouts, nbytes, n, more), table)

    def copied(self, c: Carry, by_source: bool) -> tuple[int, int]:
        """From when to when the copy, or the old block, is there beside the other."""
        if c.reader in self.until and self.producers[c.tensor][0] > c.reader:
            stacked, end = self.until[c.reader]  # what a turn hands to the next is moved at its end
            return 2 * stacked, 2 * end + 1
        if c.reader >= 0 and by_source:
            return 2 * c.reader, 2 * c.reader + 1
        if c.reader >= 0:
            op = self.program.operators[c.reader]
            return 2 * op.id, 2 * max(self.end(op.id), self.through(op)) + 2
        first = min(u for u, _ in self.consumers[c.tensor])
        if by_source:
            return 2 * first, 2 * first + 1
        return 2 * first, 2 * self.last_use(c.tensor) + 2

    def last_use(self, tensor: int) -> int:
        """The last operator that needs a copy of an argument (the argument itself may stay longer)."""
        last = 0
        for u, _ in self.consumers[tensor]:
            op = self.program.operators[u]
            last = max(last, self.end(u), self.through(op))
        return last

    def end(self, op: int) -> int:
        """The last operator of the loop that an operator hands a value to; else itself."""
        return self.until[op][1] if op in self.until else op

    def through(self, op: Operator) -> int:
        """The last operator that needs what another reads: its own readers, where they compute it again."""
        if not is_light(op) or any(self.life.held[r] for r in op.results):
            return op.id
        return max([op.id, *(self.life.needed[r] for r in op.results)])

    def tables(self, c: Carry, by_source: bool, fluid: bool) -> list[np.ndarray]:
        """Tables maker x copy and copy x reader: one tells the layout, the other allows and charges."""
        tensor, topology = self.program.tensors[c.tensor], self.problem.topology
        sources, targets = c.source.layouts, c.target.layouts
        moved = (
            redistribute.table(sources, targets, tensor.shape, tensor.itemsize, topology, c.together)
            * c.times
        )
        if c.whole:
            cut = [{a for d in lay.dims for a in d} for lay in targets]
            scatters = np.array([[not k.isdisjoint(lay.partial) for k in cut] for lay in sources])
            moved = np.where(scatters, np.inf, moved)
        same = np.array([[a == b for b in targets] for a in sources])
        kinds = [np.where(same, 0.0, np.inf), np.where(same, np.inf, moved)]
        if fluid:
            view = np.array([[_is_slice(a, b) for b in targets] for a in sources])
            kinds = [kinds[0], np.where(view, np.inf, kinds[1]), np.where(view, kinds[1], np.inf)]
        own = c.source if by_source else c.target
        tells = np.where(own.index[:, None] == np.arange(len(own.layouts))[None, :], 0.0, np.inf)
        tells = np.hstack([tells] * len(kinds))
        if by_source:  # a row of the copy: a kind and a layout of the maker
            return [tells, np.ascontiguousarray(np.vstack(kinds)[:, c.target.index])]
        return [np.ascontiguousarray(np.hstack(kinds)[c.source.index]), np.ascontiguousarray(tells.T)]


def _is_slice(source: Layout, target: Layout) -> bool:
    """Whether each device has what it will need: the target only cuts further."""
    return source != target and not source.partial and all(
        b[: len(a)] == a for a, b in zip(source.dims, target.dims, strict=True)
    )  # fmt: skip


def _loop_ends(program: Program) -> dict[int, tuple[int, int]]:
    """Of the operators that hand values to a loop the first one after its body, and its last: it needs them so long."""
    found: dict[int, tuple[int, int]] = {}

    def visit(block: Block) -> None:
        for step in block.steps:
            if isinstance(step, int):
                continue
            body = max([i for inner in step.blocks for i in operators_of(inner)], default=-1)
            end = max([body, *step.boundary.get("ys", ())])
            for role in ("const", "carry", "xs"):
                found.update((i, (body + 1, end)) for i in step.boundary.get(role, ()) if i < end)
            for inner in step.blocks:
                visit(inner)

    visit(program.body)
    return found


def _first_times(program: Program) -> dict[int, int]:
    """Results of loops and branches are allocated before their bodies run: when each begins to take room."""
    producers = program.producers()
    found: dict[int, int] = {}

    def visit(block: Block) -> None:
        for step in block.steps:
            if isinstance(step, int):
                continue
            if step.boundary:
                ids = [i for role in step.boundary.values() for i in role]
                for t in step.results:
                    found[t] = min([*ids, producers[t][0]])
            for inner in step.blocks:
                visit(inner)

    visit(program.body)
    return found
