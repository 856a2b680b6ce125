"""Errors of meshes, devices and counts of shards, raised before a mesh is chosen or a pin resolved on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh

from jshard._core.errors import MeshError, StrategyError
from jshard._core.messages import join_choices, type_with_article
from jshard._spec import mesh_factorization
from jshard._spec.entry import (
    JointConstraint,
    Pin,
    check_divides,
    check_not_all_padding,
    format_pieces,
    nearest_strategy,
    pad_advice,
    possible_cuts,
)


PLATFORMS = {"cpu": ("cpu",), "gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",)}
"""The values of `device`, and the platform names under which JAX reports such devices."""


def check_device(device: object) -> None:
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


def check_axes_divide(
    pin: Pin,
    cuts: Sequence[int | None],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    can_pad: bool = True,
) -> None:
    """Raise a `StrategyError` if the axes of a spec do not divide their dimension, with axes that do.

    - `cuts`: shards per dimension under the spec. `sizes`: of the axes that the spec may use.
    - `can_pad`: whether the option `pad` would make the spec legal.
    """
    for dim, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
        if not cut or size % cut == 0:
            continue
        if pin.pads:
            check_not_all_padding(cut, size, dim, pin.where, math.prod(sizes.values()))
            continue
        own = (pin.axes or ())[dim] or ()
        others = {a for d, named in enumerate(pin.axes or ()) if d != dim for a in named or ()}
        free = [a for a, s in sizes.items() if a not in others and s > 1]
        combinations = itertools.chain(
            *(itertools.combinations(free, n) for n in range(1, min(len(free), 3) + 1))
        )
        fits = [c for c in combinations if size % math.prod(sizes[a] for a in c) == 0]
        fits.sort(key=lambda c: abs(math.prod(sizes[a] for a in c) - cut))
        offered = [repr(c[0]) if len(c) == 1 else repr(c) for c in fits[:3]]
        raise StrategyError(
            f"a cut of {cut}, by mesh {'axis' if len(own) == 1 else 'axes'} {' and '.join(map(repr, own))}, does not "
            f"divide dimension {dim}, of size {size}",
            where=pin.where,
            fix=f"{join_choices([*offered, None])} there, or P.UNCONSTRAINED to leave it to the search",
            padded=pad_advice(cut, size) if can_pad else "",
        )


def check_user_mesh(mesh: Mesh | AbstractMesh, device: str | None) -> None:
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
    if device is not None and not is_on_platform(mesh, device):
        raise MeshError(
            f"device={device!r}, but the mesh is of {_platform(mesh)} devices",
            where="device and mesh",
            fix=f"a mesh of {device} devices, or device=None",
        )


def check_device_counts(
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    count: int,
    joint: Sequence[JointConstraint] = (),
    free_devices: Sequence[int] = (),
) -> None:
    """Raise a `StrategyError` for cuts that no mesh of `count` devices allows.

    - `pins`, `shapes`: of the pinned tensors, in parallel; a shape is None where it is unknown.
    - `joint`: constraints of operators; `free_devices`: for each of these with `specs`, the number of devices along
        axes that its specs leave free.
    """
    devices = f"{count} device" + ("s" if count > 1 else "")
    for pin, shape in zip(pins, shapes, strict=True):
        if pin is not None and pin.axes is None:
            _check_count_of(pin, shape, count, devices)
    left = iter(free_devices)
    for j in joint:
        free, made = next(left) if j.specs else count, math.prod(j.cuts)
        if free % made:
            of = devices if free == count else f"the {free} of {devices} that its specs leave"
            possible = format_pieces(mesh_factorization.divisors(free))
            raise StrategyError(
                f"{j.what} cut what it loops over into {made} pieces together, which do not divide {of}",
                where=j.where,
                fix=f"cuts that make {possible} together, or None for all but one of them",
            )


def _check_count_of(pin: Pin, shape: Sequence[int] | None, count: int, devices: str) -> None:
    if shape is not None:
        check_divides(pin.cuts, shape, pin.where, count, pin.pads)
    made = math.prod(c or 1 for c in pin.cuts_on(count))
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
                fix=f"{format_pieces(possible_cuts(pin.cuts, shape, dim, count, pads=pin.pads))} there",
            )
    if count % made:
        raise StrategyError(
            f"strategy {pin} makes {made} pieces, which do not divide {devices}",
            where=pin.where,
            fix=such,
        )


def is_on_platform(mesh: Mesh | AbstractMesh, device: str | None) -> bool:
    return device is None or _platform(mesh) in (None, *PLATFORMS[device])


def _platform(mesh: Mesh | AbstractMesh) -> str | None:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return getattr(mesh.abstract_device, "platform", None)
