"""The machine to plan for: meshes to choose from, how their axes lie on physical links, memory per device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jshard._api.shard_request import ShardRequest
from jshard._core import hardware, jaxcompat as compat, topology as device_topology
from jshard._core.errors import MeshError, PlanMismatchError
from jshard._core.jax_types import Device, JaxMesh
from jshard._core.named_topology import MeshRequest, topology as named_topology
from jshard._core.saved_chip import named_chip
from jshard._core.topology import Topology
from jshard._program.user_shard_map import mesh_axes
from jshard._spec.committed_shardings import Placement
from jshard._spec.default_budget import default_memory_budget
from jshard._spec.entry import JointConstraint, Pin
from jshard._spec.mesh_selection import (
    ChosenMesh,
    candidate_grids,
    candidate_meshes,
    choose_mesh,
    mesh_device_count,
    mesh_devices,
)


def requested_mesh(request: ShardRequest, argument_mesh: JaxMesh | None = None) -> MeshRequest | None:
    """The mesh that the user gave, None if none.

    With `plan=` and no mesh, given or in context, it is the plan's mesh: `argument_mesh` if that has the plan's axes,
    else the plan's axes over the first devices. Raises `PlanMismatchError` if there are fewer.
    """
    if request.mesh is not None or request.plan is None or compat.context_mesh() is not None:
        return request.mesh
    axes, devices = request.plan.mesh, jax.devices(request.options.device)
    if argument_mesh is not None and mesh_axes(argument_mesh) == axes:
        return argument_mesh
    if len(devices) < axes.total:
        raise PlanMismatchError(
            f"the plan was made for {axes.total} devices ({axes}), there are {len(devices)}",
            where=f"plan= of {request.name}",
            fix="give mesh= the machine that the plan is for, or plan again",
        )
    return jax.sharding.Mesh(np.array(devices[: axes.total]).reshape(axes.sizes), axes.names)


def auto_meshes(
    request: ShardRequest,
    pins: Sequence[Pin | None],
    shapes: Sequence[Sequence[int] | None],
    joint: Sequence[JointConstraint],
) -> list[tuple[ChosenMesh, ShardRequest]]:
    """The meshes that `mesh="auto"` compares, each with the request to plan on it.

    They are factorizations of the local devices, of some of them (`"auto:4"`), or of a named machine
    (`"auto:v5e:4x4"`); `pins`, `shapes` and `joint` as for `choose_mesh`.
    """
    assert isinstance(request.mesh, str)
    name, device = request.mesh.partition(":")[2], request.options.device
    if not name:
        return [(c, request) for c in candidate_meshes(device, pins, shapes, joint=joint)]
    if name.isdigit():
        local = jax.devices(device)
        if not 1 <= int(name) <= len(local):
            raise MeshError(
                f"mesh={request.mesh!r} asks for {name} devices, there are {len(local)}",
                where="mesh",
                fix=f'"auto:{len(local)}" or fewer, or a machine by name: "auto:v5e:4x4"',
            )
        return [(c, request) for c in candidate_meshes(device, pins, shapes, local[: int(name)], joint)]
    count = device_topology.named_device_count(name)
    machines = [named_topology(name, axes) for axes in candidate_grids(count, pins, shapes, joint)]
    return [
        (choose_mesh(m, device, pins, shapes, joint=joint), dataclasses.replace(request, mesh=m))
        for m in machines
    ]


def num_devices(request: ShardRequest, placement: Placement) -> int:
    """How many devices the function will be sharded over, known before a mesh is chosen."""
    mesh = requested_mesh(request)
    if isinstance(mesh, str) and mesh.partition(":")[0] == "auto":
        name = mesh.partition(":")[2]
        if name:
            return int(name) if name.isdigit() else device_topology.named_device_count(name)
    entries = (request.in_strategy, request.parameter_plan, request.out_strategy)
    return mesh_device_count(placement.mesh if mesh is None else mesh, request.options.device, entries)


def planned_devices(request: ShardRequest, placement: Placement) -> list[Device]:
    """The devices that a call will be planned for, if they are here to run it, known before a mesh is chosen."""
    mesh, device = requested_mesh(request, placement.mesh), request.options.device
    if isinstance(mesh, str):
        name = mesh.partition(":")[2]
        return jax.devices(device)[: int(name) if name else None] if name.isdigit() or not name else []
    entries = (request.in_strategy, request.parameter_plan, request.out_strategy)
    devices = mesh_devices(mesh, device, entries, placement.mesh)
    try:
        return devices if devices and devices[0] in jax.devices(devices[0].platform) else []
    except RuntimeError:  # of an ahead-of-time compiler
        return []


def physical_topology(request: ShardRequest, chosen: ChosenMesh) -> Topology:
    """The physical links of each axis of the chosen mesh, and the chip: `hardware=` before that of the mesh."""
    mesh = request.mesh
    chip = request.options.hardware
    if isinstance(chip, str):
        chip = named_chip(chip)
    links = getattr(mesh, "links", None)
    if isinstance(links, Topology) and links.mesh == chosen.axes:
        return links if chip is None else dataclasses.replace(links, chip=chip)
    name = getattr(mesh, "chip", None)
    if chip is None and isinstance(name, str):
        chip = hardware.get(name)
    if chip is None and isinstance(chosen.mesh, jax.sharding.AbstractMesh):
        chip = hardware.for_device(jax.devices(request.options.device)[0])
    return device_topology.from_mesh(chosen.mesh, chip)


def memory_budget(request: ShardRequest, topology: Topology) -> float | None:
    """Bytes per device that a plan may use; None for no limit."""
    if request.options.memory_budget is not None:
        return float(request.options.memory_budget)
    return default_memory_budget(topology.chip)
