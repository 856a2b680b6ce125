"""What the real TPU and GPU compilers do, without devices: the reader, the door, plans of three models.

Runs where the wheels are installed; `python benchmarks/compilers/compilers.py` sets them up and sets what they want in
the environment. Every case compiles on the compiler itself, so these are slower than the rest.
"""

from __future__ import annotations

import importlib.util
import os
import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from jshard._core.named_topology import topology
from jshard._verify import read_program, verify_plan
from tests.helpers import known_traffic, rules_examples
from tests.helpers.collective_programs import PROGRAMS
from tests.laws import rules_bytes, rules_validator


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


TPU = pytest.mark.skipif(not installed("libtpu"), reason="libtpu is not installed")
GPU = pytest.mark.skipif(
    not any(installed(f"jax_plugins.xla_cuda{v}") for v in (12, 13))
    or "xla_gpu_autotune_level=0" not in os.environ.get("XLA_FLAGS", ""),
    reason="no CUDA plugin, or XLA_FLAGS without --xla_gpu_autotune_level=0",
)
MESHES = [
    pytest.param("v5e:2x4", {"x": 2, "y": 4}, 1, marks=TPU),
    pytest.param("v5p:2x2x2", {"x": 2, "y": 4}, 1, marks=TPU),
    pytest.param("tpu7x:2x2x1", {"x": 2, "y": 4}, 1, marks=TPU),
    pytest.param("v5e:2x2", {"x": 2, "y": 4}, 2, marks=TPU),
    pytest.param("h100:1x8", {"x": 2, "y": 4}, 1, marks=GPU),
]


@pytest.mark.parametrize("name, axes, slices", MESHES)
@pytest.mark.parametrize("dtype, rows, cols", [(jnp.bfloat16, 1024, 2048), (jnp.float32, 64, 128)])
def test_the_reader_finds_the_traffic_of_the_shapes(name, axes, slices, dtype, rows, cols) -> None:
    if slices > 1 and rows < 1024:
        pytest.skip("between slices the TPU compiler pads arrays to whole tiles")
    mesh = topology(name, axes, num_slices=slices, compiles=True).jax_mesh
    itemsize = jnp.dtype(dtype).itemsize
    for program in known_traffic.programs(rows, cols):
        found = read_program(program.lower(mesh, dtype).compile())
        want = {k: v * itemsize for k, v in program.expected.items()}
        assert (program.name, known_traffic.requested_by_kind(found), found.unread) == (
            program.name,
            want,
            (),
        )


@pytest.mark.parametrize("name, axes, slices", MESHES)
def test_a_training_step_has_the_traffic_of_its_jaxpr(name, axes, slices) -> None:
    """Large enough that the TPU compiler spreads collectives over fusions and pads reduce-scatters."""
    mesh = topology(name, axes, num_slices=slices, compiles=True).jax_mesh
    f, args = known_traffic.training_step(mesh, layers=2, batch=8192, d=2048, ff=8192, dtype=jnp.bfloat16)
    traced = f.trace(*args)
    found = read_program(traced.lower().compile())
    assert found.complete
    # Between slices the scalar loss is padded to a tile of 1 KiB.
    assert known_traffic.requested_by_kind(found) == pytest.approx(
        known_traffic.jaxpr_traffic(traced.jaxpr, mesh), abs=2048
    )
    assert found.flops == 2 * 2 * 3 * 2 * 8192 * 2048 * 8192 / 8
    assert found.peak_bytes and found.peak_bytes > 2 * 2 * 2048 * 8192 * 2 / 8
    assert (found.estimated_cycles is not None) == (not name.startswith("h100"))


@pytest.mark.parametrize(
    "name, axes",
    [
        pytest.param(name, axes, marks=GPU if name[0] in "hab" else TPU)
        for name, axes in [
            ("v5e:1x1", {"x": 1}),
            ("v5e:4x8", {"x": 4, "y": 8}),
            ("v5e:16x16", {"x": 256}),
            ("v6e:2x4", {"x": 8}),
            ("v4:2x2x1", {"x": 4}),
            ("v5p:1x2x2", {"x": 4}),
            ("v5p:8x8x8", {"x": 8, "y": 64}),
            ("tpu7x:1x1x1", {"x": 2}),
            ("tpu7x:4x4x4", {"x": 16, "y": 8}),
            ("h100:4x8", {"x": 4, "y": 8}),
            ("a100:8", {"x": 8}),
            ("h200:8", {"x": 8}),
            ("b200:2x8", {"x": 16}),
        ]
    ],
)
def test_named_machines_give_devices_that_compile(name, axes) -> None:
    t = topology(name, axes, compiles=True)
    assert t.compiles and t.jax_mesh.devices.size == t.devices and t.links.mesh.total == t.devices
    assert len({d.id for d in t.jax_mesh.devices.flat}) == t.devices
    spec = jax.sharding.NamedSharding(t.jax_mesh, jax.P(tuple(axes)))
    x = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=spec)
    total = known_traffic.requested_by_kind(read_program(jax.jit(jnp.sum).lower(x).compile()))
    assert total == ({"all_reduce": 2 * 4 * (t.devices - 1) / t.devices} if t.devices > 1 else {})


def sgd(loss):
    """A training step: value, and parameters moved along the gradient."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    return step


def mlp(params, x):
    for up, down in params:
        x = x + jax.nn.relu(x @ up) @ down
    return jnp.mean(x.astype(jnp.float32) ** 2)


def transformer(params, x):
    """Scanned blocks of causal attention and feed-forward, on embedded tokens."""

    def block(h, p):
        q, k, v = (jnp.einsum("btd,dhe->bhte", h, p[n]) for n in "qkv")
        scores = jnp.einsum("bhte,bhse->bhts", q, k) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        h = h + jnp.einsum("bhts,bhse,hed->btd", weights, v, p["o"])
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

    return jnp.mean(lax.scan(block, x, params)[0].astype(jnp.float32) ** 2)


def language_head(params, tokens, targets):
    """Embedding, one product, and a softmax over the vocabulary."""
    logits = (params["embed"][tokens] @ params["head"]).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen)


def shaped(dtype, **shapes):
    return {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}


def workload(name: str):
    """Step, arguments and the in_strategy that cuts the batch into eight."""
    bf16, s = jnp.bfloat16, jax.ShapeDtypeStruct
    if name == "mlp":
        weights = [(s((1024, 4096), bf16), s((4096, 1024), bf16))] * 2
        return sgd(mlp), (weights, s((4096, 1024), bf16)), (None, (8, 1))
    if name == "transformer":
        n, d, h, e = 2, 512, 8, 64
        layers = shaped(
            bf16, q=(n, d, h, e), k=(n, d, h, e), v=(n, d, h, e), o=(n, h, e, d), up=(n, d, 4 * d),
            down=(n, 4 * d, d),
        )  # fmt: skip
        return sgd(transformer), (layers, s((16, 256, d), bf16)), (None, (8, 1, 1))
    params = shaped(bf16, embed=(8192, 512), head=(512, 8192))
    tokens = s((16, 256), jnp.int32)
    return sgd(language_head), (params, tokens, tokens), (None, (8, 1), (8, 1))


@pytest.mark.parametrize("name, axes, slices", [MESHES[0], MESHES[1], MESHES[-1]])
@pytest.mark.parametrize("model", ["mlp", "transformer", "language_head"])
def test_what_is_emitted_is_what_was_planned(model, name, axes, slices) -> None:
    step, args, strategy = workload(model)
    mesh = topology(name, axes, compiles=True)
    f = jshard.shard(step, in_strategy=strategy, level=2, mesh=mesh)
    plan = f.plan(*args)
    verified = verify_plan(plan, f.lower(*args).compile())
    assert verified.predicted > 0
    assert verified.ok and verified.error <= 0.02, str(verified)


@TPU
@pytest.mark.parametrize(
    "name, sizes",
    [
        ("v5e:2x4", (2, 4)),
        ("v5e:4x8", (2, 4, 4)),
        ("v6e:4x4", (4, 4)),
        ("v5p:4x4x4", (4, 16)),
        ("tpu7x:2x2x2", (4, 4)),
    ],
)
def test_a_plan_does_not_depend_on_the_compiler_being_installed(name, sizes) -> None:
    axes = dict(zip("abc", sizes, strict=False))
    assert topology(name, axes, compiles=False).links == topology(name, axes, compiles=True).links


# -- the law of bytes: `tests/laws/test_bytes_law.py` has it for the CPU's compiler --------------------------

EIGHT = [pytest.param("v5p:2x2x2", marks=TPU), pytest.param("h100:1x8", marks=GPU)]


@pytest.mark.parametrize("machine", EIGHT)
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_named_programs_move_what_is_planned(name, level, machine) -> None:
    f, args, cuts = PROGRAMS[name]
    sharded = jshard.shard(f, cuts, mesh=topology(machine, {"x": 8}, compiles=True), level=level)
    plan = sharded.plan(*args)
    v = verify_plan(plan, sharded.lower(*args).compile())
    assert v.ok and plan.cost.optimal, str(v)


@pytest.mark.parametrize("machine", EIGHT)
@pytest.mark.parametrize("level", [0, 2])
def test_an_all_reduce_and_a_slice_that_were_planned_are_no_reduce_scatter(level, machine) -> None:
    mesh = topology(machine, {"x": 2, "y": 4}, compiles=True)
    f = jshard.shard(
        lambda a, b: jax.nn.relu(jshard.op(jnp.dot, ((2, 4), (4, 1)), (2, 1))(a, b)), mesh=mesh, level=level
    )
    args = jax.ShapeDtypeStruct((512, 128), "float32"), jax.ShapeDtypeStruct((128, 512), "float32")
    v = verify_plan(f.plan(*args), f.lower(*args).compile())
    assert v.ok and v.by_kind == {"all_reduce": (786432, 786432)}, str(v)


# 64-bit types are emulated on TPUs, with collectives of other sizes, or none. Narrow arrays as small as these are sent as
# whole tiles: 32 bytes of int8 as an all-reduce of u32[1,1,128].
TYPES = [t for t in rules_bytes.DTYPES if not t.endswith(("64", "128"))]
WORDS = [t for t in TYPES if t.endswith("32")]


@pytest.mark.parametrize("machine", EIGHT)
@pytest.mark.parametrize("name", ["reductions", "arg_reductions", "scatters", "sorts"])
def test_operators_of_every_type_move_what_is_planned(name, machine) -> None:
    rng = random.Random(f"bytes of {name}")
    fn, *args = rules_examples.EXAMPLES[name]()
    cases = rules_validator.cases(fn, *args)
    mesh = topology(machine, {"x": 2, "y": 4}, compiles=True)
    tried = 0
    for _ in range(60):
        some = WORDS if machine.startswith("v5") else TYPES
        single = rules_bytes.in_dtype(rng.choice(cases), rng.choice(some))
        if single is not None and tried < 6:
            tried += 1
            found = rules_bytes.trial(single, 8, rng, mesh.hardware, mesh.jax_mesh)
            assert not found.text, found.text
    assert tried == 6
