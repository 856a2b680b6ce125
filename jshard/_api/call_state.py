"""Mutable state around a sharded function: what it captures, and which objects cannot be arguments.

JAX traces arrays in pytrees. An object that holds arrays and is no pytree is either supported by its library (Flax's
nnx, `flax/_function.py`: split into arrays before the call, written back after it), or refused with its path: what a
traced function writes to it would be lost silently.

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
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.errors import ArgumentError, ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.marker_primitives import mark_argument
from jshard._core.messages import describe_value, type_with_article
from jshard._spec.tree_paths import input_leaves


MAX_SEARCHED_OBJECTS = 50_000
"""Limit of the search for captured state, in objects; a function that captures more is searched only so far."""


SHAPE_TEXT = re.compile(r"([a-z]+\d*)\[([\d,\s]*)\]")
"""A shape as text, such as "f32[8,128]"."""


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """How the user sees the arguments and results of a function whose state was split into arrays.

    - `arguments`: (args, kwargs) of the function -> the same leaves in the user's containers.
    - `results`: result of the function -> the user's result, whose leaves come first, and the paths of the other leaves.
    """

    arguments: Callable[[tuple, dict[str, Any]], tuple[tuple, dict[str, PyTree]]] = lambda args, kwargs: (
        args,
        kwargs,
    )
    results: Callable[[PyTree], tuple[PyTree, tuple[str, ...]]] = lambda out: (out, ())


def not_an_array(
    name: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], names: Sequence[str]
) -> ArgumentError:
    """The error for the first leaf of a call that is no array in JAX."""
    leaves = jax.tree.leaves((tuple(args), dict(kwargs)))
    for leaf, about in zip(leaves, input_leaves(args, kwargs, names), strict=True):
        if compat.array_type(leaf) is None or compat.is_ref(leaf):
            return _not_an_array_error(name, leaf, about.path, about.argument)
    raise AssertionError("every leaf is an array")


def _not_an_array_error(name: str, leaf: object, path: str, argument: str) -> ArgumentError:
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
    slots = _slots([("", leaf)])
    held = next((s.path[1:] for s in slots if any(map(_is_array, jax.tree.leaves(s.value)))), None)
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
    if isinstance(leaf, str) and (shape := SHAPE_TEXT.fullmatch(leaf.strip())):
        fix = f"an array, or its shape: {_shape_advice(shape[2], shape[1])}"
    elif path == argument and _hashable(leaf):
        fix = f"static_argnames={argument!r}, which makes it part of the program"
    else:
        fix = f"only arrays and numbers inside {argument}; what is part of the program goes into a static argument"
    return ArgumentError(
        f"argument {path} is {describe_value(leaf)}, neither an array nor a container of arrays",
        where=where,
        fix=fix,
    )


def refuse_arguments(
    name: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], error: Exception
) -> None:
    """Raise a `ShardError` where a call failed for its arguments: a shape in place of an array, one example under `vmap`.

    `error`: of the call. Under `vmap` the function is traced for one example, and any error may follow from that.
    """
    for x in filter(compat.is_tracer, jax.tree.leaves((args, kwargs))):
        mark_argument(x, name)
    _refuse_shapes(name, args, error)


def _refuse_shapes(name: str, args: Sequence[PyTree], error: Exception) -> None:
    """Raise `ArgumentError` where a call failed and an argument is a shape, as text or as a tuple of ints.

    `error`: of the call. A wrong strategy is wrong for want of arrays only if all arguments are shapes.
    """
    if not isinstance(error, TypeError) and not (isinstance(error, ShardError) and all(map(_is_shape, args))):
        return
    for i, value in enumerate(args):
        if _is_shape(value):
            text = SHAPE_TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
            shape, dtype = (text[2], text[1]) if text else (", ".join(map(str, value)), "float32")
            raise ArgumentError(
                f"argument {i} is {describe_value(value)}, a shape and not an array",
                where=f"call of {name}",
                fix=_shape_advice(shape, dtype),
            )


def _is_shape(value: object) -> bool:
    if isinstance(value, str):
        return SHAPE_TEXT.fullmatch(value.strip()) is not None
    return isinstance(value, tuple | list) and len(value) > 0 and all(type(n) is int for n in value)


def _shape_advice(shape: str, dtype: str) -> str:
    sizes = tuple(int(n) for n in shape.split(",") if n.strip())
    short = {"f": "float", "bf": "bfloat", "s": "int", "i": "int", "u": "uint"}
    letters = dtype.rstrip("0123456789")
    return f'jax.ShapeDtypeStruct({sizes}, "{short.get(letters, letters)}{dtype[len(letters) :]}")'


def refuse_refs(constants: Sequence[object], fn: Function, name: str) -> None:
    """Raise `ShardError` for a mutable array (`jax.Ref`) among the captured constants of a trace."""
    for ref in filter(compat.is_ref, constants):
        path = next((path for path, value in captured(fn) if value is ref), "ref")
        raise ShardError(
            f"{name} captures {path}, a Ref, an array that is changed in place",
            where=f"{path}, captured by {name}",
            fix=f"its value as an argument, {name}({path}[...], ...), and the new value as a result",
        )


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def refuse_captured_writes(fn: Function, others: Sequence[tuple[str, object]], name: str) -> Iterator[None]:
    """Context of a trace of `fn`: raise `ShardError` if it writes traced values into captured objects, and undo that.

    `others`: further (path, object) pairs that it can reach, such as static arguments.
    """
    writable = [s for s in _slots([*captured(fn), *others]) if s.key is not None]
    try:
        yield
    finally:
        written = [s for s in writable if s.holds_leaked_tracer]
        for s in reversed(written):
            s.restore()
    if written:
        path = written[0].path
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        raise ShardError(
            f"{name} sets {path}{more}, which it captures: only its trace would see that",
            where=f"{path}, captured by {name}",
            fix=f"{path} as an argument of {name}, and its new value as a result",
        )


def captured(fn: Function) -> Iterator[tuple[str, object]]:
    """(name, object) of everything a function can reach beside its arguments: closures, defaults, globals.

    >>> scale, shift = [2.0], {"by": 1.0}
    >>> [name for name, _ in captured(lambda x: x * scale[0] + shift["by"])]
    ['scale', 'shift']
    """
    seen: set[int] = set()
    queue = [_attributes(fn).get("__wrapped__", fn), fn]
    while queue and len(seen) < MAX_SEARCHED_OBJECTS:
        f = queue.pop(0)
        if id(f) in seen:
            continue
        seen.add(id(f))
        for path, value in _direct_references(f):
            inner = _attributes(value).get("__wrapped__")
            queue += [v for v in (value, inner) if isinstance(v, types.FunctionType | functools.partial)]
            if not _is_opaque(value):
                yield path, value


def _direct_references(fn: Function) -> Iterator[tuple[str, object]]:
    if isinstance(fn, functools.partial):
        yield from ((f"argument {i} of the partial", a) for i, a in enumerate(fn.args))
        yield from fn.keywords.items()
        yield "func", fn.func
    elif isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield "func", fn.__func__
    elif isinstance(fn, types.FunctionType):
        for cell_name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell_name, cell.cell_contents
        yield from ((f"default {i}", d) for i, d in enumerate(fn.__defaults__ or ()))
        yield from (fn.__kwdefaults__ or {}).items()
        values = fn.__globals__
        yield from ((n, values[n]) for n in dict.fromkeys(_global_names(fn.__code__)) if n in values)
    elif not _is_opaque(fn):
        yield type(fn).__name__, fn  # a callable object


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Global names that code loads; `co_names` would include attributes."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


class _Slot(NamedTuple):
    """A place in an object that holds a value.

    `parent`: the slot of the container, or the name of a root. `label`: key, index or attribute in the path. `key`: the
    same for writing; None if the container is immutable.
    """

    parent: _Slot | str
    label: object
    container: object
    key: Any
    value: object

    @property
    def path(self) -> str:
        """As Python source: `state.layers[0]['w']`."""
        steps, slot = [], self
        while isinstance(slot, _Slot):
            index = isinstance(slot.container, dict | list | tuple)
            steps.append(f"[{slot.label!r}]" if index else f".{slot.label}")
            slot = slot.parent
        return str(slot) + "".join(reversed(steps))

    @property
    def holds_leaked_tracer(self) -> bool:
        """Whether the slot held arrays or numbers, and holds traced values now."""
        if isinstance(self.container, list):
            now = self.container[self.key] if self.key < len(self.container) else self.value
        else:
            items = self.container if isinstance(self.container, dict) else vars(self.container)
            now = items.get(self.key, self.value)
        return now is not self.value and _contains(now, compat.is_tracer) and _contains(self.value, _numeric)

    def restore(self) -> None:
        """Write the original value back."""
        (self.container if isinstance(self.container, dict | list) else vars(self.container))[self.key] = (
            self.value
        )


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _numeric(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)


def _contains(root: object, test: Callable[[object], bool]) -> bool:
    """Whether the test holds for an object or anything reachable from it."""
    return test(root) or any(test(s.value) for s in _slots([("", root)]))


def _slots(roots: Sequence[tuple[str, object]]) -> Iterator[_Slot]:
    """The slots of all objects reachable from `roots`, (path, object) pairs; objects of libraries are not searched."""
    seen: set[int] = set()
    stack: list[tuple[_Slot | str, object]] = [*reversed(roots)]
    while stack and len(seen) < MAX_SEARCHED_OBJECTS:
        parent, container = stack.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if type(container).__module__.partition(".")[0] in _UNSEARCHED_LIBRARIES:
            continue
        slots = [
            _Slot(parent, label, container, key, value) for label, key, value in _direct_slots(container)
        ]
        yield from slots
        stack += [(s, s.value) for s in reversed(slots) if not _is_opaque(s.value)]


_OPAQUE_TYPES = (
    jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, type(None),
)  # fmt: skip
_UNSEARCHED_LIBRARIES = frozenset(
    ("jax", "jaxlib", "numpy", "scipy", "flax", "jshard", "logging", "threading", "_thread")
)
"""Libraries whose objects hold no state that user code writes."""


def _is_opaque(value: object) -> bool:
    """Whether a value is not searched; so for a proxy whose class cannot be read."""
    try:
        return isinstance(value, _OPAQUE_TYPES)
    except Exception:
        return True


def _direct_slots(container: object) -> Iterator[tuple[Any, Any, Any]]:
    """(label, key or None, value) of the direct contents of an object."""
    if _is_opaque(container):
        return
    if isinstance(container, dict):
        yield from ((k, k, v) for k, v in list(container.items()))
    elif isinstance(container, list | tuple):
        settable = isinstance(container, list)
        yield from ((i, i if settable else None, v) for i, v in enumerate(container))
    else:
        yield from ((k, k, v) for k, v in list(_attributes(container).items()))


def _attributes(value: object) -> dict[str, object]:
    """An object's own `__dict__`: no properties, and no call of a user's `__getattr__`."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}
