"""`custom_linear_solve`: a user's solver on whole systems, of which devices may have some each.

Its operands are the constants of four functions: the matrix product, its transpose, the solver and its transpose.
Evaluation needs the solver only. So the matrix itself, which only derivatives read, is not gathered for a compiled
call; if JAX differentiates the sharded function from outside, it is gathered when the operator is bound.

Dimensions along which the systems are separate (`separate_systems.py`: the batch of `jnp.linalg.solve`, the columns of a
right-hand side) may be cut, and the solver runs on a device's own systems.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr
from jshard._rules.factors import Factors
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule
from jshard._rules.separate_systems import Numbers, SeparateSystems, functions_of


rule = family("other")


def _solver_of(op: OpView) -> tuple[Jaxpr | ClosedJaxpr, list[int]]:
    """The solver's jaxpr, and the indices of the operands that are its arguments."""
    solve = functions_of(op)["solve"]
    return solve.body, [*solve.constants, *range(sum(op.params["const_lengths"]), len(op.ins))]


def _solve_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    solve, read = _solver_of(ctx.op)
    cut = any(axes for axes in ctx.result_layout(0).dims)
    if not compat.check_vma_enabled():
        if cut:
            return SeparateSystems(ctx.op).solve(*operands)
        return compat.as_function(solve)(*(operands[i] for i in read))
    whole = list(operands)
    for i, dims in enumerate(ctx.rule.operands):
        for d, axes in enumerate(ctx.operand_layout(i).dims):
            if axes and dims[d] not in ctx.rule.results[0]:
                whole[i] = compat.all_gather_invariant(whole[i], axes, axis=d)
    if cut:
        return SeparateSystems(ctx.op).solve_differentiably(*compat.to_common_vma(whole))
    return ctx.bind(*whole)


@rule("custom_linear_solve", local=_solve_local)
def linear_solve(op: OpView) -> Rule:
    """Operands that the solver reads are sharded along separate systems only; the others may be in every dimension."""
    solve, arguments = _solver_of(op)
    jaxpr, _ = compat.open_jaxpr(solve)
    atoms = [*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars]
    used = {v for v in atoms if not compat.is_literal(v)}
    whole = {i for i, v in zip(arguments, jaxpr.invars, strict=True) if v in used}
    f, systems = Factors(), SeparateSystems(op)
    outs = systems.of_results()
    separate = {
        k: f.new(n) for k, n in zip(outs[0], op.outs[0].shape, strict=True) if k is not None
    }  # fmt: skip
    aligned: dict[tuple[int, int], int] = {}

    def dims(numbers: Numbers, shape: Sequence[int], read: bool) -> Dims:
        # Others aligned, since a matrix may be passed twice: for the product and for its transpose.
        of: list[tuple[int, ...]] = []
        for d, (k, n) in enumerate(zip(numbers, shape, strict=True)):
            if k is None and not read and (d, n) not in aligned:
                aligned[d, n] = f.new(n)
            of.append((separate[k],) if k is not None else () if read else (aligned[d, n],))
        return tuple(of)

    ins = [
        dims(k, a.shape, i in whole)
        for i, (k, a) in enumerate(zip(systems.of_operands(), op.ins, strict=True))
    ]
    results = [dims(k, a.shape, read=True) for k, a in zip(outs, op.outs, strict=True)]
    return Rule(tuple(ins), tuple(results), f.sizes, work=0.0, note=OPAQUE[op.primitive], opaque=not separate)
