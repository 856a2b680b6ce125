"""Shardings that arguments are committed to: which of them the plan should keep, and what a call has to move.

An array that is sharded over a mesh is taken as a request to keep that sharding; an array on one device, on the host
or replicated is not, since any layout is available from there. (Under `jax.set_mesh`, every new array is replicated.)
A sharding is kept if some axes of the planner's mesh give every device the block it already has, whatever the axes of
the two meshes are called.

>>> from jax.sharding import AbstractMesh, PartitionSpec as P
>>> theirs = AbstractMesh((4, 2), ("data", "model"))
>>> sharding = NamedSharding(theirs, P("model", "data"))
>>> mesh = AbstractMesh((2, 2, 2), ("x", "y", "z"))
>>> equivalent_axes(sharding, (8, 8), mesh)
(('z',), ('x', 'y'))
>>> equivalent_axes(sharding, (8, 8), AbstractMesh((8,), ("x",))) is None
True
>>> [max_received_bytes(sharding, NamedSharding(mesh, P(axis)), (8, 8), itemsize=4) for axis in ("z", "x")]
[96, 128]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Device, PyTree


@dataclasses.dataclass(frozen=True)
class Placement:
    """The committed shardings of a call's arguments, hashable: part of the call's signature.

    `mesh`: the mesh that all of them are on, if it is to be the mesh of the plan. `sharded`: (argument number, sharding)
    of those that are sharded over several devices.
    """

    mesh: Mesh | AbstractMesh | None = None
    sharded: tuple[tuple[int, NamedSharding], ...] = ()


def placement(leaves: Sequence[PyTree], *, use_argument_mesh: bool = True) -> Placement:
    """The placement of the flat arguments of a call.

    `use_argument_mesh`: whether their mesh may become the plan's, if all are on the same devices.
    """
    committed = [(i, s) for i, x in enumerate(leaves) if (s := committed_sharding(x)) is not None]
    sharded = tuple((i, s) for i, s in committed if is_sharded(s, leaves[i].shape))
    meshes = [s.mesh for _, s in (*sharded, *committed)]
    same_devices = len({_device_set(m) for m in meshes}) == 1
    return Placement(meshes[0] if use_argument_mesh and same_devices else None, sharded)


def committed_sharding(x: object) -> NamedSharding | None:
    """The `NamedSharding` over several devices that an array (or a type) is committed to; else None."""
    if isinstance(x, jax.ShapeDtypeStruct):
        found = x.sharding
    elif compat.is_tracer(x):
        found = getattr(jax.typeof(x), "sharding", None)
        if AxisType.Explicit not in getattr(getattr(found, "mesh", None), "axis_types", ()):
            return None
    else:
        found = x.sharding if isinstance(x, jax.Array) and getattr(x, "committed", True) else None
    if not isinstance(found, NamedSharding) or found.mesh.size == 1 or getattr(found.spec, "unreduced", None):
        return None
    return found


@functools.lru_cache(maxsize=4096)
def is_sharded(sharding: NamedSharding, shape: Sequence[int]) -> bool:
    """Whether any dimension of an array of `shape` is sharded."""
    return any(n > 1 for n in _shards_per_dim(sharding, len(shape)))


@functools.lru_cache(maxsize=4096)
def equivalent_axes(
    sharding: NamedSharding, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> tuple[tuple[str, ...], ...] | None:
    """Axes of `mesh` per dimension that give every device the block it has under `sharding`; None if none do."""
    where = _device_positions(sharding.mesh, mesh)
    if where is None:
        return None
    grid = tuple(mesh.axis_sizes)
    numbers = _block_indices(sharding, len(shape))[where].reshape(*grid, len(shape))
    out = []
    for k, pieces in enumerate(_shards_per_dim(sharding, len(shape))):
        mine = numbers[..., k]
        steps = [int(mine[_unit_step(a, grid)]) - int(mine[(0,) * len(grid)]) for a in range(len(grid))]
        axes = sorted((a for a in range(len(grid)) if steps[a]), key=lambda a: -steps[a])
        if math.prod(grid[a] for a in axes) != pieces:
            return None
        expected = np.zeros(grid, dtype=np.int64)
        for a in axes:
            place = np.arange(grid[a]).reshape([-1 if b == a else 1 for b in range(len(grid))])
            expected = expected * grid[a] + place
        if not np.array_equal(expected, mine):
            return None
        out.append(tuple(str(mesh.axis_names[a]) for a in axes))
    return tuple(out)


def same_device_order(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> bool:
    """Whether a sharding's mesh has the devices of `mesh` in the same order, so that splitting axes can align them."""
    where = _device_positions(sharding.mesh, mesh)
    return where is not None and np.array_equal(where, np.arange(len(where)))


def max_received_bytes(source: Sharding, target: NamedSharding, shape: Sequence[int], itemsize: int) -> int:
    """Most bytes that any device receives when an array is moved from `source` to `target`.

    A device does not receive the part of its new block that it already has.
    """
    shape = tuple(shape)
    places = any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in (source, target))
    have, want = _blocks(source, shape, places), _blocks(target, shape, places)
    most = 0
    for device, block in want.items():
        size = math.prod(b - a for a, b in block)
        kept = 0
        if device in have and source.memory_kind == target.memory_kind:
            both = zip(block, have[device], strict=True)
            kept = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in both)
        most = max(most, size - kept)
    return most * itemsize


def same_devices(argument_mesh: Mesh | AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    """Whether two meshes are over the same devices; of an abstract mesh, only the size is compared."""
    if isinstance(argument_mesh, AbstractMesh):
        return argument_mesh.size == mesh.size
    return _device_set(argument_mesh) == _device_set(mesh)


def describe_sharding(sharding: Sharding) -> str:
    """A sharding as text: `P('data') on data=4 x model=2`, or the device."""
    if isinstance(sharding, NamedSharding):
        axes = " x ".join(
            f"{n}={s}" for n, s in zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True)
        )
        spec = ", ".join(repr(d) for d in sharding.spec)
        kind = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
        return f"P({spec}) on {axes}{kind}"
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"


def _device_set(mesh: Mesh | AbstractMesh) -> frozenset[Device]:
    """A key that is equal for meshes over the same devices."""
    return frozenset(mesh.devices.flat) if isinstance(mesh, Mesh) else mesh.size


def _device_positions(other: Mesh | AbstractMesh, mesh: Mesh | AbstractMesh) -> np.ndarray | None:
    """For each device of `mesh`, in flat order, its flat position in the other; None if that has other devices."""
    if other.size != mesh.size:
        return None
    if not (isinstance(other, Mesh) and isinstance(mesh, Mesh)):
        return np.arange(mesh.size)
    places = {d: i for i, d in enumerate(other.devices.flat)}
    if any(d not in places for d in mesh.devices.flat):
        return None
    return np.array([places[d] for d in mesh.devices.flat])


def _axes_per_dim(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return [d if isinstance(d, tuple) else () if d is None else (d,) for d in spec]


def _shards_per_dim(sharding: NamedSharding, ndim: int) -> list[int]:
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True))
    return [math.prod(sizes[a] for a in d) for d in _axes_per_dim(sharding, ndim)]


def _block_indices(sharding: NamedSharding, ndim: int) -> np.ndarray:
    """The index of each device's block along each dimension, int64 of shape (devices, dimensions)."""
    names, sizes = list(sharding.mesh.axis_names), tuple(sharding.mesh.axis_sizes)
    at = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1)
    out = np.zeros((len(at), ndim), dtype=np.int64)
    for k, axes in enumerate(_axes_per_dim(sharding, ndim)):
        for a in axes:
            out[:, k] = out[:, k] * sizes[names.index(a)] + at[:, names.index(a)]
    return out


def _unit_step(axis: int, grid: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(1, n - 1) if b == axis else 0 for b, n in enumerate(grid))


def _blocks(
    sharding: Sharding, shape: tuple[int, ...], places: bool
) -> dict[Device | int, tuple[tuple[int, int], ...]]:
    """The block of each device (or of each flat mesh position, if `places`), as (start, end) of every dimension."""
    if isinstance(sharding, NamedSharding):
        pieces = _shards_per_dim(sharding, len(shape))
        sizes = [s // n for s, n in zip(shape, pieces, strict=True)]
        mesh = sharding.mesh
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) and not places else range(mesh.size)
        return {
            d: tuple((int(i) * n, (int(i) + 1) * n) for i, n in zip(row, sizes, strict=True))
            for d, row in zip(devices, _block_indices(sharding, len(shape)), strict=True)
        }
    found = sharding.devices_indices_map(shape)
    return {
        d: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for d, index in found.items()
    }
