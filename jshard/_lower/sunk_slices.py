"""Slices of values that their readers compute: taken of what those are computed from.

Problem.  A plan counts a local slice of a fused value (elementwise work that every reader computes for itself) as computed
where it is read, the slice alone. Compilers do so for one slice. Where readers slice different parts (a smoothed `one_hot`
that the loss reads by rows and its gradient by columns), XLA computes the whole value once and writes it: 2 GiB on each
device for 8,192 tokens and 32,768 words, of which it reads a sixteenth.

Idea.  The slice of an elementwise operator's result is that operator on slices of its operands. So where the schedule
slices a fused value, its operators run once more with the candidate that makes the block that is wanted, back to values
that are in memory; those are sliced. The operators on whole blocks stay without a reader, and compilers drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.typing import ArrayLike

from jshard._core.layout import Layout
from jshard._lower.emit_collectives import apply_reshard
from jshard._lower.made_and_read import products_alone_read
from jshard._program.graph import Literal
from jshard._program.memory.liveness import Liveness
from jshard._program.tail_primitives import PAD_TAIL
from jshard._rules.registry import StackSlice, materialized
from jshard._rules.rule import Candidate
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.last_uses import is_fused_slice
from jshard._schedule.schedule import Reshard, RunOperator


Local = jax.Array | StackSlice
Bind = Callable[[RunOperator, Sequence[ArrayLike | Local], Candidate], Sequence[Local]]
"""Runs an operator on local operands under a candidate."""

_MOST_OPERATORS = 64  # that run once more for one slice


class SunkSlices:
    """Computes slices of fused values; remembers which action made each value."""

    def __init__(self, assignment: Assignment, live: Liveness, bind: Bind):
        self.assignment, self.live, self.bind = assignment, live, bind
        self.mesh = assignment.topology.mesh
        self.made: dict[Value, RunOperator | Reshard] = {}
        self.for_products = False  # whether matrix products alone read the slice that is computed

    def record(self, action: RunOperator | Reshard) -> None:
        """Remember what made a fused value."""
        if isinstance(action, Reshard):
            if is_fused_slice(action, self.live):
                self.made[action.tensor, action.target] = action
            return
        op, states = self.assignment.program.operators[action.op], self.assignment.states[action.op]
        if len(op.results) != 1 or states.rule.internal or states.rule.opaque or states.op is None:
            return
        if self.live.sliced_in_readers[op.results[0]] and not action.loop_invariant:
            self.made[self.assignment.values[op.results[0]]] = action

    def block(self, action: Reshard, env: Mapping[Value, Local]) -> jax.Array | None:
        """What a reshard makes, if it slices a fused value whose operators can run on slices; else None."""
        source = (action.tensor, action.source)
        if not is_fused_slice(action, self.live) or action.loop_invariant or source not in self.made:
            return None
        found: dict[tuple[Value, Layout], jax.Array | None] = {}
        on_tpu = self.assignment.topology.chip.name.startswith("tpu")
        self.for_products = on_tpu and products_alone_read(self.assignment, action.tensor, action.target)
        block = self._block(source, action.target, env, found)
        return block if len(found) <= _MOST_OPERATORS else None

    def _block(
        self,
        value: Value,
        target: Layout,
        env: Mapping[Value, Local],
        found: dict[tuple[Value, Layout], jax.Array | None],
    ) -> jax.Array | None:
        """The block of a value in another layout: computed, else sliced; None if neither can be."""
        if value[1] == target:
            return materialized(env[value]) if value in env else None
        if (value, target) not in found and len(found) <= _MOST_OPERATORS:
            found[value, target] = None
            action, computed = self.made.get(value), None
            if isinstance(action, Reshard):
                computed = self._block((action.tensor, action.source), target, env, found)
            elif action is not None:
                computed = self._computed(action, target, env, found)
            found[value, target] = self._sliced(value, target, env) if computed is None else computed
        return found.get((value, target))

    def _computed(
        self,
        action: RunOperator,
        target: Layout,
        env: Mapping[Value, Local],
        found: dict[tuple[Value, Layout], jax.Array | None],
    ) -> jax.Array | None:
        """The result of an operator in another layout, from operands in those that it needs for that."""
        if self.for_products and self.assignment.program.operators[action.op].primitive == PAD_TAIL:
            return None  # the kernels of products read their blocks of the padded operand
        states = self.assignment.states[action.op]
        for k, candidate in enumerate(states.candidates):
            if candidate is None or states.results[0].layout(k) != target:
                continue
            operands: list[ArrayLike | Local | None] = [
                v.value
                if isinstance(v, Literal)
                else self._block(v, states.operands[n].layout(k), env, found)
                for n, v in enumerate(action.reads)
            ]
            if all(x is not None for x in operands):
                (result,) = self.bind(action, [x for x in operands if x is not None], candidate)
                return materialized(result)
        return None

    def _sliced(self, value: Value, target: Layout, env: Mapping[Value, Local]) -> jax.Array | None:
        """A slice of a value; None if more than slices lead to it."""
        steps = self.assignment.reshard_steps(value[0], value[1], target)
        if value not in env or any(s.kind != "slice" for s in steps):
            return None
        return apply_reshard(materialized(env[value]), value[1], target, steps, self.mesh, vma=False)
