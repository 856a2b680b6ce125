"""Mesh selection: the user's mesh, that in context, of a `NamedSharding` or of the arguments, or an inferred one.

In each case the planner gets named axes such that every pinned cut is a product of axis sizes. An inferred mesh is
built so (`mesh_factorization.fewest_axes`); in a user's mesh, an axis is split where a cut requires it: `data` of 8
into `data_0` of 4 and `data_1` of 2, with the devices in the same order. A spec with `data` then means both parts.
All axes are Auto for JAX, since the plan makes every collective explicit.

>>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
>>> chosen = choose_mesh(mesh, None, [Pin((4, 2), None, "in_strategy[0] (argument x)")], [(32, 128)])
>>> str(chosen.axes), chosen.source, chosen.axis_parts["data"]
('data_0=4 x data_1=2', 'given', ('data_0', 'data_1'))
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard._core import jaxcompat as compat
from jshard._core.aot_devices import hybrid_grid
from jshard._core.errors import MeshError, StrategyError
from jshard._core.jax_types import Device, JaxMesh
from jshard._core.layout import MeshAxes
from jshard._core.messages import type_with_article
from jshard._core.topology import parse_name
from jshard._spec import mesh_factorization
from jshard._spec.committed_shardings import same_device_order
from jshard._spec.entry import (
    JointConstraint,
    Pin,
    check_divides,
)
from jshard._spec.mesh_checks import (
    check_axes_divide,
    check_device,
    check_device_counts,
    check_user_mesh,
    is_on_platform,
)
from jshard._spec.mesh_translation import (
    axis_translation,
    boundaries,
    required_splits,
    resolve_mesh,
    spec_axes,
    unknown_axis,
)


AXIS_NAMES = ("x", "y", "z", "u", "v", "w", "r", "s", "t", "p", "q")


@dataclasses.dataclass(frozen=True)
class ChosenMesh:
    """The mesh of a plan.

    - `mesh`: with Auto axes and the planner's names. `axes`: the same names and sizes.
    - `user_mesh`: the mesh before axes were split; None if inferred.
    - `source`: "given", "context", "named sharding", "arguments" or "inferred".
    - `axis_parts`: axis of the user's mesh -> the planner's axes that it consists of.
    - `pins`: the pins of the choice, resolved on this mesh (`resolve_pin`).
    """

    mesh: Mesh | AbstractMesh
    axes: MeshAxes
    user_mesh: Mesh | AbstractMesh | None
    source: str
    axis_parts: Mapping[str, tuple[str, ...]]
    pins: tuple[Pin | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.axes} ({self.source})"


def choose_mesh(
    mesh: object,
    device: str | None,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    devices: Sequence[Device] | None = None,
    joint: Sequence[JointConstraint] = (),
    *,
    argument_mesh: Mesh | AbstractMesh | None = None,
    argument_shardings: Sequence[NamedSharding] = (),
) -> ChosenMesh:
    """The mesh to plan on, and the pins in its axes.

    Arguments:

    - `mesh`: None, "auto", a `Mesh`, an `AbstractMesh`, or an object with one (`.jax_mesh` or `.mesh`).
    - `device`: "cpu", "gpu", "tpu" or None.
    - `pins`: of inputs, results and operators, in order of appearance; `shapes`: of these tensors, None if unknown.
    - `devices`: the devices of an inferred mesh, instead of all of `device`.
    - `joint`: constraints of operators with several pins (`_plan/operator_pins.py`).
    - `argument_mesh`: the mesh that the arguments are committed to; preferred to an inferred one.
    - `argument_shardings`: committed shardings to keep, where splitting axes makes them expressible.

    Raises `MeshError` for a mesh or device that cannot be used, `StrategyError` for a pin that the mesh does not allow.
    """
    check_device(device)
    user_mesh, source = _mesh_and_source(mesh, pins)
    if (
        user_mesh is None
        and mesh is None
        and argument_mesh is not None
        and is_on_platform(argument_mesh, device)
    ):
        with contextlib.suppress(StrategyError):  # the pins may need more devices than the arguments are on
            aligned = [s for s in argument_shardings if same_device_order(s, argument_mesh)]
            return _split_axes(argument_mesh, "arguments", pins, shapes, joint, aligned)
    if user_mesh is None:
        used = list(devices) if devices is not None else _devices_of(device)
        return _infer_mesh(used, mesh_factorization.fewest_axes, pins, shapes, joint)
    check_user_mesh(user_mesh, device)
    aligned = [s for s in argument_shardings if same_device_order(s, user_mesh)]
    return _split_axes(user_mesh, source, pins, shapes, joint, aligned)


def mesh_device_count(mesh: object, device: str | None, entries: object = None) -> int:
    """How many devices the mesh of `choose_mesh` will have; `entries`: the strategies, as the user wrote them.

    >>> mesh_device_count(AbstractMesh((2, 4), ("x", "y")), None)
    8
    """
    check_device(device)
    user = _user_mesh(mesh, entries)
    return len(_devices_of(device)) if user is None else user.size


def mesh_devices(
    mesh: object, device: str | None, entries: object, argument_mesh: Mesh | AbstractMesh | None
) -> list[Device]:
    """The devices of the mesh that `choose_mesh` will choose; none for a mesh that is only a description.

    >>> len(mesh_devices(None, None, None, None)), mesh_devices(AbstractMesh((2,), ("x",)), None, None, None)
    (16, [])
    """
    check_device(device)
    user = mesh_before_pins(mesh, entries, argument_mesh)
    if user is None:
        return _devices_of(device)
    return list(user.devices.flat) if isinstance(user, Mesh) else []


def mesh_before_pins(
    mesh: object, entries: object, argument_mesh: Mesh | AbstractMesh | None
) -> Mesh | AbstractMesh | None:
    """The mesh of `choose_mesh` with the user's axes; None where it will be inferred from the pins.

    >>> mesh_before_pins(AbstractMesh((2,), ("x",)), None, None).axis_names, mesh_before_pins(None, None, None)
    (('x',), None)
    """
    return _user_mesh(mesh, entries) or (argument_mesh if mesh is None else None)


def _user_mesh(mesh: object, entries: object) -> Mesh | AbstractMesh | None:
    """The mesh that was given, that in context, or that of a `NamedSharding` among the entries."""
    return _mesh_and_source(mesh, [Pin((), None, "", m) for m in _meshes_of_shardings(entries)])[0]


def _meshes_of_shardings(entries: object) -> Iterator[JaxMesh]:
    """The meshes of the `NamedSharding`s in a pytree of entries."""
    if isinstance(entries, NamedSharding):
        yield entries.mesh
    elif isinstance(entries, Mapping):
        yield from itertools.chain(*map(_meshes_of_shardings, entries.values()))
    elif isinstance(entries, tuple | list) and not isinstance(entries, PartitionSpec):
        yield from itertools.chain(*map(_meshes_of_shardings, entries))


def candidate_meshes(
    device: str | None,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    devices: Sequence[Device] | None = None,
    joint: Sequence[JointConstraint] = (),
) -> tuple[ChosenMesh, ...]:
    """The meshes that the pins allow on the devices, fewest axes first: those that `mesh="auto"` compares."""
    check_device(device)
    used = list(devices) if devices is not None else _devices_of(device)
    check_device_counts(pins, shapes, len(used), joint)
    grids = _grids_to_try(len(used), pins, joint)
    if _slices(used) > 1:  # the major axes span the slices, so their order counts
        grids = [p for g in grids for p in sorted(set(itertools.permutations(g)))]
    return tuple(
        _infer_mesh(used, lambda count, cuts, sizes=sizes: sizes, pins, shapes, joint) for sizes in grids
    )


def candidate_grids(
    count: int,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    joint: Sequence[JointConstraint] = (),
) -> tuple[dict[str, int], ...]:
    """Axis sizes of the meshes of `count` devices that the pins allow: those of `mesh="auto:v5e:4x4"`.

    >>> candidate_grids(8, [Pin((2, None), None, "x")], [(16, 16)])
    ({'x': 2, 'y': 4}, {'x': 2, 'y': 2, 'z': 2})
    """
    check_device_counts(pins, shapes, count, joint)
    return tuple(dict(zip(AXIS_NAMES, sizes, strict=False)) for sizes in _grids_to_try(count, pins, joint))


def _grids_to_try(
    count: int, pins: Sequence[Pin | None], joint: Sequence[JointConstraint]
) -> list[tuple[int, ...]]:
    """Meshes to compare: of at most three axes unless the pins require more (a search on four takes minutes)."""
    every = mesh_factorization.grids(count, _required_cuts(pins, joint))
    return [g for g in every if len(g) <= max(3, len(every[0]))] or [()]


def resolve_pin(pin: Pin | None, chosen: ChosenMesh, shape: Sequence[int] | None) -> Pin | None:
    """The pin on the chosen mesh: axes of the user's mesh replaced by their parts, cuts known and checked."""
    if chosen.user_mesh is not None:
        pin = resolve_mesh(pin, chosen.user_mesh)
    if pin is None:
        return None
    axes = pin.axes
    sizes: dict[str, int] = {}
    if axes is not None:
        names = axis_translation(pin, chosen.axes, chosen.axis_parts)
        sizes = {axis: chosen.axes.size(*parts) for axis, parts in names.items()}
        for axis in spec_axes(pin):
            if axis not in names:
                raise unknown_axis(pin, axis, tuple(names))
        axes = tuple(None if d is None else tuple(itertools.chain(*(names[a] for a in d))) for d in axes)
        cuts = tuple(None if d is None else chosen.axes.size(*d) for d in axes)
    else:
        cuts = pin.cuts_on(chosen.axes.total)
    if shape is not None:
        dim = pin.all_devices_dim
        if dim is not None and shape[dim] % chosen.axes.total and not pin.pads:
            raise StrategyError(
                f"{chosen.axes.total} devices do not divide dimension {dim}, of size {shape[dim]}",
                where=pin.where,
                fix="'full_batch', or one entry per result",
            )
        if axes is None:
            check_divides(cuts, tuple(shape), pin.where, chosen.axes.total, pin.pads)
        else:
            check_axes_divide(pin, cuts, tuple(shape), sizes)
    return Pin(cuts, axes, pin.where, pads=pin.pads)


def check_mesh(mesh: object) -> None:
    """Raise a `MeshError` unless `mesh` is a value that `shard` accepts."""
    if not (isinstance(mesh, str) and mesh.partition(":")[0] == "auto"):
        _mesh_and_source(mesh, ())


def _mesh_and_source(mesh: object, pins: Sequence[Pin | None]) -> tuple[Mesh | AbstractMesh | None, str]:
    if mesh is not None and not (isinstance(mesh, str) and mesh == "auto"):
        for name in ("jax_mesh", "mesh"):
            if not isinstance(mesh, Mesh | AbstractMesh):
                mesh = getattr(mesh, name, mesh)
        if not isinstance(mesh, Mesh | AbstractMesh):
            if isinstance(mesh, str) and _is_machine_name(mesh):
                parse_name(mesh)  # raises where there is no such machine
            shown = (
                f"mesh={mesh!r} is not known"
                if isinstance(mesh, str)
                else f"mesh is {type_with_article(mesh)}"
            )
            raise MeshError(
                shown,
                where="mesh",
                fix=_mesh_advice(mesh),
            )
        return mesh, "given"
    if mesh is None:
        context = _context_mesh()
        if context is not None:
            return context, "context"
    for pin in pins:
        if pin is not None and pin.mesh is not None:
            return pin.mesh, "named sharding"
    return None, "inferred"


def _is_machine_name(mesh: object) -> bool:
    return isinstance(mesh, str) and re.fullmatch(r"[A-Za-z]\w*:\d+(x\d+)*", mesh) is not None


def _mesh_advice(mesh: object) -> str:
    """What to write in place of a value that is no mesh, from what it seems to be: a grid, devices, a machine's name."""
    if _is_machine_name(mesh):
        return f'mesh="auto:{mesh}", whose axes are chosen, or mesh=jshard.topology("{mesh}", {{axis: size}})'
    sizes = (
        list(mesh.values())
        if isinstance(mesh, Mapping)
        else list(mesh)
        if isinstance(mesh, tuple | list)
        else []
    )
    if sizes and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        names = tuple(mesh) if isinstance(mesh, Mapping) else tuple("xyzuvw"[: len(sizes)])
        return f"a mesh of that grid: mesh=jax.make_mesh({tuple(sizes)}, {names})"
    if sizes and all(hasattr(d, "device_kind") for d in sizes):
        return f'a mesh of them: mesh=jax.make_mesh(({len(sizes)},), ("x",), devices=...)'
    if getattr(mesh, "__name__", "") == "topology":
        return 'a call of it: mesh=jshard.topology("v5e:2x4", {"x": 2, "y": 4})'
    return 'a jax.sharding.Mesh or AbstractMesh, jshard.topology(...), "auto" or None'


def _context_mesh() -> Mesh | AbstractMesh | None:
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            concrete = jax.sharding.get_mesh()
        except ValueError:  # inside `jit` only the abstract mesh is available
            return abstract
        return abstract if concrete.empty else concrete
    return compat.entered_mesh()


def _devices_of(device: str | None) -> list[Device]:
    try:
        return list(jax.devices(device))
    except RuntimeError as error:
        raise MeshError(
            f"no {device or 'usable'} device here",
            where="device",
            fix="another device, or mesh=jshard.topology(...) to plan without devices",
        ) from error


def _slices(devices: Sequence[Device]) -> int:
    """Number of TPU slices or NVLink domains, as far as JAX knows them; 1 for other devices."""
    return len({getattr(d, "slice_index", None) for d in devices})


def _required_cuts(pins: Sequence[Pin | None], joint: Sequence[JointConstraint]) -> list[tuple[int, ...]]:
    """Cuts that the mesh must express; not those of specs, and not "all devices", which every mesh expresses."""
    own = [tuple(c for c in p.cuts if c is not None) for p in pins if p is not None and p.axes is None]
    return own + [j.cuts for j in joint if not j.specs]


def _infer_mesh(
    devices: list[Device],
    factorize: Callable[[int, list[tuple[int, ...]]], tuple[int, ...] | None],
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    joint: Sequence[JointConstraint],
) -> ChosenMesh:
    """A new mesh of the devices; `factorize(count, cuts)` gives its axis sizes."""
    for pin in pins:
        axis = next(spec_axes(pin), None)
        if pin is not None and axis is not None:
            raise StrategyError(
                f"the spec {pin} names mesh axis {axis!r}, but there is no mesh",
                where=pin.where,
                fix="mesh=..., or `with jax.set_mesh(mesh):` around the call, or pieces per dimension",
            )
    check_device_counts(pins, shapes, len(devices), joint)
    sizes = factorize(len(devices), _required_cuts(pins, joint)) or (1,)
    names = tuple(AXIS_NAMES[i] if i < len(AXIS_NAMES) else f"x{i}" for i in range(len(sizes)))
    auto = (AxisType.Auto,) * len(sizes)
    slices = _slices(devices)
    try:
        # On TPU, neighbours on the mesh are then neighbours on the torus.
        if slices > 1:
            mesh = Mesh(hybrid_grid(devices, sizes, slices), names, axis_types=auto)
        else:
            mesh = jax.make_mesh(sizes, names, axis_types=auto, devices=devices)
    except (NotImplementedError, ValueError):
        mesh = Mesh(np.asarray(devices, dtype=object).reshape(sizes), names, axis_types=auto)
    chosen = ChosenMesh(mesh, MeshAxes(names, sizes), None, "inferred", {n: (n,) for n in names})
    return _resolve_pins(chosen, pins, shapes)


def _split_axes(
    user: Mesh | AbstractMesh,
    source: str,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    joint: Sequence[JointConstraint],
    argument_shardings: Sequence[NamedSharding] = (),
) -> ChosenMesh:
    """The user's mesh with axes split where pins, or shardings on other meshes, require it."""
    pins = [resolve_mesh(pin, user) for pin in pins]
    for pin in pins:
        for axis in spec_axes(pin) if pin is not None and pin.mesh is None else ():
            if pin is not None and axis not in user.axis_names:
                raise unknown_axis(pin, axis, user.axis_names)
    # Each axis is first split at the boundaries of other meshes, then as the cuts require.
    splits = required_splits(user, pins, [s.mesh for s in argument_shardings])
    sizes = tuple(itertools.chain(*splits))
    restricted = [(j.cuts, _parts_of_named_axes(j, pins, user, sizes)) for j in joint if j.specs]
    free = [math.prod(s for i, s in enumerate(sizes) if i not in taken) for _, taken in restricted]
    check_device_counts(pins, shapes, math.prod(user.axis_sizes), joint, free)
    parts = mesh_factorization.split(sizes, _required_cuts(pins, joint), restricted)
    assert parts is not None, (
        "prime factors express every tuple of cuts whose product divides the device count"
    )
    next_parts = iter(parts)
    by_axis = [tuple(itertools.chain(*(next(next_parts) for _ in split))) for split in splits]
    axis_parts = _name_parts(user.axis_names, by_axis)
    names = tuple(itertools.chain(*axis_parts.values()))
    sizes = tuple(itertools.chain(*by_axis))
    chosen = ChosenMesh(_with_axes(user, names, sizes), MeshAxes(names, sizes), user, source, axis_parts)
    return _resolve_pins(chosen, pins, shapes)


def _name_parts(names: Sequence[str], parts: Sequence[tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Names for the parts of each axis: `data_0`, `data_1`; with more underscores where such names are taken."""
    taken = set(names)
    out: dict[str, tuple[str, ...]] = {}
    for axis, own in zip(names, parts, strict=True):
        stem = f"{axis}_"
        while len(own) > 1 and any(f"{stem}{i}" in taken for i in range(len(own))):
            stem += "_"
        out[axis] = (axis,) if len(own) == 1 else tuple(f"{stem}{i}" for i in range(len(own)))
        taken.update(out[axis])
    return out


def _parts_of_named_axes(
    joint: JointConstraint, pins: Sequence[Pin | None], user: Mesh | AbstractMesh, parts: Sequence[int]
) -> frozenset[int]:
    """Which parts of the user's axes, by number, belong to an axis that a spec of the operator names."""
    ends = boundaries(parts)
    out: set[int] = set()
    for k in joint.specs:
        pin = pins[k]
        mesh = user if pin is None or pin.mesh is None else pin.mesh
        named = set(spec_axes(pin))
        ranges = itertools.pairwise(boundaries(mesh.axis_sizes))
        for axis, (low, high) in zip(mesh.axis_names, ranges, strict=True):
            if axis in named:
                out |= {i for i, (a, b) in enumerate(itertools.pairwise(ends)) if low <= a and b <= high}
    return frozenset(out)


def _with_axes(
    user: Mesh | AbstractMesh, names: tuple[str, ...], sizes: tuple[int, ...]
) -> Mesh | AbstractMesh:
    auto = (AxisType.Auto,) * len(names)
    if tuple(user.axis_names) == names and tuple(user.axis_types) == auto:
        return user
    if isinstance(user, Mesh):
        return Mesh(user.devices.reshape(sizes), names, axis_types=auto)
    return AbstractMesh(sizes, names, axis_types=auto, abstract_device=user.abstract_device)


def _resolve_pins(
    chosen: ChosenMesh, pins: Sequence[Pin | None], shapes: Sequence[Sequence[int] | None]
) -> ChosenMesh:
    resolved = tuple(resolve_pin(p, chosen, s) for p, s in zip(pins, shapes, strict=True))
    return dataclasses.replace(chosen, pins=resolved)
