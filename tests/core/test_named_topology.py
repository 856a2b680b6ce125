"""`topology`: abstract meshes, CPU devices, links, every refusal, options passed to the compilers."""

from __future__ import annotations

import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import jshard
from jshard._core import aot_devices, hardware, topology as device_topology
from jshard._core.errors import MeshError
from jshard._core.named_topology import topology
from jshard._report.crossing import crossing
from jshard._spec.mesh_selection import candidate_meshes


@pytest.fixture
def no_wheels(monkeypatch):
    """As on a machine without libtpu and without the CUDA plugin."""
    monkeypatch.setattr(aot_devices, "installed", lambda module: False)


@pytest.mark.parametrize(
    "name, axes, chip, links",
    [
        ("v5e:4x8", {"data": 4, "model": 8}, "tpu-v5e", ["ici", "ici"]),
        ("v5p:4x4x4", {"x": 16, "y": 4}, "tpu-v5p", ["ici", "ici"]),
        ("v4:2x2x1", {"x": 4}, "tpu-v4", ["ici"]),
        ("tpu7x:2x2x1", {"x": 4, "die": 2}, "tpu-7x", ["ici", "die"]),
        ("h100:4x8", {"data": 4, "model": 8}, "gpu-h100", ["network", "nvlink"]),
        ("h100:8", {"x": 8}, "gpu-h100", ["nvlink"]),
    ],
)
def test_an_abstract_mesh_without_wheels(no_wheels, name, axes, chip, links) -> None:
    t = topology(name, axes)
    assert isinstance(t.jax_mesh, AbstractMesh) and not t.compiles
    assert t.axes == axes and t.chip == chip and t.devices == np.prod(list(axes.values()))
    assert set(t.jax_mesh.axis_types) == {AxisType.Auto}
    assert [link.kind for link in t.links.links] == links
    assert t == topology(name, dict(axes)) and hash(t) == hash(topology(name, axes))
    assert str(t) == f"{name} ({chip}), {' x '.join(f'{n}={s}' for n, s in axes.items())}: plans only"


def test_slices_are_the_slow_major_axis(no_wheels) -> None:
    t = topology("v5e:2x4", {"data": 2, "model": 8}, num_slices=2)
    assert t.devices == 16 and t.slices == 2
    assert [link.kind for link in t.links.links] == ["network", "ici"]
    assert str(t).startswith("v5e:2x4 x 2 slices (tpu-v5e)")


def test_slices_of_gpus_are_islands(no_wheels) -> None:
    axes = {"data": 8, "model": 4}
    assert topology("h100:8", axes, num_slices=4) == topology("h100:4x8", axes)
    assert topology("h100:2x8", axes, num_slices=2).links == topology("h100:4x8", axes).links


@pytest.mark.parametrize("sizes", [(2, 16), (4, 8), (8, 4), (16, 2), (2, 4, 4), (32,)])
def test_hybrid_grids_are_those_of_jax(sizes) -> None:
    devices = aot_devices.fake_tpu_devices(hardware.get("v5e"), (4, 4), 2)
    across = aot_devices.axes_across(sizes, 2)
    inside = [s // a for s, a in zip(sizes, across, strict=True)]
    wanted = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    assert np.array_equal(aot_devices.hybrid_grid(devices[::-1], sizes, 2), wanted)


def test_inferred_meshes_span_slices_by_their_major_axes() -> None:
    devices = aot_devices.fake_tpu_devices(hardware.get("v5e"), (2, 4), 2)
    grids = [m.mesh.devices for m in candidate_meshes(None, (), (), devices)]
    assert {g.shape for g in grids} >= {(2, 8), (8, 2), (4, 4)}
    for grid in grids:
        half = grid.reshape(2, -1)
        assert [{d.slice_index for d in part} for part in half] == [{0}, {1}]


def test_gpus_of_several_hosts_have_nvlink_inside_each() -> None:
    def gpu(i: int, slice_index: int | None) -> object:
        where = {} if slice_index is None else {"slice_index": slice_index}
        return types.SimpleNamespace(
            id=i, platform="gpu", device_kind="NVIDIA H100 80GB HBM3", process_index=i // 4, **where
        )

    def links(slice_of, *shape: int) -> list[list[tuple[str, int]]]:
        grid = np.array([gpu(i, slice_of(i)) for i in range(16)]).reshape(shape)
        sizes = {n: s for n, s in zip("abc", shape, strict=False)}
        mesh = types.SimpleNamespace(devices=grid, axis_names=tuple(sizes), shape=sizes)
        return [[(w.kind, w.size) for w in link.wires] for link in device_topology.from_mesh(mesh).links]

    by_host = links(lambda i: None, 4, 4)  # four hosts of four
    assert by_host == [[("network", 4)], [("nvlink", 4)]]
    by_domain = links(lambda i: i // 8, 2, 8)  # two hosts to an NVLink domain
    assert by_domain == [[("network", 2)], [("nvlink", 8)]]
    assert links(lambda i: i // 8, 4, 4) == [[("nvlink", 2), ("network", 2)], [("nvlink", 4)]]


def test_reports_say_what_crosses_slices() -> None:
    mesh = topology("v5e:2x2", {"data": 2, "model": 4}, num_slices=2, compiles=False)
    f = jshard.shard(lambda x, w: (x @ w).sum(0), mesh=mesh, in_strategy=((2, 1), (1, 4)))
    plan = f.plan(jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32"))
    found = crossing(plan, plan.search_again.topology)
    sums = [c for c in plan.collectives if "data" in c.axes]
    assert sums and found.axes == (("data", 2),)
    assert found.bytes == pytest.approx(sum(c.total for c in sums)) and found.seconds > 0
    assert "between slices (data 2)" in str(plan)
    one = jshard.shard(lambda x: x.sum(), mesh=topology("v5e:2x4", {"data": 8}, compiles=False))
    assert "between slices" not in str(one.plan(jax.ShapeDtypeStruct((64, 64), "float32")))


def test_cpu_devices_are_real_and_compile() -> None:
    t = topology("cpu:8", {"x": 2, "y": 4})
    assert isinstance(t.jax_mesh, Mesh) and t.compiles and list(t.jax_mesh.devices.flat) == jax.devices()[:8]
    assert set(t.jax_mesh.axis_types) == {AxisType.Auto}
    x = jax.device_put(jnp.arange(8.0), NamedSharding(t.jax_mesh, P(("x", "y"))))
    assert float(jax.jit(jnp.sum)(x)) == 28


def test_a_planning_mesh_traces_and_lowers(no_wheels) -> None:
    mesh = topology("v5e:2x4", {"x": 2, "y": 4}).jax_mesh
    f = jax.shard_map(lambda a: jax.lax.psum(a, "y"), mesh=mesh, in_specs=P("x", "y"), out_specs=P("x"))
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((4, 8), jnp.float32)).shape == (4, 2)


def test_nothing_in_the_environment_is_touched(no_wheels) -> None:
    before = dict(os.environ)
    topology("v5e:4x8", {"x": 32})
    assert dict(os.environ) == before


WHERE = "\n  where: topology 'v5e:4x8'\n  write instead: "
SHAPES_3D = "one of 1x1x1, 1x1x2, 1x2x2, 2x2x2, 2x2x4, 2x4x4, or three multiples of 4 up to "


@pytest.mark.parametrize(
    "name, axes, more, message",
    [
        (
            "v5g:4x8",
            {"x": 32},
            {},
            "unknown chip 'v5g'\n  where: hardware.get\n"
            "  write instead: one of tpu-v5p, tpu-v5e, ... or hardware.register(...)",
        ),
        (
            "v5e:32x32",
            {"x": 1024},
            {},
            "tpu-v5e has no slice of shape 32x32\n  where: topology 'v5e:32x32'\n"
            "  write instead: one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
        ),
        (
            "v5p:3x3x3",
            {"x": 27},
            {},
            "tpu-v5p has no slice of shape 3x3x3\n  where: topology 'v5p:3x3x3'\n"
            f"  write instead: {SHAPES_3D}16x20x28",
        ),
        (
            "v5e",
            {"x": 1},
            {},
            "'v5e' names no shape\n  where: topology name\n"
            "  write instead: chip:shape, such as 'tpu-v5e:4x8'",
        ),
        (
            "v5e:4x8",
            {"x": 4, "y": 4},
            {},
            f"v5e:4x8 has 32 devices, the axes {{'x': 4, 'y': 4}} are 16{WHERE}"
            "axes whose sizes multiply to 32, such as {'x': 32, 'y': 1}",
        ),
        (
            "v5e:4x8",
            {},
            {},
            f"v5e:4x8 has 32 devices, the axes {{}} are 1{WHERE}"
            "axes whose sizes multiply to 32, such as {'x': 32}",
        ),
        (
            "v5e:4x8",
            {"x": "32"},
            {},
            f"v5e:4x8 has 32 devices, the axes {{'x': 32}} are not whole numbers{WHERE}"
            "axes whose sizes multiply to 32, such as {'x': 32}",
        ),
        (
            "cpu:8",
            {"x": 16},
            {"num_slices": 2},
            "2 slices of cpu\n  where: topology 'cpu:8'\n  write instead: num_slices >= 1, on TPU and GPU",
        ),
        (
            "v5e:4x8",
            {"x": 32},
            {"num_slices": 0},
            f"0 slices of tpu-v5e{WHERE}num_slices >= 1, on TPU and GPU",
        ),
        (
            "v5e:4x8",
            {"x": 32},
            {"compiles": True},
            f"compiling for tpu-v5e needs a wheel that is not installed: libtpu{WHERE}"
            "pip install libtpu, of JAX's own version (pip install jax[tpu] knows it); "
            "or compiles=False to plan only",
        ),
        (
            "h100:8",
            {"x": 8},
            {"compiles": True},
            "compiling for gpu-h100 needs a wheel that is not installed: jax-cuda12-plugin jax-cuda12-pjrt\n"
            "  where: topology 'h100:8'\n"
            "  write instead: pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, of JAX's own version; "
            "or compiles=False to plan only",
        ),
        (
            "cpu:4096",
            {"x": 4096},
            {"compiles": True},
            f"4096 CPU devices are wanted, JAX has {len(jax.devices('cpu'))}\n  where: topology 'cpu:4096'\n"
            "  write instead: XLA_FLAGS=--xla_force_host_platform_device_count=4096 before Python starts",
        ),
    ],
)
def test_what_is_refused_and_what_is_said(no_wheels, name, axes, more, message) -> None:
    with pytest.raises(MeshError) as error:
        topology(name, axes, **more)
    assert str(error.value) == message


def fake_compiler(monkeypatch, answer) -> list[tuple]:
    """Put a stand-in where JAX's topologies come from; returns what it is asked."""
    asked: list[tuple] = []

    def get_topology_desc(name="", platform=None, **options):
        asked.append((name, platform, options))
        return answer()

    module = types.SimpleNamespace(get_topology_desc=get_topology_desc)
    monkeypatch.setitem(sys.modules, "jax.experimental.topologies", module)
    monkeypatch.setattr("jax.experimental.topologies", module, raising=False)
    monkeypatch.setattr(aot_devices, "installed", lambda module: True)
    return asked


@pytest.mark.parametrize(
    "name, axes, more, asked",
    [
        ("v5e:2x4", {"x": 8}, {}, ("v5e:2x4", "tpu", {})),
        ("v5e:1x1", {"x": 1}, {}, ("v5e:1x1", "tpu", {"chips_per_host_bounds": (1, 1, 1)})),
        ("v5p:1x2x2", {"x": 4}, {}, ("v5p:1x2x2", "tpu", {"chips_per_host_bounds": (1, 2, 1)})),
        ("v4:2x2x1", {"x": 4}, {}, ("v4:2x2x1", "tpu", {"chip_config_name": "megacore"})),
        ("7x:2x2x1", {"x": 8}, {}, ("tpu7x:2x2x1", "tpu", {})),
        ("v5e:2x4", {"x": 16}, {"num_slices": 2}, ("v5e:2x4", "tpu", {"num_slices": 2})),
    ],
)
def test_what_the_tpu_compiler_is_asked(monkeypatch, name, axes, more, asked) -> None:
    count = int(np.prod(list(axes.values())))
    devices = types.SimpleNamespace(devices=jax.devices()[:count])
    seen = fake_compiler(monkeypatch, lambda: devices)
    t = topology(name, axes, **more)
    assert seen == [asked] and t.compiles and isinstance(t.jax_mesh, Mesh)
    assert sorted(d.id for d in t.jax_mesh.devices.flat) == list(range(count))


def test_what_the_gpu_compiler_is_asked(monkeypatch) -> None:
    seen = fake_compiler(monkeypatch, lambda: types.SimpleNamespace(devices=jax.devices()[:16]))
    t = topology("h100:2x8", {"x": 2, "y": 8})
    ((_, platform, options),) = seen
    assert platform == "cuda" and options["topology"] == "1x2x8" and t.jax_mesh.shape == {"x": 2, "y": 8}
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in options["target_config"]


@pytest.mark.parametrize(
    "name, error, fix",
    [
        (
            "v5e:4x8",
            'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm ..."',
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment before Python starts: another process compiles "
            "for TPU; or compiles=False to plan only",
        ),
        (
            "v5e:4x8",
            "could not query the metadata server\nand more",
            "TPU_SKIP_MDS_QUERY=1 in the environment before Python starts; or compiles=False to plan only",
        ),
        (
            "h100:4x8",
            "topology not implemented for cuda",
            "JAX_PLATFORMS=cpu in the environment before Python starts (the CUDA plugin looks for a GPU "
            "otherwise); or compiles=False to plan only",
        ),
    ],
)
def test_a_compiler_that_does_not_start(monkeypatch, name, error, fix) -> None:
    def answer():
        raise RuntimeError(error)

    fake_compiler(monkeypatch, answer)
    with pytest.raises(MeshError) as caught:
        topology(name, {"x": 32})
    first = error.splitlines()[0]
    chip = hardware.get(name.split(":")[0]).name
    assert str(caught.value) == (
        f"the compiler for {chip} did not start: {first}\n  where: topology {name!r}\n  write instead: {fix}"
    )
    assert topology(name, {"x": 32}, compiles=False).devices == 32


def test_a_gpu_without_a_compiler_target() -> None:
    with pytest.raises(MeshError) as error:
        aot_devices.gpu_target(hardware.get("v5e"))
    assert str(error.value) == (
        "no compiler target is known for tpu-v5e\n  where: topology\n"
        "  write instead: one of gpu-a100, gpu-h100, gpu-h200, gpu-b200, or compiles=False to plan only"
    )


def test_a_machine_that_is_not_there_is_wired_as_jax_lays_a_mesh_over_it() -> None:
    # JAX lays 4 devices of a v5e tray as a 2 x 2 square, whose ring has a wire along both sides.
    data, model = topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False).links.links
    assert (len(data.wires), len(model.wires)) != (1, 1)
    lone = topology("v5e:2x4", {"x": 8}, compiles=False).links.links[0]
    assert lone != model
