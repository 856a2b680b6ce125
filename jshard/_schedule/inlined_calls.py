"""Calls that compilers inline though copies made inside stay inside: where each begins and ends, what enters and leaves.

A `remat` that is recomputed is a scope of its own (`_program/scopes.py`), but has no boundary operators: what happens in
it happens at one place of the program, once. So the schedule of a program whose only inner blocks are such calls is
still a list, and numpy finds its reshards (`vectorized.py`). What enters a call is in memory until the call ends.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
>>> program = build(jax.jit(f).trace(jnp.ones(4)).jaxpr, name="f", input_names=["x"])
>>> calls = inlined_calls(program)
>>> calls.depth.tolist(), (calls.last - calls.first).tolist()  # sin, both cos, their products
([0, 1], [5, 4])
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._program.graph import Block, Literal, Program


@dataclasses.dataclass(frozen=True, eq=False)
class InlinedCalls:
    """Scopes, 0 the program itself, in the order in which they begin.

    - `runs`: the operators that run, in order.
    - `first`, `last`: (scopes,) the first and the last operator that runs inside; `depth`: (scopes,) calls around it.
    - `enters`: (n, 3) scope, tensor and its number among the operands; `is_read`: (n,) whether any operator inside reads
      it. `enters_from`: (n,) the scope around.
    - `leaves`: (n, 3) scope, tensor and its number among the results.
    """

    runs: Ints
    first: Ints
    last: Ints
    depth: Ints
    enters: Ints
    is_read: Bools
    enters_from: Ints
    leaves: Ints


def inlined_calls(program: Program) -> InlinedCalls | None:
    """The calls of a program; None for one with loops or branches, or whose operators run in another order. Memoised."""
    if "inlined calls" not in program.memo:
        program.memo["inlined calls"] = _inlined_calls(program)
    return program.memo["inlined calls"]


def _inlined_calls(program: Program) -> InlinedCalls | None:
    walk = _Walk(program)
    if not walk.block(program.body, 0, 0):
        return None
    runs = np.array(walk.runs, dtype=np.int64)
    outputs = np.array(program.outputs, dtype=np.int64)
    if not (np.diff(np.concatenate([runs, outputs])) > 0).all():
        return None
    enters = np.array(walk.enters, dtype=np.int64).reshape(-1, 5)
    first, last, depth = (np.array(column, dtype=np.int64) for column in (walk.first, walk.last, walk.depth))
    leaves = np.array(walk.leaves, dtype=np.int64).reshape(-1, 3)
    return InlinedCalls(runs, first, last, depth, enters[:, :3], enters[:, 3] > 0, enters[:, 4], leaves)


class _Walk:
    """Collects the calls of a program in pre-order, as `_program/scopes.py` numbers them; used once."""

    def __init__(self, program: Program) -> None:
        self.operators = program.operators
        self.runs: list[int] = []
        self.first: list[int] = [0]
        self.last: list[int] = [0]
        self.depth: list[int] = [0]
        self.enters: list[tuple[int, int, int, bool, int]] = []
        self.leaves: list[tuple[int, int, int]] = []

    def block(self, block: Block, scope: int, depth: int) -> bool:
        """Walk a block; whether it has inlined calls alone."""
        for step in block.steps:
            if isinstance(step, int):
                self.runs.append(step)
                continue
            if step.boundary:
                return False
            if not step.has_scope:
                if not self.block(step.blocks[0], scope, depth):
                    return False
                continue
            inner, begin = len(self.first), len(self.runs)
            self.first.append(0)
            self.last.append(0)
            self.depth.append(depth + 1)
            if not self.block(step.blocks[0], inner, depth + 1) or begin == len(self.runs):
                return False  # a call in which nothing runs has no place
            self.first[inner], self.last[inner] = self.runs[begin], self.runs[-1]
            read = {a for i in self.runs[begin:] for a in self.operators[i].operands if isinstance(a, int)}
            operands = dict.fromkeys(a for a in step.operands if not isinstance(a, Literal))
            self.enters += [(inner, t, k, t in read, scope) for k, t in enumerate(operands)]
            results = (a for a in step.blocks[0].outputs if not isinstance(a, Literal))
            self.leaves += [(inner, t, k) for k, t in enumerate(results)]
        if depth == 0 and scope == 0 and self.runs:
            self.first[0], self.last[0] = self.runs[0], self.runs[-1]
        return True
