"""Dead-code elimination on the flat graph: operators that nothing reads once equal values are one.

Value numbering (`common_subexpressions.py`) gives equal values one name: of a gradient that is transposed twice the
gradient's own, of a sum over a mask that is made twice that of the first sum. The first transpose and the second mask are
then read by nobody. XLA removes them, and a plan that keeps them prices exchanges that no compiled program has.

Removed are equations that could have been merged: without effects, foreign code, barriers and sharding constraints. An
operator that has a pin stays, and so does what a call or a loop passes on. Others keep their names, and so do their tensors.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> program = build(jax.make_jaxpr(lambda x: (x.T.T * 2).T)(jnp.ones((4, 8))), name="f", input_names=["x"])
>>> [op.name or op.primitive for op in program.operators]          # `transpose.1`, and its reader, are not there
['x', 'mul.2', 'transpose.3', 'result']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

import numpy as np

from jshard._program.common_subexpressions import never_merged
from jshard._program.graph import Program
from jshard._program.operators import Atom, Block, Call, Literal, Operator, calls_of, operator_name


def without_dead_operators(program: Program) -> Program:
    """The program without equations that are read by nothing but such equations."""
    dead = _dead(program)
    return _without(program, dead) if dead else program


def _dead(program: Program) -> set[int]:
    """The dead operators: those whose results have no uses, then those that only these use."""
    ops, u = program.operators, program.use_def
    uses = np.bincount(u.use_tensor, minlength=len(program.tensors)).tolist()
    pending = [op.id for op in ops if op.results and not any([uses[t] for t in op.results])]
    passed = set(_passed_on(program.body))
    pinned = {op for op, *_ in program.pins}
    dead: set[int] = set()
    while pending:
        op = ops[pending.pop()]
        if op.id in dead or op.id in pinned or not _removable(op):
            continue
        if any(uses[t] or t in passed for t in op.results):
            continue
        dead.add(op.id)
        for t in op.operands:
            if not isinstance(t, Literal):
                uses[t] -= 1
                pending.append(int(u.def_op[t]))
    return dead


def _removable(op: Operator) -> bool:
    """Whether an operator does nothing but give its results."""
    return op.kind == "eqn" and not op.equation.effects and not never_merged(op.primitive)


def _passed_on(body: Block) -> Iterator[Atom | None]:
    """The values that bodies and calls name, whether an operator reads them or not."""
    yield from body.outputs
    for call in calls_of(body):
        yield from call.operands
        for block in call.blocks:
            yield from block.inputs
            yield from block.outputs


def _without(program: Program, dead: Set[int]) -> Program:
    """The program without some operators and their results; the others are numbered anew."""
    kept = [op for op in program.operators if op.id not in dead]
    gone = {t for i in dead for t in program.operators[i].results}
    tensors = [t for t in program.tensors if t.id not in gone]
    of_op = {op.id: k for k, op in enumerate(kept)}
    of_tensor = {t.id: k for k, t in enumerate(tensors)}

    def atoms(some: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple([of_tensor[a] if type(a) is int else a for a in some])

    def block(b: Block) -> Block:
        steps = [of_op[s] if isinstance(s, int) else call(s) for s in b.steps if s not in dead]
        inputs = tuple([None if a is None else of_tensor[a] for a in b.inputs])
        return Block(inputs, atoms(b.outputs), tuple(steps))

    def call(c: Call) -> Call:
        return dataclasses.replace(
            c,
            operands=atoms(c.operands),
            results=tuple([of_tensor[t] for t in c.results]),
            blocks=tuple([block(b) for b in c.blocks]),
            boundary={role: tuple([of_op[i] for i in ids]) for role, ids in c.boundary.items()},
        )

    def moved(op: Operator, k: int) -> Operator:
        operands, results = atoms(op.operands), tuple([of_tensor[t] for t in op.results])
        # Nothing before it is removed, and no value that a loop carries.
        if op.id == k and operands == op.operands:
            return op
        return dataclasses.replace(op, id=k, operands=operands, results=results, name=operator_name(op))

    return dataclasses.replace(
        program,
        tensors=tuple([t if t.id == k else dataclasses.replace(t, id=k) for k, t in enumerate(tensors)]),
        operators=tuple([moved(op, k) for k, op in enumerate(kept)]),
        inputs=tuple([of_op[i] for i in program.inputs]),
        outputs=tuple([of_op[i] for i in program.outputs]),
        body=block(program.body),
        pins=tuple([(of_op[op], *rest) for op, *rest in program.pins]),
    )
