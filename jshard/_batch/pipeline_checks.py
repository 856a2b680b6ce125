"""What refuses a pipeline: layers that couple the examples, that stages do not divide, an axis that is used twice."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jshard._batch.batch_class import BatchClass, CoupledError, described, fixed_shapes_advice
from jshard._batch.body_classes import class_in
from jshard._batch.loop_parts import LoopParts
from jshard._batch.pipeline_shape import PipelineShape
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import bodies_of
from jshard._program.pin_primitives import PIN_OPERAND, PIN_RESULT


_BRANCH_ADVICE = (
    "; where a sum over the batch decides a lax.cond whose branches return sums over the batch, "
    "jnp.where(decision, one, other) of both sums"
)


def coupled_layers(error: CoupledError) -> ShardError:
    """The error for layers that couple the examples, or have an operator of fixed shapes."""
    advice = fixed_shapes_advice([error.eqn])
    if advice:
        return ShardError(
            f"a layer has a {error.eqn.primitive.name}, which runs on no microbatch: its shapes are fixed",
            where=described(error.eqn),
            fix=f"no pipeline, or {advice}",
        )
    return ShardError(
        "a loop over layers couples the examples of the batch, so that no microbatch passes alone",
        where=str(error),
        fix="no pipeline, or compute what couples the examples outside the loop (batch statistics kept fixed, LayerNorm "
        "or GroupNorm for BatchNorm, sums over the batch returned by the layers and combined after the loop)"
        + _BRANCH_ADVICE
        * (error.eqn.primitive.name == "cond"),
    )


def check_forward(
    jaxpr: Jaxpr, loops: Mapping[int, LoopParts], classes: Mapping[JaxprAtom, BatchClass]
) -> None:
    """Raise `ShardError` if the loops are a backward pass alone, and the forward pass has its parameters otherwise."""
    if not all(compat.is_backward("", jaxpr.eqns[k]) for k in loops):
        return
    lengths = {p.layers for p in loops.values()}
    for k, eqn in enumerate(jaxpr.eqns):
        if k in loops or eqn.primitive.name != "scan" or int(eqn.params["length"]) not in lengths:
            continue
        n_consts, n_carry = compat.scan_split(eqn.params)
        if any(class_in(classes, v).is_example for v in eqn.invars[n_consts : n_consts + n_carry]):
            raise ShardError(
                "the loop over layers reads all parameters in each layer, so that no stage holds only its own",
                where=described(eqn),
                fix="jax.lax.scan over the stacked parameters, lax.scan(layer, x, w), where the body indexes them by the "
                "number of the layer (lax.fori_loop)",
            )


def check_layers(eqn: JaxprEqn, parts: LoopParts, shape: PipelineShape, unrolled: bool) -> None:
    """Raise `ShardError` if the layers do not divide into stages and rounds, or pass keys on.

    `unrolled`: whether the layers were in no loop.
    """
    for j in parts.moving:
        if jnp.issubdtype(parts.carries[j].aval.dtype, jax.dtypes.extended):
            raise ShardError(
                "keys of random numbers per example pass from layer to layer",
                where=_where(eqn, parts),
                fix="one key for all examples, or a key for each layer, as an input of the loop",
            )
    each, n = shape.stages * shape.rounds, parts.layers
    rounds = f" in {shape.rounds} rounds" if shape.rounds > 1 else ""
    if n < each:
        raise ShardError(
            f"{n} layers are fewer than the {shape.stages} stages{rounds}",
            where=_where(eqn, parts),
            fix="an axis of fewer devices, or fewer rounds"
            + "; layers count that are alike, also in the parameters whose gradients are taken" * unrolled,
        )
    if n % each and not shape.uneven:
        added = shape.padded(n) - n
        raise ShardError(
            f"{shape.stages} stages{rounds} do not divide {n} layers",
            where=_where(eqn, parts),
            fix=f'"uneven": True in the pipeline, which adds {added} layers that do nothing, or a multiple of {each} layers',
        )


def _where(eqn: JaxprEqn, parts: LoopParts) -> str:
    """A loop over layers; for layers that were in no loop, their first operator with a line."""
    operators = (eqn, *parts.jaxpr.eqns)
    return described(next((e for e in operators if compat.source_line(e)), eqn))


def check_axes(body: Jaxpr, shape: PipelineShape) -> None:
    """Raise `ShardError` if a constraint inside a layer names the axis of the stages."""
    for eqn in body.eqns:
        used = _pinned_axes(eqn).intersection(shape.axes)
        if used:
            axis = repr(used.pop())
            raise ShardError(
                f"axis {axis} is used twice: by the stages of the pipeline, and by a constraint inside a layer",
                where=described(eqn),
                fix=f"a constraint without {axis}, or another axis for the pipeline",
            )
        for inner in bodies_of(eqn):
            check_axes(inner, shape)


def _pinned_axes(eqn: JaxprEqn) -> set[str]:
    """The mesh axes that a constraint names."""
    if eqn.primitive.name in (PIN_OPERAND, PIN_RESULT):
        return {a for axes in getattr(eqn.params["pin"], "axes", None) or () for a in axes or ()}
    sharding = compat.constraint_of(eqn) if eqn.primitive.name in ("sharding_constraint", "reshard") else None
    if not isinstance(sharding, NamedSharding):
        return set()
    entries = [d for d in sharding.spec if d is not None and d is not PartitionSpec.UNCONSTRAINED]
    return {a for d in entries for a in (d if isinstance(d, tuple) else (d,))}
