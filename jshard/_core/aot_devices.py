"""Devices of machines that are not attached: those of the TPU and GPU compilers, and stand-ins for mesh layouts.

libtpu and JAX's CUDA plugin compile ahead of time without a device. Nothing in the environment is changed; what these
compilers need there is listed in `named_topology.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence

import jax
import numpy as np

from jshard._core.errors import MeshError
from jshard._core.hardware import Chip
from jshard._core.jax_types import Device


def compile_only_devices(
    chip: Chip, physical: tuple[int, ...], slices: int, where: str, *, required: bool
) -> list[Device] | None:
    """Devices to compile for; None if their compiler is not installed and not `required`.

    Raises: `MeshError` with `where` if it is required and missing, or if it does not start.
    """
    if chip.interconnect == "shared":
        available, count = jax.devices("cpu"), math.prod(physical)
        if len(available) >= count:
            return available[:count]
        if not required:
            return None
        raise MeshError(
            f"{count} CPU devices are wanted, JAX has {len(available)}",
            where=where,
            fix=f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before Python starts",
        )
    tpu = chip.interconnect.startswith("torus")
    if not (installed("libtpu") if tpu else cuda_plugin_installed()):
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
    except Exception as error:  # the plugins raise RuntimeError, NotImplementedError and others
        raise MeshError(
            f"the compiler for {chip.name} did not start: {str(error).strip().splitlines()[0]}",
            where=where,
            fix=_startup_hint(str(error), tpu),
        ) from error
    return list(description.devices)


def _startup_hint(error: str, tpu: bool) -> str:
    """The environment variable that avoids a known start-up error; it is for the user to set."""
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


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def cuda_plugin_installed() -> bool:
    """Whether JAX's CUDA plugin, which has the compiler for GPU, is there."""
    return any(installed(f"jax_plugins.xla_cuda{v}") for v in (12, 13))


def _tpu_name(chip: Chip, physical: Sequence[int]) -> str:
    generation = {"tpu-7x": "tpu7x"}.get(chip.name, chip.name.removeprefix("tpu-"))
    return f"{generation}:{'x'.join(map(str, physical))}"


def _tpu_options(chip: Chip, physical: Sequence[int], slices: int) -> dict[str, object]:
    """libtpu's options besides the name of the topology, found by experiment (jax_facts.md section 6).

    A host has 2 x 2 x 1 chips by default and a shape must consist of whole hosts, so small shapes need smaller hosts.
    On v4 libtpu counts cores unless `megacore` joins the two of a chip, as on the real machines.
    """
    options: dict[str, object] = {}
    padded = (*physical, 1)[:3] if len(physical) < 3 else tuple(physical)
    bounds = tuple(host if n % host == 0 else 1 for n, host in zip(padded, (2, 2, 1), strict=True))
    if bounds != (2, 2, 1):
        options["chips_per_host_bounds"] = bounds
    if chip.name == "tpu-v4":
        options["chip_config_name"] = "megacore"
    if slices > 1:
        options["num_slices"] = slices
    return options


# JAX's `device_kind`, on which `mesh_utils` bases its device order.
_TPU_DEVICE_KINDS = {
    "tpu-v4": "TPU v4",
    "tpu-v5e": "TPU v5 lite",
    "tpu-v5p": "TPU v5",
    "tpu-v6e": "TPU v6 lite",
    "tpu-7x": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class FakeTpuDevice:
    """The attributes of a TPU device that `mesh_utils.create_device_mesh` reads."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    device_kind: str
    process_index: int = 0
    platform: str = "tpu"


def fake_tpu_devices(chip: Chip, physical: Sequence[int], slices: int) -> list[FakeTpuDevice]:
    """Stand-ins for the devices of a TPU, numbered as the TPU runtime does: x fastest, slices slowest."""
    x, y, z = (*physical, 1, 1)[:3]
    kind = _TPU_DEVICE_KINDS.get(chip.name, "TPU")
    places = [
        ((i, j, k), core, s)
        for s in range(slices) for k in range(z) for j in range(y) for i in range(x) for core in range(chip.dies)
    ]  # fmt: skip
    return [FakeTpuDevice(n, at, core, s, kind) for n, (at, core, s) in enumerate(places)]


def device_grid(devices: Sequence[Device], sizes: tuple[int, ...], chip: Chip, slices: int) -> np.ndarray:
    """Devices as an array of shape `sizes`: TPU slices in JAX's order on a torus, all others in device order."""
    if not chip.interconnect.startswith("torus"):
        return np.asarray(devices, dtype=object).reshape(sizes)
    return hybrid_grid(devices, sizes, slices)


def hybrid_grid(devices: Sequence[Device], sizes: tuple[int, ...], slices: int) -> np.ndarray:
    """Devices of several slices as an array of shape `sizes`, whose major axes span the slices.

    The grid of `mesh_utils.create_hybrid_device_mesh` with the factors that `axes_across` gives. In device order where
    the sizes have no such factors, or the slices differ in size.

    >>> from jshard._core import hardware
    >>> grid = hybrid_grid(fake_tpu_devices(hardware.get("v5e"), (2, 2), 2), (4, 2), 2)
    >>> [[d.slice_index for d in row] for row in grid]
    [[0, 0], [0, 0], [1, 1], [1, 1]]
    """
    from jax.experimental import mesh_utils

    across = axes_across(sizes, slices)
    groups: dict[int, list[Device]] = {}
    for d in devices:
        groups.setdefault(getattr(d, "slice_index", 0) or 0, []).append(d)
    if across is None or len(groups) != slices or len({len(g) for g in groups.values()}) != 1:
        return np.asarray(devices, dtype=object).reshape(sizes)
    inside = tuple(s // a for s, a in zip(sizes, across, strict=True))
    grids = []
    for _, group in sorted(groups.items()):
        try:
            grids.append(mesh_utils.create_device_mesh(inside, group, allow_split_physical_axes=True))
        except (NotImplementedError, ValueError):  # no assignment for this shape: device order
            grids.append(np.asarray(group, dtype=object).reshape(inside))
    blocks = np.empty((*across, *inside), dtype=object)
    for index, grid in zip(np.ndindex(*across), grids, strict=True):
        blocks[index] = grid
    order = [d for k in range(len(sizes)) for d in (k, k + len(sizes))]
    return blocks.transpose(order).reshape(sizes)


def axes_across(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """The factor of each mesh axis between slices, taken from the major axes first; None if there are none.

    >>> axes_across((4, 2), 2), axes_across((2, 8), 4), axes_across((3, 3), 2)
    ((2, 1), (2, 2), None)
    """
    left, across = slices, []
    for size in sizes:
        across.append(math.gcd(size, left))
        left //= across[-1]
    return tuple(across) if left == 1 else None


# Cores, FPUs per core, shared memory per core, L2, GHz, capability, memory, name; from the specs of XLA's own
# deviceless compiler: openxla/xla xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb
_GPU_TARGETS = {
    "gpu-a100": (108, 64, 167936, 41943040, 1.41, 8, 85100068864, "NVIDIA A100-SXM4-80GB"),
    "gpu-h100": (132, 128, 233472, 52428800, 1.98, 9, 84942979072, "NVIDIA H100 80GB HBM3"),
    "gpu-h200": (132, 128, 233472, 52428800, 1.98, 9, 151397597184, "NVIDIA H200 141GB HBM3e"),
    "gpu-b200": (148, 128, 233472, 132644864, 1.965, 10, 191514411008, "NVIDIA B200"),
}


def gpu_target(chip: Chip) -> str:
    """The `GpuTargetConfigProto` of a chip, as text, for compiling without a GPU.

    >>> from jshard._core import hardware
    >>> "core_count: 132" in gpu_target(hardware.get("h100"))
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
