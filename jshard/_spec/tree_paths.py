"""Dotted names of pytree leaves, and the children of a pytree node.

JAX gives paths as keys (`DictKey('w')`, `GetAttrKey('kernel')`, `SequenceKey(0)`); users write `params.w`. The `.value`
field of Flax variables is dropped: a kernel is `kernel`, not `kernel.value`.

>>> leaves = input_leaves(({"w": jax.ShapeDtypeStruct((4, 2), "float32")}, 1.0), {}, ["params", "lr"])
>>> [(leaf.path, leaf.shape) for leaf in leaves]
[('params.w', (4, 2)), ('lr', ())]
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jshard._core.jax_types import PyTree
from jshard._core.padded_array import PADDED_FIELD


VARIABLE_FIELDS = ("value", "raw_value", "_value")
"""Attributes in which `flax.nnx` variables and `flax.linen` boxes hold their array (flax 0.12)."""


KeyPath = tuple[Any, ...]
"""The path of a node in a pytree, as JAX gives it: a key for each level."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the arguments: dotted path (argument name first), shape, dtype, argument name."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    argument: str

    @property
    def inner(self) -> str:
        """The path without the argument name; empty when the argument itself is the leaf."""
        return self.path[len(self.argument) + 1 :]


def key_name(key: Any) -> str:
    """One path key as text: `w` for `DictKey('w')`, `0` for `SequenceKey(0)`."""
    if isinstance(key, DictKey | FlattenedIndexKey):
        return str(key.key)
    if isinstance(key, GetAttrKey):
        return key.name
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key).strip(".[]'\"")


def path_name(keypath: KeyPath) -> str:
    """A JAX key path as a dotted name, without the array field of Flax variables.

    >>> path_name((DictKey("block1"), SequenceKey(0), GetAttrKey("kernel"), GetAttrKey("value")))
    'block1.0.kernel'
    """
    keys = tuple(keypath)
    if keys and isinstance(keys[-1], GetAttrKey) and keys[-1].name == PADDED_FIELD:
        keys = keys[:-1]
    if keys and isinstance(keys[-1], GetAttrKey) and keys[-1].name in VARIABLE_FIELDS:
        keys = keys[:-1]
    return join(*map(key_name, keys))


def join(*parts: str) -> str:
    """The parts that are not empty, joined by dots."""
    return ".".join(p for p in parts if p)


def input_leaves(
    args: Sequence[PyTree], kwargs: Mapping[str, PyTree], names: Sequence[str]
) -> tuple[Leaf, ...]:
    """The leaves of a call, in the order of `jax.tree.flatten((args, kwargs))`.

    `names` are the names of the positional arguments; at least as many as there are `args`.
    """
    found = []
    for name, value in (*zip(names, args, strict=False), *sorted(kwargs.items())):
        for keypath, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            found.append(Leaf(join(name, path_name(keypath)), shape_of(leaf), dtype_of(leaf), name))
    return tuple(found)


def argument_names(fn: Callable, count: int) -> tuple[str, ...]:
    """Names of all parameters that can be positional, for a call with `count` positional arguments.

    Arguments of `*xs` are named `xs.0`, `xs.1`; those of a callable without a signature `arg0`, `arg1`.

    >>> argument_names(lambda x, w, b=None: x, 2), argument_names(lambda x, *ws: x, 3)
    (('x', 'w', 'b'), ('x', 'ws.0', 'ws.1'))
    """
    names: list[str] = []
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return tuple(f"arg{i}" for i in range(count))
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}.{i}" for i in range(count - len(names))]
    return tuple(names)


def is_leaf(tree: PyTree) -> bool:
    """Whether a value is a leaf of a pytree (None is a node without leaves)."""
    return jax.tree_util.all_leaves([tree])


def one_level(tree: PyTree) -> list[tuple[object, PyTree]]:
    """The children of a pytree node as (key, child), in flattening order; empty for leaves and None.

    >>> [(key_name(k), child) for k, child in one_level({"b": 1, "a": (2, None)})]
    [('a', (2, None)), ('b', 1)]
    """
    if tree is None or is_leaf(tree):
        return []
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(path[0], child) for path, child in flat]


def shape_of(leaf: object) -> tuple[int, ...]:
    """Shape of an array or `ShapeDtypeStruct`; `()` for numbers and anything else (tracing refuses the latter)."""
    shape = getattr(leaf, "shape", None)
    return tuple(shape) if shape is not None else ()


def dtype_of(leaf: PyTree) -> np.dtype | None:
    """Dtype of an array or number in JAX; None for anything else."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    return (
        jax.dtypes.result_type(leaf) if isinstance(leaf, bool | int | float | complex | np.generic) else None
    )
