"""State of nnx among the arguments of a sharded function: carried as `nnx.jit` carries it.

A train step takes a model and an optimizer, in a tuple, a dict or a train state, and changes both. JAX would see
containers of arrays and drop the changes. So every graph node of nnx (modules, variables, optimizers, metrics,
random streams) is split into its arrays before the call, the function of arrays is planned, and what changed is
written into the objects after it: with nnx's own `split`, `merge` and update context, so that shared references, new
attributes and objects made inside are what `nnx.jit` makes of them. What did not change is no result. Names are
those of the arguments: `model.fc1.kernel`, `optimizer.opt_state.0.mu.fc1.kernel`.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import errors, nnx

from jshard import _jaxcompat as compat
from jshard._api.call_state import View, captured
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._core.errors import ShardError
from jshard._core.messages import type_with_article
from jshard._flax import metadata as pins
from jshard._flax.name_scopes import module_scopes
from jshard._spec.tree_paths import argument_names, join, path_name


def is_state(x: Any) -> bool:
    """Whether an object is one that nnx carries: a module, a variable, an optimizer, random streams, a metric."""
    return isinstance(x, nnx.Variable | nnx.Pytree) or nnx.graphlib.is_graph_node(x) and not compat.is_ref(x)


def holds_state(tree: Any) -> bool:
    """Whether anything in a pytree is carried by nnx."""
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


@jax.tree_util.register_pytree_node_class
class SplitNode:
    """A graph node taken apart: its structure, and the arrays of its variables."""

    __slots__ = ("graph", "leaves")

    def __init__(self, graph: Any, leaves: Sequence[Any]):
        self.graph, self.leaves = graph, leaves

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.graph

    @classmethod
    def tree_unflatten(cls, graph: Any, leaves: Any) -> SplitNode:
        return cls(graph, list(leaves))


@dataclasses.dataclass(frozen=True)
class _StateChange:
    """What became of the arguments: `sources` has for each array of theirs the argument it still is, or None.

    `paths` are those of the arrays that changed, `shown` is the tree of the result as its user knows it. `same`:
    nothing changed, and the result holds no graph node.
    """

    tree: Any
    sources: tuple[int | None, ...]
    paths: tuple[str, ...]
    result_tree: Any
    unchanged: bool


@jax.tree_util.register_pytree_node_class
class _ResultAndState:
    """The user's result, and the arrays of the state that changed."""

    __slots__ = ("after", "changed", "result")

    def __init__(self, result: Any, changed: Sequence[Any], after: _StateChange):
        self.result, self.changed, self.after = result, changed, after

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return (self.result, *self.changed), self.after

    @classmethod
    def tree_unflatten(cls, after: _StateChange, parts: Any) -> _ResultAndState:
        return cls(parts[0], parts[1:], after)


class StatefulFunction:
    """A sharded function some of whose arguments hold state of nnx.

    `make` turns a `Request` into the sharded function of arrays.
    """

    def __init__(self, request: ShardRequest, make: Callable[[ShardRequest], Any]):
        pins.install()
        self.request = request
        self.inner = make(
            dataclasses.replace(request, fn=self._pure(), view=View(_view_arguments, _view_results))
        )

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function, and write what it changed into the objects."""
        with self.split_arguments(args, kwargs) as (args, kwargs):
            made = self.inner(*args, **kwargs)
            if self.inner.calls_back and compat.at_top_level():
                jax.block_until_ready(made)  # a callback that fails leaves everything as it was
            after = made.after
            if after.unchanged:
                return made.result
            given = jax.tree.leaves(traced_arguments(self.request, args, kwargs))
            new = iter(made.changed)
            leaves = [next(new) if i is None else given[i] for i in after.sources]
            state = jax.tree.unflatten(after.tree, leaves)
            return _merge_nodes((state, made.result), is_inner=False, ctxtag=self)[1]

    @contextlib.contextmanager
    def split_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[tuple, dict[str, Any]]]:
        """The arguments of `inner`; within this context its trace and its results belong to the objects given."""
        with nnx.update_context(self):
            yield self._map_traced(lambda t: _split_nodes(t, self), args, kwargs)

    def _map_traced(
        self, change: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The call with its arguments changed, but for the static ones."""
        numbers, names = self.request.statics
        left, left_kw = change(traced_arguments(self.request, args, kwargs))
        given = iter(left)
        whole = tuple(a if i in numbers else next(given) for i, a in enumerate(args))
        return whole, {k: v if k in names else left_kw[k] for k, v in kwargs.items()}

    def _pure(self) -> Callable[..., Any]:
        """The function of arrays."""
        request = self.request

        def pure(*args: Any, **kwargs: Any) -> Any:
            given = traced_arguments(request, args, kwargs)
            inputs = {id(x): i for i, x in enumerate(jax.tree.leaves(given))}
            before = jax.tree.leaves(given, is_leaf=_is_node)
            whole, whole_kw = self._map_traced(
                lambda t: _merge_nodes(t, is_inner=True, ctxtag=self), args, kwargs
            )
            objects = jax.tree.map(
                lambda x: x if is_state(x) else None,
                traced_arguments(request, whole, whole_kw),
                is_leaf=is_state,
            )
            with contextlib.ExitStack() as stack:
                for x in jax.tree.leaves(objects, is_leaf=is_state):
                    if isinstance(x, nnx.Pytree):
                        stack.enter_context(module_scopes(x))
                result = request.fn(*whole, **whole_kw)
            paths, shown = _user_paths((objects, result), request, len(args))
            state, result = _split_nodes((objects, result), self)
            leaves, tree = jax.tree.flatten(state)
            lost = self._donated(given, len(args))
            sources = tuple(None if (i := inputs.get(id(x))) in lost else i for x in leaves)
            changed = [x for x, i in zip(leaves, sources, strict=True) if i is None]
            nodes = [n.graph.with_no_outer_index() for n in jax.tree.leaves(state, is_leaf=_is_node)]
            same = nodes == [n.graph for n in before if _is_node(n)] and not changed
            same = same and not any(map(_is_node, jax.tree.leaves(result, is_leaf=_is_node)))
            names = tuple(p for p, i in zip(paths, sources, strict=True) if i is None)
            return _ResultAndState(result, changed, _StateChange(tree, sources, names, shown, same))

        pure.__name__ = pure.__qualname__ = request.name
        pure.__wrapped__ = request.fn  # type: ignore[attr-defined]  # its signature, and what it captures
        return pure

    def _donated(self, given: tuple[tuple, dict[str, Any]], count: int) -> set[int | None]:
        """Arrays that are gone after the call, by their number: they come back as results, changed or not."""
        numbers, call = self.request.statics[0], self.request.call
        names = [n for i, n in enumerate(argument_names(self.request.fn, count)) if i not in numbers]
        places = [i for i in range(count) if i not in numbers]
        args, kwargs = jax.tree.unflatten(jax.tree.structure(given), range(len(jax.tree.leaves(given))))
        out: set[int | None] = set()
        for place, name, a in zip(places, names, args, strict=False):
            if place in call.donate_argnums or name in call.donate_argnames:
                out.update(jax.tree.leaves(a))
        for name, a in kwargs.items():
            if name in call.donate_argnames:
                out.update(jax.tree.leaves(a))
        return out


def _is_node(x: Any) -> bool:
    return type(x) is SplitNode


def _split_nodes(tree: Any, tag: Any) -> Any:
    """A tree with its graph nodes taken apart."""
    return nnx.to_tree(
        tree, split_fn=lambda c, p, f, x: SplitNode(*c.flatten(x, with_paths=False)), ctxtag=tag
    )


def _merge_nodes(tree: Any, *, is_inner: bool | None, ctxtag: Any) -> Any:
    """A tree with its graph nodes put together, or into the objects that they come from."""
    return nnx.from_tree(
        tree,
        merge_fn=lambda c, p, f, node: c.unflatten(node.graph, node.leaves),
        is_node_leaf=_is_node,
        is_leaf=_is_node,
        is_inner=is_inner,
        ctxtag=ctxtag,
    )


def _view_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments with `nnx.State` in place of their taken apart nodes; the same leaves in the same order."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    whole = _merge_nodes(jax.tree.unflatten(treedef, range(len(leaves))), is_inner=None, ctxtag=None)
    for build in (_nested_state, _flat_state):
        numbered = nnx.to_tree(whole, split_fn=lambda c, p, f, x, build=build: build(c.flatten(x)[1]))
        places, shape = jax.tree.flatten(numbered)
        if places == list(range(len(leaves))):
            break
    return jax.tree.unflatten(shape, leaves)


def _view_results(out: _ResultAndState) -> tuple[Any, tuple[str, ...]]:
    return jax.tree.unflatten(out.after.result_tree, jax.tree.leaves(out.result)), out.after.paths


def _nested_state(flat: Any) -> Any:
    """A flat state as a tree: of a bare variable it is the variable."""
    items = list(flat)
    return items[0][1] if items and items[0][0] == () else nnx.from_flat_state(items)


def _flat_state(flat: Any) -> Any:
    """The same with one level, where a state would sort its parts otherwise than the graph does."""
    return collections.OrderedDict((".".join(map(str, path)), x) for path, x in flat)


def _user_paths(objects: tuple[Any, Any], request: ShardRequest, count: int) -> tuple[list[str], Any]:
    """The path of every array of the arguments' state, and the tree of the result, as the user knows them."""
    numbers = request.statics[0]
    names = [n for i, n in enumerate(argument_names(request.fn, count)) if i not in numbers]
    (args, kwargs), result = nnx.to_tree(objects, split_fn=lambda c, p, f, x: _flat_state(c.flatten(x)[1]))
    paths = [
        join(name, path_name(path))
        for name, value in (*zip(names, args, strict=False), *sorted(kwargs.items()))
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]
    return paths, jax.tree.structure(result)


def explain_trace_error(error: Exception, fn: Any, name: str) -> Exception:
    """The error for a graph node that a function captures and changes, in place of what nnx says of trace levels."""
    if not isinstance(error, errors.TraceContextError | ValueError) or "trace level" not in str(error):
        return error
    held = [(path, x) for path, x in captured(fn) if is_state(x)]
    if not held:
        return error
    told = ", ".join(f"{p} ({type(v).__name__})" for p, v in held)
    fix = f"it as an argument: {name}({', '.join(p for p, _ in held)}, ...)"
    if isinstance(fn, functools.partial):
        fix = (
            f"all as arguments: jshard.shard({getattr(fn.func, '__name__', 'function')}) instead of a partial"
        )
    return ShardError(
        f"{name} changes state that is not among its arguments; it captures {told}",
        where=f"{held[0][0]}, captured by {name}",
        fix=fix,
    )


def refuse_bound_method(fn: Any) -> None:
    """Refuse a method that is bound to a graph node, and a graph node that is called, as `nnx.jit` does."""
    owner = fn if is_state(fn) else getattr(fn, "__self__", None)
    if not is_state(owner):
        return
    cls, method = type(owner).__name__, "__call__" if owner is fn else fn.__name__
    raise ShardError(
        f"{cls}.{method} is bound to {type_with_article(owner)}, whose state the function would capture",
        where="fn",
        fix=f"jshard.shard({cls}.{method}), called with the object first; or module.shard(...) of jshard.flax",
    )
