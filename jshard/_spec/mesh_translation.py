"""Translation of a `NamedSharding` on another mesh over the same devices to the axes of the mesh in use.

In the flat order of devices, a mesh axis is the range between two *boundaries*, the products of the leading axis
sizes. Two meshes with the same device order have common parts if their boundaries, merged and sorted, divide one
another: the mesh in use is split at the other's boundaries, and each axis of either mesh is a sequence of parts.

>>> boundaries((4, 2)), boundaries((8,))
([1, 4, 8], [1, 8])
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from jshard._core.errors import StrategyError
from jshard._core.jax_types import Device
from jshard._core.layout import MeshAxes
from jshard._core.messages import suggest
from jshard._spec.entry import Pin


def spec_axes(pin: Pin | None) -> Iterator[str]:
    """The mesh axes in a pin's spec."""
    return itertools.chain.from_iterable(d or () for d in (pin.axes if pin is not None and pin.axes else ()))


def boundaries(sizes: Sequence[int]) -> list[int]:
    """Products of the leading sizes, from 1 on."""
    return list(itertools.accumulate(sizes, operator.mul, initial=1))


def resolve_mesh(pin: Pin | None, user: Mesh | AbstractMesh) -> Pin | None:
    """The pin on the mesh in use: without its own mesh, if that has the same axes.

    With the same axes over the same devices, the order of devices does not matter, because a spec names axes and the
    array is placed on the mesh in use. Raises `StrategyError` for a mesh of other devices, or with other axes in another
    order.
    """
    if pin is None or pin.mesh is None or not any(True for _ in spec_axes(pin)):
        return pin
    other = pin.mesh
    for axis in spec_axes(pin):
        if axis not in other.axis_names:
            raise unknown_axis(pin, axis, other.axis_names)
    theirs, ours = _devices(other), _devices(user)
    concrete = bool(theirs and ours)
    if other.size != user.size or concrete and set(theirs) != set(ours):
        raise _foreign_mesh_error(pin, user, "whose devices are not those of")
    if dict(other.shape) == dict(user.shape):
        return dataclasses.replace(pin, mesh=None)
    if concrete and theirs != ours:
        raise _foreign_mesh_error(pin, user, "whose devices are in another order than those of")
    return pin


def required_splits(
    user: Mesh | AbstractMesh, pins: Sequence[Pin | None], argument_meshes: Sequence[Mesh | AbstractMesh] = ()
) -> list[tuple[int, ...]]:
    """The parts of each axis of the mesh in use that the meshes of pins require.

    The boundaries of `argument_meshes` are added where they are compatible. Raises `StrategyError` for a pin whose mesh
    has incompatible boundaries.
    """
    ends = set(boundaries(user.axis_sizes))
    for pin in pins:
        if pin is not None and pin.mesh is not None:
            ends |= set(boundaries(pin.mesh.axis_sizes))
            if any(b % a for a, b in itertools.pairwise(sorted(ends))):
                raise _foreign_mesh_error(pin, user, "whose axes cannot be told in those of")
    for mesh in argument_meshes:
        merged = ends | set(boundaries(mesh.axis_sizes))
        if not any(b % a for a, b in itertools.pairwise(sorted(merged))):
            ends = merged
    parts = []
    for low, high in itertools.pairwise(boundaries(user.axis_sizes)):
        inside = sorted(e for e in ends if low <= e <= high)
        parts.append(tuple(b // a for a, b in itertools.pairwise(inside)) or (1,))
    return parts


def axis_translation(
    pin: Pin, own: MeshAxes, axis_parts: Mapping[str, tuple[str, ...]]
) -> Mapping[str, tuple[str, ...]]:
    """Axis names usable in the pin's spec -> axes of the planner's mesh `own`.

    Without a mesh of its own, a pin uses the axes of the user's mesh: `axis_parts`. An axis of the pin's mesh that is
    no sequence of the planner's axes is left out.
    """
    if pin.mesh is None:
        return axis_parts
    ends = boundaries(own.sizes)
    names = {}
    of_other = itertools.pairwise(boundaries(pin.mesh.axis_sizes))
    for axis, (low, high) in zip(pin.mesh.axis_names, of_other, strict=True):
        runs = zip(own.names, itertools.pairwise(ends), strict=True)
        inside = tuple(n for n, (a, b) in runs if low <= a < b <= high)
        if own.size(*inside) == high // low:
            names[axis] = inside
    return names


def unknown_axis(pin: Pin, axis: str, known: Sequence[str]) -> StrategyError:
    """The error for a spec with an axis that the mesh does not have."""
    return StrategyError(
        f"the spec {pin} names mesh axis {axis!r}, which the mesh lacks",
        where=pin.where,
        fix=f"{suggest(axis, known)} (axes of the mesh: {', '.join(map(str, known))})",
    )


def _devices(mesh: Mesh | AbstractMesh) -> list[Device]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def format_mesh(mesh: Mesh | AbstractMesh) -> str:
    """A mesh as text: `data=4 x model=2`."""
    return " x ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _foreign_mesh_error(pin: Pin, user: Mesh | AbstractMesh, why: str) -> StrategyError:
    assert pin.mesh is not None
    return StrategyError(
        f"the NamedSharding is of another mesh, {format_mesh(pin.mesh)}, {why} the mesh in use, "
        f"{format_mesh(user)}",
        where=pin.where,
        fix="a NamedSharding on the mesh in use, or a PartitionSpec of its axes",
    )
