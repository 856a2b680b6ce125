"""A program whose loops over layers run as pipelines: the layers are dealt to stages, the batch goes through in pieces.

Problem.  Layers too large for a device, or devices on both sides of a slow link, want each group of devices to hold some of
the layers and to pass only activations on. Written by hand, that changes the model's code, and its backward pass follows
from whatever autodiff makes of it.

Idea.  The pipeline is made from the traced program, after differentiation. Layers that a Python loop has unrolled are first
written as loops over stacked layers (`stacked_layers.py`). Every loop over stacked layers whose carry is
per example, forward or backward, becomes a loop over ticks (`tick_loop.py`), and the rest stays as it was. Values,
gradients and random bits are those of the whole batch. How the program lies on the devices is left to the search, but for
the stages, which are cut over the axis of the pipeline.

>>> import jax, jax.numpy as jnp
>>> from jax.extend.core import jaxpr_as_fun
>>> from jshard._batch.batch_class import SHARED, per_example
>>> def loss(w, x):
...     return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)
>>> w, x = jnp.ones((4, 3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 24
>>> closed = jax.make_jaxpr(jax.value_and_grad(loss))(w, x)
>>> classes = SHARED, per_example(0)
>>> staged = in_pipeline(with_loops_over_layers(closed, classes, 8, 4), classes, 8, PipelineShape(("stage",), 2, 4))
>>> [e.params["length"] for e in staged.closed.jaxpr.eqns if e.primitive.name == "scan"]
[5, 5]
>>> value, gradient = jax.jit(jaxpr_as_fun(staged.closed))(w, x)
>>> wanted = jax.value_and_grad(loss)(w, x)
>>> bool(jnp.allclose(value, wanted[0])), bool(jnp.allclose(gradient, wanted[1]))
(True, True)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError, fixed_shapes_advice
from jshard._batch.batch_positions import with_positions_shared
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.completed_calls import with_calls_completed
from jshard._batch.layers_outside import layers_outside
from jshard._batch.loop_parts import LoopParts, loop_parts
from jshard._batch.outside_pipeline import results_of_loop, run_early, run_late
from jshard._batch.piece_operator import run_whole, shape_of
from jshard._batch.pipeline_checks import check_axes, check_forward, check_layers, coupled_layers
from jshard._batch.pipeline_shape import PipelineShape
from jshard._batch.saved_sums import with_sums_saved
from jshard._batch.stacked_layers import Stacked, stack_layers
from jshard._batch.tick_loop import CutStages, TickLoop, Ticks
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import with_calls_inlined
from jshard._program.loop_invariants import CALLS_WITH_BODY, body_of


WholeValue = Callable[[JaxprAtom], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Pipelined:
    """A program with pipelines.

    - `layers`: the number of layers of each of its loops over ticks.
    - `outside`: the equation and the reason, where a backward pass through the layers runs outside them.
    """

    closed: ClosedJaxpr
    layers: tuple[int, ...]
    outside: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class LoopsOverLayers:
    """A program with its layers in loops, its calls inlined; `unrolled`: whether the loops were made for it."""

    closed: ClosedJaxpr
    unrolled: bool


def with_loops_over_layers(
    closed: ClosedJaxpr, inputs: Sequence[BatchClass], examples: int, pieces: int
) -> LoopsOverLayers:
    """The program, with loops where its layers are unrolled; `pieces`: of the batch, any number that divides it.

    Raises `ShardError` if there are no layers that pass on values per example.
    """
    analysis = Analysis(examples, pieces)
    traced = with_positions_shared(closed)
    closed = with_sums_saved(traced, inputs, analysis)
    if _layer_loops(_inlined(closed), inputs, analysis)[0]:
        return LoopsOverLayers(closed, unrolled=False)
    stacked = _with_unrolled_stacked(traced, inputs, analysis)
    if stacked.closed is not None:
        in_loops = with_sums_saved(stacked.closed, inputs, analysis)
        if _layer_loops(_inlined(in_loops), inputs, analysis)[0]:
            return LoopsOverLayers(in_loops, unrolled=True)
    fixed = fixed_shapes_advice(_inlined(traced).eqns)
    raise ShardError(
        "no loop over layers passes values per example from layer to layer, and no layers outside loops are alike"
        if not stacked.why_not
        else "the layers, which are not in a loop, do not follow each other as in one",
        where=stacked.why_not or "pipeline",
        fix="layers one after the other in a Python loop or a scan, outside jax.checkpoint and other loops, that are alike: "
        "the same operators on the same shapes, of the activations that the layer before returns, of parameters of their "
        "own and of values that are the same for all layers; or no pipeline"
        + (f"; {fixed}" if fixed else ""),
    )


def _inlined(closed: ClosedJaxpr) -> Jaxpr:
    """The open jaxpr with its calls inlined, without dead code."""
    return compat.without_dead_code(with_calls_inlined(compat.open_jaxpr(closed)[0], lines=True))


def _with_unrolled_stacked(closed: ClosedJaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> Stacked:
    """The program with its unrolled layers as loops.

    What the layer on the data lacks is added before sums over examples move out of checkpointed calls, so that they move
    out of all alike.
    """
    completed = closed.replace(jaxpr=with_calls_completed(_inlined(closed)))
    opened, consts = compat.open_jaxpr(with_sums_saved(completed, inputs, analysis))
    classes = _layer_loops(opened, inputs, analysis)[1]
    return stack_layers(opened, consts, lambda v: class_in(classes, v).is_example)


def in_pipeline(
    layers: LoopsOverLayers, inputs: Sequence[BatchClass], examples: int, shape: PipelineShape,
    cut_stages: CutStages | None = None,
) -> Pipelined:  # fmt: skip
    """The program with its loops over layers as pipelines; `inputs` are the classes of its arguments.

    `cut_stages`: constrains a value so that dimension 0, the stages, is cut over their axis.

    Raises `ShardError` if a loop couples the examples or does not divide into the stages.
    """
    _, consts = compat.open_jaxpr(layers.closed)
    jaxpr = _inlined(layers.closed)
    analysis = Analysis(examples, shape.microbatches)
    loops, classes = _layer_loops(jaxpr, inputs, analysis)
    check_forward(jaxpr, loops, classes)
    for k, parts in loops.items():
        check_layers(jaxpr.eqns[k], parts, shape, layers.unrolled)
        check_axes(parts.jaxpr, shape)

    def run(*arguments: jax.Array) -> list[jax.Array]:
        values: dict[JaxprAtom, jax.Array | Ticks] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def whole(v: JaxprAtom) -> jax.Array:
            if compat.is_literal(v):
                return v.val  # type: ignore[return-value]
            x = values[v]
            if isinstance(x, Ticks):
                x = values[v] = x.whole()
            return x

        for k, eqn in enumerate(jaxpr.eqns):
            with compat.eqn_context(eqn):
                if k in loops:
                    own = {
                        v: x
                        for v in eqn.invars
                        if not compat.is_literal(v) and isinstance(x := values[v], Ticks)
                    }
                    loop = TickLoop(loops[k], shape, analysis, cut_stages or (lambda x: x))
                    results = _run_loop(eqn, loop, own, whole)
                else:
                    results = run_whole(eqn, list(map(whole, eqn.invars)))
                values.update(zip(eqn.outvars, results, strict=True))
        return [jnp.asarray(whole(v)) for v in jaxpr.outvars]

    return Pipelined(
        compat.make_jaxpr(run, *map(shape_of, jaxpr.invars)), tuple(p.layers for p in loops.values()),
        layers_outside(jaxpr, loops, classes, analysis),
    )  # fmt: skip


def _layer_loops(
    jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis
) -> tuple[dict[int, LoopParts], Mapping[JaxprAtom, BatchClass]]:
    """The loops over layers by position, from the classes of the values before them; and the classes."""
    classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
    classes.update(zip(jaxpr.invars, inputs, strict=True))
    loops: dict[int, LoopParts] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        operands = [class_in(classes, v) for v in eqn.invars]
        parts = _parts_if_layers(eqn, operands, analysis)
        if parts is not None:
            loops[k] = parts
        results = _classes_after(eqn, operands, analysis) if parts is None else parts.results()
        classes.update(zip(eqn.outvars, results, strict=True))
    return loops, classes


def _classes_after(eqn: JaxprEqn, operands: Sequence[BatchClass], analysis: Analysis) -> Sequence[BatchClass]:
    """The classes of the results of an equation outside the loops; finished sums and coupled values are shared.

    A checkpointed call that computes a sum again is walked through: what reads the sum may yet be per example.
    """
    try:
        results = analysis.cut(eqn, operands).results
    except CoupledError:
        called = body_of(eqn) if eqn.primitive.name in CALLS_WITH_BODY else None
        if called is None:
            return [SHARED] * len(eqn.outvars)
        body, _ = analysis.open(called)
        classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(body.constvars, SHARED)
        classes.update(zip(body.invars, operands, strict=True))
        for inner in body.eqns:
            read = [class_in(classes, v) for v in inner.invars]
            classes.update(zip(inner.outvars, _classes_after(inner, read, analysis), strict=True))
        results = [class_in(classes, v) for v in body.outvars]
    return [SHARED if c == SUM else c for c in results]


def _parts_if_layers(eqn: JaxprEqn, operands: Sequence[BatchClass], analysis: Analysis) -> LoopParts | None:
    """The parts of a loop that carries values per example and reads a slice of shared floats in every iteration.

    None for other equations. Raises `ShardError` if the values with which the loop begins are per example, and the body
    couples the examples.
    """
    if eqn.primitive.name != "scan":
        return None
    n_consts, n_carry = compat.scan_split(eqn.params)
    first = n_consts + n_carry
    stacked = zip(eqn.invars[first:], operands[first:], strict=True)
    if not any(c == SHARED and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v, c in stacked):
        return None
    if not any(c.is_example for c in operands):
        return None
    try:
        parts = loop_parts(eqn, operands, analysis)
    except CoupledError as error:
        if not any(c.is_example for c in operands[n_consts:first]):
            return None
        raise coupled_layers(error) from None
    return parts if parts.moving else None


def _run_loop(
    eqn: JaxprEqn, loop: TickLoop, own: Mapping[JaxprAtom, Ticks], whole: WholeValue
) -> list[jax.Array | Ticks]:
    """The results of a loop over layers, those per example of each layer as ticks wrote them."""
    parts = loop.parts
    outer = dict(zip((*parts.consts, *parts.carries, *parts.slices), eqn.invars, strict=True))
    initial = {v: jnp.asarray(whole(outer[v]), v.aval.dtype) for v in parts.carries}
    shared = dict(parts.constants)
    shared.update((v, jnp.asarray(whole(outer[v]))) for v in parts.consts)
    shared.update((parts.carries[j], initial[parts.carries[j]]) for j in parts.fixed)
    ticks: dict[JaxprAtom, jax.Array] = {}
    stacks: dict[JaxprAtom, jax.Array] = {}
    for v in parts.slices:
        found = own.get(outer[v])
        if found is not None and found.fits(loop.shape, parts.layers, parts.classes[v]):
            ticks[v] = found.array
        else:
            stacks[v] = whole(outer[v])
    early = run_early(parts, shared, stacks, initial)
    main = {v: x for v, x in {**stacks, **early.entering}.items() if v in parts.read}
    moved, examples, sums = loop.run(
        {v: x for v, x in shared.items() if v in parts.read}, main,
        {v: x for v, x in ticks.items() if v in parts.read}, [initial[parts.carries[j]] for j in parts.moving],
    )  # fmt: skip
    finished = dict(zip(parts.sums, sums, strict=True))
    finished.update(
        (v, x.whole()) for v, x in zip(parts.examples, examples, strict=True) if v in parts.crossing_examples
    )
    late = run_late(parts, shared, {**stacks, **early.entering}, finished, initial)
    return results_of_loop(parts, initial, (early, late), moved, examples, sums)
