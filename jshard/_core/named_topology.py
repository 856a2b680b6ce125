"""A mesh of machines that are not here: to plan for, and to compile for where the compiler is installed.

The TPU compiler (libtpu) and the GPU compiler (JAX's CUDA plugin) need no device. With their wheels installed
`topology` gives a mesh of devices that compile but do not run; without, an abstract mesh to plan on. libtpu
ends the process on shapes that it does not know, so names are checked before it sees them.

>>> t = topology("v5e:4x8", {"data": 4, "model": 8}, compiles=False)
>>> print(t)
v5e:4x8 (tpu-v5e), data=4 x model=8: plans only
>>> t.jax_mesh.shape["model"], t.compiles
(8, False)

Nothing in the environment is changed. What the compilers want there must be set before Python starts:
`ALLOW_MULTIPLE_LIBTPU_LOAD=1` when several processes compile for TPU at once (libtpu keeps one lock a
machine), `TPU_SKIP_MDS_QUERY=1` where it would look for a cloud that is not there, `JAX_PLATFORMS=cpu` for
the CUDA plugin on a machine without GPU, and `XLA_FLAGS=--xla_gpu_autotune_level=0
--xla_gpu_enable_triton_gemm=false` to compile for GPU without one to tune on.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jshard._core import topology as torus
from jshard._core.argument_checks import checked
from jshard._core.errors import MeshError
from jshard._core.hardware import Chip
from jshard._core.layout import MeshAxes
from jshard._core.messages import describe_value


@dataclasses.dataclass(frozen=True)
class TopologyMesh:
    """A mesh on a named machine; `shard(..., mesh=...)` takes it.

    >>> topology("v5p:4x4x4", {"x": 16, "y": 4}, compiles=False).devices
    64

    Args:
      name: as given to `topology`.
      hardware: the chip's entry in the hardware table.
      physical: chips along each torus axis, or islands x GPUs.
      slices: TPU slices, joined by the data-centre network.
      jax_mesh: a `Mesh` of the compiler's devices, or an `AbstractMesh`; all axes Auto.
      compiles: whether programs can be compiled for it here.
    """

    name: str
    hardware: Chip
    physical: tuple[int, ...]
    slices: int
    jax_mesh: Mesh | AbstractMesh
    compiles: bool

    @property
    def axes(self) -> dict[str, int]:
        """Axis names and sizes, major first."""
        return {str(n): int(s) for n, s in self.jax_mesh.shape.items()}

    @property
    def chip(self) -> str:
        """Name of the chip in the hardware table."""
        return self.hardware.name

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.axes.values())

    @functools.cached_property
    def links(self) -> torus.Topology:
        """The wires below every axis, as the planner's costs see them."""
        axes = MeshAxes(tuple(self.axes), tuple(self.axes.values()))
        if self.hardware.interconnect.startswith("torus"):
            # By coordinates: JAX does not always lay an axis along the torus (v5e: 4 devices are a 2 x 2 square),
            # and a plan must not depend on whether the compiler is installed.
            if self.compiles:
                return torus.from_mesh(self.jax_mesh, self.hardware)
            stand_ins = _fake_tpu_devices(self.hardware, self.physical, self.slices)
            if len(stand_ins) == axes.total:
                placed = _device_grid(stand_ins, axes.sizes, self.hardware, self.slices)
                return torus.from_mesh(axes, self.hardware, device_grid=placed)
        physical = self.physical if self.hardware.interconnect != "shared" else None
        return torus.from_mesh(axes, self.hardware, physical=physical, slices=self.slices)

    def __str__(self) -> str:
        slices = f" x {self.slices} slices" if self.slices > 1 else ""
        axes = MeshAxes(tuple(self.axes), tuple(self.axes.values()))
        return f"{self.name}{slices} ({self.chip}), {axes}: {'compiles' if self.compiles else 'plans only'}"


@checked
def topology(
    name: str, axes: Mapping[str, int], *, num_slices: int = 1, compiles: bool | None = None
) -> TopologyMesh:
    """A mesh to plan and compile for without owning it.

    >>> mesh = topology("h100:4x8", {"data": 4, "model": 8}, compiles=False)
    >>> mesh.chip, mesh.axes
    ('gpu-h100', {'data': 4, 'model': 8})
    >>> topology("v5e:32x32", {"x": 1024})
    Traceback (most recent call last):
    ...
    jshard._core.errors.MeshError: tpu-v5e has no slice of shape 32x32
      where: topology 'v5e:32x32'
      write instead: one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16

    Args:
      name: chip and shape: `"v5e:4x8"` and `"v5p:4x4x8"` in chips along the torus, `"h100:4x8"` in islands x
        GPUs, `"cpu:8"`. On v4 a device is a chip, on 7x a chip is two devices.
      axes: axis names and sizes, major first; their product is the number of devices.
      num_slices: TPU slices joined by the network; they cut the major axes.
      compiles: True for a mesh that can compile, an error without the compiler's wheel; False for an
        abstract one; None for the first where the wheel is installed, else the second.

    Raises:
      MeshError: unknown chip, a shape that the chip does not come in, axes that do not fit, no compiler.
    """
    where = f"topology {name!r}"
    if not isinstance(name, str):
        raise MeshError(
            f"the machine is {describe_value(name)}", where="topology", fix='its name, such as "v5e:4x8"'
        )
    if not isinstance(axes, Mapping):
        raise MeshError(
            f"the axes are {describe_value(axes)}",
            where=where,
            fix='names and sizes: {"data": 4, "model": 8}',
        )
    chip, physical = torus.parse_name(name)
    if isinstance(num_slices, bool) or not isinstance(num_slices, int):
        raise MeshError(f"num_slices is {describe_value(num_slices)}", where=where, fix="num_slices=2")
    if num_slices < 1 or num_slices > 1 and not chip.interconnect.startswith("torus"):
        raise MeshError(
            f"{num_slices} slices of {chip.name}",
            where=where,
            fix="num_slices >= 1, on TPU; for GPUs islands x GPUs in the name",
        )
    count = torus.device_count(chip, physical) * num_slices
    names, sizes = tuple(axes), tuple(axes.values())
    if not names or any(not isinstance(s, int) or s < 1 for s in sizes) or math.prod(sizes) != count:
        shown = ", ".join(f"{n!r}: {s}" for n, s in axes.items())
        raise MeshError(
            f"{name} has {count} devices, the axes {{{shown}}} are {_product_text(sizes)}",
            where=where,
            fix=f"axes whose sizes multiply to {count}, such as {_axes_example(names, count)}",
        )
    devices = None
    if compiles is not False:
        devices = _compile_only_devices(chip, physical, num_slices, where, required=bool(compiles))
    types = (AxisType.Auto,) * len(names)
    if devices is None:
        mesh = AbstractMesh(sizes, names, axis_types=types)
    else:
        mesh = Mesh(_device_grid(devices, sizes, chip, num_slices), names, axis_types=types)
    return TopologyMesh(name, chip, physical, num_slices, mesh, devices is not None)


def _product_text(sizes: Sequence[Any]) -> str:
    whole = all(isinstance(s, int) for s in sizes)
    return str(math.prod(sizes)) if whole else "not whole numbers"


def _axes_example(names: Sequence[str], count: int) -> str:
    names = names or ("x",)
    return "{" + ", ".join(f"{n!r}: {count if i == 0 else 1}" for i, n in enumerate(names)) + "}"


def _compile_only_devices(
    chip: Chip, physical: tuple[int, ...], slices: int, where: str, *, required: bool
) -> list[Any] | None:
    """Devices that compile; None where the compiler is not installed and not required."""
    if chip.interconnect == "shared":
        here, wanted = jax.devices("cpu"), math.prod(physical)
        if len(here) >= wanted:
            return here[:wanted]
        if not required:
            return None
        raise MeshError(
            f"{wanted} CPU devices are wanted, JAX has {len(here)}",
            where=where,
            fix=f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before Python starts",
        )
    tpu = chip.interconnect.startswith("torus")
    if not (_installed("libtpu") if tpu else _cuda_plugin()):
        if not required:
            return None
        wheel = "libtpu" if tpu else "jax-cuda12-plugin jax-cuda12-pjrt"
        raise MeshError(
            f"compiling for {chip.name} needs a wheel that is not installed: {wheel}",
            where=where,
            fix=f"pip install {'' if tpu else '--no-deps '}{wheel}, of JAX's own version"
            f"{'' if not tpu else ' (pip install jax[tpu] knows it)'}; or compiles=False to plan only",
        )
    from jax.experimental import topologies

    try:
        if tpu:
            description = topologies.get_topology_desc(
                _tpu_name(chip, physical), platform="tpu", **_tpu_options(chip, physical, slices)
            )
        else:
            shape = (1,) * (3 - len(physical)) + physical
            description = topologies.get_topology_desc(
                platform="cuda", topology="x".join(map(str, shape)), target_config=gpu_target(chip)
            )
    except Exception as error:  # the plugins raise what they like: RuntimeError, NotImplementedError, ...
        raise MeshError(
            f"the compiler for {chip.name} did not start: {str(error).strip().splitlines()[0]}",
            where=where,
            fix=_startup_hint(str(error), tpu),
        ) from error
    return list(description.devices)


def _startup_hint(error: str, tpu: bool) -> str:
    """What to set for the errors that were seen; nothing here sets it."""
    if "lockfile" in error or "multi-process" in error:
        return (
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment before Python starts: another process "
            "compiles for TPU; or compiles=False to plan only"
        )
    if tpu:
        return "TPU_SKIP_MDS_QUERY=1 in the environment before Python starts; or compiles=False to plan only"
    return (
        "JAX_PLATFORMS=cpu in the environment before Python starts (the CUDA plugin looks for a GPU "
        "otherwise); or compiles=False to plan only"
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _cuda_plugin() -> bool:
    return any(_installed(f"jax_plugins.xla_cuda{v}") for v in (12, 13))


def _tpu_name(chip: Chip, physical: Sequence[int]) -> str:
    generation = {"tpu-7x": "tpu7x"}.get(chip.name, chip.name.removeprefix("tpu-"))
    return f"{generation}:{'x'.join(map(str, physical))}"


def _tpu_options(chip: Chip, physical: Sequence[int], slices: int) -> dict[str, Any]:
    """What libtpu wants besides the name, found by trying (jax_facts.md section 6).

    Hosts hold 2 x 2 x 1 chips by default, and a shape must be made of whole hosts: smaller ones need smaller
    hosts. v4 counts cores unless they are joined, as they are on the machines themselves.
    """
    options: dict[str, Any] = {}
    padded = (*physical, 1)[:3] if len(physical) < 3 else tuple(physical)
    bounds = tuple(host if n % host == 0 else 1 for n, host in zip(padded, (2, 2, 1), strict=True))
    if bounds != (2, 2, 1):
        options["chips_per_host_bounds"] = bounds
    if chip.name == "tpu-v4":
        options["chip_config_name"] = "megacore"
    if slices > 1:
        options["num_slices"] = slices
    return options


# How JAX names the devices; its layouts of meshes differ between them.
_TPU_DEVICE_KINDS = {
    "tpu-v4": "TPU v4",
    "tpu-v5e": "TPU v5 lite",
    "tpu-v5p": "TPU v5",
    "tpu-v6e": "TPU v6 lite",
    "tpu-7x": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class _FakeTpuDevice:
    """What JAX looks at when it lays a mesh over TPU devices."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    device_kind: str
    process_index: int = 0
    platform: str = "tpu"


def _fake_tpu_devices(chip: Chip, physical: Sequence[int], slices: int) -> list[_FakeTpuDevice]:
    """Devices of a machine that is not there, in the order in which the TPU runtime numbers them: x fastest."""
    x, y, z = (*physical, 1, 1)[:3]
    kind = _TPU_DEVICE_KINDS.get(chip.name, "TPU")
    places = [
        ((i, j, k), core, s)
        for s in range(slices) for k in range(z) for j in range(y) for i in range(x) for core in range(chip.dies)
    ]  # fmt: skip
    return [_FakeTpuDevice(n, at, core, s, kind) for n, (at, core, s) in enumerate(places)]


def _device_grid(devices: list[Any], sizes: tuple[int, ...], chip: Chip, slices: int) -> np.ndarray:
    """Devices as a grid: TPU slices as JAX lays meshes over a torus, everything else in order."""
    from jax.experimental import mesh_utils

    if not chip.interconnect.startswith("torus"):
        return np.asarray(devices, dtype=object).reshape(sizes)
    left, across = slices, []
    for size in sizes:  # slices cut the major axes
        across.append(math.gcd(size, left))
        left //= across[-1]
    inside = tuple(s // a for s, a in zip(sizes, across, strict=True))
    groups: dict[int, list[Any]] = {}
    for d in devices:
        groups.setdefault(getattr(d, "slice_index", 0) or 0, []).append(d)
    if left != 1 or len(groups) != slices:
        return np.asarray(devices, dtype=object).reshape(sizes)
    grids = []
    for group in groups.values():
        try:
            grids.append(mesh_utils.create_device_mesh(inside, group, allow_split_physical_axes=True))
        except (NotImplementedError, ValueError):  # shapes that no assignment fits: in the order they come
            grids.append(np.asarray(group, dtype=object).reshape(inside))
    blocks = np.empty((*across, *inside), dtype=object)
    for index, grid in zip(np.ndindex(*across), grids, strict=True):
        blocks[index] = grid
    order = [d for k in range(len(sizes)) for d in (k, k + len(sizes))]
    return blocks.transpose(order).reshape(sizes)


# Cores, FPUs per core, shared memory per core, L2, GHz, capability, memory, name; from the specs of XLA's own
# deviceless compiler: openxla/xla xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb
_GPU_TARGETS = {
    "gpu-a100": (108, 64, 167936, 41943040, 1.41, 8, 85100068864, "NVIDIA A100-SXM4-80GB"),
    "gpu-h100": (132, 128, 233472, 52428800, 1.98, 9, 84942979072, "NVIDIA H100 80GB HBM3"),
    "gpu-h200": (132, 128, 233472, 52428800, 1.98, 9, 151397597184, "NVIDIA H200 141GB HBM3e"),
    "gpu-b200": (148, 128, 233472, 132644864, 1.965, 10, 191514411008, "NVIDIA B200"),
}


def gpu_target(chip: Chip) -> str:
    """What the GPU compiler must know of a chip, as a `GpuTargetConfigProto` text.

    >>> from jshard import _hardware
    >>> "core_count: 132" in gpu_target(_hardware.get("h100"))
    True
    """
    if chip.name not in _GPU_TARGETS:
        raise MeshError(
            f"no compiler target is known for {chip.name}",
            where="topology",
            fix=f"one of {', '.join(_GPU_TARGETS)}, or compiles=False to plan only",
        )
    cores, fpus, shared, l2, ghz, major, memory, name = _GPU_TARGETS[chip.name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {ghz} l2_cache_size: {l2}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bandwidth)} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
