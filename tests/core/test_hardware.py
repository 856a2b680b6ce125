"""The table of chips: every figure has a source, spellings of names are accepted, others are refused with a text."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from jshard._core import hardware as hardware
from jshard._core.errors import MeshError


BUILT_IN = (
    "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x",
    "gpu-a100", "gpu-h100", "gpu-h200", "gpu-b200", "cpu",
)  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_number_has_a_source(name):
    chip = hardware.get(name)
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.name in ("name", "sources") or value is None or value == default:
            continue
        assert chip.sources.get(field.name), f"{name}.{field.name} = {value} has no source"
    assert set(chip.sources) <= {f.name for f in dataclasses.fields(chip)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_chips_are_values(name):
    chip = hardware.get(name)
    assert hash(chip) == hash(dataclasses.replace(chip)) and chip == dataclasses.replace(chip)
    assert chip.name in str(chip)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.bf16_flops = 1.0  # type: ignore[misc]


# Bytes/s both ways of all links, as the vendors print it (hardware.md 1.1); a 7x chip is two devices.
TOTALS = {"v4": 540e9, "v5e": 400e9, "v5p": 1200e9, "v6e": 800e9, "7x": 600e9, "a100": 600e9, "h100": 900e9}


@pytest.mark.parametrize("name", TOTALS)
def test_links_add_up_to_the_vendors_total(name):
    chip = hardware.get(name)
    assert 2 * chip.links * chip.link_bandwidth == pytest.approx(TOTALS[name])


# Tokens per device that keep data parallelism bound by compute: FLOP/s over one axis' bandwidth (1.4). The
# GPU's figure divides by all of NVLink.
@pytest.mark.parametrize(
    ("name", "tokens"), [("v4", 3056), ("v5e", 1970), ("v5p", 2295), ("v6e", 4590), ("h100", 2200)]
)
def test_arithmetic_intensity_is_the_books(name, tokens):
    chip = hardware.get(name)
    both_ways = 2 * chip.link_bandwidth if name != "h100" else chip.links * chip.link_bandwidth
    assert chip.bf16_flops / both_ways == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("v5e", "tpu-v5e"), ("TPU v5e", "tpu-v5e"), ("v5litepod", "tpu-v5e"), ("tpu7x", "tpu-7x"),
        ("v7x", "tpu-7x"), ("ironwood", "tpu-7x"), ("H100", "gpu-h100"), ("cpu", "cpu"), ("v5", "tpu-v5p"),
    ],
)  # fmt: skip
def test_names_are_forgiving(said, meant):
    assert hardware.get(said).name == meant


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "tpu-v4"), ("TPU v5 lite", "tpu-v5e"), ("TPU v5", "tpu-v5p"), ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"), ("TPU7x", "tpu-7x"), ("NVIDIA A100-SXM4-80GB", "gpu-a100"),
        ("NVIDIA H100 80GB HBM3", "gpu-h100"), ("NVIDIA H200", "gpu-h200"), ("NVIDIA B200", "gpu-b200"),
        ("cpu", "cpu"), ("Some New Thing", "cpu"),
    ],
)  # fmt: skip
def test_devices_are_recognised(kind, name):
    assert hardware.for_device(SimpleNamespace(device_kind=kind)).name == name


def test_the_cpu_device_is_the_cpu():
    assert hardware.for_device(jax.devices("cpu")[0]) == hardware.get("cpu")
    assert hardware.get("cpu").hbm_bytes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "h10",
            "unknown chip 'h10'\n  where: hardware.get\n"
            "  write instead: one of gpu-h100, gpu-h200, gpu-a100, ... or hardware.register(...)",
        ),
        (
            "qqq",
            "unknown chip 'qqq'\n  where: hardware.get\n"
            "  write instead: one of tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu-7x, "
            "gpu-a100, gpu-h100, gpu-h200, gpu-b200, cpu",
        ),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, text, monkeypatch):
    monkeypatch.setattr(hardware, "_TABLE", {n: hardware._TABLE[n] for n in BUILT_IN})
    with pytest.raises(MeshError) as e:
        hardware.get(name)
    assert str(e.value) == text


def test_register_adds_and_never_replaces(monkeypatch):
    monkeypatch.setattr(hardware, "_TABLE", dict(hardware._TABLE))
    mine = dataclasses.replace(hardware.get("h100"), name="gpu-mine", hbm_bytes=1e9)
    assert hardware.register(mine) is mine and hardware.get("mine") == mine and "gpu-mine" in hardware.names()
    assert hardware.register(mine) == mine
    for name in ("gpu-mine", "gpu-h100", "v5litepod"):
        with pytest.raises(MeshError) as e:
            hardware.register(dataclasses.replace(mine, name=name, hbm_bytes=2e9))
        assert "is already in the table" in str(e.value)
        assert "write instead: dataclasses.replace(chip, name=...) with another name" in str(e.value)
    assert hardware.get("mine") == mine
