"""The program of a planned call: compiled for calls at top level, inlined into the trace of another transformation.

A compiled program takes its arguments in the planned layouts. JAX itself places arrays that are on the host or not
committed to devices; an array committed to another sharding is moved first. Under `jit`, `grad` or `scan` nothing is
compiled: the planned program is inlined into that trace, in a form that JAX can differentiate.

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
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from jshard._api.compiler_options import compiler_options, explicit_budget
from jshard._api.differentiation import WITHOUT_PADDING, planned_alone_note
from jshard._api.gradient_together import gradient_together
from jshard._api.plan import Plan
from jshard._api.prepare import PlannedCall
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._api.trace_call import explicit_sharding
from jshard._core import jaxcompat as compat
from jshard._core.errors import MeshError
from jshard._core.jax_types import Function, JaxMesh, PyTree
from jshard._core.layout import Layout
from jshard._core.marker_primitives import mark_argument, never_compiled
from jshard._lower.spmd import spmd
from jshard._plan.derivative_rule import plan_derivative_rule
from jshard._plan.rows import EntryRow
from jshard._spec.committed_shardings import (
    Placement,
    committed_sharding,
    describe_sharding,
    equivalent_axes,
    max_received_bytes,
    same_devices,
)
from jshard._spec.mesh_selection import ChosenMesh


_log = logging.getLogger("jshard")


class Executable:
    """One planned signature, compiled when it is first run.

    `is_common`: whether its plan is known to be that of all processes of the program.
    """

    def __init__(self, prepared: PlannedCall, *, is_common: bool = False):
        self.prepared = prepared
        self.is_common = is_common or compat.coordination_client() is None
        self.notes: list[str] = []  # how backward passes were planned, for `Plan.steps`
        self._lock = threading.RLock()
        self._compiled: jax.stages.Compiled | None = None

    @property
    def plan(self) -> Plan:
        """The plan; its steps include notes on derivatives that were taken from outside."""
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
        """The compiled program, cached."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self.lower().compile()
        return self._compiled

    def warn_if_interrupted(self) -> None:
        """Log that the plan is what an interrupted search had."""
        plan, name = self.prepared.plan, self.prepared.request.name
        if plan.interrupted:
            _log.warning(
                "%s: the search was interrupted; the best plan it had (gap %.2g%%) is used from now on, "
                "until %s.clear_cache()",
                name, 100 * plan.cost.gap, name,
            )  # fmt: skip

    @functools.cached_property
    def inlined(self) -> Function:
        """The program as a function for another trace: flat arguments and captured arrays -> flat results."""
        return _differentiable(self.prepared, self.notes)

    def accepts_placement(self, placement: Placement) -> bool:
        """Whether a call with arguments placed so would get this plan: it moves no argument that is not pinned."""
        prepared, sharded = self.prepared, dict(placement.sharded)
        mesh = prepared.chosen.mesh
        if placement.mesh is None:
            if prepared.chosen.source == "arguments":
                return False
        elif not same_devices(placement.mesh, mesh):
            return False
        if not prepared.committed <= sharded.keys():
            return False
        return all(
            i in prepared.pinned or self._is_placed_as_planned(i, sharding, mesh)
            for i, sharding in sharded.items()
        )

    def _is_placed_as_planned(self, i: int, sharding: NamedSharding, mesh: JaxMesh) -> bool:
        row = self.prepared.plan.inputs[i]
        return equivalent_axes(sharding, row.shape, mesh) == row.layout.dims

    def entry_moves(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> tuple[EntryRow, ...]:
        """The arguments that are moved before a call, each with the bytes received per device."""
        leaves = jax.tree.leaves(traced_arguments(self.prepared.request, args, kwargs))
        plan = self.prepared.plan
        rows = []
        for x, row, target in zip(leaves, plan.inputs, jax.tree.leaves(plan.in_shardings), strict=False):
            source = committed_sharding(x)
            if source is None and isinstance(x, jax.Array) and not compat.is_tracer(x):
                source = x.sharding
            if source is None or not _needs_move(x, source, target):
                continue
            named = isinstance(source, NamedSharding)
            if named and equivalent_axes(source, row.shape, target.mesh) == row.layout.dims:
                continue  # the same blocks on the same devices, on a mesh with other axes
            received = max_received_bytes(source, target, row.shape, compat.itemsize(x.dtype))
            rows.append(EntryRow(row.path, describe_sharding(source), str(row.layout), float(received)))
        return tuple(rows)

    def run(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> tuple[PyTree, object]:
        """The results of a call, and the data with which JAX's dispatch repeats it; None if it must not."""
        if _has_no_devices(self.prepared) or not _devices_can_run(self.prepared.chosen.mesh):
            raise _cannot_run_error(self.prepared, "")
        compiled = self.compile()
        traced = traced_arguments(self.prepared.request, args, kwargs)
        placed, placed_kw, repeatable = _place_arguments(self.prepared, *traced)
        out, fastpath = compat.call_and_fastpath_data(compiled, placed, placed_kw)
        return _retype_for_explicit_mesh(self.prepared, out, fastpath if repeatable else None)


def _has_no_devices(prepared: PlannedCall) -> bool:
    """Whether the mesh is abstract and no mesh in context supplies devices."""
    mesh, context = prepared.chosen.mesh, compat.context_mesh()
    if not isinstance(mesh, AbstractMesh):
        return False
    if context is not None and context.size == mesh.size:
        return False
    # In a trace, an abstract mesh of the arguments' types stands for devices.
    return compat.at_top_level() or prepared.chosen.source != "arguments"


def _devices_can_run(mesh: JaxMesh) -> bool:
    """Whether the devices of a mesh can run programs; those of an ahead-of-time compiler cannot."""
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
    body = spmd(prepared.schedule, mesh, donated=prepared.donated)
    constants = _captured_arrays(prepared)

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # A separate computation: its arguments have the planned shardings, whatever mesh is in context.
        with compat.with_mesh(mesh):
            return _unflatten_results(prepared, body(*jax.tree.leaves((args, kwargs)), *constants))

    run.__name__ = run.__qualname__ = prepared.request.name
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(prepared.in_avals, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(prepared.in_tree, shapes)
    donate_argnums, donate_argnames = _donated_arguments(prepared)
    rows = prepared.plan.outputs
    jitted = jax.jit(
        run,
        out_shardings=jax.tree.unflatten(
            prepared.out_tree, [NamedSharding(mesh, r.layout.spec) for r in rows]
        ),
        donate_argnums=donate_argnums or None,
        donate_argnames=donate_argnames or None,
        compiler_options=compiler_options(explicit_budget(prepared.plan), mesh),
    )
    return jitted.lower(*args, **kwargs)


def _captured_arrays(prepared: PlannedCall) -> list[jax.Array]:
    """The captured arrays; those with a sharding in their type are placed in their planned layout, untyped."""
    assignment, mesh = prepared.schedule.assignment, prepared.chosen.mesh
    program = assignment.program
    out = list(program.constants)
    for k, op in enumerate(program.inputs[len(prepared.in_avals) :]):
        if not compat.is_tracer(out[k]) and explicit_sharding(out[k]) is not None:
            layout = assignment.result_layout(program.operators[op].results[0])
            out[k] = jax.device_put(out[k], NamedSharding(mesh, layout.spec))
    return out


def _unflatten_results(prepared: PlannedCall, leaves: Sequence[jax.Array]) -> PyTree:
    """The results as a pytree, with the weak types of the function, which `shard_map` drops."""
    typed = [compat.weakly_typed(x) if w else x for x, w in zip(leaves, prepared.weak_typed, strict=True)]
    return jax.tree.unflatten(prepared.out_tree, typed)


def _donated_arguments(prepared: PlannedCall) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and keywords of the donated arguments, among the traced ones."""
    donated = set(prepared.donated)
    args, kwargs = jax.tree.unflatten(prepared.in_tree, range(len(prepared.in_avals)))
    positions = tuple(i for i, a in enumerate(args) if donated.intersection(jax.tree.leaves(a)))
    return positions, tuple(n for n, a in kwargs.items() if donated.intersection(jax.tree.leaves(a)))


def _differentiable(prepared: PlannedCall, notes: list[str]) -> PyTree:
    """The program as a function of flat arguments and captured arrays, for use in another trace.

    Its derivative rule runs the schedule of `gradient_together`, planned when JAX first differentiates it; `notes`
    receives why the backward pass was not planned jointly. JAX compiles the function as a whole where it runs eagerly.
    """
    mesh, name = prepared.chosen.mesh, prepared.request.name
    body = spmd(prepared.schedule, mesh, vma=True, plan_rule=plan_derivative_rule)
    forward_passes: dict[tuple[int, ...], Function] = {}  # key: numbers of differentiated arguments

    def forward(*values: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(body(*values))

    def jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> PyTree:
        numbers = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        if numbers not in forward_passes:
            of, planned = gradient_together(prepared, numbers)
            notes.extend([WITHOUT_PADDING] if of is not prepared else [])
            notes.extend([planned.note] if planned.note else [])
            forward_passes[numbers] = spmd(
                planned.schedule, of.chosen.mesh, vma=True, plan_rule=plan_derivative_rule
            )

        def of_differentiated(*differentiated: jax.Array) -> tuple[jax.Array, ...]:
            values = list(primals)
            for i, x in zip(numbers, differentiated, strict=True):
                values[i] = x
            return tuple(forward_passes[numbers](*values))

        return jax.jvp(of_differentiated, [primals[i] for i in numbers], [tangents[i] for i in numbers])

    forward.__name__ = forward.__qualname__ = name
    # JAX allows no effects in derivative rules.
    jaxpr = prepared.schedule.assignment.program.jaxpr
    if jaxpr is None or compat.has_effects(jaxpr):

        def watched(*values: jax.Array) -> tuple[jax.Array, ...]:
            return forward(
                *(
                    _note_differentiation(x, notes) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else x
                    for x in values
                )
            )

        watched.__name__ = watched.__qualname__ = name
        return jax.jit(watched)
    rule = jax.custom_jvp(forward)
    rule.defjvp(jvp, symbolic_zeros=True)
    return jax.jit(rule)


def _note_differentiation(x: jax.Array, notes: list[str]) -> PyTree:
    """The identity; adds a note when it is differentiated."""

    @jax.custom_jvp
    def identity(x: jax.Array) -> jax.Array:
        return x

    @identity.defjvp
    def _(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> PyTree:
        notes.append(planned_alone_note("", "JAX lets no effects into rules of derivatives"))
        return primals[0], tangents[0]

    return identity(x)


def inline(executable: Executable, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Run the planned program in the current trace, in a form that JAX can differentiate."""
    prepared = executable.prepared
    leaves = jax.tree.leaves(traced_arguments(prepared.request, args, kwargs))
    marked = [mark_argument(x, prepared.request.name) for x in leaves]
    if _has_no_devices(prepared):
        error = _cannot_run_error(prepared, "")
        marked = [never_compiled(x, error) for x in marked]
    values = (*marked, *prepared.schedule.assignment.program.constants)
    mesh, explicit = prepared.chosen.mesh, _explicit_mesh(values)

    def run(*values: jax.Array) -> PyTree:
        with compat.with_mesh(mesh):
            return executable.inlined(*values)

    out: PyTree
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
        assignment = prepared.schedule.assignment
        specs = tuple(
            user_spec(prepared.chosen, explicit, assignment.operand_layout(i, 0))
            for i in assignment.program.outputs
        )
        with compat.with_mesh(explicit):
            out = jax.sharding.auto_axes(run, axes=explicit.axis_names, out_sharding=specs)(*values)
    return _unflatten_results(prepared, out)


def _explicit_mesh(values: Sequence[object]) -> AbstractMesh | None:
    """The mesh with Explicit axes in context, else in the type of an argument; None if there is none."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None) for x in values]
    return next((m for m in meshes if m is not None and AxisType.Explicit in m.axis_types), None)


def user_spec(chosen: ChosenMesh, mesh: JaxMesh, layout: Layout) -> PartitionSpec:
    """A layout in the axes of the user's mesh; a dimension that these cannot express is replicated."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    axis_parts = {
        n: parts for n, parts in chosen.axis_parts.items() if sizes.get(n) == chosen.axes.size(*parts)
    }

    def dimension(axes: tuple[str, ...]) -> tuple[str, ...]:
        names, remaining = [], axes
        while remaining:
            name = next((n for n, parts in axis_parts.items() if remaining[: len(parts)] == parts), None)
            if name is None:
                return ()
            names.append(name)
            remaining = remaining[len(axis_parts[name]) :]
        return tuple(names)

    return PartitionSpec(*(dimension(d) or None for d in layout.dims))


def _retype_for_explicit_mesh(prepared: PlannedCall, out: PyTree, fastpath: Any) -> tuple[PyTree, object]:
    """The results with types on the Explicit mesh in context, in their planned blocks where its axes allow."""
    mesh, assignment = jax.sharding.get_mesh(), prepared.schedule.assignment
    if mesh.empty or _explicit_mesh(()) is None:
        return out, fastpath
    leaves, tree = jax.tree.flatten(out)
    layouts = [assignment.operand_layout(i, 0) for i in assignment.program.outputs]
    wanted = [NamedSharding(mesh, user_spec(prepared.chosen, mesh, lay)) for lay in layouts]
    typed = jax.device_put(leaves, wanted)
    same = all(
        y.sharding.is_equivalent_to(x.sharding, x.ndim)
        and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
        for x, y in zip(leaves, typed, strict=True)
    )
    if fastpath is not None:
        # Without a move, only the types differ, and dispatch can set these itself.
        fastpath = (
            fastpath._replace(out_shardings=wanted, out_avals=[y.aval for y in typed]) if same else None
        )
    return jax.tree.unflatten(tree, typed), fastpath


def _place_arguments(prepared: PlannedCall, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The arguments in the planned shardings, and whether JAX's dispatch can place them itself in later calls."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    misplaced = [i for i, (x, s) in enumerate(zip(leaves, shardings, strict=True)) if _is_misplaced(x, s)]
    if not misplaced:
        return args, kwargs, True
    for i in misplaced:
        _check_devices(prepared.request, leaves[i], shardings[i])
    # Dispatch passes on arrays over as many devices as the program has, and places all others itself.
    repeatable = all(len(leaves[i].sharding.device_set) != shardings[i].num_devices for i in misplaced)
    moved = jax.device_put([leaves[i] for i in misplaced], [shardings[i] for i in misplaced])
    for i, x in zip(misplaced, moved, strict=True):
        leaves[i] = x
    return (*jax.tree.unflatten(tree, leaves), repeatable)


def _is_misplaced(x: jax.Array, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and _needs_move(x, x.sharding, sharding)


def _needs_move(x: jax.Array, sharding: Sharding, target: NamedSharding) -> bool:
    """Whether an argument with this sharding must be moved; not if JAX places it itself (host, not committed)."""
    if not getattr(x, "committed", True) or sharding is target:
        return False
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh) or isinstance(target.mesh, AbstractMesh):
        dims = (
            equivalent_axes(sharding, x.shape, target.mesh) if isinstance(sharding, NamedSharding) else None
        )
        return dims is None or NamedSharding(target.mesh, Layout(dims).spec) != target
    return not sharding.is_equivalent_to(target, x.ndim)


def _check_devices(request: ShardRequest, x: jax.Array, sharding: NamedSharding) -> None:
    foreign = x.sharding.device_set - sharding.device_set
    if foreign:
        names = ", ".join(str(d) for d in sorted(foreign, key=lambda d: d.id)[:3])
        raise MeshError(
            f"an argument of shape {x.shape} lies on {names}, outside the mesh of {len(sharding.device_set)} devices",
            where=f"call of {request.name}",
            fix="jax.device_put(x, f.plan(x).in_shardings[0][0]), or give shard a mesh with these devices",
        )
