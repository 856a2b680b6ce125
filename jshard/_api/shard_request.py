"""What was asked of `shard`, and what a call gives: arguments by name, static ones apart, traced on shapes.

>>> import jshard
>>> f = jshard.shard(lambda x, n: x * n, static_argnums=1)
>>> left, left_kw, names = named_traced_arguments(f.request, (jax.numpy.ones(3), 2), {})
>>> names, abstract(left)
(('x',), (ShapeDtypeStruct(shape=(3,), dtype=float32),))
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jshard import _jaxcompat as compat
from jshard._api.call_state import View, refuse_captured_writes
from jshard._api.plan import Plan
from jshard._core.errors import ShardError
from jshard._spec.options import CallOptions, PlanOptions
from jshard._spec.tree_paths import Leaf, argument_names


@dataclasses.dataclass(frozen=True, eq=False)
class ShardRequest:
    """The checked arguments of `shard`: what is asked of every call."""

    fn: Callable[..., Any]
    name: str
    in_strategy: Any
    out_strategy: Any
    parameter_plan: Any
    options: PlanOptions
    call: CallOptions
    mesh: Any
    plan: Plan | None
    view: View = View()

    @functools.cached_property
    def statics(self) -> tuple[set[int], set[str]]:
        """Positions and names of the static arguments: asked at every call, so found once."""
        return static_positions(self.fn, self.call)


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredParameterPlan:
    """A `parameter_plan` whose names depend on the arguments of the call."""

    resolve: Callable[[Sequence[Leaf]], Any]


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


def named_traced_arguments(
    request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
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
        aval = compat.array_type(x)
        if aval is None:  # an array of strings, say
            return x
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
    return x


def abstract_with_shardings(tree: Any) -> Any:
    """Shapes and dtypes, with the shardings that are part of the types."""
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


def explicit_sharding(x: Any) -> Any:
    """The sharding that is part of an array's type, on a mesh with Explicit axes; None if none is."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else getattr(jax.typeof(x), "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    return sharding if AxisType.Explicit in kinds else None


def traced_arguments(
    request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that are traced."""
    numbers, names = request.statics
    if not numbers and not names:
        return tuple(args), dict(kwargs)
    left = tuple(a for i, a in enumerate(args) if i not in numbers)
    return left, {k: v for k, v in kwargs.items() if k not in names}


def static_values(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The static arguments of a call: (position or name, value)."""
    numbers, names = request.statics
    positional = tuple((i, a) for i, a in enumerate(args) if i in numbers)
    return positional + tuple((n, kwargs[n]) for n in sorted(kwargs) if n in names)


def trace(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The function traced on shapes, and the mesh of its arguments' types if it needs them; None if it does not.

    JAX types arrays by their sharding where a mesh has Explicit axes. Of these types only the user's own wishes
    are of use here, so the function is traced without them; but some functions are right for them alone.
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
    return _trace_with(request, args, kwargs, abstract_with_shardings), getattr(mesh, "abstract_mesh", mesh)


def _trace_with(
    request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Callable[[Any], Any]
) -> Any:
    numbers, names = request.statics
    shapes = [a if i in numbers else shape(a) for i, a in enumerate(args)]
    shapes_kw = {k: v if k in names else shape(v) for k, v in kwargs.items()}
    jitted: Any = jax.jit(
        request.fn,
        static_argnums=tuple(sorted(numbers)) or None,
        static_argnames=tuple(sorted(names)) or None,
    )
    statics = static_values(request, args, kwargs)
    named = [(n if isinstance(n, str) else f"static argument {n}", v) for n, v in statics]
    try:
        with refuse_captured_writes(request.fn, named, request.name):
            return jitted.trace(*shapes, **shapes_kw)
    except ShardError:
        jitted.clear_cache()  # a trace that JAX has kept would not set anything, and be taken for a good one
        raise


def source_line_of(jaxpr: Any, primitives: Container[str]) -> str | None:
    """The user's line that calls a sharded function, or a `shard_map`; None if none does.

    Frames of the library are not what users look for; a cached `jit` has kept no other, so its caller's are taken.
    """
    own = (os.path.dirname(__file__) + os.sep, os.path.dirname(jax.__file__) + os.sep)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found = "" if eqn.primitive.name in primitives else None
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if found is None and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
                found = source_line_of(inner, primitives)
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


def donated(request: ShardRequest, args: tuple, kwargs: dict, names: tuple[str, ...]) -> tuple[int, ...]:
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
