"""Sharded functions with state of `flax.nnx` among their arguments (`_api/state_library.py`), like `nnx.jit`.

A train step takes a model and an optimizer, in a tuple, a dict or a train state, and changes both; JAX itself would
drop the changes. So every graph node of nnx (modules, variables, optimizers, metrics, random streams) is split into its
arrays before the call, the function of arrays is planned, and changes are written into the objects after the call. This
uses nnx's own `split`, `merge` and update context, so shared references, new attributes and objects created inside
behave as in `nnx.jit`. Arrays that did not change are no results. Paths are those of the arguments: `model.fc1.kernel`,
`optimizer.opt_state.0.mu.fc1.kernel`.

>>> import jax.numpy as jnp, optax
>>> from flax import nnx
>>> import jshard
>>> @jshard.shard(in_strategy={"x": (1, 1)})
... def step(state, x):
...     state["model"].bias[...] += x.sum(0)
...     return state["model"](x)
>>> state = {"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
>>> y = step(state, jnp.ones((3, 2)))
>>> state["model"].bias[...].tolist()
[3.0, 3.0]
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import errors, nnx

from jshard._api.call_state import View, captured
from jshard._api.shard_request import ShardRequest, donated_leaves, traced_arguments
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, PyTree, PyTreeDef
from jshard._core.messages import type_with_article
from jshard._spec.tree_paths import argument_names, join, path_name
from jshard.flax import _metadata as pins
from jshard.flax._name_scopes import module_scopes


def is_state(x: object) -> bool:
    """Whether an object is a graph node of nnx: a module, a variable, an optimizer, random streams, a metric."""
    return isinstance(x, nnx.Variable | nnx.Pytree) or nnx.graphlib.is_graph_node(x) and not compat.is_ref(x)


def holds_state(tree: PyTree) -> bool:
    """Whether a pytree contains a graph node of nnx."""
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


@jax.tree_util.register_pytree_node_class
class SplitNode:
    """A graph node split into its structure and the arrays of its variables."""

    __slots__ = ("graph", "leaves")

    def __init__(self, graph: Hashable, leaves: Sequence[jax.Array]):
        self.graph, self.leaves = graph, leaves

    def tree_flatten(self) -> tuple[Sequence[PyTree], Hashable]:
        return self.leaves, self.graph

    @classmethod
    def tree_unflatten(cls, graph: Hashable, leaves: Sequence[jax.Array]) -> SplitNode:
        return cls(graph, list(leaves))


@dataclasses.dataclass(frozen=True)
class _StateChange:
    """How a call changed the state among its arguments.

    - `tree`: structure of the state after the call, split.
    - `sources`: for each array of it, the number of the argument leaf that it still is; None if it changed.
    - `paths`: of the changed arrays. `result_tree`: structure of the result as the user sees it.
    - `unchanged`: nothing changed, and the result contains no graph node.
    """

    tree: PyTree
    sources: tuple[int | None, ...]
    paths: tuple[str, ...]
    result_tree: PyTree
    unchanged: bool


@jax.tree_util.register_pytree_node_class
class _ResultAndState:
    """The user's result, and the arrays of the state that changed."""

    __slots__ = ("after", "changed", "result")

    def __init__(self, result: PyTree, changed: Sequence[jax.Array], after: _StateChange):
        self.result, self.changed, self.after = result, changed, after

    def tree_flatten(self) -> tuple[Sequence[PyTree], Hashable]:
        return (self.result, *self.changed), self.after

    @classmethod
    def tree_unflatten(cls, after: _StateChange, parts: Sequence[PyTree]) -> _ResultAndState:
        return cls(parts[0], parts[1:], after)


class StatefulFunction:
    """A sharded function with nnx state among its arguments; implements `_api/state_library.StatefulFunction`.

    `make`: turns a request for a function of arrays into a sharded function.
    """

    def __init__(self, request: ShardRequest, make: Callable[[ShardRequest], Any]):
        pins.install()
        self.request = request
        self.inner = make(
            dataclasses.replace(request, fn=self._pure(), view=View(_view_arguments, _view_results))
        )

    def __call__(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """Call the function, and write changes into the objects among the arguments."""
        with self.split_arguments(args, kwargs) as (args, kwargs):
            out = self.inner(*args, **kwargs)
            if self.inner.calls_back and compat.at_top_level():
                jax.block_until_ready(out)  # if a host callback fails, the state must stay unchanged
            after = out.after
            if after.unchanged:
                return out.result
            old = jax.tree.leaves(traced_arguments(self.request, args, kwargs))
            new = iter(out.changed)
            leaves = [next(new) if i is None else old[i] for i in after.sources]
            state = jax.tree.unflatten(after.tree, leaves)
            return _merge_nodes((state, out.result), is_inner=False, ctxtag=self)[1]

    @contextlib.contextmanager
    def split_arguments(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> Iterator[tuple[tuple, dict[str, PyTree]]]:
        """Context with the arguments of `inner`, in which its trace and results are linked to the original objects."""
        with nnx.update_context(self):
            yield self._map_traced(lambda t: _split_nodes(t, self), args, kwargs)

    def _map_traced(
        self, change: Callable[[PyTree], PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[tuple, dict[str, PyTree]]:
        """All arguments, with `change` applied to the traced ones."""
        numbers, names = self.request.statics
        changed, changed_kw = change(traced_arguments(self.request, args, kwargs))
        next_changed = iter(changed)
        merged = tuple(a if i in numbers else next(next_changed) for i, a in enumerate(args))
        return merged, {k: v if k in names else changed_kw[k] for k, v in kwargs.items()}

    def _pure(self) -> Function:
        """The function of arrays: merges its arguments, calls the user's function, splits result and state."""
        request = self.request

        def pure(*args: PyTree, **kwargs: PyTree) -> _ResultAndState:
            traced = traced_arguments(request, args, kwargs)
            merged, merged_kw = self._map_traced(
                lambda t: _merge_nodes(t, is_inner=True, ctxtag=self), args, kwargs
            )
            objects = jax.tree.map(
                lambda x: x if is_state(x) else None,
                traced_arguments(request, merged, merged_kw),
                is_leaf=is_state,
            )
            with contextlib.ExitStack() as stack:
                for x in jax.tree.leaves(objects, is_leaf=is_state):
                    if isinstance(x, nnx.Pytree):
                        stack.enter_context(module_scopes(x))
                result = request.fn(*merged, **merged_kw)
            return self._split_result(traced, objects, result, len(args))

        pure.__name__ = pure.__qualname__ = request.name
        pure.__wrapped__ = request.fn  # type: ignore[attr-defined]  # for its signature and its captured state
        return pure

    def _split_result(self, traced: PyTree, objects: PyTree, result: PyTree, count: int) -> _ResultAndState:
        """The result of a call and the arrays that it changed.

        `traced`: the split arguments, `objects`: their merged graph nodes, after the call; `count`: number of positional
        arguments. A donated array counts as changed, since its buffer is gone after the call.
        """
        inputs = {id(x): i for i, x in enumerate(jax.tree.leaves(traced))}
        before = [n.graph for n in jax.tree.leaves(traced, is_leaf=_is_node) if _is_node(n)]
        paths, result_tree = _user_paths((objects, result), self.request, count)
        state, result = _split_nodes((objects, result), self)
        leaves, tree = jax.tree.flatten(state)
        args, kwargs = traced
        donated = set(donated_leaves(self.request, args, kwargs, _traced_names(self.request, count)))
        numbers = [inputs.get(id(x)) for x in leaves]
        sources = tuple(None if i in donated else i for i in numbers)
        changed = [x for x, i in zip(leaves, sources, strict=True) if i is None]
        nodes = [n.graph.with_no_outer_index() for n in jax.tree.leaves(state, is_leaf=_is_node)]
        result_has_nodes = any(map(_is_node, jax.tree.leaves(result, is_leaf=_is_node)))
        unchanged = nodes == before and not changed and not result_has_nodes
        changed_paths = tuple(p for p, i in zip(paths, sources, strict=True) if i is None)
        return _ResultAndState(
            result, changed, _StateChange(tree, sources, changed_paths, result_tree, unchanged)
        )


def _traced_names(request: ShardRequest, count: int) -> tuple[str, ...]:
    """Names of the positional parameters that are not static, for a call with `count` positional arguments."""
    numbers = request.statics[0]
    return tuple(n for i, n in enumerate(argument_names(request.fn, count)) if i not in numbers)


def _is_node(x: object) -> bool:
    return type(x) is SplitNode


def _split_nodes(tree: PyTree, tag: Hashable) -> PyTree:
    """A tree with its graph nodes split into `SplitNode`s."""
    return nnx.to_tree(
        tree, split_fn=lambda c, p, f, x: SplitNode(*c.flatten(x, with_paths=False)), ctxtag=tag
    )


def _merge_nodes(tree: PyTree, *, is_inner: bool | None, ctxtag: Hashable) -> PyTree:
    """A tree with its `SplitNode`s merged: into new objects, or inside an update context into their originals."""
    return nnx.from_tree(
        tree,
        merge_fn=lambda c, p, f, node: c.unflatten(node.graph, node.leaves),
        is_node_leaf=_is_node,
        is_leaf=_is_node,
        is_inner=is_inner,
        ctxtag=ctxtag,
    )


def _view_arguments(args: tuple, kwargs: dict[str, PyTree]) -> tuple[tuple, dict[str, PyTree]]:
    """Arguments with `nnx.State` in place of split nodes; the same leaves in the same order."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    merged = _merge_nodes(jax.tree.unflatten(treedef, range(len(leaves))), is_inner=None, ctxtag=None)
    for build in (_nested_state, _flat_state):
        numbered = nnx.to_tree(merged, split_fn=lambda c, p, f, x, build=build: build(c.flatten(x)[1]))
        numbers, structure = jax.tree.flatten(numbered)
        if numbers == list(range(len(leaves))):
            break
    return jax.tree.unflatten(structure, leaves)


def _view_results(out: _ResultAndState) -> tuple[PyTree, tuple[str, ...]]:
    return jax.tree.unflatten(out.after.result_tree, jax.tree.leaves(out.result)), out.after.paths


def _nested_state(flat: PyTree) -> PyTree:
    """A flat state as a nested one; that of a single variable is the variable."""
    items = list(flat)
    return items[0][1] if items and items[0][0] == () else nnx.from_flat_state(items)


def _flat_state(flat: PyTree) -> PyTree:
    """A flat state as one ordered level, for graphs whose order differs from that of `nnx.State`."""
    return collections.OrderedDict((".".join(map(str, path)), x) for path, x in flat)


def _user_paths(
    objects: tuple[PyTree, PyTree], request: ShardRequest, count: int
) -> tuple[list[str], PyTreeDef]:
    """The path of every array of the arguments' state, and the structure of the result, as the user sees them."""
    names = _traced_names(request, count)
    (args, kwargs), result = nnx.to_tree(objects, split_fn=lambda c, p, f, x: _flat_state(c.flatten(x)[1]))
    paths = [
        join(name, path_name(path))
        for name, value in (*zip(names, args, strict=False), *sorted(kwargs.items()))
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]
    return paths, jax.tree.structure(result)


def explain_trace_error(error: Exception, fn: Function, name: str) -> Exception:
    """A `ShardError` in place of nnx's error on trace levels, if `fn` captures and changes a graph node."""
    if not isinstance(error, errors.TraceContextError | ValueError) or "trace level" not in str(error):
        return error
    state = [(path, x) for path, x in captured(fn) if is_state(x)]
    if not state:
        return error
    names = ", ".join(f"{p} ({type(v).__name__})" for p, v in state)
    fix = f"it as an argument: {name}({', '.join(p for p, _ in state)}, ...)"
    if isinstance(fn, functools.partial):
        fix = (
            f"all as arguments: jshard.shard({getattr(fn.func, '__name__', 'function')}) instead of a partial"
        )
    return ShardError(
        f"{name} changes state that is not among its arguments; it captures {names}",
        where=f"{state[0][0]}, captured by {name}",
        fix=fix,
    )


def refuse_bound_method(fn: Function) -> None:
    """Raise `ShardError` for a method bound to a graph node, or a callable graph node, as `nnx.jit` does."""
    owner = fn if is_state(fn) else getattr(fn, "__self__", None)
    if not is_state(owner):
        return
    cls, method = type(owner).__name__, "__call__" if owner is fn else fn.__name__
    raise ShardError(
        f"{cls}.{method} is bound to {type_with_article(owner)}, whose state the function would capture",
        where="fn",
        fix=f"jshard.shard({cls}.{method}), called with the object first; or module.shard(...) of jshard.flax",
    )
