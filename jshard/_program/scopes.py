"""Scopes: the body of a loop, branch or call in which each tensor is defined and each operand is used.

A resharded copy of a tensor serves all later operators of the same body and none of another body, since a copy made
inside a loop, a branch or a recomputed `remat` is not visible outside. So whether two operators share one collective,
and thus the cost of a plan, depends on their scopes. Scope 0 is the program itself. A boundary operator uses the values
that enter a body in the outer scope, and those that leave it in the inner one.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]
>>> s = build(jax.jit(f).trace(jnp.ones(4)).jaxpr, name="f", input_names=["x"]).scopes
>>> s.use_scope.tolist()       # the initial carry; the operand of `sin` and the new carry, both inside; the result
[0, 1, 1, 0]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._program.operators import Block, Call, Operator
from jshard._program.use_def import UseDef


@dataclasses.dataclass(frozen=True, eq=False)
class Scopes:
    """Scope numbers of uses (in the order of `UseDef`) and of tensors."""

    use_scope: Ints  # (uses,)
    def_scope: Ints  # (tensors,)
    is_captured: Bools  # (tensors,) captured arrays, which every body reads in their own placement
    rule_inputs: frozenset[int]  # inputs of calls with custom derivative rules


def scopes_of(operators: Sequence[Operator], body: Block, use_def: UseDef) -> Scopes:
    """The scopes of the uses and tensors of a program with this outermost block."""
    numbering = _ScopeNumbering(operators, use_def)
    numbering.block(body, 0)
    return Scopes(
        np.array(numbering.use_scope, dtype=np.int64),
        np.array(numbering.def_scope, dtype=np.int64),
        use_def.has_kind("const")[use_def.def_op],
        frozenset(numbering.rule_inputs),
    )


class _ScopeNumbering:
    """Numbers bodies in pre-order and records the scope of every use and definition; used once."""

    def __init__(self, operators: Sequence[Operator], use_def: UseDef):
        self.operators = operators
        self.use_begin = use_def.use_begin.tolist()
        self.use_scope = [0] * len(use_def.use_tensor)
        self.def_scope = [0] * len(use_def.def_op)
        self.num_bodies = 0
        self.rule_inputs: set[int] = set()

    def block(self, block: Block, scope: int) -> None:
        for step in block.steps:
            if not isinstance(step, int):
                self.call(step, scope)
            elif scope:
                self.operator(step, scope)

    def operator(self, op: int, scope: int) -> None:
        for use in range(self.use_begin[op], self.use_begin[op + 1]):
            self.use_scope[use] = scope
        for t in self.operators[op].results:
            self.def_scope[t] = scope

    def boundary(self, op: int, operands: list[int], results: list[int]) -> None:
        """Record the scope of each operand and each result of a boundary operator."""
        operator, use = self.operators[op], self.use_begin[op]
        for atom, scope in zip(operator.operands, operands, strict=True):
            if isinstance(atom, int):
                self.use_scope[use] = scope
                use += 1
        for t, scope in zip(operator.results, results, strict=True):
            self.def_scope[t] = scope

    def body(self, block: Block) -> int:
        """Walk a body in a new scope; the scope's number."""
        self.num_bodies += 1
        number = self.num_bodies
        self.block(block, number)
        return number

    def call(self, call: Call, scope: int) -> None:
        if call.kind in ("custom_jvp", "custom_vjp"):
            self.rule_inputs.update(t for t in call.blocks[0].inputs if t is not None)
        if not call.has_scope:
            self.block(call.blocks[0], scope)
            return
        bodies = [self.body(block) for block in call.blocks]
        for role, ops in call.boundary.items():
            for op in ops:
                self.boundary(op, *_boundary_scopes(call, role, scope, bodies))


def _boundary_scopes(call: Call, role: str, outside: int, bodies: list[int]) -> tuple[list[int], list[int]]:
    """Scopes of the operands and of the results of the boundary operators of a role."""
    last = bodies[-1]  # the body of a loop
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
