"""From mesh axes to physical links: bandwidth, latency and ring or line of each mesh axis.

A mesh is only names and sizes; the cost of a collective depends on the links below. A `Topology` pairs every mesh axis
with an `AxisLink`: the `Wire`s below it, each with bandwidth, latency and wrap-around. Device coordinates decide if
they are known; otherwise the usual slice shape of the chip is assumed, and mesh axes are assigned as `jax.make_mesh`
does: whole physical axes if the sizes match, parts of one if not.

>>> t = from_mesh(MeshAxes(("data", "model"), (4, 16)), hardware.get("v5e"), physical=(4, 16))
>>> print(t)
tpu-v5e, data=4 x model=16
  data: 4.1e+10 B/s, line, ici
  model: 4.1e+10 B/s, ring, ici

Rules: jax-ml/scaling-book tpus.md and gpus.md. An axis of v5e or v6e wraps when it is 16 long; on v4, v5p and
7x all axes wrap when every slice dimension is a multiple of 4. GPU axes inside an island use NVLink,
minor-most mesh axes first; the others use the network cards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import AbstractMesh

from jshard._core import hardware as hardware
from jshard._core.errors import MeshError
from jshard._core.hardware import Chip
from jshard._core.jax_types import JaxMesh
from jshard._core.layout import CollectiveKind, MeshAxes


WireKind = Literal["shared", "die", "ici", "nvlink", "network"]
WIRE_KINDS: tuple[WireKind, ...] = ("shared", "die", "ici", "nvlink", "network")  # from near to far

_SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SHAPES_3D_SMALL = ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclasses.dataclass(frozen=True)
class Wire:
    """The part of a mesh axis on one kind of link: a torus axis or part of one, an NVLink island, a network.

    Arguments:

    - `kind`: `"shared"`, `"die"`, `"ici"`, `"nvlink"` or `"network"`, from near to far.
    - `size`: devices of the mesh axis along it; the product over an axis' wires is the axis' size.
    - `bandwidth`: bytes/s one way per device, efficiency included.
    - `alpha`: seconds per step of a collective.
    - `axis`, `axis_length`, `stride`: for a torus, the index of its axis, its length, and the distance of neighbours.
    - `ring`: whether the whole torus axis wraps around, so that data moves in both directions.
    """

    kind: WireKind
    size: int
    bandwidth: float
    alpha: float
    axis: int = 0
    axis_length: int = 1
    stride: int = 1
    ring: bool = False

    @property
    def wrap(self) -> bool:
        """Whether the devices on this wire form a ring."""
        return self.ring and self.size == self.axis_length

    @property
    def rate(self) -> float:
        """Bytes/s one way per device: interleaved groups on one torus axis share its links."""
        return self.bandwidth / self.stride


@dataclasses.dataclass(frozen=True)
class AxisLink:
    """The wires below one mesh axis, from near to far.

    >>> AxisLink((Wire("ici", 4, 5e10, 1e-6), Wire("ici", 4, 5e10, 1e-6, axis=1))).bandwidth
    100000000000.0
    """

    wires: tuple[Wire, ...]

    @property
    def kind(self) -> WireKind:
        """Kind of the farthest wire, which decides the cost."""
        return self.wires[-1].kind

    @property
    def bandwidth(self) -> float:
        """Bytes/s one way per device on the farthest kind of wire; those of several torus axes add up."""
        return sum(w.rate for w in self.wires if w.kind == self.kind)

    @property
    def wrap(self) -> bool:
        """Whether every wire is a ring."""
        return all(w.wrap for w in self.wires)

    @property
    def alpha(self) -> float:
        """Seconds per step on the farthest wire."""
        return self.wires[-1].alpha

    @property
    def torus_axes(self) -> int:
        """Number of torus axes below."""
        return sum(w.kind == "ici" for w in self.wires)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A mesh on a machine: one `AxisLink` per mesh axis.

    Arguments:

    - `mesh`: axis names and sizes.
    - `chip`: the hardware table's entry.
    - `links`: in the order of `mesh.names`.
    - `slices`: number of TPU slices, or of GPU islands, that the mesh spans.
    - `hidden`: by kind of collective, the share of its seconds that a search leaves out, since products hide it.
    """

    mesh: MeshAxes
    chip: Chip
    links: tuple[AxisLink, ...]
    slices: int = 1
    hidden: tuple[tuple[CollectiveKind, float], ...] = ()

    def link(self, axis: str) -> AxisLink:
        """The link of a mesh axis."""
        return self.links[self.mesh.names.index(axis)]

    def __str__(self) -> str:
        lines = [f"{self.chip.name}, {self.mesh}"]
        for name, link in zip(self.mesh.names, self.links, strict=True):
            form = "ring" if link.wrap else "line"
            lines.append(f"  {name}: {link.bandwidth:.3g} B/s, {form}, {link.kind}")
        return "\n".join(lines)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.chip, self.links, self.slices, self.hidden))

    def __hash__(self) -> int:  # topologies are keys of every cost cache: the hash is cached
        return self._hash


def parse_name(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Chip and physical shape of a name such as `"v5e:4x8"` (chips) or `"h100:4x8"` (islands x GPUs).

    >>> chip, shape = parse_name("v5p:4x4x8")
    >>> chip.name, shape
    ('tpu-v5p', (4, 4, 8))

    Arguments:

    - `name`: `chip:shape`; an unknown chip, or a shape that the chip does not come in, raises `MeshError`.
    """
    chip_name, _, text = name.partition(":")
    chip = hardware.get(chip_name)
    examples = {"torus2d": "4x8", "torus3d": "4x4x4", "switch": "2x8", "shared": "8"}
    example = f"{chip.name}:{examples[chip.interconnect]}"
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        fix = f"chip:shape, such as {example!r}"
        raise MeshError(f"{name!r} names no shape", where="topology name", fix=fix)
    shape = tuple(int(n) for n in text.split("x"))
    check_shape(chip, shape, name)
    return chip, shape


def check_shape(chip: Chip, shape: tuple[int, ...], name: str) -> None:
    """Raise `MeshError` when a chip does not come in that shape (libtpu aborts the process on some)."""
    where, text = f"topology {name!r}", "x".join(map(str, shape))
    if chip.interconnect == "torus2d" and tuple(sorted(shape)) not in _SHAPES_2D:
        shapes = ", ".join("x".join(map(str, s)) for s in _SHAPES_2D)
        raise MeshError(f"{chip.name} has no slice of shape {text}", where=where, fix=f"one of {shapes}")
    if chip.interconnect == "torus3d":
        cubes = len(shape) == 3 and all(n % 4 == 0 for n in shape)
        fits = all(n <= m for n, m in zip(sorted(shape), sorted(chip.max_slice), strict=False))
        if not (tuple(sorted(shape)) in _SHAPES_3D_SMALL or (cubes and fits)):
            small = ", ".join("x".join(map(str, s)) for s in _SHAPES_3D_SMALL)
            largest = "x".join(map(str, chip.max_slice))
            raise MeshError(
                f"{chip.name} has no slice of shape {text}",
                where=where,
                fix=f"one of {small}, or three multiples of 4 up to {largest}",
            )
    if chip.interconnect in ("switch", "shared") and len(shape) > 2:
        raise MeshError(
            f"{chip.name} has no shape of {len(shape)} dimensions",
            where=where,
            fix="islands x devices, such as 2x8",
        )


def shape_of_size(chip: Chip, shape: Sequence[int], devices: int) -> tuple[int, ...] | None:
    """A shape that the chip comes in with so many devices: the given one, its shortest axis doubled again and again.

    >>> shape_of_size(hardware.get("v5e"), (4, 8), 128), shape_of_size(hardware.get("h100"), (2, 8), 64)
    ((16, 8), (8, 8))
    >>> shape_of_size(hardware.get("v5e"), (4, 8), 1024) is None
    True
    """
    larger = list(shape)
    while device_count(chip, larger) < devices:
        # More islands, and no larger ones.
        at = larger.index(min(larger)) if chip.interconnect.startswith("torus") else 0
        larger[at] *= 2
    if device_count(chip, larger) != devices:
        return None
    try:
        check_shape(chip, tuple(larger), "x".join(map(str, larger)))
    except MeshError:
        return None
    return tuple(larger)


def device_count(chip: Chip, shape: Sequence[int]) -> int:
    """JAX devices of a physical shape: a 7x chip counts twice.

    >>> device_count(hardware.get("7x"), (2, 2, 1))
    8
    """
    return math.prod(shape) * chip.dies


def named_device_count(name: str) -> int:
    """JAX devices of a machine by name.

    >>> named_device_count("v5e:4x8"), named_device_count("h100:2x8")
    (32, 16)
    """
    return device_count(*parse_name(name))


def from_mesh(
    mesh: JaxMesh | MeshAxes,
    chip: Chip | None = None,
    *,
    physical: Sequence[int] | None = None,
    slices: int = 1,
    device_grid: np.ndarray | None = None,
) -> Topology:
    """The topology of a mesh: from its devices' coordinates if they have any, else of an assumed shape.

    >>> print(from_mesh(MeshAxes(("x",), (8,)), hardware.get("cpu")))
    cpu, x=8
      x: 2e+09 B/s, line, shared

    Arguments:

    - `mesh`: a `jax.sharding.Mesh`, an `AbstractMesh`, or `MeshAxes`.
    - `chip`: of the devices; required unless the mesh has devices.
    - `physical`: chips along each torus axis (TPU), or islands x devices (GPU), when known.
    - `slices`: number of TPU slices joined by the data-centre network; the major-most mesh axes span them.
    - `device_grid`: for a mesh without devices, an array of its shape of objects with device coordinates.
    """
    devices = device_grid if isinstance(mesh, (MeshAxes, AbstractMesh)) else getattr(mesh, "devices", None)
    axes = mesh if isinstance(mesh, MeshAxes) else mesh_axes(mesh)
    if chip is None:
        if devices is None:
            fix = "hardware='tpu-v5e'"
            raise MeshError("a mesh without devices needs a chip", where=f"mesh {axes}", fix=fix)
        chip = hardware.for_device(devices.flat[0])
    if physical is not None and device_count(chip, physical) * slices != axes.total:
        raise MeshError(
            f"{'x'.join(map(str, physical))} {chip.name} is {device_count(chip, physical) * slices} devices, "
            f"the mesh has {axes.total}",
            where=f"mesh {axes}",
            fix="a mesh of as many devices",
        )
    if chip.interconnect == "shared":
        w = chip.link_bandwidth * chip.efficiency
        return Topology(axes, chip, tuple(AxisLink((Wire("shared", n, w, chip.alpha),)) for n in axes.sizes))
    if chip.interconnect == "switch":
        island = physical[-1] if physical else chip.node_size
        domains = None if devices is None or physical is not None else link_domains(devices)
        if domains is not None:
            return Topology(axes, chip, _links_from_domains(axes, chip, domains), len(np.unique(domains)))
        return Topology(axes, chip, _switch_links(axes, chip, island), slices=-(-axes.total // island))
    if devices is not None and physical is None and getattr(devices.flat[0], "coords", None) is not None:
        links, slices = _links_from_coords(axes, chip, devices)
        return Topology(axes, chip, links, slices)
    if axes.total % (slices * chip.dies):  # 7x devices come in pairs: no shape for an odd number
        shape: tuple[int, ...] = (axes.total,)
    else:
        shape = tuple(physical or assumed_shape(chip, axes.total // slices // chip.dies))
    return Topology(axes, chip, _torus_links(axes, chip, shape, slices), slices)


def without_unit_axes(t: Topology) -> Topology:
    """The topology without mesh axes of size one, which shard nothing and only enlarge the search.

    >>> t = from_mesh(MeshAxes(("x", "one"), (8, 1)), hardware.get("cpu"))
    >>> without_unit_axes(t).mesh.names
    ('x',)
    """
    keep = [i for i, n in enumerate(t.mesh.sizes) if n > 1]
    names, sizes = tuple(t.mesh.names[i] for i in keep), tuple(t.mesh.sizes[i] for i in keep)
    return dataclasses.replace(t, mesh=MeshAxes(names, sizes), links=tuple(t.links[i] for i in keep))


def mesh_axes(mesh: JaxMesh) -> MeshAxes:
    """`MeshAxes` of a `jax.sharding.Mesh` or `AbstractMesh`."""
    return MeshAxes(tuple(mesh.axis_names), tuple(int(s) for s in mesh.shape.values()))


def assumed_shape(chip: Chip, chips: int) -> tuple[int, ...]:
    """The usual slice shape of a number of chips: the one closest to a square or cube.

    >>> assumed_shape(hardware.get("v5e"), 32), assumed_shape(hardware.get("v5p"), 512)
    ((4, 8), (8, 8, 8))
    """
    dims = 2 if chip.interconnect == "torus2d" else 3
    best: tuple[int, ...] = (1,) * (dims - 1) + (chips,)
    for head in itertools.product([d for d in range(1, chips + 1) if chips % d == 0], repeat=dims - 1):
        last, remainder = divmod(chips, math.prod(head))
        shape = (*head, last)
        if remainder == 0 and list(shape) == sorted(shape) and shape[-1] - shape[0] < best[-1] - best[0]:
            best = shape
    return best


def wraps(chip: Chip, shape: Sequence[int], axis: int) -> bool:
    """Whether a torus axis of a slice wraps around (scaling-book tpus.md).

    >>> wraps(hardware.get("v5e"), (8, 16), 1), wraps(hardware.get("v5e"), (8, 16), 0)
    (True, False)
    """
    if chip.interconnect == "torus2d":
        return shape[axis] == 16
    return chip.interconnect == "torus3d" and len(shape) == 3 and all(n % 4 == 0 for n in shape)


def _switch_links(axes: MeshAxes, chip: Chip, island: int) -> tuple[AxisLink, ...]:
    links: list[AxisLink] = []
    stride = 1  # devices between neighbours along the axis; minor-most axis last
    for n in reversed(axes.sizes):
        inside = min(n, max(1, island // stride))
        inside = inside if n % inside == 0 else 1  # islands of unequal shares: all members count as apart
        parts = [_PhysicalPart(_ISLAND, inside, inside, 1)] if inside > 1 or n == 1 else []
        parts += [_PhysicalPart(_NETWORK, n // inside, n // inside, 1)] if n > inside else []
        links.append(_axis_link(parts, chip, ()))
        stride *= n
    return tuple(reversed(links))


def link_domains(devices: np.ndarray) -> np.ndarray | None:
    """The NVLink domain, or TPU slice, of each device of a mesh: its `slice_index`, else its process.

    None where all devices have the same, or JAX knows none. `jax.distributed.initialize` sets `slice_index` on GPU.
    """
    for name in ("slice_index", "process_index"):
        found = [getattr(d, name, None) for d in devices.flat]
        if None not in found and len(set(found)) > 1:
            return np.array(found, dtype=np.int64).reshape(devices.shape)
    return None


def _links_from_domains(axes: MeshAxes, chip: Chip, domains: np.ndarray) -> tuple[AxisLink, ...]:
    """Links of GPUs: an axis is on NVLink as far as its devices are in one domain, else on the network."""
    links = []
    for m, n in enumerate(axes.sizes):
        line = domains[tuple(slice(None) if i == m else 0 for i in range(domains.ndim))]
        count = len(np.unique(line))
        inside = n // count if n % count == 0 else 1  # domains of unequal shares: all members count as apart
        parts = [_PhysicalPart(_ISLAND, inside, inside, 1)] if inside > 1 or n == 1 else []
        parts += [_PhysicalPart(_NETWORK, n // inside, n // inside, 1)] if n > inside else []
        links.append(_axis_link(parts, chip, ()))
    return tuple(links)


@dataclasses.dataclass(frozen=True)
class _PhysicalPart:
    """A mesh axis, or part of it, on one physical axis: `size` of `axis_length` positions, `stride` apart."""

    axis: int  # index of the torus axis, or one of the three constants below
    size: int
    axis_length: int
    stride: int


_DIES, _ISLAND, _NETWORK = -1, -2, -3


def _torus_links(axes: MeshAxes, chip: Chip, shape: tuple[int, ...], slices: int) -> tuple[AxisLink, ...]:
    ids = [_NETWORK] * (slices > 1) + list(range(len(shape))) + [_DIES] * (chip.dies > 1)
    sizes = [slices] * (slices > 1) + list(shape) + [chip.dies] * (chip.dies > 1)
    parts = _assign_whole_axes(axes.sizes, ids, sizes) or _assign_row_major(axes.sizes, ids, sizes)
    return tuple(_axis_link(p, chip, shape) for p in parts)


def _assign_whole_axes(
    mesh: Sequence[int], ids: Sequence[int], sizes: Sequence[int]
) -> list[list[_PhysicalPart]] | None:
    """Assign every physical axis to one mesh axis; None if no assignment gives the mesh axes their sizes."""
    real = [i for i in range(len(ids)) if sizes[i] > 1]
    owners = itertools.product(range(len(mesh)), repeat=len(real))
    # Assignments in order first: slices stay major and dies minor, as in `jax.make_mesh`.
    for owner in sorted(owners, key=lambda o: (list(o) != sorted(o), o)):
        out: list[list[_PhysicalPart]] = [[] for _ in mesh]
        for i, o in zip(real, owner, strict=True):
            out[o].append(_PhysicalPart(ids[i], sizes[i], sizes[i], 1))
        if all(math.prod(p.size for p in parts) == n for parts, n in zip(out, mesh, strict=True)):
            return out
    return None


def _assign_row_major(
    mesh: Sequence[int], ids: Sequence[int], sizes: Sequence[int]
) -> list[list[_PhysicalPart]]:
    """Assign the physical axes to the mesh in row-major order, starting at the minor end."""
    out: list[list[_PhysicalPart]] = [[] for _ in mesh]
    i, left, stride = len(ids) - 1, sizes[-1], 1
    for m in reversed(range(len(mesh))):
        need = mesh[m]
        while need > 1 and i >= 0:
            if left == 1:
                i -= 1
                left, stride = (sizes[i], 1) if i >= 0 else (1, 1)
                continue
            step = math.gcd(need, left)
            if step == 1:  # coprime sizes: the axis folds over several physical ones; counted as one line
                out[m].append(_PhysicalPart(ids[i], need, 0, stride))
                left, need = max(1, left // need), 1
                break
            out[m].append(_PhysicalPart(ids[i], step, sizes[i], stride))
            need, left, stride = need // step, left // step, stride * step
    return out


def _axis_link(parts: Sequence[_PhysicalPart], chip: Chip, shape: Sequence[int]) -> AxisLink:
    """Wires of the parts of one mesh axis, from near to far."""
    e = chip.efficiency
    wires = []
    for p in parts:
        if p.axis == _NETWORK:
            wires.append(Wire("network", p.size, chip.nic_bandwidth * e, chip.nic_alpha))
        elif p.axis == _ISLAND:
            wires.append(Wire("nvlink", p.size, chip.links * chip.link_bandwidth * e, chip.alpha))
        elif p.axis == _DIES:
            wires.append(Wire("die", p.size, chip.die_bandwidth * e, chip.alpha))
        else:
            ring = p.axis < len(shape) and wraps(chip, shape, p.axis)
            wires.append(
                Wire(
                    "ici", p.size, chip.link_bandwidth * e, chip.alpha, p.axis, p.axis_length, p.stride, ring
                )
            )
    if not wires:  # an axis of size one needs no link
        wires.append(Wire("ici", 1, chip.link_bandwidth * e, chip.alpha))
    return AxisLink(tuple(sorted(wires, key=lambda w: (WIRE_KINDS.index(w.kind), w.axis, w.stride))))


def _links_from_coords(axes: MeshAxes, chip: Chip, devices: np.ndarray) -> tuple[tuple[AxisLink, ...], int]:
    """Links and number of slices from device coordinates: those that change along a mesh axis are its wires."""

    def place(d: Any) -> tuple[int, ...]:
        return (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0) or 0)

    columns = list(zip(*map(place, devices.flat), strict=True))
    slices = len(set(columns[0]))
    extent = [len(set(c)) for c in columns]
    shape = [n for i, n in enumerate(extent[1:-1]) if i < (2 if chip.interconnect == "torus2d" else 3)]
    ids = [_NETWORK, *range(len(extent) - 2), _DIES]
    links = []
    for m in range(len(axes.sizes)):
        line = devices[tuple(slice(None) if i == m else 0 for i in range(devices.ndim))]
        parts = []
        for i, values in enumerate(zip(*map(place, line), strict=True)):
            seen = sorted(set(values))
            if len(seen) > 1:
                stride = min(b - a for a, b in itertools.pairwise(seen))
                parts.append(_PhysicalPart(ids[i], len(seen), extent[i], stride if ids[i] >= 0 else 1))
        links.append(_axis_link(parts, chip, shape))
    return tuple(links), slices
