"""Copies that compilers would merge with an earlier one of the same value, kept apart as the plan counts them.

Problem.  A plan may make a copy again for a later reader, so that the first need not stay in memory; or two copies in
different layouts, each by the same gather. To a compiler equal collectives are one, whose result then stays in memory.

Idea.  The operand goes through a barrier, so that the second collective is another one; that of a copy made again together
with values that its reader waits for anyway, so that it starts late. XLA of jaxlib 0.10 on CPU drops barriers and merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import jax
from jax import lax

from jshard._core.layout import Layout
from jshard._cost.resharding import ReshardStep
from jshard._program.memory.liveness import liveness
from jshard._rules.registry import StackSlice, materialized
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.awaited_values import awaited_values
from jshard._schedule.schedule import Reshard


class UnmergedCopies:
    """Of one run of a program, the first collectives of copies so far."""

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self._made_after = {(t, op): awaited for t, op, awaited in assignment.regather_after}
        self._first_steps: Counter[tuple[int, Layout, ReshardStep]] = Counter()

    def behind_barrier(
        self, action: Reshard, x: jax.Array, env: Mapping[Value, jax.Array | StackSlice]
    ) -> jax.Array:
        """The operand of a copy; behind a barrier where an earlier copy begins with the same collective."""
        key = action.tensor, action.source, action.steps[0]
        before = self._first_steps[key]
        self._first_steps[key] += action.steps[0].kind != "slice"
        if action.regathered:
            x, *_ = lax.optimization_barrier((x, *self._awaited(action, env)))
        for _ in range(0 if action.regathered else before):  # as many as set it apart from all earlier ones
            x = lax.optimization_barrier(x)
        return x

    def _awaited(self, action: Reshard, env: Mapping[Value, jax.Array | StackSlice]) -> list[jax.Array]:
        """Values that the reader waits for beside the copy."""
        program = self.assignment.program
        in_memory = liveness(program).materialized
        awaited = awaited_values(program, in_memory, action.reader, action.tensor)
        values = [self.assignment.values[t] for t in awaited]
        others = [materialized(env[v]) for v in values if v in env]
        # The result of the product that a copy is made after, in the layout that it came to last.
        product = self._made_after.get((action.tensor, action.reader))
        last = next((v for v in reversed(list(env)) if v[0] == product), None)
        others += [] if last is None else [materialized(env[last])]
        return others
