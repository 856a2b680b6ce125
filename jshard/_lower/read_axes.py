"""The mesh axes over which all readers of a loop's inputs differ, so that cotangents are summed once after the loop.

Problem.  Under `check_vma` JAX casts a replicated weight where an operator combines it with values that vary over an axis,
and the transpose of the cast is a sum over that axis. In a loop over microbatches or ticks the sum would run in every turn,
where one sum of what the turns have added up is enough.

Idea.  What all readers in the body would cast is cast before the loop. Readers are followed through views of the input,
local slices, inner loops and checkpointed calls. What is communicated, carried or returned keeps the axes of its layout, so
that the types of all other values stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshard._core import jaxcompat as compat
from jshard._program.graph import Literal
from jshard._program.user_shard_map import SHARD_MAP
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.schedule import Action, Reshard, RunCall, RunOperator


Axes = frozenset[str]

CASTS_OWN_OPERANDS = (SHARD_MAP, "custom_linear_solve", "device_put", "optimization_barrier")
"""A user's `shard_map` types values by its specs, a solver by its functions; of the others, each result has its own type."""

_VIEWS = frozenset(
    "convert_element_type reshape transpose squeeze expand_dims broadcast_in_dim copy neg slice dynamic_slice gather "
    "jshard_pin_operand jshard_pin_result jshard_own_result jshard_module_output name rounded_sum".split()
)
"""Operators of one array (and positions in it) that do the same on whatever axes it varies over."""


def varying_as_read(
    action: RunCall, operands: Sequence[jax.Array], assignment: Assignment
) -> list[jax.Array]:
    """The operands of a scan, those that it does not carry varying over the axes over which all their readers do."""
    axes = _read_axes(action, list(map(_own, action.returns[0])), assignment)
    carries = _carry_positions(action)
    return [
        x if k in carries or not jnp.issubdtype(x.dtype, jnp.inexact) else compat.cast_vma(x, axes[k])
        for k, x in enumerate(operands)
    ]


def _read_axes(action: RunCall, results: Sequence[Axes], assignment: Assignment) -> list[Axes]:
    """For each value that enters the first body of a call, the axes over which its readers vary, or it does.

    `results`: the axes over which the results of the body are read.
    """
    readers = _Readers(assignment)
    for v, axes in zip(action.returns[0], results, strict=True):
        readers.add(v, axes)
    for inner in reversed(action.bodies[0]):
        readers.of_action(inner)
    return [readers.of(v) for v in action.entry[0]]


class _Readers:
    """The axes common to the readers of each value, of actions taken from the last to the first."""

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.common: dict[Value, Axes] = {}

    def of(self, v: Value) -> Axes:
        """The axes of all readers of a value; its own where there are none."""
        return self.common.get(v, frozenset()) | frozenset(v[1].axes)

    def add(self, v: Value | Literal, axes: Axes) -> None:
        """A reader of a value that varies over some axes."""
        if not isinstance(v, Literal):
            self.common[v] = self.common.get(v, axes) & axes

    def of_action(self, action: Action) -> None:
        """What an action reads."""
        if isinstance(action, Reshard):
            own = frozenset(action.source.axes)
            local = all(n < 0 for n in action.collective_ids)
            of_result = self.of((action.tensor, action.target)) if local else frozenset()
            self.add((action.tensor, action.source), own | of_result)
        elif isinstance(action, RunOperator):
            self._of_operator(action)
        elif action.call.kind == "remat":
            results = [_own(v) if isinstance(v, Literal) else self.of(v) for v in action.returns[0]]
            entering = _read_axes(action, results, self.assignment)
            for v, axes in zip(action.entry[0], entering, strict=True):
                self.add(v, axes)
        elif action.call.kind == "scan":
            entering = _read_axes(action, list(map(_own, action.returns[0])), self.assignment)
            carries = _carry_positions(action)
            for k, (v, axes) in enumerate(zip(action.reads, entering, strict=True)):
                self.add(v, _own(v) if k in carries else axes)
        else:
            for v in (*action.reads, *(v for values in action.entry for v in values)):
                self.add(v, _own(v))

    def _of_operator(self, action: RunOperator) -> None:
        op = self.assignment.program.operators[action.op]
        rule = self.assignment.states[action.op].rule
        if op.primitive in CASTS_OWN_OPERANDS or action.collective_ids or rule.opaque:
            for v in action.reads:
                self.add(v, _own(v))
            return
        axes = frozenset().union(*map(_own, action.reads))
        if op.primitive in _VIEWS:
            values = [(t, self.assignment.result_layout(t)) for t in op.results]
            axes = axes.union(*(self.common.get(v, frozenset()) for v in values))
        for v in action.reads:
            self.add(v, axes)


def _carry_positions(action: RunCall) -> range:
    """Which operands of a scan are carried."""
    first = len(action.call.boundary["const"])
    return range(first, first + len(action.call.boundary["carry"]))


def _own(v: Value | Literal) -> Axes:
    return frozenset() if isinstance(v, Literal) else frozenset(v[1].axes)
