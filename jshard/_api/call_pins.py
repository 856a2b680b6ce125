"""All pins of a call: of arguments, of results, of operators inside, and of arguments with committed shardings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jshard._api.machine import num_devices, requested_mesh
from jshard._api.shard_request import DeferredParameterPlan, ShardRequest
from jshard._api.trace_call import TracedArguments, TracedProgram
from jshard._core import jaxcompat as compat
from jshard._core.topology import Topology
from jshard._plan.operator_pins import joint_cuts
from jshard._plan.request import Place
from jshard._program.graph import Program
from jshard._spec.committed_shardings import equivalent_axes
from jshard._spec.entry import JointConstraint, Pin, parse_entry
from jshard._spec.mesh_selection import ChosenMesh, choose_mesh, resolve_pin
from jshard._spec.partitioning_metadata import with_metadata
from jshard._spec.strategies import pins_for_inputs, pins_for_outputs, without_static
from jshard._spec.tree_paths import argument_names


PlacedPin = tuple[int, str, int, Pin]
"""A pin and its place: (operator, "operand" or "result", index, pin)."""


@dataclasses.dataclass(frozen=True, eq=False)
class CallPins:
    """The pins of a call; `places`, `pins` and `shapes` run in parallel: arguments, results, operators.

    `committed`: argument number -> (committed sharding, path), for arguments that nothing else pins.
    `joint`: what operators with several pins require of the mesh together.
    """

    places: list[Place]
    pins: list[Pin | None]
    shapes: list[tuple[int, ...]]
    committed: dict[int, tuple[NamedSharding, str]]
    joint: tuple[JointConstraint, ...]

    def resolve(self, chosen: ChosenMesh, topology: Topology) -> tuple[list[PlacedPin], list[PlacedPin]]:
        """In the axes of a mesh: the pins, and those that keep arguments in their committed shardings."""
        resolved = [_resolve(p, chosen, s, topology) for p, s in zip(self.pins, self.shapes, strict=True)]
        pinned = [(*w, p) for w, p in zip(self.places, resolved, strict=True) if p is not None]
        committed = []
        for i, (sharding, path) in self.committed.items():
            axes = equivalent_axes(sharding, self.shapes[i], chosen.mesh)
            if axes is None:
                continue
            pin = Pin(tuple(chosen.axes.size(*d) for d in axes), axes, f"argument {path}, as it lies")
            committed.append((*self.places[i], _drop_unit_axes(pin, topology)))
        return pinned, committed


def pins_of_arguments(request: ShardRequest, call: TracedArguments, count: int) -> tuple[Pin | None, ...]:
    """One pin (or None) per argument leaf: `in_strategy` and `parameter_plan`, else partitioning metadata.

    `count`: how many positional arguments the call has, static ones included. With a configuration, metadata waits until
    its rules are known (`config_pins.py`).
    """
    in_strategy = without_static(
        request.in_strategy, argument_names(request.fn, count), tuple(request.statics[1])
    )
    plan = request.parameter_plan
    if isinstance(plan, DeferredParameterPlan):
        plan = plan.resolve(call.leaves)
    pins = pins_for_inputs(
        *call.user_view, in_strategy, plan, names=call.names, strict=request.options.strict,
        devices=_devices_to_divide(request, call),
    )  # fmt: skip
    return pins if request.config is not None else with_partitioning_metadata(request, call, pins)


def with_partitioning_metadata(
    request: ShardRequest, call: TracedArguments, pins: Sequence[Pin | None]
) -> tuple[Pin | None, ...]:
    """The pins of arguments, completed by partitioning metadata."""
    mesh = request.mesh if request.mesh is not None else compat.context_mesh()
    return with_metadata(pins, *call.user_view, call.names, mesh)


def pins_of_results(
    request: ShardRequest, call: TracedArguments, traced: TracedProgram
) -> tuple[Pin | None, ...]:
    """One pin (or None) per leaf of all results; changed state, after the user's result, has none."""
    tree = jax.tree.structure(traced.result)
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in traced.avals[: tree.num_leaves]]
    pins = pins_for_outputs(
        jax.tree.unflatten(tree, shapes), request.out_strategy, devices=_devices_to_divide(request, call)
    )
    return pins + (None,) * (len(traced.avals) - len(pins))


def _devices_to_divide(request: ShardRequest, call: TracedArguments) -> int | None:
    """The number of devices, for messages on cuts that do not divide; None where they may pad (`padded_pins.py`)."""
    return None if request.options.pad is True else num_devices(request, call.placement)


def collect_pins(
    request: ShardRequest,
    call: TracedArguments,
    traced: TracedProgram,
    in_pins: Sequence[Pin | None],
    out_pins: Sequence[Pin | None],
) -> CallPins:
    """The pins of arguments, results and operators, and the committed shardings of the other arguments."""
    program = traced.program
    inner = _operator_pins(program)
    places: list[Place] = [(i, "result", 0) for i in program.inputs[: len(in_pins)]]
    places += [(i, "operand", 0) for i in program.outputs[: len(out_pins)]]
    places += [(op, side, k) for op, side, k, _ in inner]
    shapes = [leaf.shape for leaf in call.leaves] + [o.shape for o in traced.avals]
    shapes += [_pinned_shape(program, op, side, k) for op, side, k, _ in inner]
    free = {i for i, p in enumerate(in_pins) if (p is None or p.free) and request.plan is None}
    committed = {i: (s, call.leaves[i].path) for i, s in call.placement.sharded if i in free}
    joint = joint_cuts(program, inner, len(in_pins) + len(out_pins))
    pins = [*in_pins, *out_pins, *(p for *_, p in inner)]
    if request.options.pad is True:
        pins = [p and dataclasses.replace(p, pads=True) for p in pins]
    return CallPins(places, pins, shapes, committed, joint)


def program_pins(program: Program, chosen: ChosenMesh, topology: Topology) -> list[PlacedPin]:
    """Pins that the user's code puts on operators, in the axes of a mesh."""
    out = []
    for op, side, k, pin in _operator_pins(program):
        resolved = _resolve(pin, chosen, _pinned_shape(program, op, side, k), topology)
        if resolved is not None:
            out.append((op, side, k, resolved))
    return out


def _operator_pins(program: Program) -> list[PlacedPin]:
    """Pins that `jshard.op` and sharding constraints left in the program."""
    out = []
    for op, side, k, pin in program.pins:
        if isinstance(pin, jax.sharding.NamedSharding):
            operator = program.operators[op]
            where = f"{operator.primitive} {operator.source}".strip()
            pin = parse_entry(pin, _pinned_shape(program, op, side, k), where)
        if isinstance(pin, Pin):  # other shardings (by device order, by backend) name no mesh axes
            out.append((op, side, k, pin))
    return out


def _pinned_shape(program: Program, op: int, side: str, k: int) -> tuple[int, ...]:
    operator = program.operators[op]
    atom: Any = operator.operands[k] if side == "operand" else operator.results[k]
    return program.tensors[atom].shape if isinstance(atom, int) else tuple(atom.aval.shape)


def _resolve(pin: Pin | None, chosen: ChosenMesh, shape: tuple[int, ...], topology: Topology) -> Pin | None:
    """A pin in the axes of a mesh; None if it leaves its tensor free."""
    resolved = resolve_pin(pin, chosen, shape)
    return None if resolved is None or resolved.free else _drop_unit_axes(resolved, topology)


def _drop_unit_axes(pin: Pin, topology: Topology) -> Pin:
    """A pin without mesh axes of size one, which the planner's topology does not have."""
    if pin.axes is None:
        return pin
    names = set(topology.mesh.names)
    axes = tuple(d if d is None else tuple(a for a in d if a in names) for d in pin.axes)
    return dataclasses.replace(pin, axes=axes)


def mesh_of_call(request: ShardRequest, call: TracedArguments, pins: CallPins) -> ChosenMesh:
    """The mesh of a call: the user's, that of the arguments, or one for the pins."""
    argument_mesh = call.placement.mesh
    return choose_mesh(
        requested_mesh(request, argument_mesh),
        request.options.device,
        pins.pins,
        pins.shapes,
        joint=pins.joint,
        argument_mesh=argument_mesh,
        argument_shardings=[s for s, _ in pins.committed.values()],
    )
