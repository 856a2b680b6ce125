"""State that a function changes: how it looks to the user, what is captured, and what cannot be carried.

JAX sees arrays and containers of arrays. An object that holds arrays and is no container to JAX is either carried by
its library (`jshard._flax.function`: split into arrays before the call, written back after it), or refused by name:
what a traced function changes in it would be lost, and no loss would say so.

>>> state = {"total": jax.numpy.zeros(())}
>>> def count(x):
...     state["total"] = state["total"] + x.sum()
...     return state["total"]
>>> with refuse_captured_writes(count, (), "count"):
...     jaxpr = jax.make_jaxpr(count)(jax.numpy.ones(3))
Traceback (most recent call last):
...
jshard._core.errors.ShardError: count sets state['total'], which it captures: only its trace would see that
  where: state['total'], captured by count
  write instead: state['total'] as an argument of count, and its new value as a result
>>> float(state["total"])
0.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jshard import _jaxcompat as compat
from jshard._core.errors import ArgumentError, ShardError
from jshard._core.messages import describe_value, type_with_article
from jshard._spec.tree_paths import input_leaves


MAX_SEARCHED_OBJECTS = 50_000
"""Captured objects that are looked at; a function that captures more is not searched to the end."""


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """How a function of split state looks to its user.

    `arguments`: (args, kwargs) as the function takes them -> the same, with the same leaves, as they are named.
    `results`: what the function returns -> the user's result, whose leaves come first, and the paths of the others.
    """

    arguments: Callable[[tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]] = lambda args, kwargs: (
        args,
        kwargs,
    )
    results: Callable[[Any], tuple[Any, tuple[str, ...]]] = lambda out: (out, ())


def not_an_array(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> ArgumentError:
    """The error for the first leaf of a call that JAX takes for no array."""
    leaves = jax.tree.leaves((tuple(args), dict(kwargs)))
    for leaf, about in zip(leaves, input_leaves(args, kwargs, names), strict=True):
        if compat.array_type(leaf) is None or compat.is_ref(leaf):
            return _not_an_array_error(name, leaf, about.path, about.argument)
    raise AssertionError("every leaf is an array")


def _not_an_array_error(name: str, leaf: Any, path: str, argument: str) -> ArgumentError:
    where = f"call of {name}, argument {path}"
    cls = type(leaf).__name__
    if compat.is_ref(leaf):
        return ArgumentError(
            f"argument {path} is a Ref, an array that is changed in place",
            where=where,
            fix=f"its value as the argument, {path}[...], and the new value as a result",
        )
    if hasattr(leaf, "__jax_array__"):
        return ArgumentError(
            f"argument {path} is {type_with_article(leaf)}, which only its __jax_array__ makes an array",
            where=where,
            fix=f"its array: jax.numpy.asarray({path})",
        )
    inside = _slots([("", leaf)])
    held = next((p.path[1:] for p in inside if any(map(_is_array, jax.tree.leaves(p.value)))), None)
    if held is not None:
        if dataclasses.is_dataclass(leaf):
            fix = f"jax.tree_util.register_dataclass({cls}), so that JAX knows its fields"
        else:
            fix = f"{cls} as a pytree (jax.tree_util.register_pytree_node_class, or a registered dataclass)"
        return ArgumentError(
            f"argument {path} is {type_with_article(leaf)}, which holds arrays ({held}) and is no pytree: "
            f"what {name} changes in it would be lost",
            where=where,
            fix=f"{fix}, with what changes as a result; or its arrays as arguments",
        )
    if path == argument and _hashable(leaf):
        fix = f"static_argnames={argument!r}, which makes it part of the program"
    else:
        fix = f"only arrays and numbers inside {argument}; what is part of the program goes into a static argument"
    return ArgumentError(
        f"argument {path} is {describe_value(leaf)}, neither an array nor a container of arrays",
        where=where,
        fix=fix,
    )


def refuse_refs(constants: Sequence[Any], fn: Any, name: str) -> None:
    """Refuse mutable arrays among what a traced function captured."""
    for ref in filter(compat.is_ref, constants):
        path = next((path for path, value in captured(fn) if value is ref), "ref")
        raise ShardError(
            f"{name} captures {path}, a Ref, an array that is changed in place",
            where=f"{path}, captured by {name}",
            fix=f"its value as an argument, {name}({path}[...], ...), and the new value as a result",
        )


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def refuse_captured_writes(fn: Any, others: Sequence[tuple[str, Any]], name: str) -> Iterator[None]:
    """While `fn` is traced: refuse that it puts traced values into objects that it captures, and put them back.

    `others` are more (path, object) that it reaches, such as static arguments.
    """
    before = [p for p in _slots([*captured(fn), *others]) if p.key is not None]
    try:
        yield
    finally:
        lost = [p for p in before if p.holds_leaked_tracer]
        for p in reversed(lost):
            p.restore()
    if lost:
        path = lost[0].path
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ShardError(
            f"{name} sets {path}{more}, which it captures: only its trace would see that",
            where=f"{path}, captured by {name}",
            fix=f"{path} as an argument of {name}, and its new value as a result",
        )


def captured(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, object) of everything a function reaches beside its arguments: closures, defaults, globals it names.

    >>> scale, shift = [2.0], {"by": 1.0}
    >>> [name for name, _ in captured(lambda x: x * scale[0] + shift["by"])]
    ['scale', 'shift']
    """
    seen: set[int] = set()
    ahead = [_attributes(fn).get("__wrapped__", fn), fn]
    while ahead and len(seen) < MAX_SEARCHED_OBJECTS:
        f = ahead.pop(0)
        if id(f) in seen:
            continue
        seen.add(id(f))
        for path, value in _direct_references(f):
            inner = _attributes(value).get("__wrapped__")
            ahead += [v for v in (value, inner) if isinstance(v, types.FunctionType | functools.partial)]
            if not _is_opaque(value):
                yield path, value


def _direct_references(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield from ((f"argument {i} of the partial", a) for i, a in enumerate(fn.args))
        yield from fn.keywords.items()
        yield "func", fn.func
    elif isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield "func", fn.__func__
    elif isinstance(fn, types.FunctionType):
        for cell_name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is empty yet
                yield cell_name, cell.cell_contents
        yield from ((f"default {i}", d) for i, d in enumerate(fn.__defaults__ or ()))
        yield from (fn.__kwdefaults__ or {}).items()
        found = fn.__globals__
        yield from ((n, found[n]) for n in dict.fromkeys(_global_names(fn.__code__)) if n in found)
    elif not _is_opaque(fn):
        yield type(fn).__name__, fn  # an object that is called


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that code reads from its module: `co_names` would have those of attributes too."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


class _Slot(NamedTuple):
    """Where an object holds a value: below `above`, a place or the name of a root; the key is None where nobody sets it."""

    parent: Any
    label: Any
    container: Any
    key: Any
    value: Any

    @property
    def path(self) -> str:
        """As the user writes it: `state.layers[0]['w']`."""
        steps, here = [], self
        while isinstance(here, _Slot):
            index = isinstance(here.container, dict | list | tuple)
            steps.append(f"[{here.label!r}]" if index else f".{here.label}")
            here = here.parent
        return str(here) + "".join(reversed(steps))

    @property
    def holds_leaked_tracer(self) -> bool:
        """Whether arrays or numbers were here and traced values are now."""
        if isinstance(self.container, list):
            now = self.container[self.key] if self.key < len(self.container) else self.value
        else:
            items = self.container if isinstance(self.container, dict) else vars(self.container)
            now = items.get(self.key, self.value)
        return now is not self.value and _contains(now, compat.is_tracer) and _contains(self.value, _numeric)

    def restore(self) -> None:
        """Put back what was here."""
        (self.container if isinstance(self.container, dict | list) else vars(self.container))[self.key] = (
            self.value
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _numeric(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)


def _contains(root: Any, test: Callable[[Any], bool]) -> bool:
    """Whether the test holds for an object or for anything in it."""
    return test(root) or any(test(p.value) for p in _slots([("", root)]))


def _slots(roots: Sequence[tuple[str, Any]]) -> Iterator[_Slot]:
    """Everything that objects hold; those of libraries are not searched."""
    seen: set[int] = set()
    ahead: list[tuple[Any, Any]] = list(roots)[::-1]
    while ahead and len(seen) < MAX_SEARCHED_OBJECTS:
        above, here = ahead.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if type(here).__module__.partition(".")[0] in _UNSEARCHED_LIBRARIES:
            continue
        found = [_Slot(above, written, here, key, value) for written, key, value in _direct_slots(here)]
        yield from found
        ahead += [(p, p.value) for p in reversed(found) if not _is_opaque(p.value)]


_OPAQUE_TYPES = (
    jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, type(None),
)  # fmt: skip
_UNSEARCHED_LIBRARIES = frozenset(
    ("jax", "jaxlib", "numpy", "scipy", "flax", "jshard", "logging", "threading", "_thread")
)
"""Whose objects hold nothing that a user sets: not searched."""


def _is_opaque(value: Any) -> bool:
    """Whether nothing in a value is looked at; a proxy that does not even tell its class is left alone."""
    try:
        return isinstance(value, _OPAQUE_TYPES)
    except Exception:
        return True


def _direct_slots(here: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(how it is written, key or None, value) of what an object holds directly."""
    if _is_opaque(here):
        return
    if isinstance(here, dict):
        yield from ((k, k, v) for k, v in list(here.items()))
    elif isinstance(here, list | tuple):
        settable = isinstance(here, list)
        yield from ((i, i if settable else None, v) for i, v in enumerate(here))
    else:
        yield from ((k, k, v) for k, v in list(_attributes(here).items()))


def _attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes: no properties, no `__getattr__` of the user's."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}
