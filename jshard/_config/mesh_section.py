"""The section `mesh` of a configuration: read, and made into a mesh that `shard` takes.

Forms: axes with sizes, of which one may be -1; axes on a slice (`ici`) and over the network between slices (`dcn`);
a machine that is not attached (`machine: "v5p:4x4x4"`, with `axes`); `"auto"`, `"auto:8"`, `"auto:v5e:4x4"`.

>>> from jshard._config.yaml_reader import locate
>>> section = parse_mesh(locate({"ici": {"fsdp": 4, "tensor": 2}, "dcn": {"data": 2}}, "config"))
>>> section.sizes, section.text
({'fsdp': 4, 'tensor': 2, 'data': 2}, '{ici: {fsdp: 4, tensor: 2}, dcn: {data: 2}}')
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jshard._config.config_record import MeshSection
from jshard._config.yaml_reader import Located
from jshard._core.errors import MeshError
from jshard._core.jax_types import Device
from jshard._core.messages import describe_value, suggest
from jshard._core.named_topology import MeshRequest, topology
from jshard._core.topology import named_device_count


FORMS = 'axes with sizes, {data: 2, fsdp: -1}; {machine: "v5p:4x4x4", axes: {...}}; {ici: {...}, dcn: {...}}; "auto"'


def parse_mesh(
    node: Located | None, ici: Located | None = None, dcn: Located | None = None
) -> MeshSection | None:
    """The section of a document; `ici`, `dcn`: torchprime's keys `ici_mesh` and `dcn_mesh`."""
    if node is None and ici is None and dcn is None:
        return None
    if node is None:
        at = ici or dcn
        assert at is not None
        return MeshSection(_sizes(ici), tuple(p for p in _sizes(dcn) if p[1] != 1), where=at.where)
    if isinstance(node.value, str) and node.value.partition(":")[0] == "auto":
        return MeshSection(machine=node.value, where=node.where)
    if not isinstance(node.value, Mapping):
        raise MeshError(f"mesh is {describe_value(node.value)}", where=node.where, fix=FORMS)
    keys = dict(node.value)
    if "machine" in keys:
        _only(keys, ("machine", "axes", "slices"))
        machine, axes = keys["machine"].value, keys.get("axes")
        slices = keys["slices"].value if "slices" in keys else 1
        if not isinstance(machine, str) or axes is None or not isinstance(slices, int):
            raise MeshError(
                "a machine without a name, axes, or a number of slices", where=node.where, fix=FORMS
            )
        return MeshSection(_sizes(axes), machine=machine, slices=slices, where=node.where)
    if set(keys) & {"ici", "dcn"}:
        _only(keys, ("ici", "dcn"))
        return MeshSection(_sizes(keys.get("ici")), _sizes(keys.get("dcn")), where=node.where)
    return MeshSection(_sizes(node), where=node.where)


def build_mesh(section: MeshSection, device: str | None = None) -> MeshRequest:
    """The mesh of a section, over the first of the devices there are; or what `shard(mesh=)` takes in its place.

    >>> build_mesh(MeshSection((("data", 1), ("tensor", 2)))).shape["tensor"]
    2
    """
    if section.machine and not section.axes:
        return section.machine
    if section.machine:
        axes = _filled(section, named_device_count(section.machine) * section.slices)
        return topology(section.machine, dict(axes.axes), num_slices=section.slices)
    devices = jax.devices(device)
    section = _filled(section, len(devices))
    sizes = section.sizes
    count = math.prod(sizes.values())
    if count > len(devices):
        raise MeshError(
            f"the mesh {section.text} has {count} devices, there are {len(devices)}",
            where=section.where,
            fix=f"sizes whose product is at most {len(devices)}, or -1 for one of them; or a machine that is not attached: "
            f'{{machine: "v5p:4x4x4", axes: {{...}}}}',
        )
    if math.prod(s for _, s in section.dcn) > 1:
        return _hybrid(section, devices)
    if count == len(devices):
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    return Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def _hybrid(section: MeshSection, devices: Sequence[Device]) -> Mesh:
    """A mesh whose `dcn` factors are the major ones of their axes: slow links between slices, fast ones inside."""
    names, ici, dcn = section.names, dict(section.axes), dict(section.dcn)
    inner, outer = ([of.get(n, 1) for n in names] for of in (ici, dcn))
    slices = {getattr(d, "slice_index", None) for d in devices}
    if len(slices) == math.prod(outer) > 1:
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    else:  # devices without slices, such as virtual ones: consecutive devices are one slice
        flat = np.array(devices[: math.prod(inner) * math.prod(outer)]).reshape(*outer, *inner)
        order = [k for i in range(len(names)) for k in (i, len(names) + i)]
        grid = flat.transpose(order).reshape([a * b for a, b in zip(outer, inner, strict=True)])
    return Mesh(grid, names)


def _filled(section: MeshSection, devices: int) -> MeshSection:
    """The section with its -1 replaced by what the devices leave."""
    axes = (*section.axes, *section.dcn)
    known = math.prod(s for _, s in axes if s > 0)
    open_axes = [n for n, s in axes if s < 0]
    if not open_axes:
        return section
    if devices % known or devices < known:
        raise MeshError(
            f"{devices} devices are no multiple of {known}, the sizes beside the -1 of {section.text}",
            where=section.where,
            fix=f"sizes whose product divides {devices}",
        )
    fill = {n: devices // known for n in open_axes}

    def filled(part: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((n, fill[n] if s < 0 else s) for n, s in part)

    return dataclasses.replace(section, axes=filled(section.axes), dcn=filled(section.dcn))


def _sizes(node: Located | None) -> tuple[tuple[str, int], ...]:
    if node is None or node.value is None:
        return ()
    if not isinstance(node.value, Mapping):
        raise MeshError(f"mesh axes are {describe_value(node.value)}", where=node.where, fix=FORMS)
    sizes: list[tuple[str, int]] = []
    for name, size in node.value.items():
        if (
            isinstance(size.value, bool)
            or not isinstance(size.value, int)
            or (size.value < 1 and size.value != -1)
        ):
            raise MeshError(
                f"the size of mesh axis {name!r} is {describe_value(size.value)}",
                where=size.where,
                fix="a positive number, or -1 for what is left",
            )
        sizes.append((name, size.value))
    if [s for _, s in sizes].count(-1) > 1:
        raise MeshError("two mesh axes have the size -1", where=node.where, fix="-1 for one axis only")
    return tuple(sizes)


def _only(keys: Mapping[str, Located], known: tuple[str, ...]) -> None:
    for key, value in keys.items():
        if key not in known:
            raise MeshError(f"mesh has no key {key!r}", where=value.where, fix=suggest(key, known))
