"""From a planned signature to a running program: compile it once, place what lies elsewhere, or write it inline.

A compiled program takes its arguments in the planned layouts. JAX itself brings there what is on the host or not
committed to a device; what is committed elsewhere is moved first. Under another transformation (`jit`, `grad`,
`scan`) nothing is compiled: the planned program is written into that trace, in the form JAX can differentiate.

>>> import jax.numpy as jnp, jshard
>>> from jshard._api.prepare import prepare
>>> f = jshard.shard(lambda x, w: x @ w)
>>> executable = Executable(prepare(f._request, (jnp.ones((4, 2)), jnp.ones((2, 3))), {}))
>>> executable.run((jnp.ones((4, 2)), jnp.ones((2, 3))), {})[0].shape
(4, 3)
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jshard import _jaxcompat as compat
from jshard._api.differentiation import plan_for_gradient, planned_alone_note
from jshard._api.plan import Plan
from jshard._api.prepare import PlannedCall
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._api.trace_call import explicit_sharding
from jshard._core.errors import MeshError
from jshard._core.layout import Layout
from jshard._lower.spmd import spmd
from jshard._plan.derivative_rule import plan_derivative_rule
from jshard._plan.records import EntryRow
from jshard._spec.committed_shardings import (
    Placement,
    committed_sharding,
    describe_sharding,
    equivalent_axes,
    max_received_bytes,
    same_devices,
)
from jshard._spec.mesh_selection import ChosenMesh


class Executable:
    """One planned signature, compiled when it is first run."""

    def __init__(self, prepared: PlannedCall):
        self.prepared = prepared
        self.notes: list[str] = []  # of derivatives that were taken from outside
        self._lock = threading.RLock()
        self._compiled: jax.stages.Compiled | None = None

    @property
    def plan(self) -> Plan:
        """The plan, and what became of derivatives that were taken of it from outside."""
        plan = self.prepared.plan
        return (
            dataclasses.replace(plan, steps=(*plan.steps, *dict.fromkeys(self.notes))) if self.notes else plan
        )

    def lower(self) -> jax.stages.Lowered:
        """The planned program for arguments in the planned layouts."""
        if _has_no_devices(self.prepared):
            raise _cannot_run_error(self.prepared, f"{self.prepared.request.name}.lower")
        return _lower(self.prepared)

    def compile(self) -> jax.stages.Compiled:
        """The program compiled, once."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self.lower().compile()  # kept only when whole
        return self._compiled

    @functools.cached_property
    def inlined(self) -> Any:
        """The program for use inside another trace: flat arguments and captured arrays to flat results."""
        return _differentiable(self.prepared, self.notes)

    def accepts_placement(self, lying: Placement) -> bool:
        """Whether this is the plan of a call whose arguments lie so: of all that are not pinned, none is moved."""
        prepared, cut = self.prepared, dict(lying.sharded)
        mesh = prepared.chosen.mesh
        if lying.mesh is None:
            if prepared.chosen.source == "arguments":
                return False
        elif not same_devices(lying.mesh, mesh):
            return False
        if not prepared.committed <= cut.keys():
            return False
        return all(
            i in prepared.pinned or self._is_placed_as_planned(i, sharding, mesh)
            for i, sharding in cut.items()
        )

    def _is_placed_as_planned(self, i: int, sharding: NamedSharding, mesh: Any) -> bool:
        row = self.prepared.plan.inputs[i]
        return equivalent_axes(sharding, row.shape, mesh) == row.layout.dims

    def entry_moves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[EntryRow, ...]:
        """The arguments that are moved before a call, and what that receives."""
        left, left_kw = traced_arguments(self.prepared.request, args, kwargs)
        plan, rows = self.prepared.plan, []
        shardings = jax.tree.leaves(plan.in_shardings)
        for x, row, target in zip(jax.tree.leaves((left, left_kw)), plan.inputs, shardings, strict=False):
            given = committed_sharding(x) or (
                x.sharding if isinstance(x, jax.Array) and not compat.is_tracer(x) else None
            )
            if given is None or not _needs_move(x, given, target):
                continue
            if (
                isinstance(given, NamedSharding)
                and equivalent_axes(given, row.shape, target.mesh) == row.layout.dims
            ):
                continue  # the same blocks on the same devices, told of another mesh
            moved = max_received_bytes(given, target, row.shape, compat.itemsize(x.dtype))
            rows.append(EntryRow(row.path, describe_sharding(given), str(row.layout), float(moved)))
        return tuple(rows)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Results of a call, and what JAX's dispatch needs to repeat it; None where it could not know better."""
        if _has_no_devices(self.prepared) or not _devices_can_run(self.prepared.chosen.mesh):
            raise _cannot_run_error(self.prepared, "")
        compiled = self.compile()
        left, left_kw = traced_arguments(self.prepared.request, args, kwargs)
        left, left_kw, repeatable = _place_arguments(self.prepared, left, left_kw)
        out, again = compat.call_and_fastpath_data(compiled, left, left_kw)
        return _retype_for_explicit_mesh(self.prepared, out, again if repeatable else None)


def _has_no_devices(prepared: PlannedCall) -> bool:
    """Whether the mesh is a description that no context fills with devices."""
    mesh, here = prepared.chosen.mesh, compat.context_mesh()
    if not isinstance(mesh, AbstractMesh):
        return False
    if here is not None and here.size == mesh.size:
        return False
    return compat.at_top_level() or prepared.chosen.source != "arguments"  # in a trace they are on devices


def _devices_can_run(mesh: Any) -> bool:
    """Whether the devices of a mesh can run something; those that a compiler brings cannot."""
    if isinstance(mesh, AbstractMesh):
        return True
    device = mesh.devices.flat[0]
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:
        return False


def _cannot_run_error(prepared: PlannedCall, where: str) -> MeshError:
    name, mesh = prepared.request.name, prepared.request.mesh
    machine = str(getattr(mesh, "name", "")) or (mesh.partition(":")[2] if isinstance(mesh, str) else "")
    named = f" of {machine}" if machine else ""
    if isinstance(prepared.chosen.mesh, AbstractMesh):
        return MeshError(
            f"{name} is planned for {prepared.plan.mesh}, a description{named} without devices",
            where=where or f"call of {name}",
            fix="its plan, which needs none: .plan(...) of a function, jshard.flax.plan_of(...) of a module; a mesh of "
            "devices that are here to run it; jshard.topology(...) where its compiler is installed, libtpu or JAX's "
            "CUDA plugin, to compile it",
        )
    return MeshError(
        f"{name} is planned for {prepared.plan.mesh}{named}, whose devices are not here: they compile only",
        where=where or f"call of {name}",
        fix=".plan(...) and .lower(...).compile(), which need none; a mesh of devices that are here to run it",
    )


def _lower(prepared: PlannedCall) -> jax.stages.Lowered:
    mesh = prepared.chosen.mesh
    body = spmd(prepared.schedule, mesh)
    constants = _captured_arrays(prepared)

    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiled call of its own: its arguments come in our shardings, a mesh in context says nothing of them.
        with compat.with_mesh(mesh):
            return _unflatten_results(prepared, body(*jax.tree.leaves((args, kwargs)), *constants))

    run.__name__ = run.__qualname__ = prepared.request.name
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(prepared.in_avals, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(prepared.in_tree, shapes)
    given, named = _donated_arguments(prepared)
    rows = prepared.plan.outputs
    jitted = jax.jit(
        run,
        out_shardings=jax.tree.unflatten(
            prepared.out_tree, [NamedSharding(mesh, r.layout.spec) for r in rows]
        ),
        donate_argnums=given or None,
        donate_argnames=named or None,
    )
    return jitted.lower(*args, **kwargs)


def _captured_arrays(prepared: PlannedCall) -> list[Any]:
    """Captured arrays; those typed by a mesh with Explicit axes in their planned blocks, without that type."""
    choice, mesh = prepared.schedule.assignment, prepared.chosen.mesh
    program = choice.program
    out = list(program.constants)
    for k, op in enumerate(program.inputs[len(prepared.in_avals) :]):
        if not compat.is_tracer(out[k]) and explicit_sharding(out[k]) is not None:
            layout = choice.result_layout(program.operators[op].results[0])
            out[k] = jax.device_put(out[k], NamedSharding(mesh, layout.spec))
    return out


def _unflatten_results(prepared: PlannedCall, leaves: Sequence[Any]) -> Any:
    """The results as the function itself types them: blocks of a computation have lost weak types."""
    typed = [compat.weakly_typed(x) if w else x for x, w in zip(leaves, prepared.weak_typed, strict=True)]
    return jax.tree.unflatten(prepared.out_tree, typed)


def _donated_arguments(prepared: PlannedCall) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Donated arguments by position and by keyword, static ones not counted."""
    donated = set(prepared.donated)
    numbered = jax.tree.unflatten(prepared.in_tree, range(len(prepared.in_avals)))
    args, kwargs = numbered
    given = tuple(i for i, a in enumerate(args) if donated.intersection(jax.tree.leaves(a)))
    return given, tuple(n for n, a in kwargs.items() if donated.intersection(jax.tree.leaves(a)))


def _differentiable(prepared: PlannedCall, notes: list[str]) -> Any:
    """The program as a function of flat arguments and captured arrays for use inside another trace.

    Its derivative is that of the program planned for training; `said` gets the reason where that could not be planned.
    Compiled as a whole where JAX runs it eagerly.
    """
    mesh, name = prepared.chosen.mesh, prepared.request.name
    body = spmd(prepared.schedule, mesh, vma=True, plan_rule=plan_derivative_rule)
    trained: dict[tuple[int, ...], Any] = {}

    def forward(*values: Any) -> tuple[Any, ...]:
        return tuple(body(*values))

    def pushed(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        if moving not in trained:
            found = plan_for_gradient(prepared, moving)
            notes.extend([found.note] if found.note else [])
            trained[moving] = spmd(found.schedule, mesh, vma=True, plan_rule=plan_derivative_rule)

        def of_moving(*moved: Any) -> tuple[Any, ...]:
            values = list(primals)
            for i, x in zip(moving, moved, strict=True):
                values[i] = x
            return tuple(trained[moving](*values))

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])

    forward.__name__ = forward.__qualname__ = name
    if compat.has_effects(prepared.schedule.assignment.program.jaxpr):  # JAX lets none into rules

        def watched(*values: Any) -> tuple[Any, ...]:
            return forward(
                *(
                    _note_differentiation(x, notes) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else x
                    for x in values
                )
            )

        watched.__name__ = watched.__qualname__ = name
        return jax.jit(watched)
    rule = jax.custom_jvp(forward)
    rule.defjvp(pushed, symbolic_zeros=True)
    return jax.jit(rule)


def _note_differentiation(x: Any, notes: list[str]) -> Any:
    """The value itself; `said` is told where it is differentiated."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        notes.append(planned_alone_note("", "JAX lets no effects into rules of derivatives"))
        return primals[0], tangents[0]

    return same(x)


def inline(program: Executable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The planned program inside another trace, in the form JAX can differentiate."""
    prepared = program.prepared
    leaves = jax.tree.leaves(traced_arguments(prepared.request, args, kwargs))
    marked = [compat.mark_argument(x, prepared.request.name) for x in leaves]
    if _has_no_devices(prepared):
        error = _cannot_run_error(prepared, "")
        marked = [compat.never_compiled(x, error) for x in marked]
    values = (*marked, *prepared.schedule.assignment.program.constants)
    mesh, explicit = prepared.chosen.mesh, _explicit_mesh(values)

    def run(*values: Any) -> Any:
        with compat.with_mesh(mesh):
            return program.inlined(*values)

    out: Any
    if explicit is None:
        out = run(*values)
    else:
        if explicit.size != mesh.size:
            name = prepared.request.name
            raise MeshError(
                f"{name} is planned for {mesh.size} devices, but an Explicit mesh of {explicit.size} is in use: "
                f"{explicit.axis_names}",
                where=f"call of {name}",
                fix=f"jshard.shard({name}, ..., mesh=...) with that mesh",
            )
        choice = prepared.schedule.assignment
        specs = tuple(
            user_spec(prepared.chosen, explicit, choice.operand_layout(i, 0)) for i in choice.program.outputs
        )
        with compat.with_mesh(explicit):
            out = jax.sharding.auto_axes(run, axes=explicit.axis_names, out_sharding=specs)(*values)
    return _unflatten_results(prepared, out)


def _explicit_mesh(values: Sequence[Any]) -> Any:
    """The mesh with Explicit axes that is in context, or on which an argument is typed; None if neither."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None) for x in values]
    return next((m for m in meshes if m is not None and AxisType.Explicit in m.axis_types), None)


def user_spec(chosen: ChosenMesh, mesh: Any, layout: Layout) -> PartitionSpec:
    """A layout in the axes of the user's own mesh; a dimension that they cannot express is whole."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    own = {n: parts for n, parts in chosen.axis_parts.items() if sizes.get(n) == chosen.axes.size(*parts)}

    def dimension(axes: tuple[str, ...]) -> tuple[str, ...]:
        names, left = [], axes
        while left:
            name = next((n for n, parts in own.items() if left[: len(parts)] == parts), None)
            if name is None:
                return ()
            names.append(name)
            left = left[len(own[name]) :]
        return tuple(names)

    return PartitionSpec(*(dimension(d) or None for d in layout.dims))


def _retype_for_explicit_mesh(prepared: PlannedCall, out: Any, fastpath: Any) -> tuple[Any, Any]:
    """Results as a context with Explicit axes wants them: on that mesh, in the same blocks where its axes allow."""
    mesh, choice = jax.sharding.get_mesh(), prepared.schedule.assignment
    if mesh.empty or _explicit_mesh(()) is None:
        return out, fastpath
    leaves, tree = jax.tree.flatten(out)
    layouts = [choice.operand_layout(i, 0) for i in choice.program.outputs]
    wanted = [NamedSharding(mesh, user_spec(prepared.chosen, mesh, lay)) for lay in layouts]
    typed = jax.device_put(leaves, wanted)
    same = all(
        y.sharding.is_equivalent_to(x.sharding, x.ndim)
        and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
        for x, y in zip(leaves, typed, strict=True)
    )
    if fastpath is not None:
        # What stays where it is only gets other types, which is all that dispatch has to know.
        fastpath = (
            fastpath._replace(out_shardings=wanted, out_avals=[y.aval for y in typed]) if same else None
        )
    return jax.tree.unflatten(tree, typed), fastpath


def _place_arguments(prepared: PlannedCall, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The arguments where the plan wants them, and whether JAX's own dispatch can do the same next time."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    elsewhere = [i for i, (x, s) in enumerate(zip(leaves, shardings, strict=True)) if _is_misplaced(x, s)]
    if not elsewhere:
        return args, kwargs, True
    for i in elsewhere:
        _check_devices(prepared.request, leaves[i], shardings[i])
    # It takes arrays on as many devices as the program has as they are, and brings others to their places.
    repeatable = all(len(leaves[i].sharding.device_set) != shardings[i].num_devices for i in elsewhere)
    moved = jax.device_put([leaves[i] for i in elsewhere], [shardings[i] for i in elsewhere])
    for i, x in zip(elsewhere, moved, strict=True):
        leaves[i] = x
    return (*jax.tree.unflatten(tree, leaves), repeatable)


def _is_misplaced(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and _needs_move(x, x.sharding, sharding)


def _needs_move(x: Any, sharding: Any, target: NamedSharding) -> bool:
    """Whether an argument that lies as `given` is moved; what is on the host or not committed JAX itself places."""
    if not getattr(x, "committed", True) or sharding is target:
        return False
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh) or isinstance(target.mesh, AbstractMesh):
        dims = (
            equivalent_axes(sharding, x.shape, target.mesh) if isinstance(sharding, NamedSharding) else None
        )
        return dims is None or NamedSharding(target.mesh, Layout(dims).spec) != target
    return not sharding.is_equivalent_to(target, x.ndim)


def _check_devices(request: ShardRequest, x: Any, sharding: NamedSharding) -> None:
    foreign = x.sharding.device_set - sharding.device_set
    if foreign:
        names = ", ".join(str(d) for d in sorted(foreign, key=lambda d: d.id)[:3])
        raise MeshError(
            f"an argument of shape {x.shape} lies on {names}, outside the mesh of {len(sharding.device_set)} devices",
            where=f"call of {request.name}",
            fix="jax.device_put(x, f.plan(x).in_shardings[0][0]), or give shard a mesh with these devices",
        )
