"""Loops over layers that carry what couples the examples, divided into a loop per example and one over finished sums.

Problem.  Experts add an auxiliary loss to the loop's carry: of every layer the product of two sums over the batch. No piece
of the batch has a share of that product, so the whole loop would run between the loops over pieces.

Method.  Loop distribution (Kennedy and McKinley 1990): shared carries in a loop of their own before; what is per example in
the second, which returns the sums of every layer; the carries computed from finished sums in the third. The parts are those
of a pipeline (`loop_parts.py`). Each equation runs once, as it was traced, so values stay as they were.

>>> import jax, jax.numpy as jnp
>>> from jax.extend.core import jaxpr_as_fun
>>> from jshard._batch.batch_class import SHARED, per_example
>>> from jshard._batch.body_classes import Analysis
>>> def f(w, x):
...     def layer(carry, w):
...         h, balance = carry
...         return (jnp.tanh(h @ w), balance + jnp.mean(h) ** 2), None
...     return jax.lax.scan(layer, (x, 0.0), w)[0]
>>> w, x = jnp.ones((4, 3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 24
>>> divided = with_loops_divided(jax.make_jaxpr(f)(w, x), [SHARED, per_example(0)], Analysis(8, 4))
>>> sum(e.primitive.name == "scan" for e in divided.jaxpr.eqns)
2
>>> bool(jnp.allclose(jaxpr_as_fun(divided)(w, x)[1], f(w, x)[1]))
True
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.loop_parts import LoopParts, loop_parts
from jshard._batch.outside_pipeline import Values, needed, results_of_loop, run_early, run_equations, run_late
from jshard._batch.piece_operator import run_whole, shape_of
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom
from jshard._program.inlining import with_calls_inlined


def with_loops_divided(closed: ClosedJaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> ClosedJaxpr:
    """The program with such loops divided, if it has any; `inputs` are the classes of its arguments."""
    opened, consts = compat.open_jaxpr(closed)
    jaxpr = with_calls_inlined(opened, lines=True)
    loops = _coupled_loops(jaxpr, inputs, analysis)
    if not loops:
        return closed

    def run(*arguments: jax.Array) -> list[jax.Array]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def whole(v: JaxprAtom) -> jax.Array:
            return v.val if compat.is_literal(v) else values[v]  # type: ignore[return-value]

        for k, eqn in enumerate(jaxpr.eqns):
            operands = list(map(whole, eqn.invars))
            with compat.eqn_context(eqn):
                results = _run_divided(loops[k], operands) if k in loops else run_whole(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [jnp.asarray(whole(v)) for v in jaxpr.outvars]

    return compat.make_jaxpr(run, *map(shape_of, jaxpr.invars))


def _coupled_loops(jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> dict[int, LoopParts]:
    """The loops, by position, that couple the examples as a whole and do not in parts."""
    classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
    classes.update(zip(jaxpr.invars, inputs, strict=True))
    loops: dict[int, LoopParts] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        operands = [class_in(classes, v) for v in eqn.invars]
        try:
            results: Sequence[BatchClass] = analysis.cut(eqn, operands).results
        except CoupledError:
            results = [SHARED] * len(eqn.outvars)
            if eqn.primitive.name == "scan" and not eqn.effects:
                try:
                    loops[k] = loop_parts(eqn, operands, analysis)
                    results = loops[k].results()
                except CoupledError:
                    pass  # no part of it is per example
        classes.update((v, SHARED if c == SUM else c) for v, c in zip(eqn.outvars, results, strict=True))
    return loops


def _run_divided(parts: LoopParts, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a loop, run in its parts on the whole batch."""
    outer = dict(zip((*parts.consts, *parts.carries, *parts.slices), map(jnp.asarray, operands), strict=True))
    initial = {v: outer[v] for v in parts.carries}
    shared: dict[JaxprAtom, jax.Array] = {**parts.constants, **{v: outer[v] for v in parts.consts}}
    shared.update((v, initial[v]) for v in (parts.carries[j] for j in parts.fixed))
    stacks = {v: outer[v] for v in parts.slices}
    early = run_early(parts, shared, stacks, initial)
    stacks.update(early.entering)
    moved, examples, sums = _run_per_example(
        parts, shared, stacks, [initial[parts.carries[j]] for j in parts.moving]
    )
    finished = dict(zip((*parts.sums, *parts.examples), (*sums, *examples), strict=True))
    late = run_late(parts, shared, stacks, finished, initial)
    return results_of_loop(parts, initial, (early, late), moved, examples, sums)


def _run_per_example(
    parts: LoopParts, shared: Values, stacks: Values, moving: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]]:
    """The carries per example after the last layer; results per example and sums of every layer, stacked."""
    carries = [parts.carries[j] for j in parts.moving]
    carried, each = [parts.carried[j] for j in parts.moving], (*parts.examples, *parts.sums)
    positions, read = needed(parts, frozenset(parts.cuts), (*carried, *each), {*shared, *stacks, *carries})
    names = [v for v in stacks if v in read]

    def layer(
        carry: tuple[jax.Array, ...], slices: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        known = {**shared, **dict(zip(names, slices, strict=True)), **dict(zip(carries, carry, strict=True))}
        found = run_equations(parts, positions, known, (*carried, *each))
        return tuple(found[: len(carried)]), tuple(found[len(carried) :])

    moved, stacked = lax.scan(
        layer, tuple(moving), tuple(stacks[v] for v in names), length=parts.layers, reverse=parts.reverse
    )
    return moved, stacked[: len(parts.examples)], stacked[len(parts.examples) :]
