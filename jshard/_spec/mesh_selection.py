"""The mesh: given by the user, found in context, that of a `NamedSharding` or of the arguments, or inferred.

Whatever it comes from, the planner sees named axes in which every pinned cut is a product of whole axes.
An inferred mesh is made so (`grid.coarsest`); of a given mesh an axis is split internally where a cut
needs it, `data` of 8 into `data_0` of 4 and `data_1` of 2, devices in the same order. A spec that names
`data` then means both parts. JAX sees Auto axes only, since what runs is spelled out by the plan.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.interpreters.pxla
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard._core.errors import MeshError, StrategyError
from jshard._core.layout import MeshAxes
from jshard._core.messages import join_choices, type_with_article
from jshard._spec import mesh_factorization
from jshard._spec.committed_shardings import same_device_order
from jshard._spec.entry import (
    EVERY_DEVICE,
    Pin,
    check_divides,
    format_pieces,
    nearest_strategy,
    possible_cuts,
)
from jshard._spec.mesh_translation import (
    axis_translation,
    boundaries,
    required_splits,
    resolve_mesh,
    spec_axes,
    unknown_axis,
)


PLATFORMS = {"cpu": ("cpu",), "gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",)}
"""The values of `device`, and the platform names under which JAX reports such devices."""

AXIS_NAMES = ("x", "y", "z", "u", "v", "w", "r", "s", "t", "p", "q")


@dataclasses.dataclass(frozen=True)
class ChosenMesh:
    """The mesh of a plan.

    `mesh`: with Auto axes and the planner's names; `axes`: the same names and sizes; `user`: the mesh as the
    user gave it, None if inferred; `how`: "given", "context", "named sharding", "arguments" or "inferred"; `renamed`:
    axis of the user's mesh -> the planner's axes it consists of; `pins`: the pins that led to the choice,
    with specs in the planner's axes and every known cut filled in.
    """

    mesh: Mesh | AbstractMesh
    axes: MeshAxes
    user_mesh: Mesh | AbstractMesh | None
    source: str
    axis_parts: Mapping[str, tuple[str, ...]]
    pins: tuple[Pin | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.axes} ({self.source})"


@dataclasses.dataclass(frozen=True)
class JointConstraint:
    """Pins that one operator must keep at once: each of its loop indices takes axes of its own.

    `cuts`: the pieces of every loop index that a pin cuts by count, as a strategy of one tensor would have them.
    `specs`: which of the pins name axes; those axes are not there for `cuts`. `what` and `where` are for messages.

    A product whose operands are pinned to (2, 1) and (1, 2) cuts its rows and its columns: `Joint((2, 2))` needs two
    axes of 2, where each pin alone needs one.
    """

    cuts: tuple[int, ...]
    specs: tuple[int, ...] = ()
    what: str = ""
    where: str = ""


def choose_mesh(
    mesh: Any,
    device: str | None,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    devices: Sequence[Any] | None = None,
    joint: Sequence[JointConstraint] = (),
    *,
    argument_mesh: Mesh | AbstractMesh | None = None,
    argument_shardings: Sequence[NamedSharding] = (),
) -> ChosenMesh:
    """The mesh to plan on, and the pins in its axes.

    `mesh`: None, "auto", a `Mesh`, an `AbstractMesh`, or an object that holds one (`.jax_mesh` or `.mesh`).
    `device`: "cpu", "gpu", "tpu" or None. `pins`: of inputs, results and operators, in order of appearance.
    `shapes`: of the pinned tensors; None where unknown. `devices`: to arrange, instead of all of `device`.
    `joint`: what operators with pins need beside (`_plan/operator_pins.py`).
    `follow`: the mesh that the arguments are on, which is taken before one is inferred. `lying`: how arguments lie
    that may stay so where axes can be split for them.
    Raises `MeshError` for a mesh or device that cannot be used, `StrategyError` for a pin it cannot carry.
    """
    check_device(device)
    user, how = _mesh_and_source(mesh, pins)
    if user is None and mesh is None and argument_mesh is not None and _is_on_platform(argument_mesh, device):
        with contextlib.suppress(StrategyError):  # what is asked may need more devices than they are on
            there = [s for s in argument_shardings if same_device_order(s, argument_mesh)]
            return _split_axes(argument_mesh, "arguments", pins, shapes, joint, there)
    if user is None:
        found = list(devices) if devices is not None else _devices_of(device)
        return _infer_mesh(found, mesh_factorization.fewest_axes, pins, shapes, joint)
    _check_mesh(user, device)
    return _split_axes(
        user, how, pins, shapes, joint, [s for s in argument_shardings if same_device_order(s, user)]
    )


def device_count(mesh: Any, device: str | None, entries: Any = None) -> int:
    """How many devices `choose_mesh` would use for a request with these entries.

    >>> device_count(AbstractMesh((2, 4), ("x", "y")), None)
    8
    """
    check_device(device)
    user, _ = _mesh_and_source(mesh, [Pin((), None, "", m) for m in _meshes_of_shardings(entries)])
    return len(_devices_of(device)) if user is None else user.size


def _meshes_of_shardings(entries: Any) -> Iterator[Any]:
    """The meshes of the `NamedSharding`s among some entries."""
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
    devices: Sequence[Any] | None = None,
    joint: Sequence[JointConstraint] = (),
) -> tuple[ChosenMesh, ...]:
    """Every mesh the pins allow on the devices, coarsest first: what `mesh="auto"` tries."""
    check_device(device)
    found = list(devices) if devices is not None else _devices_of(device)
    _check_device_counts(pins, shapes, len(found), joint)
    few = _grids_to_try(len(found), pins, joint)
    return tuple(_infer_mesh(found, lambda n, w, sizes=sizes: sizes, pins, shapes, joint) for sizes in few)


def candidate_grids(
    count: int,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    joint: Sequence[JointConstraint] = (),
) -> tuple[dict[str, int], ...]:
    """Axes of every grid of so many devices that the pins allow: what `mesh="auto:v5e:4x4"` tries.

    >>> candidate_grids(8, [Pin((2, None), None, "x")], [(16, 16)])
    ({'x': 2, 'y': 4}, {'x': 2, 'y': 2, 'z': 2})
    """
    _check_device_counts(pins, shapes, count, joint)
    return tuple(dict(zip(AXIS_NAMES, sizes, strict=False)) for sizes in _grids_to_try(count, pins, joint))


def _grids_to_try(
    count: int, pins: Sequence[Pin | None], joint: Sequence[JointConstraint]
) -> list[tuple[int, ...]]:
    """Grids to try: of at most three axes, unless the pins need more; a plan on four takes minutes to find."""
    every = mesh_factorization.grids(count, _required_cuts(pins, joint))
    return [g for g in every if len(g) <= max(3, len(every[0]))] or [()]


def resolve_pin(pin: Pin | None, chosen: ChosenMesh, shape: Sequence[int] | None) -> Pin | None:
    """The pin in the axes of the chosen mesh: user axes replaced by their parts, cuts filled in, checked."""
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
        cuts = tuple(chosen.axes.total if c == EVERY_DEVICE else c for c in pin.cuts)
    if shape is not None:
        if EVERY_DEVICE in pin.cuts and shape[0] % chosen.axes.total:
            raise StrategyError(
                f"{chosen.axes.total} devices do not divide dimension 0, of size {shape[0]}",
                where=pin.where,
                fix="'full_batch', or one entry per result",
            )
        if axes is None:
            check_divides(cuts, tuple(shape), pin.where, chosen.axes.total)
        else:
            check_axes_divide(pin, cuts, tuple(shape), sizes)
    return Pin(cuts, axes, pin.where)


def check_mesh(mesh: Any) -> None:
    """Raise a `MeshError` unless `mesh` is a value that `shard` takes."""
    if not (isinstance(mesh, str) and mesh.partition(":")[0] == "auto"):
        _mesh_and_source(mesh, ())


def check_axes_divide(
    pin: Pin, cuts: Sequence[int | None], shape: Sequence[int], sizes: Mapping[str, int]
) -> None:
    """Raise a `StrategyError` where the axes of a spec do not divide their dimension; it offers axes that do.

    `sizes` are those of the axes that the spec could name.
    """
    for dim, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
        if not cut or size % cut == 0:
            continue
        own = (pin.axes or ())[dim] or ()
        others = {a for d, named in enumerate(pin.axes or ()) if d != dim for a in named or ()}
        free = [a for a, s in sizes.items() if a not in others and s > 1]
        some = itertools.chain(*(itertools.combinations(free, n) for n in range(1, min(len(free), 3) + 1)))
        fits = [c for c in some if size % math.prod(sizes[a] for a in c) == 0]
        fits.sort(key=lambda c: abs(math.prod(sizes[a] for a in c) - cut))
        offered = [repr(c[0]) if len(c) == 1 else repr(c) for c in fits[:3]]
        raise StrategyError(
            f"a cut of {cut}, by mesh {'axis' if len(own) == 1 else 'axes'} {' and '.join(map(repr, own))}, does not "
            f"divide dimension {dim}, of size {size}",
            where=pin.where,
            fix=f"{join_choices([*offered, None])} there, or P.UNCONSTRAINED to leave it to the search",
        )


def check_device(device: Any) -> None:
    """Raise a `MeshError` unless `device` is None, "cpu", "gpu" or "tpu"."""
    if device is None or (isinstance(device, str) and device in PLATFORMS):
        return
    if isinstance(device, str) and device.lower() == "ascend":
        raise MeshError(
            "device='Ascend' is MindSpore's; JAX has no Ascend backend",
            where="device",
            fix="device='tpu', 'gpu' or 'cpu', or None for the default backend",
        )
    if isinstance(device, str) and device.lower() in PLATFORMS:
        raise MeshError(f"device={device!r} is not known", where="device", fix=f"device={device.lower()!r}")
    what = (
        f"device={device!r} is not known"
        if isinstance(device, str)
        else f"device is {type_with_article(device)}"
    )
    raise MeshError(what, where="device", fix="device='tpu', 'gpu' or 'cpu', or None for the default backend")


def _is_on_platform(mesh: Mesh | AbstractMesh, device: str | None) -> bool:
    return device is None or _platform(mesh) in (None, *PLATFORMS[device])


def _platform(mesh: Mesh | AbstractMesh) -> str | None:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return getattr(mesh.abstract_device, "platform", None)


def _mesh_and_source(mesh: Any, pins: Sequence[Pin | None]) -> tuple[Mesh | AbstractMesh | None, str]:
    if mesh is not None and not (isinstance(mesh, str) and mesh == "auto"):
        for name in ("jax_mesh", "mesh"):
            if not isinstance(mesh, Mesh | AbstractMesh):
                mesh = getattr(mesh, name, mesh)
        if not isinstance(mesh, Mesh | AbstractMesh):
            shown = (
                f"mesh={mesh!r} is not known"
                if isinstance(mesh, str)
                else f"mesh is {type_with_article(mesh)}"
            )
            raise MeshError(
                shown,
                where="mesh",
                fix='a jax.sharding.Mesh or AbstractMesh, jshard.topology(...), "auto" or None',
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


def _context_mesh() -> Mesh | AbstractMesh | None:
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            concrete = jax.sharding.get_mesh()
        except ValueError:  # inside `jit` only the abstract mesh can be had
            return abstract
        return abstract if concrete.empty else concrete
    # `with mesh:`, deprecated by JAX; reading it the public way warns, so take the value behind the warning.
    _, resources = vars(jax.interpreters.pxla).get("_deprecations", {}).get("thread_resources", (None, None))
    entered = getattr(getattr(resources, "env", None), "physical_mesh", None)
    return entered if isinstance(entered, Mesh) and not entered.empty else None


def _check_mesh(mesh: Mesh | AbstractMesh, device: str | None) -> None:
    if mesh.empty:
        raise MeshError("the mesh is empty", where="mesh", fix="a mesh with at least one axis")
    for name in mesh.axis_names:
        if not isinstance(name, str):
            raise MeshError(
                f"mesh axis {name!r} is {type_with_article(name)}", where="mesh", fix="axis names as strings"
            )
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind == AxisType.Manual:
            raise MeshError(
                f"mesh axis {name!r} is Manual: this is the inside of a shard_map",
                where="mesh",
                fix="call the sharded function outside of shard_map",
            )
    if device is not None and not _is_on_platform(mesh, device):
        raise MeshError(
            f"device={device!r}, but the mesh is of {_platform(mesh)} devices",
            where="device and mesh",
            fix=f"a mesh of {device} devices, or device=None",
        )


def _devices_of(device: str | None) -> list[Any]:
    try:
        return list(jax.devices(device))
    except RuntimeError as error:
        raise MeshError(
            f"no {device or 'usable'} device here",
            where="device",
            fix="another device, or mesh=jshard.topology(...) to plan without devices",
        ) from error


def _required_cuts(pins: Sequence[Pin | None], joint: Sequence[JointConstraint]) -> list[tuple[int, ...]]:
    """Cuts that the grid must express; specs name axes, and "every device" is expressed by any grid."""
    alone = [
        tuple(c for c in p.cuts if c is not None and c != EVERY_DEVICE)
        for p in pins
        if p is not None and p.axes is None
    ]
    return alone + [j.cuts for j in joint if not j.specs]


def _infer_mesh(
    devices: list[Any],
    arrange: Any,
    pins: Sequence[Pin | None],
    shapes: Sequence[Any],
    joint: Sequence[JointConstraint],
) -> ChosenMesh:
    for pin in pins:
        axis = next(spec_axes(pin), None)
        if pin is not None and axis is not None:
            raise StrategyError(
                f"the spec {pin} names mesh axis {axis!r}, but there is no mesh",
                where=pin.where,
                fix="mesh=..., or `with jax.set_mesh(mesh):` around the call, or pieces per dimension",
            )
    _check_device_counts(pins, shapes, len(devices), joint)
    sizes = arrange(len(devices), _required_cuts(pins, joint)) or (1,)
    names = tuple(AXIS_NAMES[i] if i < len(AXIS_NAMES) else f"x{i}" for i in range(len(sizes)))
    auto = (AxisType.Auto,) * len(sizes)
    try:
        # On a TPU this keeps neighbours on the torus neighbours on the mesh.
        made = jax.make_mesh(sizes, names, axis_types=auto, devices=devices)
    except (NotImplementedError, ValueError):
        made = Mesh(np.asarray(devices, dtype=object).reshape(sizes), names, axis_types=auto)
    chosen = ChosenMesh(made, MeshAxes(names, sizes), None, "inferred", {n: (n,) for n in names})
    return _resolve_pins(chosen, pins, shapes)


def _split_axes(
    user: Mesh | AbstractMesh,
    source: str,
    pins: Sequence[Pin | None],
    shapes: Sequence[Any],
    joint: Sequence[JointConstraint],
    argument_shardings: Sequence[NamedSharding] = (),
) -> ChosenMesh:
    pins = [resolve_mesh(pin, user) for pin in pins]
    for pin in pins:
        for axis in spec_axes(pin) if pin is not None and pin.mesh is None else ():
            if pin is not None and axis not in user.axis_names:
                raise unknown_axis(pin, axis, user.axis_names)
    forced = required_splits(user, pins, [s.mesh for s in argument_shardings])
    whole = tuple(itertools.chain(*forced))
    beside = [(j.cuts, _parts_of_named_axes(j, pins, user, whole)) for j in joint if j.specs]
    free = [math.prod(s for i, s in enumerate(whole) if i not in taken) for _, taken in beside]
    _check_device_counts(pins, shapes, math.prod(user.axis_sizes), joint, free)
    split_parts = mesh_factorization.split(whole, _required_cuts(pins, joint), beside)
    assert split_parts is not None, (
        "prime factors express every tuple of cuts whose product divides the device count"
    )
    parts, rest = [], iter(split_parts)
    for own in forced:
        parts.append(tuple(itertools.chain(*(next(rest) for _ in own))))
    taken = set(user.axis_names)
    renamed: dict[str, tuple[str, ...]] = {}
    for axis, own in zip(user.axis_names, parts, strict=True):
        stem = f"{axis}_"
        while len(own) > 1 and any(f"{stem}{i}" in taken for i in range(len(own))):
            stem += "_"
        renamed[axis] = (axis,) if len(own) == 1 else tuple(f"{stem}{i}" for i in range(len(own)))
        taken.update(renamed[axis])
    names = tuple(itertools.chain(*renamed.values()))
    inner = tuple(itertools.chain(*parts))
    chosen = ChosenMesh(_with_axes(user, names, inner), MeshAxes(names, inner), user, source, renamed)
    return _resolve_pins(chosen, pins, shapes)


def _parts_of_named_axes(
    joint: JointConstraint, pins: Sequence[Pin | None], user: Mesh | AbstractMesh, parts: Sequence[int]
) -> frozenset[int]:
    """Which of the parts of the user's axes belong to an axis that a spec of some pins names."""
    ends = boundaries(parts)
    out: set[int] = set()
    for k in joint.specs:
        pin = pins[k]
        of = user if pin is None or pin.mesh is None else pin.mesh
        named = set(spec_axes(pin))
        for axis, (low, high) in zip(
            of.axis_names, itertools.pairwise(boundaries(of.axis_sizes)), strict=True
        ):
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


def _resolve_pins(chosen: ChosenMesh, pins: Sequence[Pin | None], shapes: Sequence[Any]) -> ChosenMesh:
    resolved = tuple(resolve_pin(p, chosen, s) for p, s in zip(pins, shapes, strict=True))
    return dataclasses.replace(chosen, pins=resolved)


def _check_device_counts(
    pins: Sequence[Pin | None],
    shapes: Sequence[Any],
    count: int,
    joint: Sequence[JointConstraint] = (),
    beside: Sequence[int] = (),
) -> None:
    """Raise a `StrategyError` for cuts that no grid of `count` devices has; `beside` are the devices that are left by
    the specs of each of `joint` that has any."""
    devices = f"{count} device" + ("s" if count > 1 else "")
    for pin, shape in zip(pins, shapes, strict=True):
        if pin is None or pin.axes is not None:
            continue
        if shape is not None:
            check_divides(pin.cuts, shape, pin.where, count)
        made = math.prod(count if c == EVERY_DEVICE else c or 1 for c in pin.cuts)
        such = f"cuts whose product divides {count}, such as {nearest_strategy(pin.cuts, shape, count)!r}"
        if made > count:
            raise StrategyError(
                f"strategy {pin} makes {made} pieces, over the device count: {devices}",
                where=pin.where,
                fix=f"{such}, or {made} devices",
            )
        for dim, cut in enumerate(pin.cuts):
            if cut and count % cut:
                raise StrategyError(
                    f"a cut of {cut} in dimension {dim}: no grid of {devices} has it",
                    where=pin.where,
                    fix=f"{format_pieces(possible_cuts(pin.cuts, shape, dim, count))} there",
                )
        if count % made:
            raise StrategyError(
                f"strategy {pin} makes {made} pieces, which do not divide {devices}",
                where=pin.where,
                fix=such,
            )
    left = iter(beside)
    for j in joint:
        free, made = next(left) if j.specs else count, math.prod(j.cuts)
        if free % made:
            of = devices if free == count else f"the {free} of {devices} that its specs leave"
            raise StrategyError(
                f"{j.what} cut what it loops over into {made} pieces together, which do not divide {of}",
                where=j.where,
                fix=f"cuts that make {format_pieces(mesh_factorization.divisors(free))} together, or None for all but one of them",
            )
