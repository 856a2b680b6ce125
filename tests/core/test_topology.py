"""Topologies: wrap-around rules, mesh axes on torus axes, nodes, networks, coordinates, names."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jshard._core import hardware as hardware
from jshard._core.errors import MeshError
from jshard._core.layout import MeshAxes
from jshard._core.topology import assumed_shape, check_shape, device_count, from_mesh, parse_name, wraps


def mesh(**axes: int) -> MeshAxes:
    return MeshAxes(tuple(axes), tuple(axes.values()))


def wires(topology, axis):
    return [(w.kind, w.size, w.wrap) for w in topology.link(axis).wires]


def test_v5e_wraps_only_at_sixteen():
    t = from_mesh(mesh(data=8, model=16), hardware.get("v5e"))
    assert wires(t, "data") == [("ici", 8, False)] and wires(t, "model") == [("ici", 16, True)]
    assert t.link("model").bandwidth == pytest.approx(5e10 * 0.82)


@pytest.mark.parametrize(
    ("shape", "ring"), [((4, 4, 4), True), ((4, 4, 8), True), ((2, 2, 4), False), ((2, 2, 2), False)]
)
def test_v5p_wraps_on_whole_cubes(shape, ring):
    chip = hardware.get("v5p")
    assert all(wraps(chip, shape, i) == ring for i in range(3))
    t = from_mesh(mesh(a=shape[0], b=shape[1], c=shape[2]), chip, physical=shape)
    assert all(link.wrap == ring for link in t.links)


def test_physical_axes_fold_under_one_mesh_axis():
    t = from_mesh(mesh(data=16, model=4), hardware.get("v5p"), physical=(4, 4, 4))
    assert t.link("data").torus_axes == 2 and t.link("model").torus_axes == 1
    assert t.link("data").bandwidth == pytest.approx(2 * t.link("model").bandwidth)


def test_a_mesh_axis_that_is_part_of_a_physical_axis_is_a_line_and_shares_links():
    t = from_mesh(mesh(a=2, b=2, c=16), hardware.get("v5e"), physical=(4, 16))
    assert wires(t, "c") == [("ici", 16, True)]
    assert wires(t, "a") == wires(t, "b") == [("ici", 2, False)]
    # Members of `a` lie two apart: two groups are interleaved on the same links.
    assert t.link("a").bandwidth == pytest.approx(t.link("b").bandwidth / 2)


@pytest.mark.parametrize("sizes", [(6,), (7,), (3, 2), (5, 3), (12, 5), (2, 3, 7), (1,), (1, 1, 8), ()])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "7x", "h100", "cpu"])
def test_any_mesh_gets_links_that_multiply_to_its_sizes(sizes, chip):
    axes = MeshAxes(tuple("abc"[: len(sizes)]), sizes)
    t = from_mesh(axes, hardware.get(chip))
    for n, link in zip(sizes, t.links, strict=True):
        assert math.prod(w.size for w in link.wires) == n
        assert link.bandwidth > 0 and link.alpha > 0


def test_islands_hold_the_minor_axes():
    t = from_mesh(mesh(data=4, model=8), hardware.get("h100"))
    assert wires(t, "model") == [("nvlink", 8, False)] and wires(t, "data") == [("network", 4, False)]
    assert t.slices == 4
    assert t.link("model").bandwidth == pytest.approx(4.5e11 * 0.82)
    assert t.link("data").bandwidth == pytest.approx(5e10 * 0.82)
    spans = from_mesh(mesh(data=32), hardware.get("h100"))
    assert wires(spans, "data") == [("nvlink", 8, False), ("network", 4, False)]
    two = from_mesh(mesh(a=4, b=4, c=2), hardware.get("h100"))
    assert [wires(two, x) for x in "abc"] == [
        [("network", 4, False)], [("nvlink", 4, False)], [("nvlink", 2, False)],
    ]  # fmt: skip
    assert wires(from_mesh(mesh(data=72), hardware.get("b200"), physical=(1, 72)), "data")[0][0] == "nvlink"


def test_slices_are_joined_by_the_network():
    t = from_mesh(mesh(data=2, fsdp=4, model=8), hardware.get("v5e"), slices=2)
    assert wires(t, "data") == [("network", 2, False)] and t.slices == 2
    both = from_mesh(mesh(data=8, model=8), hardware.get("v5e"), slices=2)
    assert wires(both, "data") == [("ici", 4, False), ("network", 2, False)]


def test_a_7x_chip_is_two_devices():
    chip = hardware.get("7x")
    assert device_count(chip, (2, 2, 1)) == 8
    t = from_mesh(mesh(a=4, b=2), chip, physical=(2, 2, 1))
    assert wires(t, "b") == [("die", 2, False)] and t.link("a").torus_axes == 2
    assert t.link("b").bandwidth > 4 * t.link("a").bandwidth


def device(coords, core=0, slice_index=0, kind="TPU v5 lite"):
    return SimpleNamespace(coords=coords, core_on_chip=core, slice_index=slice_index, device_kind=kind)


def fake_mesh(devices: np.ndarray, names: tuple[str, ...]):
    shape = dict(zip(names, devices.shape, strict=True))
    return SimpleNamespace(devices=devices, axis_names=names, shape=shape)


def grid(shape, make):
    out = np.empty(shape, dtype=object)
    for i in np.ndindex(*shape):
        out[i] = make(i)
    return out


def test_coordinates_decide_when_devices_have_them():
    straight = grid((4, 16), lambda i: device((i[0], i[1], 0)))
    t = from_mesh(fake_mesh(straight, ("data", "model")))
    assert t.chip.name == "tpu-v5e"
    assert wires(t, "data") == [("ici", 4, False)] and wires(t, "model") == [("ici", 16, True)]
    assert t == from_mesh(mesh(data=4, model=16), hardware.get("v5e"), physical=(4, 16))
    halves = grid((2, 2, 16), lambda i: device((2 * i[0] + i[1], i[2], 0)))
    t = from_mesh(fake_mesh(halves, ("a", "b", "c")))
    assert [w.stride for x in "ab" for w in t.link(x).wires] == [2, 1]
    slices = grid((2, 4, 8), lambda i: device((i[1], i[2], 0), slice_index=i[0]))
    t = from_mesh(fake_mesh(slices, ("s", "a", "b")))
    assert t.slices == 2 and wires(t, "s") == [("network", 2, False)]
    dies = grid((2, 2, 2), lambda i: device((i[0], i[1], 0), core=i[2], kind="TPU7x"))
    t = from_mesh(fake_mesh(dies, ("a", "b", "c")))
    assert wires(t, "c") == [("die", 2, False)] and t.chip.name == "tpu-7x"


def test_jax_meshes_are_taken():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    want = from_mesh(mesh(x=2, y=4), hardware.get("cpu"))
    assert from_mesh(Mesh(devices, ("x", "y"))) == want
    assert from_mesh(AbstractMesh((2, 4), ("x", "y")), hardware.get("cpu")) == want
    assert hash(from_mesh(Mesh(devices, ("x", "y")))) == hash(want)


@pytest.mark.parametrize(("chips", "shape"), [(8, (2, 4)), (16, (4, 4)), (32, (4, 8)), (256, (16, 16))])
def test_assumed_shapes_are_the_ones_sold(chips, shape):
    assert assumed_shape(hardware.get("v5e"), chips) == shape
    check_shape(hardware.get("v5e"), shape, "v5e")


@pytest.mark.parametrize(
    ("name", "chip", "shape"),
    [
        ("v5e:4x8", "tpu-v5e", (4, 8)), ("v5e:8x4", "tpu-v5e", (8, 4)), ("v6e:4x4", "tpu-v6e", (4, 4)),
        ("v5p:2x2x1", "tpu-v5p", (2, 2, 1)), ("v4:4x4x8", "tpu-v4", (4, 4, 8)), ("cpu:8", "cpu", (8,)),
        ("7x:4x4x4", "tpu-7x", (4, 4, 4)), ("h100:4x8", "gpu-h100", (4, 8)), ("b200:72", "gpu-b200", (72,)),
    ],
)  # fmt: skip
def test_names_of_topologies(name, chip, shape):
    c, s = parse_name(name)
    assert (c.name, s) == (chip, shape)


ERRORS = [
    (
        "v5e",
        "'v5e' names no shape\n  where: topology name\n  write instead: chip:shape, such as 'tpu-v5e:4x8'",
    ),
    (
        "h100:8x",
        "'h100:8x' names no shape\n  where: topology name\n"
        "  write instead: chip:shape, such as 'gpu-h100:2x8'",
    ),
    (
        "v5e:32x32",
        "tpu-v5e has no slice of shape 32x32\n  where: topology 'v5e:32x32'\n"
        "  write instead: one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    ),
    (
        "v5p:3x3x3",
        "tpu-v5p has no slice of shape 3x3x3\n  where: topology 'v5p:3x3x3'\n"
        "  write instead: one of 1x1x1, 1x1x2, 1x2x2, 2x2x2, 2x2x4, 2x4x4, "
        "or three multiples of 4 up to 16x20x28",
    ),
    (
        "h100:2x2x2",
        "gpu-h100 has no shape of 3 dimensions\n  where: topology 'h100:2x2x2'\n"
        "  write instead: islands x devices, such as 2x8",
    ),
]


@pytest.mark.parametrize(("name", "text"), ERRORS)
def test_bad_names_say_what_to_write(name, text):
    with pytest.raises(MeshError) as e:
        parse_name(name)
    assert str(e.value) == text


def test_too_large_a_torus_is_refused():
    for name in ("v5p:16x24x28", "v4:32x4x4", "v5p:4x8"):
        with pytest.raises(MeshError, match="has no slice of shape"):
            parse_name(name)


def test_a_mesh_that_does_not_fill_the_machine_is_refused():
    with pytest.raises(MeshError) as e:
        from_mesh(mesh(x=2, y=4), hardware.get("v5e"), physical=(4, 8))
    assert str(e.value) == (
        "4x8 tpu-v5e is 32 devices, the mesh has 8\n  where: mesh x=2 x y=4\n"
        "  write instead: a mesh of as many devices"
    )
    with pytest.raises(MeshError) as e:
        from_mesh(mesh(x=2))
    assert str(e.value) == (
        "a mesh without devices needs a chip\n  where: mesh x=2\n  write instead: hardware='tpu-v5e'"
    )
