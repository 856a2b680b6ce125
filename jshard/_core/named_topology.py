"""Meshes of machines that are not attached, by name: to plan for, and to compile for if the compiler is installed.

The TPU compiler (libtpu) and the GPU compiler (JAX's CUDA plugin) need no device. With their wheels installed,
`topology` returns a mesh of devices that compile but do not run; without them, an abstract mesh to plan on. libtpu
aborts the process on unknown shapes, so names are checked first.

>>> t = topology("v5e:4x8", {"data": 4, "model": 8}, compiles=False)
>>> print(t)
v5e:4x8 (tpu-v5e), data=4 x model=8: plans only
>>> t.jax_mesh.shape["model"], t.compiles
(8, False)

The environment is not changed. These variables must be set before Python starts: `ALLOW_MULTIPLE_LIBTPU_LOAD=1` if
several processes compile for TPU at once (libtpu takes one lock per machine), `TPU_SKIP_MDS_QUERY=1` outside Google
Cloud, `JAX_PLATFORMS=cpu` for the CUDA plugin on a machine without GPU, and `XLA_FLAGS=--xla_gpu_autotune_level=0
--xla_gpu_enable_triton_gemm=false` to compile for GPU without one for autotuning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jax.sharding import AbstractMesh, AxisType, Mesh

from jshard._core import aot_devices, topology as device_topology
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

    Arguments:

    - `name`: the `name` passed to `topology`.
    - `hardware`: the chip's entry in the hardware table.
    - `physical`: chips along each torus axis, or islands x GPUs.
    - `slices`: TPU slices, joined by the data-centre network.
    - `jax_mesh`: a `Mesh` of the compiler's devices, or an `AbstractMesh`; all axes Auto.
    - `compiles`: whether programs can be compiled for it on this machine.
    """

    name: str
    hardware: Chip
    physical: tuple[int, ...]
    slices: int
    jax_mesh: Mesh | AbstractMesh
    compiles: bool

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """A machine is no function: raises a `MeshError` that says where it goes."""
        raise MeshError(
            f"{self.name} is a machine, not a function",
            where="call of jshard.topology(...)",
            fix="jshard.shard(fn, mesh=machine), "
            "jshard.sweep(fn, *args, mesh=[machine]); jax.set_mesh(machine.jax_mesh) as a context",
        )

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
    def links(self) -> device_topology.Topology:
        """The physical links of every mesh axis, for the planner's costs."""
        axes = MeshAxes(tuple(self.axes), tuple(self.axes.values()))
        if self.hardware.interconnect.startswith("torus"):
            # By coordinates: JAX does not always lay an axis along the torus (v5e: 4 devices are a 2 x 2 square),
            # and a plan must not depend on whether the compiler is installed.
            if self.compiles:
                return device_topology.from_mesh(self.jax_mesh, self.hardware)
            stand_ins = aot_devices.fake_tpu_devices(self.hardware, self.physical, self.slices)
            if len(stand_ins) == axes.total:
                placed = aot_devices.device_grid(stand_ins, axes.sizes, self.hardware, self.slices)
                return device_topology.from_mesh(axes, self.hardware, device_grid=placed)
        physical = self.physical if self.hardware.interconnect != "shared" else None
        return device_topology.from_mesh(axes, self.hardware, physical=physical, slices=self.slices)

    def __str__(self) -> str:
        slices = f" x {self.slices} slices" if self.slices > 1 else ""
        axes = MeshAxes(tuple(self.axes), tuple(self.axes.values()))
        return f"{self.name}{slices} ({self.chip}), {axes}: {'compiles' if self.compiles else 'plans only'}"


MeshRequest = Mesh | AbstractMesh | TopologyMesh | str
"""What `mesh=` of `shard` takes; a string is "auto", a number of devices or a machine after it: "auto:4"."""


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

    Arguments:

    - `name`: chip and shape: `"v5e:4x8"` and `"v5p:4x4x8"` in chips along the torus, `"h100:4x8"` in islands x
        GPUs, `"cpu:8"`. On v4 a device is a chip, on 7x a chip is two devices.
    - `axes`: axis names and sizes, major first; their product is the number of devices.
    - `num_slices`: TPU slices, or GPU islands, joined by the network; the major mesh axes span them: `"h100:8"` with
        four is `"h100:4x8"`.
    - `compiles`: True for a mesh to compile for, an error without the compiler's wheel; False for an abstract
        mesh; None for the first if the wheel is installed, else the second.

    Raises: `MeshError` for an unknown chip, a shape that the chip does not come in, axes that do not fit, no compiler.
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
    chip, physical = device_topology.parse_name(name)
    if isinstance(num_slices, bool) or not isinstance(num_slices, int):
        raise MeshError(f"num_slices is {describe_value(num_slices)}", where=where, fix="num_slices=2")
    if num_slices < 1 or num_slices > 1 and chip.interconnect == "shared":
        raise MeshError(
            f"{num_slices} slices of {chip.name}",
            where=where,
            fix="num_slices >= 1, on TPU and GPU",
        )
    if num_slices > 1 and chip.interconnect == "switch":  # a slice is as many islands as the name says
        physical, num_slices = (num_slices * math.prod(physical[:-1]), physical[-1]), 1
        name = f"{name.partition(':')[0]}:{'x'.join(map(str, physical))}"
    count = device_topology.device_count(chip, physical) * num_slices
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
        devices = aot_devices.compile_only_devices(chip, physical, num_slices, where, required=bool(compiles))
    types = (AxisType.Auto,) * len(names)
    if devices is None:
        mesh = AbstractMesh(sizes, names, axis_types=types)
    else:
        mesh = Mesh(aot_devices.device_grid(devices, sizes, chip, num_slices), names, axis_types=types)
    return TopologyMesh(name, chip, physical, num_slices, mesh, devices is not None)


def _product_text(sizes: Sequence[int]) -> str:
    whole = all(isinstance(s, int) for s in sizes)
    return str(math.prod(sizes)) if whole else "not whole numbers"


def _axes_example(names: Sequence[str], count: int) -> str:
    names = names or ("x",)
    return "{" + ", ".join(f"{n!r}: {count if i == 0 else 1}" for i, n in enumerate(names)) + "}"
