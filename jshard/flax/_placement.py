"""Parameters in the shardings of a plan: created there (`init`), or moved there (`place`).

A plan's arguments have paths: `state.block1.dense1.kernel`. A parameter is matched by its own path, with or without the
argument's name, so the plan of a whole train step places a model, an optimizer, or both. State that is no argument of
the plan gets the sharding of its parameter: Adam's `opt_state.0.mu.block1.dense1.kernel` ends in the parameter's path
and has its shape. Scalars such as step counters are replicated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._api.plan import Plan
from jshard._api.plan_together import common_plan
from jshard._core.argument_checks import check_call, checked
from jshard._core.errors import PlanMismatchError, ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import suggest, type_with_article
from jshard._spec.parameter_plan import name_parts
from jshard._spec.tree_paths import path_name, shape_of
from jshard.flax._function import holds_state, is_state


@checked
def init(build: Callable[[], PyTree], plan: Plan) -> PyTree:
    """Create a model, and optimizer state with it, directly in the shardings of a plan.

    >>> from flax import nnx
    >>> import jshard.flax
    >>> build = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> abstract = nnx.eval_shape(build).shard(in_strategy=((1, 1),))
    >>> plan = jshard.flax.plan_of(abstract, jax.ShapeDtypeStruct((2, 8), "float32"))
    >>> jshard.flax.init(build, plan).kernel.shape
    (8, 4)

    `build`: a function without arguments that returns nnx modules, optimizers, linen variables, a `TrainState`,
    or a pytree of these; it is traced, and no device ever holds more than its share. Raises
    `PlanMismatchError` if the plan is for another model.
    """
    if not callable(build) or isinstance(build, nnx.Module):
        raise ShardError(
            f"init takes a function that makes the model, not a {type(build).__name__}",
            where="jshard.flax.init",
            fix="init(lambda: Net(rngs=nnx.Rngs(0)), plan); place(model, plan) for a model that exists",
        )
    _check_plan(plan, "init")
    name = getattr(build, "__name__", "build")
    called = build.__init__ if isinstance(build, type) else build
    try:
        check_call(called, (None,) if isinstance(build, type) else (), {}, name)
    except ShardError as error:
        raise ShardError(
            f"init calls {name} without arguments, and {error.what}",
            where="jshard.flax.init",
            fix=f"init(lambda: {error.fix.replace('<lambda>', 'build')}, plan)",
        ) from None
    plan, abstract = common_plan(plan, "jshard.flax.init"), nnx.eval_shape(build)
    if not holds_state(abstract):
        shapes = jax.eval_shape(build)
        return jax.jit(build, out_shardings=shardings_for(shapes, plan))()
    graph, shapes = nnx.split(abstract)
    state = jax.jit(lambda: nnx.split(build())[1], out_shardings=shardings_for(shapes, plan))()
    return nnx.merge(graph, state)


@checked
def place(tree: PyTree, plan: Plan) -> PyTree:
    """Move an existing model to the shardings of a plan.

    >>> from flax import nnx
    >>> import jshard.flax
    >>> dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).shard(in_strategy=((1, 1),))
    >>> plan = jshard.flax.plan_of(dense, jax.ShapeDtypeStruct((2, 8), "float32"))
    >>> jshard.flax.place(dense, plan) is dense
    True

    `tree`: nnx modules, optimizers and other state, changed in place and returned; or linen variables, a
    `TrainState`, optax state, returned anew; or any pytree of these. Raises `PlanMismatchError` if the plan is for
    another model.
    """
    _check_plan(plan, "place")
    if isinstance(tree, type | linen.Module):
        raise ShardError(
            f"place takes parameters, and {getattr(tree, '__name__', type(tree).__name__)} holds none",
            where="jshard.flax.place",
            fix="the variables of a linen module: place(module.init(key, x), plan); or an nnx module",
        )
    plan = common_plan(plan, "jshard.flax.place")
    parts, outer = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, nnx.State) or is_state(x))
    arrays = jax.tree.unflatten(outer, [nnx.split(x)[1] if is_state(x) else x for x in parts])
    placed = outer.flatten_up_to(jax.device_put(arrays, shardings_for(arrays, plan)))
    for x, new in zip(parts, placed, strict=True):
        if is_state(x):
            nnx.update(x, new)
    return jax.tree.unflatten(
        outer, [x if is_state(x) else new for x, new in zip(parts, placed, strict=True)]
    )


@checked
def shardings_for(tree: PyTree, plan: Plan) -> PyTree:
    """The plan's shardings for a pytree of parameters or optimizer state, as a pytree of the same structure.

    >>> shardings_for({}, None)
    {}

    Ready for `jax.device_put`, `jax.jit` and orbax. Raises `PlanMismatchError` where the plan says nothing.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        return tree
    _check_plan(plan, "shardings_for")
    mesh, index = _mesh(plan), _PlanIndex.of(plan)
    specs, missing = [], []
    for path, leaf in leaves:
        parts, shape = name_parts(path_name(path)), shape_of(leaf)
        spec = index.spec_of(parts, shape)
        if spec is None and (shape == () or _is_key(leaf)):
            spec = PartitionSpec()
        if spec is None:
            missing.append((".".join(parts), shape))
        specs.append(NamedSharding(mesh, spec if spec is not None else PartitionSpec()))
    if missing:
        name, shape = missing[0]
        paths = [r.path for r in plan.inputs]
        shapes = index.shapes_of(name_parts(name))
        hint = f"the plan has it as {shapes[0]}" if shapes else f"nearest in the plan: {suggest(name, paths)}"
        raise PlanMismatchError(
            f"the plan of {plan.name} has no {name} of shape {shape}"
            + (f", nor {len(missing) - 1} more of the {len(leaves)} parameters" if len(missing) > 1 else ""),
            where=name,
            fix=f"the plan of this model; {hint}",
        )
    return jax.tree.unflatten(treedef, specs)


@dataclasses.dataclass(frozen=True)
class _PlanIndex:
    """The arguments of a plan by path: `rows` has (shape, spec) under the full path and without the argument's name."""

    rows: dict[tuple[str, ...], list[tuple[tuple[int, ...], PartitionSpec]]]

    @staticmethod
    def of(plan: Plan) -> _PlanIndex:
        rows: dict[tuple[str, ...], list[Any]] = {}
        for r in plan.inputs:
            path = name_parts(r.path)
            row = (tuple(r.shape), r.layout.spec)
            inner = path[1:]
            while inner[:1] == ("params",):
                inner = inner[1:]
            for name in dict.fromkeys((path, path[1:], inner)):
                rows.setdefault(name, []).append(row)
        return _PlanIndex(rows)

    def spec_of(self, parts: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec | None:
        """The spec of a parameter: that of the longest path in the plan that is a suffix of its own path."""
        for start in range(len(parts)):
            for have, spec in self.rows.get(parts[start:], ()):
                if have == shape:
                    return spec
        return self.spec_by_suffix(parts, shape)

    def spec_by_suffix(self, parts: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec | None:
        """The spec of the shortest path in the plan that ends in this one: for a part of a train state."""
        ends = [
            (len(path), spec)
            for path in self.by_last_part.get(parts[-1:], ())
            if path[-len(parts) :] == parts
            for have, spec in self.rows[path]
            if have == shape
        ]
        shortest = {spec for n, spec in ends if n == min(length for length, _ in ends)}
        return shortest.pop() if len(shortest) == 1 else None

    @functools.cached_property
    def by_last_part(self) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
        """The paths of `rows` by their last part."""
        out: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for path in self.rows:
            out.setdefault(path[-1:], []).append(path)
        return out

    def shapes_of(self, parts: tuple[str, ...]) -> list[tuple[int, ...]]:
        matches = (self.rows.get(parts[start:], ()) for start in range(len(parts)))
        return [shape for rows in matches for shape, _ in rows]


def _mesh(plan: Plan) -> Mesh:
    if plan.jax_mesh is not None:
        if not isinstance(plan.jax_mesh, Mesh):
            raise ShardError(
                f"the plan of {plan.name} was made for {plan.mesh}, without devices",
                where="jshard.flax.place",
                fix="a plan on a mesh of devices",
            )
        return plan.jax_mesh
    axes, devices = plan.mesh, jax.devices()
    if len(devices) < axes.total:
        raise PlanMismatchError(
            f"the plan was made for {axes.total} devices ({axes}), there are {len(devices)}",
            where=f"plan of {plan.name}",
            fix="plan again for the devices there are",
        )
    return Mesh(np.array(devices[: axes.total]).reshape(axes.sizes), axes.names)


def _check_plan(plan: object, function: str) -> None:
    if not isinstance(plan, Plan):
        raise ShardError(
            f"{function} takes a plan, not {type_with_article(plan)}",
            where=f"jshard.flax.{function}",
            fix="jshard.flax.plan_of(module, x), or f.plan(...) of a function from jshard.shard",
        )


def _is_key(leaf: object) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", None) or float, jax.dtypes.prng_key)
