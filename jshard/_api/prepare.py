"""From a call to something that runs: trace, pins, mesh, plan, schedule. What `shard` does once per signature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jshard import _jaxcompat as compat
from jshard._api.call_state import refuse_refs
from jshard._api.plan import Plan
from jshard._api.shard_request import (
    DeferredParameterPlan,
    ShardRequest,
    abstract,
    abstract_with_shardings,
    donated as donated_leaves,
    named_traced_arguments,
    source_line_of,
    static_values,
    trace as _trace,
)
from jshard._api.state_matching import find_state_ties
from jshard._core import hardware as hardware, topology as topologies
from jshard._core.errors import MeshError, NestedShardError, PlanMismatchError, SearchError, ShardError
from jshard._core.gc_pause import gc_paused
from jshard._core.named_topology import topology
from jshard._core.topology import Topology
from jshard._memory.list_scheduling import reorder_for_memory
from jshard._plan.operator_pins import joint_cuts
from jshard._plan.planner import PlanRequest, make_plan, schedule_of_plan
from jshard._program.graph import Program
from jshard._program.trace import build
from jshard._program.user_shard_map import axes_of, check_meshes
from jshard._schedule.schedule import Schedule
from jshard._spec.committed_shardings import Placement, equivalent_axes, placement
from jshard._spec.entry import Pin, parse_entry
from jshard._spec.mesh_selection import (
    ChosenMesh,
    JointConstraint,
    candidate_grids,
    candidate_meshes,
    choose_mesh,
    device_count,
    resolve_pin,
)
from jshard._spec.partitioning_metadata import with_metadata
from jshard._spec.strategies import pins_for_inputs, pins_for_outputs, without_static
from jshard._spec.tree_paths import Leaf, argument_names, input_leaves, path_name


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCall:
    """One signature, planned: the plan, its schedule, and the trees of arguments and results.

    `weak`: which results have a weak type. `pinned`: arguments that the user pinned. `lying`: arguments that are
    planned as they lie, since nothing pins them.
    """

    request: ShardRequest
    plan: Plan
    schedule: Schedule
    chosen: ChosenMesh
    in_tree: Any
    out_tree: Any
    in_avals: tuple[Any, ...]
    weak_typed: tuple[bool, ...]
    donated: tuple[int, ...]
    statics: tuple[Any, ...]
    pinned: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class _TracedArguments:
    """The arguments that are not static: as they come, their shapes, these as their user knows them, and where they are."""

    traced_args: tuple[Any, ...]
    traced_kwargs: dict[str, Any]
    names: tuple[str, ...]
    shapes: tuple[tuple, dict[str, Any]]
    user_view: tuple[tuple, dict[str, Any]]
    placement: Placement

    @staticmethod
    def of(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _TracedArguments:
        left, left_kw, names = named_traced_arguments(request, args, kwargs)
        shapes = abstract(tuple(left)), abstract(left_kw)
        follow = request.mesh is None and compat.context_mesh() is None
        where = placement(jax.tree.leaves((left, left_kw)), use_argument_mesh=follow)
        return _TracedArguments(left, left_kw, names, shapes, request.view.arguments(*shapes), where)

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return input_leaves(*self.user_view, self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class _TracedProgram:
    """The program, its result as its user knows it, and the avals of all results, state included."""

    program: Program
    result: Any
    avals: list[Any]
    tree: Any
    weak_typed: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _AllPins:
    """Everything that is pinned, and where: (operator, side, index), and the shapes of the pinned tensors."""

    sites: list[tuple[int, str, int]]
    pins: list[Pin | None]
    shapes: list[tuple[int, ...]]
    committed: dict[
        int, tuple[NamedSharding, str]
    ]  # arguments that nothing else pins, their shardings and paths
    joint: tuple[JointConstraint, ...]  # what operators with several pins need beside

    def resolve(self, chosen: ChosenMesh, topology: Topology) -> tuple[list[Any], list[Any]]:
        """The pins in the axes of a mesh, and those of arguments that can stay as they lie."""
        resolved = [
            _drop_unit_axes(resolve_pin(p, chosen, s), topology)
            for p, s in zip(self.pins, self.shapes, strict=True)
        ]
        asked = [(*w, p) for w, p in zip(self.sites, resolved, strict=True) if p is not None and not p.free]
        lying = []
        for i, (sharding, path) in self.committed.items():
            axes = equivalent_axes(sharding, self.shapes[i], chosen.mesh)
            if axes is not None:
                cuts = tuple(chosen.axes.size(*d) for d in axes)
                lying.append(
                    (
                        *self.sites[i],
                        _drop_unit_axes(Pin(cuts, axes, f"argument {path}, as it lies"), topology),
                    )
                )
        return asked, lying


def prepare(
    request: ShardRequest,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_progress: Callable[..., None] | None = None,
) -> PlannedCall:
    """Trace, pin, choose the mesh and plan; nothing is kept if anything fails."""
    call = _TracedArguments.of(request, args, kwargs)
    pins = _input_pins(request, call, len(args))
    traced, mesh = _trace(request, args, kwargs)
    if mesh is not None:
        call = dataclasses.replace(
            call, shapes=abstract_with_shardings((call.traced_args, call.traced_kwargs))
        )
    elif (here := compat.context_mesh()) is not None and AxisType.Explicit in here.axis_types:
        mesh = here
    return _plan_traced(
        request, call, (traced, mesh), pins, static_values(request, args, kwargs), on_progress
    )


def check_pins(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what is wrong with the pins of a call, before anything else of it is looked at."""
    _input_pins(request, _TracedArguments.of(request, args, kwargs), len(args))


def _input_pins(request: ShardRequest, call: _TracedArguments, count: int) -> tuple[Pin | None, ...]:
    """What the user asked of each argument, and the metadata around it."""
    statics = request.statics[1]
    in_strategy = without_static(request.in_strategy, argument_names(request.fn, count), tuple(statics))
    plan = request.parameter_plan
    if isinstance(plan, DeferredParameterPlan):
        plan = plan.resolve(call.leaves)
    pins = pins_for_inputs(
        *call.user_view, in_strategy, plan, names=call.names, strict=request.options.strict,
        devices=_device_count(request, call),
    )  # fmt: skip
    mesh = request.mesh if request.mesh is not None else compat.context_mesh()
    return with_metadata(pins, *call.user_view, call.names, mesh)


@gc_paused()
def _plan_traced(
    request: ShardRequest, call: _TracedArguments, traced: tuple[Any, Any], in_pins: Sequence[Pin | None], statics: Any,
    on_progress: Callable[..., None] | None,
) -> PlannedCall:  # fmt: skip
    """What follows the trace: the program, its mesh, its plan. `traced` has the context of the trace beside it."""
    donated = donated_leaves(request, call.traced_args, call.traced_kwargs, call.names)
    made = _build_program(request, call, *traced, donated)
    program = made.program
    out_tree, in_tree = jax.tree.structure(made.result), jax.tree.structure(call.user_view)
    shapes = jax.tree.unflatten(
        out_tree, [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in made.avals[: out_tree.num_leaves]]
    )
    out_pins = pins_for_outputs(shapes, request.out_strategy, devices=_device_count(request, call))
    out_pins += (None,) * (len(made.avals) - len(out_pins))
    in_leaves = jax.tree.leaves(call.shapes)
    tied = find_state_ties(program, in_leaves, in_tree, made.avals, out_tree, donated, out_pins)
    where = call.placement
    pins = _collect_pins(request, program, call, in_pins, out_pins, made.avals)

    def planned(chosen: ChosenMesh, request: ShardRequest = request) -> tuple[Plan, Schedule, frozenset[int]]:
        check_meshes(program, chosen.axes)
        topology = topologies.without_unit_axes(_topology(request, chosen))
        asked, lying = pins.resolve(chosen, topology)
        if request.plan is not None:
            return request.plan, schedule_of_plan(program, topology, request.plan), frozenset()
        options = request.options
        wish = PlanRequest(
            tuple(asked), tied, donated, options.level, options.search, _memory_budget(request, topology),
            replication_price=options.replication_price,
        )  # fmt: skip
        return _plan_with_committed(program, topology, wish, lying, on_progress)

    if isinstance(request.mesh, str) and request.mesh.partition(":")[0] == "auto":
        chosen, plan, schedule, lying = _cheapest_mesh(
            _auto_meshes(request, pins.pins, pins.shapes, pins.joint), planned
        )
    else:
        mesh, there = _requested_mesh(request, where.mesh), [s for s, _ in pins.committed.values()]
        chosen = choose_mesh(
            mesh,
            request.options.device,
            pins.pins,
            pins.shapes,
            joint=pins.joint,
            argument_mesh=where.mesh,
            argument_shardings=there,
        )
        plan, schedule, lying = planned(chosen)
    plan = dataclasses.replace(plan, jax_mesh=chosen.mesh, in_tree=in_tree, out_tree=out_tree)
    return PlannedCall(
        request, plan, schedule, chosen, jax.tree.structure(call.shapes), made.tree, tuple(in_leaves), made.weak_typed,
        donated, statics, frozenset(i for i, p in enumerate(in_pins) if p is not None and not p.free), lying,
    )  # fmt: skip


def _build_program(
    request: ShardRequest, call: _TracedArguments, traced: Any, context: Any, donated: tuple[int, ...]
) -> _TracedProgram:
    """The traced function as a program whose arguments and results have the names that its user knows."""
    result, state = request.view.results(traced.out_info)
    paths = [path_name(path) or "result" for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]]
    avals, tree = jax.tree.flatten(traced.out_info)
    try:
        program = build(
            traced.jaxpr,
            name=request.name,
            input_names=[leaf.path for leaf in call.leaves],
            output_names=[*paths, *state],
            captured=compat.captured_tracers(traced),
        )
    except ShardError as e:
        if not (isinstance(e, NestedShardError) or e.where == ""):
            raise
        line = source_line_of(traced.jaxpr, {compat.ARGUMENT_MARKER, "shard_map"}) or e.where
        raise type(e)(e.what, where=line, fix=e.fix) from None
    refuse_refs(program.constants, request.fn, request.name)
    program = reorder_for_memory(dataclasses.replace(program, explicit_mesh=context), donated)
    given = _requested_mesh(request) if request.mesh is not None else compat.context_mesh()
    if hasattr(given, "axis_names"):
        check_meshes(program, axes_of(given))
    outs = compat.open_jaxpr(traced.jaxpr)[0].outvars
    weak = tuple(bool(getattr(v.aval, "weak_type", False)) for v in outs)
    return _TracedProgram(program, result, avals, tree, weak)


def _collect_pins(
    request: ShardRequest, program: Program, call: _TracedArguments, in_pins: Sequence[Pin | None],
    out_pins: Sequence[Pin | None], results: Sequence[Any],
) -> _AllPins:  # fmt: skip
    """Pins of arguments, results and operators, in this order, and how the other arguments lie."""
    inner = _operator_pins(program)
    places = [(i, "result", 0) for i in program.inputs[: len(in_pins)]]
    places += [(i, "operand", 0) for i in program.outputs[: len(out_pins)]]
    places += [(op, side, k) for op, side, k, _ in inner]
    shapes = [leaf.shape for leaf in call.leaves] + [o.shape for o in results]
    shapes += [_pinned_shape(program, op, side, k) for op, side, k, _ in inner]
    free = {i for i, p in enumerate(in_pins) if (p is None or p.free) and request.plan is None}
    lying = {i: (s, call.leaves[i].path) for i, s in call.placement.sharded if i in free}
    together = joint_cuts(program, inner, len(in_pins) + len(out_pins))
    return _AllPins(places, [*in_pins, *out_pins, *(p for *_, p in inner)], shapes, lying, together)


def _plan_with_committed(
    program: Program, topology: Topology, wish: PlanRequest, lying: Sequence[Any], on_progress: Any
) -> tuple[Plan, Schedule, frozenset[int]]:
    """A plan that leaves arguments where they lie if there is one: that is a default, and gives way to what is asked."""
    if not lying:
        return (*make_plan(program, topology, wish, on_progress), frozenset())
    number = {op: i for i, op in enumerate(program.inputs)}
    names = [program.operators[op].name for op, *_ in lying]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    try:
        both = dataclasses.replace(wish, pins=(*wish.pins, *lying))
        plan, schedule = make_plan(program, topology, both, on_progress)
    except SearchError as refused:
        plan, schedule = make_plan(program, topology, wish, on_progress)
        told = f"not as they lie: {few}, since {refused.what}"
        return dataclasses.replace(plan, steps=(*plan.steps, told)), schedule, frozenset()
    plan = dataclasses.replace(plan, steps=(*plan.steps, f"as they lie: {few}"))
    return plan, schedule, frozenset(number[op] for op, *_ in lying)


def _cheapest_mesh(
    meshes: Sequence[tuple[ChosenMesh, ShardRequest]],
    planned: Callable[[ChosenMesh, ShardRequest], tuple[Plan, Schedule, frozenset[int]]],
) -> tuple[ChosenMesh, Plan, Schedule, frozenset[int]]:
    """The mesh whose plan costs least; the runners-up are told in the plan's steps."""
    found, refused = [], None
    for chosen, request in meshes:
        try:
            found.append((chosen, *planned(chosen, request)))
        except SearchError as e:  # a budget or pin that only this grid cannot keep
            refused = e
    if not found:
        assert refused is not None
        raise refused
    found.sort(key=lambda f: f[1].cost.objective)
    chosen, plan, schedule, lying = found[0]
    told = tuple(f"mesh {c.axes}: {p.cost.objective:.4g} {p.cost.unit}" for c, p, *_ in found)
    return chosen, dataclasses.replace(plan, steps=(*plan.steps, *told)), schedule, lying


def _auto_meshes(
    request: ShardRequest, pins: Sequence[Pin | None], shapes: Sequence[Any], joint: Sequence[JointConstraint]
) -> list[tuple[ChosenMesh, ShardRequest]]:
    """What `mesh="auto"` tries: grids of the devices here, of as many (`"auto:4"`), or of a named machine."""
    name, device = request.mesh.partition(":")[2], request.options.device
    if not name:
        return [(c, request) for c in candidate_meshes(device, pins, shapes, joint=joint)]
    if name.isdigit():
        here = jax.devices(device)
        if not 1 <= int(name) <= len(here):
            raise MeshError(
                f"mesh={request.mesh!r} asks for {name} devices, there are {len(here)}",
                where="mesh",
                fix=f'"auto:{len(here)}" or fewer, or a machine by name: "auto:v5e:4x4"',
            )
        return [(c, request) for c in candidate_meshes(device, pins, shapes, here[: int(name)], joint)]
    count = topologies.device_count(*topologies.parse_name(name))
    machines = [topology(name, axes) for axes in candidate_grids(count, pins, shapes, joint)]
    return [
        (choose_mesh(m, device, pins, shapes, joint=joint), dataclasses.replace(request, mesh=m))
        for m in machines
    ]


def _device_count(request: ShardRequest, call: _TracedArguments) -> int:
    """How many devices there are to cut over, those of arguments that lie on a mesh before all that are here."""
    mesh = _requested_mesh(request)
    if isinstance(mesh, str) and mesh.partition(":")[0] == "auto":
        name = mesh.partition(":")[2]
        if name:
            return int(name) if name.isdigit() else topologies.device_count(*topologies.parse_name(name))
    entries = (request.in_strategy, request.parameter_plan, request.out_strategy)
    return device_count(call.placement.mesh if mesh is None else mesh, request.options.device, entries)


def _requested_mesh(request: ShardRequest, lying: Any = None) -> Any:
    """The mesh the user gave; with a plan and no mesh, the plan's own axes over the devices at hand."""
    if request.mesh is not None or request.plan is None or compat.context_mesh() is not None:
        return request.mesh
    axes, devices = request.plan.mesh, jax.devices(request.options.device)
    if lying is not None and axes_of(lying) == axes:
        return lying
    if len(devices) < axes.total:
        raise PlanMismatchError(
            f"the plan was made for {axes.total} devices ({axes}), there are {len(devices)}",
            where=f"plan= of {request.name}",
            fix="give mesh= the machine that the plan is for, or plan again",
        )
    return jax.sharding.Mesh(np.array(devices[: axes.total]).reshape(axes.sizes), axes.names)


def _drop_unit_axes(pin: Pin | None, topology: Topology) -> Pin | None:
    """A pin without mesh axes of size one, which the planner does not see."""
    if pin is None or pin.axes is None:
        return pin
    names = set(topology.mesh.names)
    axes = tuple(d if d is None else tuple(a for a in d if a in names) for d in pin.axes)
    return dataclasses.replace(pin, axes=axes)


def _pinned_shape(program: Program, op: int, side: str, k: int) -> tuple[int, ...]:
    operator = program.operators[op]
    atom: Any = operator.operands[k] if side == "operand" else operator.results[k]
    return program.tensors[atom].shape if isinstance(atom, int) else tuple(atom.aval.shape)


def program_pins(program: Program, chosen: ChosenMesh, topology: Topology) -> list[tuple[int, str, int, Pin]]:
    """Pins that the user's code put on operators, in the axes of a mesh: (operator, side, index, pin)."""
    out = []
    for op, side, k, pin in _operator_pins(program):
        resolved = _drop_unit_axes(resolve_pin(pin, chosen, _pinned_shape(program, op, side, k)), topology)
        if resolved is not None and not resolved.free:
            out.append((op, side, k, resolved))
    return out


def _operator_pins(program: Program) -> list[tuple[int, str, int, Pin]]:
    """Pins that `jshard.op` and sharding constraints left in the program."""
    out = []
    for op, side, k, wanted in program.pins:
        if not isinstance(wanted, Pin):
            operator = program.operators[op]
            if not isinstance(wanted, jax.sharding.NamedSharding):
                continue  # a constraint by device order or backend says nothing about mesh axes
            where = f"{operator.primitive} {operator.source}".strip()
            pin = parse_entry(wanted, _pinned_shape(program, op, side, k), where)
            if pin is None:
                continue
            wanted = pin
        out.append((op, side, k, wanted))
    return out


def _topology(request: ShardRequest, chosen: ChosenMesh) -> Topology:
    mesh = request.mesh
    chip = request.options.hardware
    if isinstance(chip, str):
        chip = hardware.get(chip)
    links = getattr(mesh, "links", None)
    if isinstance(links, Topology) and links.mesh == chosen.axes:
        return links if chip is None else dataclasses.replace(links, chip=chip)
    if chip is None and isinstance(getattr(mesh, "chip", None), str):
        chip = hardware.get(mesh.chip)
    if chip is None and isinstance(chosen.mesh, jax.sharding.AbstractMesh):
        chip = hardware.for_device(jax.devices(request.options.device)[0])
    return topologies.from_mesh(chosen.mesh, chip)


def _memory_budget(request: ShardRequest, topology: Topology) -> float | None:
    if request.options.memory_budget is not None:
        return float(request.options.memory_budget)
    hbm = topology.chip.hbm_bytes
    return None if hbm is None else 0.9 * hbm
