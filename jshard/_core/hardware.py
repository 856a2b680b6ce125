"""The hardware table: compute, memory and network figures of chips, each with its source.

Every predicted second rests on these numbers, so none is without a source: `sources` has a text per field. `[S]` marks
a figure read at the source, `[R]` one recalled, `[M]` one measured, `[stand-in]` a placeholder. All figures are for one
JAX device (a TPU 7x chip is two devices); bandwidths are bytes/s in one direction.

>>> chip = get("v5e")
>>> chip.name, chip.hbm_bytes / 1e9, chip.sources["bf16_flops"]
('tpu-v5e', 16.0, 'docs.cloud.google.com/tpu/docs/v5e [S]')
>>> get("v5g")
Traceback (most recent call last):
...
jshard._core.errors.MeshError: unknown chip 'v5g'
  where: hardware.get
  write instead: one of tpu-v5p, tpu-v5e, ... or hardware.register(...)
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal

from jshard._core.collective_curves import CollectiveCurve
from jshard._core.compute_units import NO_UNITS, ComputeUnits, tpu_units
from jshard._core.errors import MeshError
from jshard._core.jax_types import Device
from jshard._core.layout import CollectiveKind
from jshard._core.switch_curves import switch_curves


Interconnect = Literal["torus2d", "torus3d", "switch", "shared"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of one accelerator, per JAX device.

    Arguments:

    - `name`: the canonical name, `"tpu-v5e"`.
    - `bf16_flops`, `f32_flops`, `fp8_flops`, `int8_flops`: dense peak of the matrix units, operations/s;
        `None` where the chip has no such unit. `f32_flops` is JAX's default precision.
    - `hbm_bytes`, `hbm_bandwidth`: memory in bytes (`None`: no budget) and bytes/s.
    - `links`, `link_bandwidth`: inter-chip links of the device and bytes/s one way of each.
    - `efficiency`: fraction of the link bandwidth that large collectives reach.
    - `alpha`: latency in seconds per step of a collective (a hop on a torus); per collective for `"shared"`.
    - `startup`: launch latency in seconds per collective, on top of its steps.
    - `interconnect`: `"torus2d"`, `"torus3d"`, `"switch"` (NVLink) or `"shared"` (one memory).
    - `node_size`: devices on one host or NVLink island.
    - `nic_bandwidth`, `nic_alpha`: bytes/s per device and seconds per step between hosts or slices.
    - `max_slice`: the largest torus, in chips along each axis; empty where there is none.
    - `dies`: JAX devices on one chip, and `die_bandwidth` the bytes/s of the link between them.
    - `clock`: cycles/s of a TPU core, in which its compiler writes estimates; 0 for others.
    - `async_kinds`: kinds of collectives that its compiler starts before their results are needed, so that products hide
        them. `combine_bytes`: up to which it sends several of them as one.
    - `all_reduced_kinds`: kinds that its compiler makes an all-reduce of over a whole torus of three axes (of a gather only
        where they are rings).
    - `units`: tiles, passes and vector unit: how far kernels stay below the peak.
    - `call_seconds`: of a call of an empty program, by `calibrate`; `plan.measure` adds it to a step. 0: unknown.
    - `curves`: measured times of collectives by size; those take the place of the latencies and bandwidths above.
    - `sources`: for each field, where the number comes from.
    """

    name: str
    bf16_flops: float
    f32_flops: float
    fp8_flops: float | None
    int8_flops: float | None
    hbm_bytes: float | None
    hbm_bandwidth: float
    links: int
    link_bandwidth: float
    efficiency: float
    alpha: float
    startup: float
    interconnect: Interconnect
    node_size: int
    nic_bandwidth: float
    nic_alpha: float
    max_slice: tuple[int, ...] = ()
    dies: int = 1
    die_bandwidth: float = 0.0
    clock: float = 0.0
    call_seconds: float = 0.0
    units: ComputeUnits = NO_UNITS
    curves: tuple[CollectiveCurve, ...] = ()
    async_kinds: tuple[CollectiveKind, ...] = ()
    combine_bytes: float = 0.0
    all_reduced_kinds: tuple[CollectiveKind, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        memory = "no memory limit" if self.hbm_bytes is None else f"{self.hbm_bytes / 1e9:.0f} GB"
        return (
            f"{self.name}: {self.bf16_flops:.3g} bf16 FLOP/s, {memory} at {self.hbm_bandwidth:.3g} B/s, "
            f"{self.links} links of {self.link_bandwidth:.3g} B/s ({self.interconnect})"
        )


_GIB = float(2**30)
_BOOK = "jax-ml/scaling-book"
_F32_TPU = "JAX's default precision multiplies float32 in one bfloat16 pass on TPU [R]; HIGHEST takes six"
_CLOCK = (
    "bf16_flops over the FLOPs of all matrix units in a cycle (128 x 128 units on v4 to v5p, 256 x 256 after); of these "
    "the TPU compiler estimates 70 to 90% for a product of 8192 x 8192 x 8192 [M]"
)
_ALL_REDUCED = (
    "libtpu 0.0.42.1: both on 4 x 4 x 4; on 2 x 2 x 2 and 2 x 2 x 4, without rings, reduce-scatters alone [M]"
)
_UNITS = "fitted to the compiler's cycles for kernels on v5e (`compute_units.py`) [M]; others by their clock"
_NIC_ALPHA = "[stand-in] NCCL's network step (LL); no figure for the data-centre network is published"


def _tpu(name: str, doc: str, *, node_size: int, **figures: Any) -> Chip:
    """A TPU, with the figures and sources that all generations share."""
    page = f"docs.cloud.google.com/tpu/docs/{doc} [S]"
    sources = dict.fromkeys(("bf16_flops", "fp8_flops", "int8_flops", "hbm_bytes", "hbm_bandwidth"), page)
    sources |= dict.fromkeys(("links", "link_bandwidth", "interconnect", "max_slice", "nic_bandwidth"), page)
    sources |= dict.fromkeys(("node_size", "dies"), page)
    sources |= {
        "f32_flops": _F32_TPU,
        "efficiency": f"{_BOOK} sharding.md: an all-gather on v5e took 680 us against 560 us predicted [S]",
        "alpha": f"{_BOOK} sharding.md: 1 us for each ICI hop [S]",
        "startup": f"{_BOOK} sharding.md: a tiny all-gather over 4 chips took 8 us, 3 us predicted [S]",
        "nic_alpha": _NIC_ALPHA,
        "clock": _CLOCK,
        "units": _UNITS,
    }
    extra = figures.pop("sources", {})
    units = tpu_units(
        figures["clock"],
        **{k: figures.pop(k) for k in ("tile", "cores", "product_efficiency") if k in figures},
    )
    common: dict[str, Any] = dict(units=units, efficiency=0.82, alpha=1e-6, startup=5e-6, nic_alpha=2.7e-6)
    return Chip(name=name, node_size=node_size, sources=sources | extra, **{**common, **figures})


def _gpu(name: str, sheet: str, **figures: Any) -> Chip:
    """An NVIDIA GPU on a board of eight, with the figures and sources that all generations share."""
    gpus = f"{_BOOK} gpus.md [S]"
    sources = dict.fromkeys(("bf16_flops", "fp8_flops", "hbm_bytes", "hbm_bandwidth"), gpus)
    sources |= dict.fromkeys(("links", "link_bandwidth", "interconnect", "node_size", "nic_bandwidth"), gpus)
    sources |= {
        "int8_flops": sheet,
        "units": "HIGHEST multiplies float32 outside the tensor cores: 156 of 19.5 and 495 of 67 TFLOP/s [R]",
        "f32_flops": f"{sheet} TF32 dense: JAX's default precision for float32 there",
        "efficiency": "370 of 450 GB/s reached over NVLink (scaling-book gpus.md; NCCL issue 1264: 380) [S]",
        "alpha": "NCCL ring step over NVLink, LL 0.6 us (autoparallel's port of NCCL tuning.cc) [S]",
        "startup": "NCCL ring base latency, LL 6.6 us (same) [S]",
        "nic_alpha": "NCCL ring step over the network, LL 2.7 us (same) [S]",
        "async_kinds": "XLA's schedules of six training steps for eight H100 (benchmarks/compilers/exposure.md) [M]",
        "combine_bytes": "the thresholds of XLA's combiners (xla/service/collective_utils.h) [S]",
        "curves": "all-reduces of eight GPUs in Galvatron's profiles [S]; bytes scaled by the links' bandwidth [derived]",
    }
    extra = figures.pop("sources", {})
    # The published points are an A100's.
    curves = switch_curves(figures["links"] * figures["link_bandwidth"] / 3e11)
    common: dict[str, Any] = dict(
        units=ComputeUnits(highest_passes=8.0),
        curves=curves,
        async_kinds=("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
        combine_bytes=30.0 * 2**20 + 7,
        efficiency=0.82,
        alpha=0.6e-6,
        startup=6.6e-6,
        interconnect="switch",
        node_size=8,
        nic_alpha=2.7e-6,
    )
    return Chip(name=name, sources=sources | extra, **{**common, **figures})


_CPU_SOURCE = "[stand-in] round numbers to plan tests on virtual devices"
_CPU_LINK = "[M] 8 virtual devices on 2 cores: 40 us for a small collective, 2 GB/s for an all-gather of 6 MB"

_BUILT_IN = (
    _tpu(
        "tpu-v4",
        "v4",
        bf16_flops=2.75e14,
        f32_flops=2.75e14,
        fp8_flops=None,
        int8_flops=2.75e14,
        hbm_bytes=32 * _GIB,
        hbm_bandwidth=1.2e12,
        links=6,
        link_bandwidth=4.5e10,
        interconnect="torus3d",
        max_slice=(16, 16, 16),
        all_reduced_kinds=("all_gather", "reduce_scatter"),
        cores=2,
        clock=1.05e9,
        node_size=4,
        nic_bandwidth=25e9 / 4,
        sources={
            "all_reduced_kinds": _ALL_REDUCED,
            "nic_bandwidth": f"{_BOOK} tpus.md: 25 GB/s for a host of four chips [S]",
        },
    ),
    _tpu(
        "tpu-v5e",
        "v5e",
        bf16_flops=1.97e14,
        f32_flops=1.97e14,
        fp8_flops=None,
        int8_flops=3.94e14,
        hbm_bytes=16e9,
        hbm_bandwidth=8.1e11,
        links=4,
        link_bandwidth=5e10,
        interconnect="torus2d",
        max_slice=(16, 16),
        clock=1.5e9,
        node_size=8,
        nic_bandwidth=25e9 / 8,
        async_kinds=("all_gather", "permute"),
        sources={
            "async_kinds": "libtpu 0.0.42.1's schedules of ten training steps (benchmarks/compilers/exposure.md), and of "
            "permutes beside a product, which it starts early on v5e, not on v4, v5p and v6e [M]",
            "link_bandwidth": "docs.cloud.google.com/tpu/docs/v5e: 400 GB/s per chip, both ways, 4 links [S]",
            "nic_bandwidth": "docs.cloud.google.com/tpu/docs/v5e: 2 x 100 Gb/s for a host of eight chips [S]",
        },
    ),
    _tpu(
        "tpu-v5p",
        "v5p",
        bf16_flops=4.59e14,
        f32_flops=4.59e14,
        fp8_flops=4.59e14,
        int8_flops=9.18e14,
        hbm_bytes=95 * _GIB,
        hbm_bandwidth=2.77e12,
        links=6,
        link_bandwidth=1e11,
        interconnect="torus3d",
        max_slice=(16, 20, 28),
        all_reduced_kinds=("all_gather", "reduce_scatter"),
        cores=2,
        product_efficiency=0.85,
        clock=1.75e9,
        node_size=4,
        nic_bandwidth=50e9 / 8,
        sources={
            "all_reduced_kinds": _ALL_REDUCED,
            "hbm_bandwidth": "docs.cloud.google.com/tpu/docs/v5p [S]; jax's own table says 2.46e12",
            "hbm_bytes": "docs.cloud.google.com/tpu/docs/v5p: 95 GiB usable of 96 [S]",
            "link_bandwidth": "docs.cloud.google.com/tpu/docs/v5p: 1200 GB/s, both ways, 6 links [S]",
        },
    ),
    _tpu(
        "tpu-v6e",
        "v6e",
        bf16_flops=9.18e14,
        f32_flops=9.18e14,
        fp8_flops=9.18e14,
        int8_flops=1.84e15,
        hbm_bytes=32e9,
        hbm_bandwidth=1.64e12,
        links=4,
        link_bandwidth=1e11,
        interconnect="torus2d",
        max_slice=(16, 16),
        tile=256,
        clock=1.75e9,
        node_size=8,
        nic_bandwidth=100e9 / 8,
    ),
    _tpu(  # one chip is two JAX devices: half of every figure of the chip's page
        "tpu-7x",
        "tpu7x",
        bf16_flops=2.31e15 / 2,
        f32_flops=2.31e15 / 2,
        fp8_flops=4.61e15 / 2,
        int8_flops=None,
        hbm_bytes=96 * _GIB,
        hbm_bandwidth=7.38e12 / 2,
        links=6,
        link_bandwidth=1e11 / 2,
        interconnect="torus3d",
        max_slice=(16, 24, 24),
        tile=256,
        clock=2.2e9,
        node_size=8,
        nic_bandwidth=100e9 / 8 / 2,
        dies=2,
        die_bandwidth=6e11,
        sources={
            "die_bandwidth": "about six times one ICI link (tpu7x page) [R]",
            "max_slice": "docs.cloud.google.com/tpu/docs/tpu7x: 9216 chips [S]; 16 x 24 x 24 [R]",
            "link_bandwidth": "tpu7x page: 1200 GB/s per chip, both ways, 6 links [S]; shared by two devices",
        },
    ),
    _gpu(
        "gpu-a100",
        "NVIDIA A100 datasheet [R],",
        bf16_flops=3.12e14,
        f32_flops=1.56e14,
        fp8_flops=None,
        int8_flops=6.2e14,
        hbm_bytes=80e9,
        hbm_bandwidth=2.0e12,
        links=12,
        link_bandwidth=2.5e10,
        nic_bandwidth=25e9,
        sources={"nic_bandwidth": "HDR 200 Gb/s for each GPU [R]"},
    ),
    _gpu(
        "gpu-h100",
        "NVIDIA H100 datasheet [R],",
        bf16_flops=9.9e14,
        f32_flops=4.95e14,
        fp8_flops=2.0e15,
        int8_flops=2.0e15,
        hbm_bytes=80e9,
        hbm_bandwidth=3.35e12,
        links=18,
        link_bandwidth=2.5e10,
        nic_bandwidth=50e9,
    ),
    _gpu(
        "gpu-h200",
        "NVIDIA H200 datasheet [R],",
        bf16_flops=9.9e14,
        f32_flops=4.95e14,
        fp8_flops=2.0e15,
        int8_flops=2.0e15,
        hbm_bytes=141e9,
        hbm_bandwidth=4.8e12,
        links=18,
        link_bandwidth=2.5e10,
        nic_bandwidth=50e9,
    ),
    _gpu(
        "gpu-b200",
        "NVIDIA B200 datasheet [R],",
        bf16_flops=2.25e15,
        f32_flops=1.1e15,
        fp8_flops=4.5e15,
        int8_flops=4.5e15,
        hbm_bytes=178e9,
        hbm_bandwidth=7.67e12,
        links=18,
        link_bandwidth=5e10,
        nic_bandwidth=50e9,
        sources={
            "hbm_bytes": "178 of 192 GB visible (pytorch/ao PR 4002) [S]",
            "hbm_bandwidth": "from the driver's 7680-bit bus (pytorch/ao PR 4002) [S]; nominal 8.0e12",
            "nic_bandwidth": "node egress 4e11 (scaling-book gpus.md) [R]",
        },
    ),
    Chip(
        "cpu",
        bf16_flops=1e11,
        f32_flops=1e11,
        fp8_flops=None,
        int8_flops=None,
        hbm_bytes=None,
        hbm_bandwidth=2e10,
        links=1,
        link_bandwidth=2e9,
        efficiency=1.0,
        alpha=4e-5,
        startup=0.0,
        interconnect="shared",
        node_size=2**30,
        nic_bandwidth=2e9,
        nic_alpha=4e-5,
        sources={
            f: _CPU_SOURCE
            for f in ("bf16_flops", "f32_flops", "hbm_bandwidth", "links", "efficiency")
            + ("startup", "interconnect", "node_size")
        }
        | {f: _CPU_LINK for f in ("link_bandwidth", "alpha", "nic_bandwidth", "nic_alpha")},
    ),
)

# Canonical name -> chip. Mutable: `register` adds to it.
_TABLE: dict[str, Chip] = {c.name: c for c in _BUILT_IN}

# Names that users and drivers give the chips, as `_key` normalises them.
_ALIASES = {
    "v5lite": "tpu-v5e", "v5litepod": "tpu-v5e", "v5": "tpu-v5p", "v6lite": "tpu-v6e", "v7x": "tpu-7x",
    "ironwood": "tpu-7x", "trillium": "tpu-v6e",
}  # fmt: skip


def _key(name: str) -> str:
    """A chip's name without vendor, case and punctuation."""
    text = name.lower().replace("nvidia", "").replace("tpu", "").replace("gpu", "")
    return "".join(ch for ch in text if ch.isalnum())


def names() -> tuple[str, ...]:
    """All chips of the table, built-in ones first.

    >>> names()[:2]
    ('tpu-v4', 'tpu-v5e')
    """
    return tuple(_TABLE)


def get(name: str) -> Chip:
    """The chip of that name; `"v5e"`, `"TPU v5 lite"` and `"tpu-v5e"` are the same.

    >>> get("TPU v5 lite").name, get("h100").name
    ('tpu-v5e', 'gpu-h100')

    Arguments:

    - `name`: chip name; an unknown one raises `MeshError` with the nearest names.
    """
    if not isinstance(name, str):
        raise MeshError(
            f"{name!r} is not the name of a chip", where="hardware.get", fix='text, such as "tpu-v5e"'
        )
    if name in _TABLE:
        return _TABLE[name]
    key = _key(name)
    by_key = {_key(n): n for n in _TABLE} | _ALIASES
    if key in by_key:
        return _TABLE[by_key[key]]
    close = difflib.get_close_matches(key, list(by_key), n=3, cutoff=0.5)
    known = list(dict.fromkeys(by_key[n] for n in close)) or list(_TABLE)
    more = ", ... or hardware.register(...)" if close else ""
    raise MeshError(f"unknown chip {name!r}", where="hardware.get", fix=f"one of {', '.join(known)}{more}")


def register(chip: Chip) -> Chip:
    """Add a chip to the table, under a name that is not taken.

    >>> mine = register(dataclasses.replace(get("h100"), name="gpu-h100-pcie", hbm_bandwidth=2e12))
    >>> get("h100-pcie").hbm_bandwidth
    2000000000000.0

    Arguments:

    - `chip`: the chip; registering an equal one again is harmless, another one of the same name an error.
    """
    if not isinstance(chip, Chip):
        raise MeshError(
            f"register takes a chip, not a {type(chip).__name__}",
            where="hardware.register",
            fix='one like those of the table: dataclasses.replace(hardware.get("h100"), name=..., ...)',
        )
    key = _key(chip.name)
    taken = next((c for c in _TABLE.values() if _key(c.name) == key), _TABLE.get(_ALIASES.get(key, "")))
    if taken is not None and taken != chip:
        raise MeshError(
            f"a chip named {taken.name!r} is already in the table",
            where="hardware.register",
            fix="dataclasses.replace(chip, name=...) with another name",
        )
    _TABLE[chip.name] = chip
    return chip


def for_device(device: Device) -> Chip:
    """The chip of a `jax.Device`, by its `device_kind`; `cpu` when the kind is not in the table.

    >>> import jax
    >>> for_device(jax.devices("cpu")[0]).name
    'cpu'

    Arguments:

    - `device`: anything with a `device_kind` text, such as `"NVIDIA H100 80GB HBM3"` or `"TPU v5 lite"`.
    """
    if not isinstance(getattr(device, "device_kind", None), str):
        raise MeshError(
            f"{device!r} is not a device", where="hardware.for_device", fix="one of jax.devices()"
        )
    key = _key(device.device_kind)
    by_key = {_key(n): n for n in _TABLE} | _ALIASES
    if key in by_key:
        return _TABLE[by_key[key]]
    # Drivers append form factor and memory ("H100 80GB HBM3"): take the longest chip name that is a prefix.
    starts = [k for k in by_key if key.startswith(k)]
    return _TABLE[by_key[max(starts, key=len)]] if starts else _TABLE["cpu"]
