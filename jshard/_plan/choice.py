"""One state for every operator and one layout for every relay: what the search decided, as layouts of values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jshard import _jaxcompat as compat
from jshard._cost.redistribute import Step as RedistributionStep, steps as redistribution
from jshard._layout import Layout
from jshard._numbers import Ints, numbered, packed
from jshard._plan.combined import combined
from jshard._plan.states import States
from jshard._program.graph import Program
from jshard._rules.rule import Candidate, Sent, own_collectives
from jshard._topology import Topology


Value = tuple[int, Layout]  # a tensor in a layout


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One state for every operator and one layout for every relay."""

    program: Program
    topology: Topology
    states: tuple[States, ...]
    state: tuple[int, ...]
    relay: Mapping[int, Layout]
    regather: bool = False  # the backward pass moves again what the forward pass moved, instead of holding it

    @property
    def producers(self) -> Sequence[tuple[int, int]]:
        """For each tensor the (operator, result index) that makes it."""
        return self.program.producers()

    @functools.cached_property
    def anew(self) -> np.ndarray:
        """(operators,) whether an operator reads none of the copies that operators before the backward pass had made."""
        ops = self.program.operators
        if not self.regather:
            return np.zeros(len(ops), dtype=bool)
        return np.array(
            [op.kind == "eqn" and compat.is_backward(op.prefix, op.eqn) for op in ops], dtype=bool
        )

    def candidate(self, op: int) -> Candidate | None:
        """The candidate of an operator; None for inputs and outputs."""
        return self.states[op].candidates[self.state[op]]

    @functools.cached_property
    def layouts(self) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
        """For each operator the layouts of its operands and results; one object for all that are alike."""
        alike: dict[tuple[int, int], tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {}
        out = []
        for s, k in zip(self.states, self.state, strict=True):
            found = alike.get((id(s), k))
            if found is None:
                found = tuple(c.of(k) for c in s.operands), tuple(c.of(k) for c in s.results)
                alike[id(s), k] = found
            out.append(found)
        return out

    @functools.cached_property
    def values(self) -> list[Value]:
        """Each tensor as it is made."""
        layouts = self.layouts
        return [(t, layouts[op][1][k]) for t, (op, k) in enumerate(self.producers)]

    @functools.cached_property
    def alike(self) -> tuple[Ints, list[int]]:
        """For each operator a number of its states and state, and one operator of each number."""
        which = np.unique(np.fromiter(map(id, self.states), np.int64, len(self.states)), return_inverse=True)[
            1
        ]
        return numbered(packed(which, np.array(self.state, dtype=np.int64)))

    def own(self, op: int) -> tuple[Sent, ...]:
        """The collectives that an operator writes itself."""
        s, candidate = self.states[op], self.candidate(op)
        if candidate is None or s.op is None or not s.rule.own and s.rule.reducer == "sum":
            return ()
        return own_collectives(s.rule, candidate, self.topology.mesh, s.op.outs)

    def needed(self, op: int, operand: int) -> Layout:
        """The layout in which an operator reads an operand."""
        return self.states[op].operands[operand].of(self.state[op])

    def made(self, tensor: int) -> Layout:
        """The layout in which a tensor is made."""
        a = self.program.arrays
        op = int(a.maker[tensor])
        return self.states[op].results[int(a.place[tensor])].of(self.state[op])

    @functools.cached_property
    def together(self) -> Mapping[int, int]:
        """How many sums go together with a tensor's, where it is more than one."""
        return combined(self.program, self.topology)

    def path(self, tensor: int, source: Layout, target: Layout) -> tuple[RedistributionStep, ...]:
        """The steps that bring a tensor from one layout to another."""
        t = self.program.tensors[tensor]
        together = self.together.get(tensor, 1)
        return redistribution(source, target, t.shape, self.topology, t.itemsize, together)

    def kept(self, tensor: int) -> Layout:
        """The layout in which a tensor is kept for its readers."""
        return self.relay.get(tensor) or self.made(tensor)
