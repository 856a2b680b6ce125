"""`custom_linear_solve`: a user's solver on whole systems; operands that only derivatives read may be sharded.

Its operands are the constants of four functions: the matrix product, its transpose, the solver and its transpose.
Evaluation needs the solver only. So the matrix itself, which only derivatives read, is not gathered for a compiled
call; if JAX differentiates the sharded function from outside, it is gathered when the operator is bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr
from jshard._rules.factors import Factors, unsharded_dims
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("other")


def _solver_of(op: OpView) -> tuple[Jaxpr | ClosedJaxpr, list[int]]:
    """The solver's jaxpr, and the indices of the operands that are its arguments."""
    lengths = op.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    last = first + lengths.solve + lengths.transpose_solve
    return op.params["jaxprs"].solve, [*range(first, first + lengths.solve), *range(last, len(op.ins))]


def _solve_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    solve, read = _solver_of(ctx.op)
    if not compat.check_vma_enabled():
        return compat.as_function(solve)(*(operands[i] for i in read))
    whole = list(operands)
    for i in range(len(operands)):
        for d, axes in enumerate(ctx.operand_layout(i).dims):
            whole[i] = compat.all_gather_invariant(whole[i], axes, axis=d) if axes else whole[i]
    return ctx.bind(*whole)


@rule("custom_linear_solve", local=_solve_local)
def linear_solve(op: OpView) -> Rule:
    """Operands that the solver reads are not sharded; the others may be in every dimension."""
    solve, arguments = _solver_of(op)
    jaxpr, _ = compat.open_jaxpr(solve)
    atoms = [*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars]
    used = {v for v in atoms if not compat.is_literal(v)}
    whole = {i for i, v in zip(arguments, jaxpr.invars, strict=True) if v in used}
    f = Factors()
    # Aligned, since a matrix may be passed twice: for the product and for its transpose.
    ins = tuple(unsharded_dims(a) if i in whole else f.aligned_dims(a.shape) for i, a in enumerate(op.ins))
    return Rule(ins, tuple(map(unsharded_dims, op.outs)), f.sizes, note=OPAQUE[op.primitive], opaque=True)
