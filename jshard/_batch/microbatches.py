"""A program whose values per example are computed piece by piece: gradient accumulation that changes no result.

Problem.  A step whose activations do not fit runs on k pieces of its batch, one after the other. Written by hand, that
changes what the step computes: random bits are drawn again, a mean over tokens becomes a mean of means, and gradients are
summed over devices k times.

Idea.  The loop is made from the traced program. What is per example runs in it, on the strided piece i, i + k, i + 2k, ...
of the batch; its carry has the sums over examples, addends of 16-bit floats in float32; all else runs once. Since the
loop only adds to its carry, a plan may leave the sums unreduced over devices until the loop ends.

>>> import jax, jax.numpy as jnp
>>> from jax.extend.core import jaxpr_as_fun
>>> from jshard._batch.batch_class import SHARED, per_example
>>> f = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
>>> w, x = jnp.ones((4, 3)), jnp.arange(32.0).reshape(8, 4) / 32
>>> closed = jax.make_jaxpr(f)(w, x)
>>> looped = in_microbatches(closed, (SHARED, per_example(0)), 8, 4)
>>> [e.primitive.name for e in looped.jaxpr.eqns].count("scan")
1
>>> loss, gradient = jax.jit(jaxpr_as_fun(looped))(w, x)
>>> bool(jnp.allclose(loss, f(w, x)[0])), bool(jnp.allclose(gradient, f(w, x)[1]))
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.batch_class import (
    SHARED,
    SUM,
    BatchClass,
    checkpoint_advice,
    described,
    fixed_shapes_advice,
)
from jshard._batch.batch_positions import with_positions_shared
from jshard._batch.body_classes import Analysis, Step, steps_for
from jshard._batch.divided_loops import with_loops_divided
from jshard._batch.free_sums import with_branches_divided
from jshard._batch.piece_operator import run_whole, shape_of
from jshard._batch.pieces import Pieces, assembled
from jshard._batch.saved_sums import with_sums_saved
from jshard._batch.stages import Stages, stages, work_of
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import ClosedJaxpr, JaxprAtom
from jshard._program.inlining import with_calls_inlined
from jshard._program.stage_shift import rounded_sum, sum_dtype


_MOST_REPEATED = 0.5
"""Work outside the last loop, as a share of the work in it, up to which a program is run in pieces."""


def staged(
    closed: ClosedJaxpr, inputs: Sequence[BatchClass], examples: int, count: int
) -> tuple[Stages, Analysis, Sequence[jax.Array]]:
    """A program's values classified, and what runs in which loop; the values of its constants."""
    analysis = Analysis(examples, count)
    saved = with_sums_saved(with_positions_shared(closed), inputs, analysis)
    opened, consts = compat.open_jaxpr(with_loops_divided(saved, inputs, analysis))
    jaxpr = with_calls_inlined(opened, lines=True)
    classes = dict.fromkeys(jaxpr.constvars, SHARED) | dict(zip(jaxpr.invars, inputs, strict=True))
    jaxpr = compat.without_dead_code(with_branches_divided(jaxpr, classes, analysis, finished=True))
    return stages(jaxpr, inputs, analysis), analysis, consts


def in_microbatches(
    closed: ClosedJaxpr, inputs: Sequence[BatchClass], examples: int, count: int
) -> ClosedJaxpr:
    """The program in loops over `count` pieces; `inputs` are the classes of its arguments.

    Raises `ShardError` where too little of it is per example.
    """
    plan, analysis, consts = staged(closed, inputs, examples, count)
    loops = [_loop_steps(plan, analysis, k) for k in range(plan.loops)]
    _check_work(plan, loops)
    jaxpr = plan.jaxpr

    def run(*arguments: jax.Array) -> list[jax.Array]:
        outer: dict[JaxprAtom, jax.Array] = dict(zip(jaxpr.constvars, consts, strict=True))
        outer.update(zip(jaxpr.invars, arguments, strict=True))

        def whole(v: JaxprAtom) -> jax.Array:
            return v.val if compat.is_literal(v) else outer[v]  # type: ignore[return-value]

        for k in range(plan.loops + 1):
            for position, eqn in enumerate(jaxpr.eqns):
                if plan.available.get(position) == k:
                    with compat.eqn_context(eqn):
                        outer.update(
                            zip(eqn.outvars, run_whole(eqn, list(map(whole, eqn.invars))), strict=True)
                        )
            if k < plan.loops and plan.targets[k]:
                outer.update(_run_loop(plan, analysis, count, k, loops[k], outer))
        return [jnp.asarray(whole(v)) for v in jaxpr.outvars]

    return compat.make_jaxpr(run, *map(shape_of, jaxpr.invars))


def _loop_steps(plan: Stages, analysis: Analysis, k: int) -> list[Step]:
    """The equations that run in loop `k`."""
    wanted = [(v, plan.classes[v]) for v in plan.targets[k]]
    return steps_for(plan.jaxpr, plan.classes, wanted, analysis, plan.cuts.get)[0]


def _run_loop(
    plan: Stages, analysis: Analysis, count: int, k: int, steps: Sequence[Step], outer: dict[JaxprAtom, jax.Array]
) -> dict[JaxprAtom, jax.Array]:  # fmt: skip
    """The whole values of the targets of loop `k`."""
    sums = [v for v in plan.targets[k] if plan.classes[v] == SUM]
    others = [v for v in plan.targets[k] if plan.classes[v] != SUM]

    def step(
        carry: tuple[jax.Array, ...], index: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        read = Pieces(analysis, count, index).run(steps, plan.classes, {}, outer.__getitem__)
        added = tuple(s + read(v, SUM).astype(s.dtype) for s, v in zip(carry, sums, strict=True))
        return added, tuple(read(v, plan.classes[v]) for v in others)

    zeros = tuple(jnp.zeros(v.aval.shape, sum_dtype(v.aval.dtype)) for v in sums)
    totals, stacks = lax.scan(step, zeros, jnp.arange(count, dtype=jnp.int32))
    out = {v: rounded_sum(x, v.aval.dtype) for v, x in zip(sums, totals, strict=True)}
    for v, x in zip(others, stacks, strict=True):  # what is shared is the same in every piece
        out[v] = x[-1] if plan.classes[v] == SHARED else assembled(x, plan.classes[v])
    return out


def _check_work(plan: Stages, loops: Sequence[Sequence[Step]]) -> None:
    """Raise `ShardError` if less than two thirds of the work on examples is done once, in pieces."""
    work = [sum(work_of(s.eqn) for s in steps) for steps in loops]
    from_batch = _made_from(plan)
    between = sum(
        work_of(e)
        for k, e in enumerate(plan.jaxpr.eqns)
        if plan.available.get(k) is not None and k in from_batch
    )
    last, again = max(work, default=0.0), sum(work) - max(work, default=0.0)
    if work and again + between <= _MOST_REPEATED * last:
        return
    names = [str(error) for error in plan.coupled.values()]
    if not names:
        names = [
            f"{text}: its sum over examples is read by values per example" for text in finished_early(plan)
        ]
    if not names:
        names = ["no argument with the batch reaches a product"]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    repeated = bool(last) and again > between
    advice = checkpoint_advice(plan.jaxpr.eqns[k] for k in plan.coupled)
    fixed = fixed_shapes_advice(error.eqn for error in plan.coupled.values())
    raise ShardError(
        "the step cannot run in microbatches: "
        + (f"{again / last:.0%} of its work would run again" if repeated else "it is not per example"),
        where="; ".join(names[:3]) + more,
        fix="no microbatches=, or compute what couples the examples outside the step (batch statistics kept fixed, "
        "LayerNorm or GroupNorm for BatchNorm)" + advice + (f"; {fixed}" if fixed else ""),
    )


def finished_early(plan: Stages) -> list[str]:
    """The operators, with lines, whose sums over examples must be whole before values per example read them."""
    makers = {v: e for e in plan.jaxpr.eqns for v in e.outvars}
    return [described(makers[v]) for targets in plan.targets[:-1] for v in targets]


def _made_from(plan: Stages) -> set[int]:
    """Positions of equations between loops that compute with coupled values: they would be per example otherwise."""
    made: set[JaxprAtom] = set()
    out: set[int] = set()
    for k, eqn in enumerate(plan.jaxpr.eqns):
        if k in plan.coupled or (
            k in plan.available and any(v in made for v in eqn.invars if not compat.is_literal(v))
        ):
            out.add(k)
            made.update(eqn.outvars)
    return out
