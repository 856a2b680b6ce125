"""Scopes: in which body of a loop, branch or call each tensor is made and each operand is read.

Problem.  A resharded copy of a tensor serves all later operators of the same body, and none of another body: what
is moved inside a loop, a branch or a `remat` that computes again stays inside. So whether two operators share one
collective depends on where they stand, and the cost of a plan has to know that.

Idea.  Number the bodies; 0 is the program itself. A boundary operator reads the values that enter a body outside,
and those that leave it inside.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]
>>> s = scopes_of(build(jax.jit(f).trace(jnp.ones(4)).jaxpr, name="f", input_names=["x"]))
>>> s.use_scope.tolist()                # the initial carry outside; `sin` and the carry that it gives inside; the result outside
[0, 1, 1, 0]
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jshard._program.use_def import Bools, Ints


if TYPE_CHECKING:
    from jshard._program.graph import Block, Call, Program


@dataclasses.dataclass(frozen=True, eq=False)
class Scopes:
    """Scope numbers of reads (in the order of `Arrays`) and tensors."""

    use_scope: Ints  # (reads,)
    def_scope: Ints  # (tensors,)
    is_captured: Bools  # (tensors,) a captured array: every body finds it as it lies
    rule_inputs: frozenset[int]  # tensors that enter a call with a derivative rule of its own


def scopes_of(program: Program) -> Scopes:
    """The scopes of a program's reads and tensors."""
    a = program.use_def
    walk = _Walk(program)
    walk.block(program.body, 0)
    everywhere = a.has_kind("const")[a.def_op]
    return Scopes(np.array(walk.read, dtype=np.int64), np.array(walk.made, dtype=np.int64), everywhere,
                  frozenset(walk.enters_rule))  # fmt: skip


class _Walk:
    """Numbers the bodies while it walks them; used once."""

    def __init__(self, program: Program):
        self.program = program
        self.begin = program.use_def.use_begin.tolist()
        self.read = [0] * len(program.use_def.use_tensor)
        self.made = [0] * len(program.tensors)
        self.count = 0
        self.enters_rule: set[int] = set()

    def block(self, block: Block, scope: int) -> None:
        for step in block.steps:
            if not isinstance(step, int):
                self.call(step, scope)
            elif scope:
                self.operator(step, scope)

    def operator(self, op: int, scope: int) -> None:
        for r in range(self.begin[op], self.begin[op + 1]):
            self.read[r] = scope
        for t in self.program.operators[op].results:
            self.made[t] = scope

    def boundary(self, op: int, operands: list[int], results: list[int]) -> None:
        """A boundary operator, given the scope of each operand and of each result."""
        operator, r = self.program.operators[op], self.begin[op]
        for atom, scope in zip(operator.operands, operands, strict=True):
            if isinstance(atom, int):
                self.read[r] = scope
                r += 1
        for t, scope in zip(operator.results, results, strict=True):
            self.made[t] = scope

    def inner(self, block: Block) -> int:
        self.count += 1
        number = self.count
        self.block(block, number)
        return number

    def call(self, call: Call, scope: int) -> None:
        if call.kind in ("custom_jvp", "custom_vjp"):
            self.enters_rule.update(t for t in call.blocks[0].inputs)
        if not call.has_scope:
            self.block(call.blocks[0], scope)
            return
        bodies = [self.inner(block) for block in call.blocks]
        for role, ops in call.boundary.items():
            for op in ops:
                self.boundary(op, *_ends(call, role, scope, bodies))


def _ends(call: Call, role: str, outside: int, bodies: list[int]) -> tuple[list[int], list[int]]:
    """Scopes of the operands and of the results of the boundary operators of a role."""
    last = bodies[-1]
    if call.kind == "while":
        test = bodies[0]
        if role in ("test", "const"):
            return [outside], [test if role == "test" else last]
        return ([outside, last], [test, last, outside]) if role == "carry" else ([test], [test])
    if role == "carry":
        return [outside, last], [last, outside]
    if role == "join":
        return bodies, [outside]
    if role == "ys":
        return [last], [outside]
    return [outside], [outside if role == "pred" else last]
