"""Pins from Flax's partitioning metadata (`nnx.with_partitioning`, `nn.with_partitioning`, logical axis names).

The variable or box around an array holds the metadata; `jshard.flax` adds a method to these classes that returns it
(`flax_protocol.HasPartitionSpec`), so this file does not depend on Flax. Strategies of the call take precedence, and
an axis name that the mesh in use does not have leaves its dimension to the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from jshard._core.jax_types import PyTree
from jshard._spec.entry import Pin, parse_entry
from jshard._spec.flax_protocol import PARTITION_SPEC
from jshard._spec.tree_paths import KeyPath, join, path_name, shape_of


def with_metadata(
    pins: Sequence[Pin | None],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    names: Sequence[str],
    mesh: object,
) -> tuple[Pin | None, ...]:
    """The pins of a call, completed by metadata for leaves without a pin.

    >>> with_metadata([None], (1.0,), {}, ["x"], None)
    (None,)
    """
    axes = getattr(mesh, "axis_names", ())
    if not axes:
        return tuple(pins)
    found: list[Pin | None] = []
    for name, value in (*zip(names, args, strict=False), *sorted(kwargs.items())):
        for path, node in jax.tree_util.tree_flatten_with_path(value, is_leaf=_has_spec)[0]:
            found += _pins_of(node, name, path, frozenset(axes))
    return tuple(p if p is not None else m for p, m in itertools.zip_longest(pins, found))


def _has_spec(node: PyTree) -> bool:
    return hasattr(type(node), PARTITION_SPEC)


def _pins_of(node: PyTree, name: str, path: KeyPath, axes: frozenset[str]) -> list[Pin | None]:
    if not _has_spec(node):
        return [None]
    leaves = jax.tree.leaves(node)
    spec = getattr(node, PARTITION_SPEC)() if len(leaves) == 1 else None
    if spec is None or len(spec) > len(shape_of(leaves[0])):
        return [None] * len(leaves)
    known = PartitionSpec(*(_drop_unknown_axes(d, axes) for d in spec))
    return [
        parse_entry(known, shape_of(leaves[0]), f"partitioning metadata of {join(name, path_name(path))}")
    ]


def _drop_unknown_axes(dimension: object, axes: frozenset[str]) -> object:
    several = dimension if isinstance(dimension, tuple | list) else (dimension,)
    if all(a is None or a in axes for a in several):
        return dimension
    return PartitionSpec.UNCONSTRAINED
