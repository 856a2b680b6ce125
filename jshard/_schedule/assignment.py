"""The assignment: one candidate for every operator and one stored layout for every shared tensor, the search's answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.layout import Layout
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._core.topology import Topology
from jshard._cost.resharding import ReshardStep, cheapest_steps
from jshard._network.allreduce_combining import combinable_sums
from jshard._network.candidates import CandidateSet
from jshard._network.shared_exchanges import SharedExchange, exchange_in_state
from jshard._program.graph import Program
from jshard._rules.rule import Candidate, workspace_bytes
from jshard._rules.sent_collectives import SentCollective, internal_collectives


Value = tuple[int, Layout]  # a tensor in a layout


class KeptEdges(NamedTuple):
    """Edges of an operator's operand: `nbytes` that stay in memory until operator `until` has run."""

    op: int
    operand: int
    until: int
    nbytes: float


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """One candidate for every operator and one layout for every relay.

    - `states`: (operators,) the candidates of each; `state`: (operators,) the chosen one.
    - `relay`: tensor -> the layout in which it is stored for several readers.
    - `regather`: (tensor, operator) pairs: the operator has the tensor resharded again, for itself and for later readers of
        that layout, and the copy of earlier readers dies: its live range is split.
    - `regather_after`: (tensor, operator, tensor awaited): that copy is made only once a product's result is where it is
        needed, so that compilers do not begin it beside the product.
    - `shared_exchanges`: operators that may use edges that others have exchanged.
    """

    program: Program
    topology: Topology
    states: tuple[CandidateSet, ...]
    state: tuple[int, ...]
    relay: Mapping[int, Layout]
    regather: frozenset[tuple[int, int]] = frozenset()
    regather_after: frozenset[tuple[int, int, int]] = frozenset()
    shared_exchanges: tuple[SharedExchange, ...] = ()

    @property
    def producers(self) -> Sequence[tuple[int, int]]:
        """For each tensor the (operator, result index) that makes it."""
        return self.program.defs()

    def candidate(self, op: int) -> Candidate | None:
        """The candidate of an operator; None for inputs and outputs."""
        return self.states[op].candidates[self.state[op]]

    @functools.cached_property
    def layouts(self) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
        """(operators,) the layouts of its operands and of its results; one object for equal (candidates, state)."""
        memo: dict[tuple[int, int], tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {}
        out = []
        for s, k in zip(self.states, self.state, strict=True):
            layouts = memo.get((id(s), k))
            if layouts is None:
                layouts = tuple(c.layout(k) for c in s.operands), tuple(c.layout(k) for c in s.results)
                memo[id(s), k] = layouts
            out.append(layouts)
        return out

    @functools.cached_property
    def values(self) -> list[Value]:
        """Each tensor as it is made."""
        layouts = self.layouts
        return [(t, layouts[op][1][k]) for t, (op, k) in enumerate(self.producers)]

    @functools.cached_property
    def state_classes(self) -> tuple[Ints, list[int]]:
        """(operators,) number of each distinct (candidates, state), and one operator of each number."""
        ids = np.fromiter(map(id, self.states), np.int64, len(self.states))
        _, candidates = np.unique(ids, return_inverse=True)
        return first_occurrence_codes(row_codes(candidates, np.array(self.state, dtype=np.int64)))

    def internal_collectives(
        self, op: int, received: Collection[int] | None = None
    ) -> tuple[SentCollective, ...]:
        """The collectives that an operator emits itself; `received`: operands whose edges others exchange, if known."""
        s, candidate = self.states[op], self.candidate(op)
        if candidate is None or s.op is None or not s.rule.internal and s.rule.reducer == "sum":
            return ()
        received = self.received_edges.get(op, {}) if received is None else received
        return internal_collectives(s.rule, candidate, self.topology.mesh, s.op.outs, s.op.ins, received)

    @functools.cached_property
    def received_edges(self) -> Mapping[int, Mapping[int, SharedExchange]]:
        """Operator -> operand -> the exchange by another operator whose edges it uses."""
        out: dict[int, dict[int, SharedExchange]] = {}
        mesh = self.topology.mesh
        for pair in self.shared_exchanges:
            read = exchange_in_state(self.states[pair.op], pair.operand, self.state[pair.op], mesh)
            sent = exchange_in_state(
                self.states[pair.first], pair.first_operand, self.state[pair.first], mesh
            )
            if read is not None and read == sent:
                out.setdefault(pair.op, {})[pair.operand] = pair
        return out

    @functools.cached_property
    def kept_edges(self) -> tuple[KeptEdges, ...]:
        """Edges that stay in memory from the operator that exchanged them to the last that uses them."""
        last: dict[tuple[int, int], int] = {}
        for of_op in self.received_edges.values():
            for pair in of_op.values():
                key = (pair.first, pair.first_operand)
                last[key] = max(pair.op, last.get(key, -1))
        return tuple(
            KeptEdges(
                op, k, until, sum(s.local_bytes for s in self.internal_collectives(op) if s.operand == k)
            )
            for (op, k), until in last.items()
        )

    def workspace_bytes(self, op: int) -> float:
        """Bytes that an operator's local implementation has in memory beside its operands and results."""
        s, candidate = self.states[op], self.candidate(op)
        if candidate is None or not s.rule.workspace:
            return 0.0
        return float(workspace_bytes(s.rule, np.array([candidate.axis_codes]), self.topology.mesh)[0])

    @functools.cached_property
    def workspaces(self) -> dict[int, float]:
        """Operator -> bytes of its workspace, of those that have one."""
        state_class, representatives = self.state_classes
        sizes = np.array([self.workspace_bytes(op) for op in representatives])[state_class]
        return {i: float(sizes[i]) for i in np.flatnonzero(sizes).tolist()}

    def operand_layout(self, op: int, operand: int) -> Layout:
        """The layout in which an operator reads an operand."""
        return self.states[op].operands[operand].layout(self.state[op])

    def result_layout(self, tensor: int) -> Layout:
        """The layout in which a tensor is made."""
        a = self.program.use_def
        op = int(a.def_op[tensor])
        return self.states[op].results[int(a.def_result[tensor])].layout(self.state[op])

    @functools.cached_property
    def combined_sums(self) -> Mapping[int, int]:
        """Tensor -> how many all-reduces are combined into one with its own, where it is more than one."""
        return combinable_sums(self.program, self.topology)

    def reshard_steps(self, tensor: int, source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
        """The steps that bring a tensor from one layout to another."""
        t = self.program.tensors[tensor]
        combined_with = self.combined_sums.get(tensor, 1)
        return cheapest_steps(source, target, t.shape, self.topology, t.itemsize, combined_with)

    def stored_layout(self, tensor: int) -> Layout:
        """The layout in which a tensor is stored for its readers."""
        return self.relay.get(tensor) or self.result_layout(tensor)
