"""`custom_linear_solve`: a solver between user functions, on whole systems; what only its derivatives read may stay cut.

The operator holds the constants of four functions: the matrix product, its transpose, the solver and its transpose.
Running it is running the solver. So the matrix itself, which only derivatives need, is not gathered for a compiled
call; where JAX differentiates the sharded function from outside, it is gathered when the operator is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jshard import _jaxcompat as compat
from jshard._rules.factors import Factors
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("other")


def _parts(op: OpView) -> tuple[Any, list[int]]:
    """The solver, and which operands of the equation are its arguments."""
    lengths = op.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    last = first + lengths.solve + lengths.transpose_solve
    return op.params["jaxprs"].solve, [*range(first, first + lengths.solve), *range(last, len(op.ins))]


def _solved(ctx: LocalContext, *operands: Any) -> Sequence[Any]:
    solve, read = _parts(ctx.op)
    if not compat.check_vma_enabled():
        return compat.as_function(solve)(*(operands[i] for i in read))
    whole = list(operands)
    for i in range(len(operands)):
        for d, axes in enumerate(ctx.operand_layout(i).dims):
            whole[i] = compat.all_gather_invariant(whole[i], axes, axis=d) if axes else whole[i]
    return ctx.bind(*whole)


@rule("custom_linear_solve", local=_solved)
def linear_solve(op: OpView) -> Rule:
    """Operands of the solver whole; of the others every dimension may be cut, since nobody reads them."""
    solve, read = _parts(op)
    jaxpr, _ = compat.open_jaxpr(solve)
    read_inside = [*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars]
    used = {v for v in read_inside if not compat.is_literal(v)}
    whole = {i for i, v in zip(read, jaxpr.invars, strict=True) if v in used}
    f = Factors()
    # One mesh axis cuts one factor: those of equal place and length are one, so that a matrix can be passed twice.
    shared: dict[tuple[int, int], int] = {}

    def dims(i: int, a: Any) -> Dims:
        if i in whole:
            return ((),) * len(a.shape)
        for place, size in enumerate(a.shape):
            if (place, size) not in shared:
                shared[place, size] = f.new(size)
        return tuple((shared[where],) for where in enumerate(a.shape))

    ins = tuple(dims(i, a) for i, a in enumerate(op.ins))
    return Rule(
        ins, tuple(((),) * len(a.shape) for a in op.outs), f.sizes, note=OPAQUE[op.primitive], opaque=True
    )
