"""The schedule of a derivative rule, between values whose layouts the plan of its call has fixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ArrayFunction, JaxMesh
from jshard._core.layout import ArrayType, Layout
from jshard._core.topology import Topology
from jshard._plan.request import PlanRequest
from jshard._program.trace import build
from jshard._schedule.schedule import Schedule
from jshard._spec.entry import Pin


def plan_derivative_rule(
    fn: ArrayFunction,
    avals: Sequence[ArrayType],
    operand_layouts: Sequence[Layout],
    result_layouts: Sequence[Layout],
    topology: Topology,
    explicit_mesh: JaxMesh | None,
) -> Schedule:
    """Trace a derivative rule on global shapes and plan it.

    Arguments:

    - `fn`: the rule, from flat arrays to a list of arrays.
    - `avals`, `operand_layouts`: types and layouts of its arguments.
    - `result_layouts`: of its first results; those after them (residuals) are planned freely.
    - `explicit_mesh`: the mesh with Explicit axes in which the program was traced, or None.
    """
    with compat.context_of_trace(explicit_mesh):
        jaxpr = compat.make_jaxpr(fn, *avals)
    names = [f"value {i}" for i in range(len(avals))]
    program = dataclasses.replace(
        build(jaxpr, name="derivative rule", input_names=names), explicit_mesh=explicit_mesh
    )
    pins = [(program.inputs[i], "result", 0, _pin(lay, topology)) for i, lay in enumerate(operand_layouts)]
    pins += [(program.outputs[i], "operand", 0, _pin(lay, topology)) for i, lay in enumerate(result_layouts)]
    from jshard._plan.planner import make_plan  # at the first plan: it imports every search

    return make_plan(program, topology, PlanRequest(tuple(pins)))[1]


def _pin(layout: Layout, topology: Topology) -> Pin:
    return Pin(layout.cuts(topology.mesh), layout.dims, "derivative rule")
