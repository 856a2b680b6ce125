"""Tracing a call on the shapes of its arguments: the jaxpr, and the program under the user's names.

>>> abstract((jax.numpy.ones(3), 2.0))
(ShapeDtypeStruct(shape=(3,), dtype=float32), ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True))
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jshard._api.call_state import refuse_captured_writes, refuse_refs
from jshard._api.machine import requested_mesh
from jshard._api.named_outputs import with_marked_outputs
from jshard._api.shard_request import ShardRequest, named_traced_arguments, static_values, traced_arguments
from jshard._core import jaxcompat as compat
from jshard._core.errors import NestedShardError, ShardError
from jshard._core.jax_types import Aval, ClosedJaxpr, JaxMesh, Jaxpr, PyTree
from jshard._core.marker_primitives import ARGUMENT_MARKER
from jshard._core.padded_array import holds_padded
from jshard._program.builder import PinOfName
from jshard._program.graph import Program
from jshard._program.memory.list_scheduling import reorder_for_memory
from jshard._program.trace import build
from jshard._program.user_shard_map import check_meshes, mesh_axes
from jshard._spec.committed_shardings import Placement, placement
from jshard._spec.tree_paths import Leaf, input_leaves, path_name


@dataclasses.dataclass(frozen=True, eq=False)
class TracedArguments:
    """The arguments of a call that are not static.

    `shapes`: (args, kwargs) as `ShapeDtypeStruct`s. `user_view`: the same leaves in the containers that the user
    sees. `placement`: the shardings that arrays are committed to.
    """

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    names: tuple[str, ...]
    shapes: tuple[tuple, dict[str, PyTree]]
    user_view: tuple[tuple, dict[str, PyTree]]
    placement: Placement

    @staticmethod
    def of(request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> TracedArguments:
        traced, traced_kw, names = named_traced_arguments(request, args, kwargs)
        shapes = abstract(traced), abstract(traced_kw)
        no_mesh = request.mesh is None and compat.context_mesh() is None
        committed = placement(jax.tree.leaves((traced, traced_kw)), use_argument_mesh=no_mesh)
        return TracedArguments(traced, traced_kw, names, shapes, request.view.arguments(*shapes), committed)

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves with the paths that the user knows, in flattening order."""
        return input_leaves(*self.user_view, self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedProgram:
    """The program of a call.

    `result`: the result as the user sees it, of shapes. `avals`, `tree`: all results of `fn`, changed state included.
    `weak_typed`: which of them have a weak type.
    """

    program: Program
    result: PyTree
    avals: list[Aval]
    tree: PyTree
    weak_typed: tuple[bool, ...]


BuiltPrograms = dict[tuple[object, ...], tuple[ClosedJaxpr, TracedProgram]]
"""Programs of one traced call by jaxpr, with the jaxpr."""


def abstract(tree: PyTree) -> PyTree:
    """A pytree with arrays and numbers replaced by `ShapeDtypeStruct`s without shardings."""
    return jax.tree.map(_abstract, tree)


def _abstract(x: PyTree) -> PyTree:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
    if isinstance(x, jax.Array) or hasattr(x, "dtype") or isinstance(x, bool | int | float | complex):
        aval = compat.array_type(x)
        if aval is None:  # an array of strings, for example
            return x
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
    return x


def abstract_with_shardings(tree: PyTree) -> PyTree:
    """`abstract`, with the shardings that are part of the arrays' types (`explicit_sharding`)."""
    shapes = jax.tree.leaves(abstract(tree))
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [
            s if (t := explicit_sharding(x)) is None
            else jax.ShapeDtypeStruct(s.shape, s.dtype, weak_type=s.weak_type, sharding=t)
            for s, x in zip(shapes, leaves, strict=True)
        ],
    )  # fmt: skip


def explicit_sharding(x: PyTree) -> NamedSharding | None:
    """The sharding that is part of an array's type, on a mesh with Explicit axes; None if none is."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else getattr(jax.typeof(x), "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    return sharding if AxisType.Explicit in kinds else None


def trace_on_shapes(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[jax.stages.Traced, PyTree]:
    """The traced function, and the Explicit mesh of its arguments' types if it cannot be traced without them.

    JAX types arrays by their sharding on a mesh with Explicit axes. The planner needs no such types, so the function
    is traced without them first; a function that fails so (it calls `jax.sharding.reshard`, say) is traced with them.
    """
    try:
        return _trace_with(request, args, kwargs, abstract), None
    except ShardError:
        raise
    except Exception as error:
        if not isinstance(error, TypeError | ValueError | AssertionError | compat.ShardingTypeError):
            raise
        leaves = jax.tree.leaves(traced_arguments(request, args, kwargs))
        mesh = next((s.mesh for s in map(explicit_sharding, leaves) if s is not None), None)
        if mesh is None:
            raise
    traced = _trace_with(request, args, kwargs, abstract_with_shardings)
    return traced, getattr(mesh, "abstract_mesh", mesh)


def _trace_with(
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    to_shapes: Callable[[PyTree], PyTree],
) -> jax.stages.Traced:
    numbers, names = request.statics
    fn = request.fn if request.config is None else with_marked_outputs(request.fn)
    if holds_padded(traced_arguments(request, args, kwargs)):
        from jshard._api.padded_trace import on_true_sizes  # here, so that `import jshard` stays light

        fn = on_true_sizes(fn)
    shapes = [a if i in numbers else to_shapes(a) for i, a in enumerate(args)]
    shapes_kw = {k: v if k in names else to_shapes(v) for k, v in kwargs.items()}
    jitted: Any = jax.jit(
        fn,
        static_argnums=tuple(sorted(numbers)) or None,
        static_argnames=tuple(sorted(names)) or None,
    )
    statics = static_values(request, args, kwargs)
    named = [(n if isinstance(n, str) else f"static argument {n}", v) for n, v in statics]
    try:
        with refuse_captured_writes(request.fn, named, request.name):
            return jitted.trace(*shapes, **shapes_kw)
    except ShardError:
        # JAX has cached this trace; a second call would reuse it, write nothing, and so pass the check.
        jitted.clear_cache()
        raise


def result_names(request: ShardRequest, traced: jax.stages.Traced) -> list[str]:
    """The paths of the flat results, and of the state that the call changes."""
    result, state = request.view.results(traced.out_info)
    paths = [path_name(path) or "result" for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]]
    return [*paths, *state]


def build_program(
    request: ShardRequest,
    call: TracedArguments,
    traced: jax.stages.Traced,
    explicit_mesh: JaxMesh | None,
    donated: tuple[int, ...],
    pin_of_name: PinOfName | None = None,
    jaxpr: ClosedJaxpr | None = None,
    recomputed: bool = False,
) -> TracedProgram:
    """The dataflow program of a traced call, its operators in an order of low peak memory.

    `jaxpr`: another jaxpr of the same function, in which values have more names, or are computed again if `recomputed`.
    """
    avals, tree = jax.tree.flatten(traced.out_info)
    try:
        program = build(
            traced.jaxpr if jaxpr is None else jaxpr,
            name=request.name,
            input_names=[leaf.path for leaf in call.leaves],
            output_names=result_names(request, traced),
            captured=compat.captured_tracers(traced),
            pin_of_name=pin_of_name,
        )
    except ShardError as e:
        if not (isinstance(e, NestedShardError) or e.where == ""):
            raise
        line = source_line_of(traced.jaxpr, {ARGUMENT_MARKER, "shard_map"}) or e.where
        raise type(e)(e.what, where=line, fix=e.fix) from None
    refuse_refs(program.constants, request.fn, request.name)
    program = reorder_for_memory(
        dataclasses.replace(program, explicit_mesh=explicit_mesh, has_recomputed=recomputed), donated
    )
    mesh = requested_mesh(request) if request.mesh is not None else compat.context_mesh()
    if isinstance(mesh, Mesh | AbstractMesh):
        check_meshes(program, mesh_axes(mesh))
    outs = compat.open_jaxpr(traced.jaxpr)[0].outvars
    weak = tuple(bool(getattr(v.aval, "weak_type", False)) for v in outs)
    return TracedProgram(program, request.view.results(traced.out_info)[0], avals, tree, weak)


def source_line_of(jaxpr: Jaxpr | ClosedJaxpr, primitives: Container[str]) -> str | None:
    """The user's source line of the first equation of one of the `primitives`; None if there is no such equation.

    Frames of jshard and JAX are left out. A cached `jit` has kept no others, so the line of its caller is taken; ""
    if no frame is left.
    """
    libraries = (str(Path(__file__).parents[1]) + os.sep, os.path.dirname(jax.__file__) + os.sep)
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        line = "" if eqn.primitive.name in primitives else None
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if line is None and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
                line = source_line_of(inner, primitives)
        if line == "":
            frames = getattr(eqn.source_info.traceback, "frames", ())
            lines = (
                f"{f.file_name}:{f.line_num} ({f.function_name})"
                for f in frames
                if not f.file_name.startswith(libraries)
            )
            return next(lines, "")
        if line:
            return line
    return None
