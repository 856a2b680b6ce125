"""`config={"pipeline": ...}` of `shard`: the program of a call with its loops over layers as pipelines, planned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Generic, TypeVar

import jax

from jshard._api.batch_of_call import BatchOfCall
from jshard._api.machine import requested_mesh
from jshard._api.pipeline_choice import cheapest_pipeline, choices
from jshard._api.plan import Plan
from jshard._api.shard_request import ShardRequest
from jshard._batch.batch_class import no_batch
from jshard._batch.pipeline_shape import PipelineShape
from jshard._batch.pipelines import in_pipeline
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import ClosedJaxpr, JaxMesh
from jshard._core.layout import MeshAxes
from jshard._core.topology import mesh_axes
from jshard._plan.rows import PipelineRow
from jshard._program.pin_primitives import pin_operand, pin_result
from jshard._spec.entry import Pin
from jshard._spec.mesh_selection import mesh_before_pins
from jshard._spec.pipeline_option import EXAMPLE, PipelineOption


Call = TypeVar("Call")


@dataclasses.dataclass(frozen=True, eq=False)
class PipelinedCall(Generic[Call]):
    """A call to be planned in a pipeline.

    - `argument_mesh`: the mesh that the arguments are committed to, if any.
    - `read_batch`: finds the batch of the call.
    - `plan_program`: plans the call with another program, or (None) with its own, where a plan of some cost is known;
        `plan_of` reads its plan, `with_plan` replaces it.
    """

    request: ShardRequest
    argument_mesh: JaxMesh | None
    read_batch: Callable[[], BatchOfCall]
    plan_program: Callable[[ClosedJaxpr | None, float], Call]
    plan_of: Callable[[Call], Plan]
    with_plan: Callable[[Call, Plan], Call]

    def planned(self, given: PipelineRow | None) -> Call:
        """The planned call in the pipeline of its request, or in that of a plan that was given.

        Raises `ShardError` for a pipeline that the mesh or the program does not allow.
        """
        if given is not None:
            return self.planned_with(
                PipelineOption(given.axis, given.microbatches, given.rounds, given.uneven)
            )
        options = self.request.options
        if options.microbatches is not None:
            raise ShardError(
                "a pipeline runs in microbatches of its own",
                where=f"microbatches= and pipeline of {self.request.name}",
                fix=f"no microbatches=: {EXAMPLE}",
            )
        if isinstance(options.pipeline, PipelineOption):
            return self.planned_with(options.pipeline)
        axes = _mesh(self.request, self.argument_mesh)
        idle = [
            (c, PipelineShape((c.axis,), axes.size(c.axis), c.microbatches, c.rounds).bubble)
            for c in choices(axes, self.read_batch().counts)
        ]
        return cheapest_pipeline(idle, self.planned_with, self.plan_of, self.with_plan)

    def planned_with(self, option: PipelineOption | None, most: float = math.inf) -> Call:
        """The planned call in one pipeline, or in none.

        `most`: the cost of a plan that is known. Raises `NoBetterPlan` where it is found that no plan costs less; of one
        program alone, since recomputation and padding compare programs of their own.
        """
        options = self.request.options
        if (
            options.level == 1
            or options.remat is not None
            or options.pad is True
            or self.request.tries_meshes
        ):
            most = math.inf
        if option is None:
            return self.plan_program(None, most)
        batch = self.read_batch()
        shape = _shape(_mesh(self.request, self.argument_mesh), option, self.request.name)
        _check_batch(batch, option, self.request.name)

        def cut_stages(x: jax.Array) -> jax.Array:
            rest = (None,) * (x.ndim - 1)
            pin = Pin((None, *rest), ((option.axis,), *rest), "pipeline", of_cotangent=True)
            return pin_operand(pin_result(x, pin), pin)

        layers = batch.in_loops
        staged = in_pipeline(layers, batch.inputs, batch.examples, shape, cut_stages)
        call = self.plan_program(staged.closed, most)
        row = PipelineRow(
            option.axis,
            shape.stages,
            option.microbatches,
            option.rounds,
            option.uneven,
            staged.layers,
            layers.unrolled,
            staged.outside,
        )
        return self.with_plan(call, dataclasses.replace(self.plan_of(call), pipeline=row))


def _mesh(request: ShardRequest, argument_mesh: JaxMesh | None) -> MeshAxes:
    """The axes of the mesh of the request."""
    asked, where = requested_mesh(request, argument_mesh), f"pipeline of {request.name}"
    mesh = mesh_before_pins(asked, request.in_strategy, argument_mesh)
    if mesh is None:
        raise ShardError(
            "a pipeline needs a mesh with an axis for its stages",
            where=where,
            fix=f'mesh=jax.make_mesh((4, 2), ("stage", "data")), and {EXAMPLE}',
        )
    return mesh_axes(mesh)


def _shape(axes: MeshAxes, option: PipelineOption, name: str) -> PipelineShape:
    """The shape of the pipeline on the mesh of the request."""
    where = f"pipeline of {name}"
    if option.axis not in axes.names:
        raise ShardError(
            f"{option.axis!r} is no axis of the mesh {axes}",
            where=where,
            fix=f'"axis": one of {", ".join(map(repr, axes.names))}',
        )
    stages = axes.size(option.axis)
    if stages < 2:
        raise ShardError(
            f"axis {option.axis!r} of the mesh {axes} has one device, so one stage",
            where=where,
            fix="an axis of two devices or more, or no pipeline",
        )
    if option.rounds > 1 and option.microbatches < stages:
        raise ShardError(
            f"{option.microbatches} microbatches in {option.rounds} rounds are fewer than the {stages} stages: "
            "the first stage would wait for the last",
            where=where,
            fix=f'"microbatches": {stages} or more, or "rounds": 1',
        )
    return PipelineShape((option.axis,), stages, option.microbatches, option.rounds, option.uneven)


def _check_batch(batch: BatchOfCall, option: PipelineOption, name: str) -> None:
    where = f"pipeline of {name}"
    if not batch.examples:
        raise no_batch(compat.open_jaxpr(batch.closed)[0], where, "no pipeline")
    if batch.examples % option.microbatches:
        allowed = ", ".join(str(k) for k in batch.counts if k > 1)
        raise ShardError(
            f"{option.microbatches} microbatches do not divide the batch of {batch.examples}, {batch.places}",
            where=where,
            fix=f'"microbatches": one of {allowed}',
        )
