"""What must be finished before values are computed again: the order that the plan's memory is counted in.

Problem.  A compiler may run an equation any time between its operands and its readers, and the one for TPUs delays what
nobody waits for: the loss, of which only the end of the program has need, keeps the logits of the forward pass through
half of the backward pass, and the products that make weight gradients keep the activations of their layers. In a
program whose activations wait for the backward pass that costs little. In one that computes them again, a layer at a
time, they pile up: a GPT step of two layers planned at 0.90 of its free peak was compiled to 1.15 of it.

Idea.  Each segment that computes values again begins with an `optimization_barrier`. Through it also pass the values
that are made before it and read after it, so that the segment begins when they are done. Only those that are in memory
anyway: a value that is fused into its readers would be written for the barrier, so one of the backward pass goes around
it. Where no other value of the backward pass is read, what that one is computed from passes the barrier: else the segment
waits for nothing, and a compiler makes it before the loss (a GPT step with `jax.checkpoint` held 23% more than planned). The
result of a collective passes one barrier later than what goes into it, so that it may run while a segment computes.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._program.memory.liveness import liveness
from jshard._program.operators import Call
from jshard._rules.registry import StackSlice, materialized
from jshard._schedule.schedule import Assignment, RunCall, Value


Env = dict[Value, jax.Array | StackSlice]


class SegmentBarriers:
    """The barriers of one lowering, in the order of the program."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.program = assignment, assignment.program
        # By value the array that was in the environment; a body that is traced twice has other arrays.
        self.passed: Env = {}
        self.communicated: Env = {}  # results of collectives that were there at the barrier before

    def enter(self, action: RunCall, env: Env) -> list[jax.Array]:
        """The operands of a `remat` after its barrier; other values that pass it are replaced in the environment."""
        operands = action.entry[0]
        around = {v for v in operands if self._is_fused(v)}
        others = [v for v in self._finished(action.call, env) if v not in operands]
        through = [*(v for v in operands if v not in around), *others]
        if not any(self._is_late(v[0]) for v in through):
            through += self._late_sources(around, env)
        after = dict(
            zip(through, lax.optimization_barrier([materialized(env[v]) for v in through]), strict=True)
        )
        for v in others:
            self.passed[v] = env[v] = after[v]
        return [after[v] if v in after else materialized(env[v]) for v in operands]

    def _is_fused(self, value: Value) -> bool:
        """Whether a value of the backward pass is computed where it is read; behind a barrier it would be written.

        Those of the forward pass go through it, else what is computed again from them would be found to be the same.
        """
        tensor = value[0]
        computed_again = self.assignment.producers[tensor][0] in self.program.recomputed
        return (
            self._is_late(tensor) and not computed_again and not liveness(self.program).materialized[tensor]
        )

    def _is_late(self, tensor: int) -> bool:
        """Whether a tensor is made in the backward pass."""
        op = self.program.operators[self.assignment.producers[tensor][0]]
        return op.kind == "eqn" and compat.is_backward(op.prefix, op.equation)

    def _late_sources(self, values: Iterable[Value], env: Env) -> list[Value]:
        """The stored values of the backward pass that fused ones are computed from, as they are in the environment."""
        stored = liveness(self.program).materialized
        waiting = [tensor for tensor, _ in values]
        seen, out = set(waiting), list[Value]()
        while waiting:
            op = self.program.operators[self.assignment.producers[waiting.pop()][0]]
            for t in op.operands:
                if not isinstance(t, int) or t in seen or not self._is_late(t):
                    continue
                seen.add(t)
                if stored[t]:
                    out += [v for v in env if v[0] == t][:1]
                else:
                    waiting.append(t)
        return out

    def _finished(self, call: Call, env: Env) -> list[Value]:
        """The values that have to be finished before a call that computes values again."""
        inner = call.inner_operators
        if self.program.recomputed.isdisjoint(inner):
            return []
        life, producers, begin = liveness(self.program), self.assignment.producers, min(inner)
        out: list[Value] = []
        communicated: Env = {}
        for value, x in env.items():
            tensor, layout = value
            operator = self.program.operators[producers[tensor][0]]
            is_stored = operator.kind == "eqn" and life.materialized[tensor]
            if not is_stored or life.last_use[tensor] < begin or self.passed.get(value) is x:
                continue
            if layout == self.assignment.result_layout(tensor) or self.communicated.get(value) is x:
                out.append(value)
            else:
                communicated[value] = x
        self.communicated = communicated
        return out
