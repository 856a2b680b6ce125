"""From a call to something that runs: trace, pins, mesh, plan, schedule. What `shard` does once per signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jshard import _hardware as hardware, _jaxcompat as compat, _topology as topologies
from jshard._doors import topology
from jshard._errors import MeshError, NestedShardError, PlanMismatchError, SearchError, ShardError
from jshard._plan.joint import joints
from jshard._plan.make import Wish, find_ties, make_plan, replay
from jshard._plan.order import ordered
from jshard._plan.plan import Plan
from jshard._plan.schedule import Schedule
from jshard._program.graph import Program
from jshard._program.mapped import axes_of, check_meshes
from jshard._program.trace import build
from jshard._program.uncollected import uncollected
from jshard._topology import Topology
from jshard._wish.entries import Pin, parse_entry
from jshard._wish.mesh import (
    ChosenMesh,
    Joint,
    candidate_grids,
    candidate_meshes,
    choose_mesh,
    device_count,
    resolve_pin,
)
from jshard._wish.metadata import with_metadata
from jshard._wish.options import CallOptions, Options
from jshard._wish.paths import argument_names, input_leaves, path_name
from jshard._wish.strategies import pins_for_inputs, pins_for_outputs, without_static


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The checked arguments of `shard`: what is asked of every call."""

    fn: Callable[..., Any]
    name: str
    in_strategy: Any
    out_strategy: Any
    parameter_plan: Any
    options: Options
    call: CallOptions
    mesh: Any
    plan: Plan | None

    @functools.cached_property
    def statics(self) -> tuple[set[int], set[str]]:
        """Positions and names of the static arguments: asked at every call, so found once."""
        return static_positions(self.fn, self.call)


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """One signature, planned: the plan, its schedule, and the trees of arguments and results."""

    request: Request
    plan: Plan
    schedule: Schedule
    chosen: ChosenMesh
    in_tree: Any
    out_tree: Any
    in_avals: tuple[Any, ...]
    donated: tuple[int, ...]
    statics: tuple[Any, ...]


def static_positions(fn: Callable[..., Any], call: CallOptions) -> tuple[set[int], set[str]]:
    """Positions and names of the static arguments, each given either way."""
    numbers, names = set(call.static_argnums), set(call.static_argnames)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = {n % len(positional) if n < 0 and positional else n for n in numbers}
    numbers |= {i for i, n in enumerate(positional) if n in names}
    names |= {positional[i] for i in numbers if i < len(positional)}
    return numbers, names


def dynamic(
    request: Request, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple, dict, tuple[str, ...]]:
    """Arguments without the static ones, and the names of the positional ones that are left."""
    numbers, names = request.statics
    all_names = argument_names(request.fn, len(args))
    left = tuple(a for i, a in enumerate(args) if i not in numbers)
    left_names = tuple(n for i, n in enumerate(all_names) if i not in numbers)
    return left, {k: v for k, v in kwargs.items() if k not in names}, left_names


def abstract(tree: Any) -> Any:
    """Arrays replaced by their shapes and dtypes; what is abstract already stays."""
    return jax.tree.map(_abstract, tree)


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
    if isinstance(x, jax.Array) or hasattr(x, "dtype") or isinstance(x, bool | int | float | complex):
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
    return x


def prepare(
    request: Request,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_progress: Callable[..., None] | None = None,
) -> Prepared:
    """Trace, pin, choose the mesh and plan; nothing is kept if anything fails."""
    left, left_kw, names = dynamic(request, args, kwargs)
    shapes_args, shapes_kw = abstract(tuple(left)), abstract(left_kw)
    statics = request.statics[1]
    in_strategy = without_static(request.in_strategy, argument_names(request.fn, len(args)), tuple(statics))
    pins = pins_for_inputs(
        shapes_args,
        shapes_kw,
        in_strategy,
        request.parameter_plan,
        names=names,
        strict=request.options.strict,
        devices=_devices(request),
    )
    pins = with_metadata(
        pins,
        shapes_args,
        shapes_kw,
        names,
        request.mesh if request.mesh is not None else compat.context_mesh(),
    )
    traced = _trace(request, args, kwargs)
    dynamics = _Dynamic(left, left_kw, names, shapes_args, shapes_kw)
    return _of_trace(request, args, kwargs, on_progress, traced, dynamics, pins)


@dataclasses.dataclass(frozen=True, eq=False)
class _Dynamic:
    """The arguments that are not static, their paths, and their shapes."""

    left: tuple[Any, ...]
    left_kw: dict[str, Any]
    names: Any
    shapes_args: Any
    shapes_kw: Any


@uncollected()
def _of_trace(
    request: Request, args: Sequence[Any], kwargs: Mapping[str, Any], on_progress: Callable[..., None] | None,
    traced: Any, dynamics: _Dynamic, pins: Sequence[Pin | None],
) -> Prepared:  # fmt: skip
    """What follows the trace: the program, its mesh, its plan."""
    left, left_kw, names = dynamics.left, dynamics.left_kw, dynamics.names
    shapes_args, shapes_kw = dynamics.shapes_args, dynamics.shapes_kw
    leaves = input_leaves(shapes_args, shapes_kw, names)
    out_flat, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    out_names = [path_name(path) or "result" for path, _ in out_flat]
    try:
        program = build(
            traced.jaxpr,
            name=request.name,
            input_names=[leaf.path for leaf in leaves],
            output_names=out_names,
            captured=compat.captured_tracers(traced),
        )
    except ShardError as e:
        if not (isinstance(e, NestedShardError) or e.where == ""):
            raise
        line = _line_of(traced.jaxpr, {compat.BOUNDARY, "shard_map"}) or e.where
        raise type(e)(e.what, where=line, fix=e.fix) from None
    donated = _donated(request, left, left_kw, names)
    program = ordered(program, donated)
    given = _mesh_of(request) if request.mesh is not None else compat.context_mesh()
    if hasattr(given, "axis_names"):
        check_meshes(program, axes_of(given))
    out_shapes = jax.tree.unflatten(out_tree, [jax.ShapeDtypeStruct(o.shape, o.dtype) for _, o in out_flat])
    out_pins = pins_for_outputs(out_shapes, request.out_strategy, devices=_devices(request))
    in_leaves, in_tree = jax.tree.flatten((shapes_args, shapes_kw))
    inner = _operator_pins(program)
    every = [*pins, *out_pins, *(p for *_, p in inner)]
    shapes = [leaf.shape for leaf in in_leaves] + [o.shape for _, o in out_flat]
    shapes += [_shape(program, op, side, k) for op, side, k, _ in inner]
    n_in, n_out = len(pins), len(out_pins)
    together = joints(program, inner, n_in + n_out)
    ties = _ties(program, in_leaves, in_tree, out_flat, out_tree, donated, out_pins)

    def planned(chosen: ChosenMesh, request: Request = request) -> tuple[Plan, Schedule]:
        check_meshes(program, chosen.axes)
        topology = topologies.without_unit_axes(_topology(request, chosen))
        resolved = [_cutting(resolve_pin(p, chosen, s), topology) for p, s in zip(every, shapes, strict=True)]
        where = [(i, "result", 0) for i in program.inputs[:n_in]]
        where += [(i, "operand", 0) for i in program.outputs[:n_out]] + [
            (op, side, k) for op, side, k, _ in inner
        ]
        placed = tuple((*w, p) for w, p in zip(where, resolved, strict=True) if p is not None and not p.free)
        if request.plan is not None:
            return request.plan, replay(program, topology, request.plan)
        options = request.options
        wish = Wish(placed, ties, donated, options.level, options.search, _budget(request, topology))
        return make_plan(program, topology, wish, on_progress)

    if isinstance(request.mesh, str) and request.mesh.partition(":")[0] == "auto":
        chosen, plan, schedule = _best(_machines(request, every, shapes, together), planned)
    else:
        chosen = choose_mesh(_mesh_of(request), request.options.device, every, shapes, joint=together)
        plan, schedule = planned(chosen)
    plan = dataclasses.replace(plan, jax_mesh=chosen.mesh, in_tree=in_tree, out_tree=out_tree)
    return Prepared(
        request,
        plan,
        schedule,
        chosen,
        in_tree,
        out_tree,
        tuple(in_leaves),
        donated,
        static_values(request, args, kwargs),
    )


def _best(
    meshes: Sequence[tuple[ChosenMesh, Request]],
    planned: Callable[[ChosenMesh, Request], tuple[Plan, Schedule]],
) -> tuple[ChosenMesh, Plan, Schedule]:
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
    chosen, plan, schedule = found[0]
    told = tuple(f"mesh {c.axes}: {p.cost.objective:.4g} {p.cost.unit}" for c, p, _ in found)
    return chosen, dataclasses.replace(plan, steps=(*plan.steps, *told)), schedule


def _machines(
    request: Request, pins: Sequence[Pin | None], shapes: Sequence[Any], joint: Sequence[Joint]
) -> list[tuple[ChosenMesh, Request]]:
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


def _devices(request: Request) -> int:
    """How many devices there are to cut over."""
    mesh = _mesh_of(request)
    if isinstance(mesh, str) and mesh.partition(":")[0] == "auto":
        name = mesh.partition(":")[2]
        if name:
            return int(name) if name.isdigit() else topologies.device_count(*topologies.parse_name(name))
    entries = (request.in_strategy, request.parameter_plan, request.out_strategy)
    return device_count(mesh, request.options.device, entries)


def _mesh_of(request: Request) -> Any:
    """The mesh the user gave; with a plan and no mesh, the plan's own axes over the devices at hand."""
    if request.mesh is not None or request.plan is None or compat.context_mesh() is not None:
        return request.mesh
    axes, devices = request.plan.mesh, jax.devices(request.options.device)
    if len(devices) < axes.total:
        raise PlanMismatchError(
            f"the plan was made for {axes.total} devices ({axes}), there are {len(devices)}",
            where=f"plan= of {request.name}",
            fix="give mesh= the machine that the plan is for, or plan again",
        )
    return jax.sharding.Mesh(np.array(devices[: axes.total]).reshape(axes.sizes), axes.names)


def _cutting(pin: Pin | None, topology: Topology) -> Pin | None:
    """A pin without mesh axes of size one, which the planner does not see."""
    if pin is None or pin.axes is None:
        return pin
    names = set(topology.mesh.names)
    axes = tuple(d if d is None else tuple(a for a in d if a in names) for d in pin.axes)
    return dataclasses.replace(pin, axes=axes)


def _trace(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    numbers, names = request.statics
    shapes = [a if i in numbers else abstract(a) for i, a in enumerate(args)]
    shapes_kw = {k: v if k in names else abstract(v) for k, v in kwargs.items()}
    jitted = jax.jit(
        request.fn,
        static_argnums=tuple(sorted(numbers)) or None,
        static_argnames=tuple(sorted(names)) or None,
    )
    return jitted.trace(*shapes, **shapes_kw)


def _line_of(jaxpr: Any, primitives: Container[str]) -> str | None:
    """The user's line that calls a sharded function, or a `shard_map`; None if none does.

    Frames of the library are not what users look for; a cached `jit` has kept no other, so its caller's are taken.
    """
    own = (os.path.dirname(__file__) + os.sep, os.path.dirname(jax.__file__) + os.sep)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found = "" if eqn.primitive.name in primitives else None
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if found is None and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
                found = _line_of(inner, primitives)
        if found == "":
            frames = getattr(eqn.source_info.traceback, "frames", ())
            lines = (
                f"{f.file_name}:{f.line_num} ({f.function_name})"
                for f in frames
                if not f.file_name.startswith(own)
            )
            return next(lines, "")
        if found:
            return found
    return None


def _shape(program: Program, op: int, side: str, k: int) -> tuple[int, ...]:
    operator = program.operators[op]
    atom: Any = operator.operands[k] if side == "operand" else operator.results[k]
    return program.tensors[atom].shape if isinstance(atom, int) else tuple(atom.aval.shape)


def program_pins(program: Program, chosen: ChosenMesh, topology: Topology) -> list[tuple[int, str, int, Pin]]:
    """Pins that the user's code put on operators, in the axes of a mesh: (operator, side, index, pin)."""
    out = []
    for op, side, k, pin in _operator_pins(program):
        resolved = _cutting(resolve_pin(pin, chosen, _shape(program, op, side, k)), topology)
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
            pin = parse_entry(wanted, _shape(program, op, side, k), where)
            if pin is None:
                continue
            wanted = pin
        out.append((op, side, k, wanted))
    return out


def _topology(request: Request, chosen: ChosenMesh) -> Topology:
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


def _budget(request: Request, topology: Topology) -> float | None:
    if request.options.memory_budget is not None:
        return float(request.options.memory_budget)
    hbm = topology.chip.hbm_bytes
    return None if hbm is None else 0.9 * hbm


def _donated(request: Request, args: tuple, kwargs: dict, names: tuple[str, ...]) -> tuple[int, ...]:
    """Flat indices of the donated leaves."""
    numbers, _ = request.statics
    positions = sorted(set(range(len(args) + len(numbers))) - numbers)
    out, leaf = [], 0
    for i, (name, value) in enumerate([*zip(names, args, strict=False), *sorted(kwargs.items())]):
        n = len(jax.tree.leaves(value))
        given = i < len(args) and positions[i] in request.call.donate_argnums
        if given or name in request.call.donate_argnames:
            out += range(leaf, leaf + n)
        leaf += n
    return tuple(out)


def _ties(
    program: Program, in_leaves: Sequence[Any], in_tree: Any, out_flat: Sequence[Any], out_tree: Any,
    donated: tuple[int, ...], out_pins: Sequence[Pin | None],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    out_leaves = [o for _, o in out_flat]
    args_tree, kwargs_tree = in_tree.children()
    arguments = _starts([*args_tree.children(), *kwargs_tree.children()])
    outer = out_tree.node_data()
    several = outer is not None and outer[0] in (tuple, list)
    if any(tree == out_tree for _, tree in arguments):
        several = False  # a list of parameters in, one of gradients out: one result, not several
    parts = out_tree.children() if several else [out_tree]
    pinned = {i for i, p in enumerate(out_pins) if p is not None}
    pairs = find_ties(in_leaves, out_leaves, arguments, _starts(parts), donated, pinned)
    tied_in, tied_out = {i for _, i in pairs}, {o for o, _ in pairs} | pinned
    # State handed back in another container is known by its path: `bn.mean` of the result is that of the argument.
    by_path: dict[str, list[int]] = {}
    for i, op in enumerate(program.inputs[: len(in_leaves)]):
        by_path.setdefault(program.operators[op].name.partition(".")[2], []).append(i)
    for o, op in enumerate(program.outputs):
        path = program.operators[op].name.partition(".")[2]
        if o in tied_out or not path or path.isdigit():
            continue
        same = [i for i in by_path.get(path, ()) if i not in tied_in]
        if len(same) != 1:
            continue
        if (out_leaves[o].shape, out_leaves[o].dtype) == (in_leaves[same[0]].shape, in_leaves[same[0]].dtype):
            pairs.append((o, same[0]))
            tied_in.add(same[0])
    return tuple((program.outputs[o], program.inputs[i]) for o, i in pairs)


def _starts(trees: Sequence[Any]) -> list[tuple[int, Any]]:
    out, at = [], 0
    for t in trees:
        out.append((at, t))
        at += t.num_leaves
    return out


def static_values(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The static arguments of a call: (position or name, value)."""
    numbers, names = request.statics
    positional = tuple((i, a) for i, a in enumerate(args) if i in numbers)
    return positional + tuple((n, kwargs[n]) for n in sorted(kwargs) if n in names)
