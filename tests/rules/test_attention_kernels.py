"""The kernels that stand in for the online softmax: splash attention run by Pallas' interpreter on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core import jaxcompat as compat
from jshard._rules.attention import kernels
from jshard._rules.attention.cudnn import cudnn_lacks
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.kernels import (
    SPLASH,
    Softmax,
    aligned,
    kernels_for,
    local_backward,
    local_forward,
)
from jshard._rules.attention.online_softmax import backward, forward, summed_delta
from jshard._rules.attention.splash import splash_backward, splash_forward, splash_lacks
from jshard._verify import read_program
from tests.helpers.attention_cases import plain_attention


SEQUENCE = jax.P(None, "x")
POSITIONS = "positions of queries and keys that are known on each device only"
INTERPRETED = SPLASH._replace(
    platform="cpu",
    forward=functools.partial(splash_forward, interpret=True),
    backward=functools.partial(splash_backward, interpret=True),
)


@pytest.fixture
def splash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splash attention in the place that TPUs have in a program."""

    def interpreted(spec: Attention, x: Operands) -> list[kernels.Kernel]:
        return [] if splash_lacks(spec, x.q[..., 0, :], x.k) else [INTERPRETED]

    monkeypatch.setattr(kernels, "kernels_for", interpreted)


def operands(queries: int, keys: int, size: int = 128, segments: bool = False) -> Operands:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=d), np.float32)
        for d in ((1, queries, 2, 2, size), (1, keys, 2, size), (1, keys, 2, size))
    )
    # Queries of segment 0 have no keys.
    ids = [jnp.asarray(rng.integers(low, 3, (1, n)), np.int32) for low, n in ((0, queries), (1, keys))]
    return Operands(q, k, v, None, None, *(ids if segments else (None, None)))


@pytest.mark.parametrize(
    ("spec", "queries", "keys", "size"),
    [
        (Attention(0.1, window=(100, 40), has_segments=True), 128, 256, 128),
        (Attention(0.1, True, (64, 0)), 256, 256, 72),
    ],
)
def test_splash_attention_is_the_online_softmax(spec: Attention, queries: int, keys: int, size: int) -> None:
    x = operands(queries, keys, size, spec.has_segments)

    @jax.jit
    def both(x: Operands) -> Any:
        ours, theirs = forward(spec, x), splash_forward(spec, x, interpret=True)
        cotangent = jnp.cos(jnp.arange(ours.out.size, dtype=np.float32)).reshape(ours.out.shape)
        want = backward(spec, x, ours.largest, ours.total, cotangent, summed_delta(cotangent, ours.out))
        softmax = Softmax(ours.largest, ours.total, ours.out, cotangent)
        return ours, theirs, want[:3], kernels._kernel_backward(INTERPRETED, spec, x, softmax)[:3]

    ours, theirs, want, got = both(x)
    np.testing.assert_allclose(theirs.out, ours.out, atol=1e-5)
    reaches = np.asarray(ours.total > 0)
    lse = [np.asarray(y.largest + jnp.log(y.total))[reaches] for y in (theirs, ours)]
    np.testing.assert_allclose(lse[0], lse[1], atol=1e-5)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * float(jnp.abs(w).max()))


@pytest.mark.usefixtures("splash_on_cpu")
def test_queries_after_the_first_go_over_blocks_of_keys() -> None:
    """Queries 256 to 383 of 512 keys: two whole blocks, one on the diagonal, one that none attends to."""
    spec, x, row = Attention(0.1, True), operands(128, 512), jnp.int32(256)
    assert "pallas_call" in str(jax.make_jaxpr(lambda x: local_forward(spec, x, row))(x))

    @jax.jit
    def both(x: Operands, row: Any) -> Any:
        ours, theirs = forward(spec, x, row), local_forward(spec, x, row)
        cotangent = jnp.sin(jnp.arange(ours.out.size, dtype=np.float32)).reshape(ours.out.shape)
        want = backward(spec, x, ours.largest, ours.total, cotangent, summed_delta(cotangent, ours.out), row)
        softmax = Softmax(ours.largest, ours.total, ours.out, cotangent)
        return ours.out, theirs.out, want[:3], local_backward(spec, x, softmax, row)[:3]

    ours, theirs, want, got = both(x, row)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * float(jnp.abs(w).max()))


@pytest.mark.usefixtures("splash_on_cpu")
@pytest.mark.parametrize(("devices", "causal"), [(2, True), (4, False)])
def test_splash_attention_in_the_ring(devices: int, causal: bool) -> None:
    """The local blocks of both orders, forward and backward, against the definition."""
    mesh = jax.make_mesh(
        (devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    rng = np.random.default_rng(1)
    q, k, v, c = (jnp.asarray(rng.normal(size=(1, 256 * devices, n, 64)), np.float32) for n in (2, 1, 1, 2))

    def step_of(attend: Any) -> Any:
        def step(q: Any, k: Any, v: Any, c: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, causal=causal), q, k, v)
            return out, *pull(c)

        return step

    run = jshard.op(step_of(jshard.ops.attention), in_strategy=(jax.P(None, "x"),) * 4)
    sharded = jshard.shard(run, mesh=mesh)
    plan = sharded.plan(q, k, v, c, verify=True)
    assert plan.verification is not None and plan.verification.ok
    assert any(row.kind == "permute" for row in plan.collectives)
    assert "splash" in sharded.lower(q, k, v, c).as_text(debug_info=True)
    for g, w in zip(sharded(q, k, v, c), jax.jit(step_of(plain_attention))(q, k, v, c), strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5 * float(jnp.abs(w).max()))


def test_what_kernels_lack() -> None:
    spec = Attention(0.1, causal=True)
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), "bfloat16") for n in (4, 2))
    assert (splash_lacks(spec, q, k), cudnn_lacks(spec, q, k, k)) == ("", "")
    assert splash_lacks(dataclasses.replace(spec, has_mask=True), q, k) == "a mask"
    assert cudnn_lacks(dataclasses.replace(spec, has_segments=True), q, k, k) == "segments"
    assert cudnn_lacks(dataclasses.replace(spec, window=(8, 0)), q, k, k) == "a window"
    short = jax.ShapeDtypeStruct((1, 96, 2, 64), "bfloat16")
    assert splash_lacks(spec, q, short) == "blocks of 256 queries and 96 keys, no multiples of 128"
    assert cudnn_lacks(spec, q, short, short) == "a causal mask of 256 queries and 96 keys"
    wide = jax.ShapeDtypeStruct((1, 256, 2, 256), "bfloat16")
    assert cudnn_lacks(spec, wide, wide, wide).startswith("heads of 256 and 256")
    float32 = jax.ShapeDtypeStruct((1, 256, 2, 64), "float32")
    assert cudnn_lacks(spec, float32, float32, float32) == "float32 operands"
    assert not aligned(spec, jnp.int32(0), 0) and aligned(Attention(0.1), jnp.int32(0), 0)


def test_kernels_are_not_traced_where_values_are_typed_by_axes() -> None:
    x = operands(128, 128)
    assert kernels_for(Attention(0.1), x)
    with compat.check_vma(True):
        assert not kernels_for(Attention(0.1), x)


def test_cudnn_gets_the_logsumexp_of_all_keys() -> None:
    """Lowered for GPUs, where no device is needed: the operands of the backward kernel, in cuDNN's order."""
    x = jax.tree.map(lambda y: y.astype("bfloat16"), operands(256, 256))
    heads = (1, 2, 2, 256)
    softmax = Softmax(*(jnp.ones((*heads, *more), np.float32) for more in ((), (), (128,), (128,))))

    def run(x: Operands, softmax: Softmax) -> Any:
        return local_forward(Attention(0.1, True), x), local_backward(Attention(0.1, True), x, softmax)

    text = jax.jit(run).trace(x, softmax).lower(lowering_platforms=("cuda",)).as_text()
    (one,) = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmaxBackward" in line]
    types = one.rpartition(" : ")[2]
    kind = "tensor<1x256x{}x128xbf16>"
    want = [kind.format(n) for n in (4, 2, 2)] + ["tensor<1x4x256xf32>", kind.format(4), kind.format(4)]
    assert types.startswith(f"({', '.join(want)}) ->")
    assert "CAUSAL" in one and text.count("@__cudnn$fmhaSoftmax(") == 1


def test_other_platforms_compile_the_online_softmax() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), "bfloat16")
    text = jax.jit(lambda x: jshard.ops.attention(x, x, x)).lower(x).as_text()
    assert "custom_call" not in text


def test_the_metadata_of_a_kernel_may_span_lines() -> None:
    text = """HloModule jit_f, num_partitions=2
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %k = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}
}"""
    assert read_program(text).complete


def test_a_program_that_xla_partitions_has_no_kernels() -> None:
    """They cannot be partitioned: a plain `jax.jit` of sharded arguments keeps the online softmax."""
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])
    x = jnp.ones((2, 256, 2, 128), "bfloat16")
    cut = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
    text = [
        jax.jit(lambda x: jshard.ops.attention(x, x, x))
        .trace(y)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        for y in (x, cut)
    ]
    assert ["@__cudnn$fmhaSoftmax" in t for t in text] == [True, False]


@pytest.mark.parametrize(
    ("machine", "axes", "specs", "how", "kernel"),
    [
        ("v5e:2x4", 8, (SEQUENCE,) * 3, {"causal": True}, "splash attention"),
        ("v5e:2x4", 8, (SEQUENCE, jax.P(), jax.P()), {"causal": True}, "splash attention"),
        ("v5e:2x4", 8, (jax.P(), SEQUENCE, SEQUENCE), {"causal": True}, f"online softmax: {POSITIONS}"),
        ("v5e:2x4", 8, (SEQUENCE,) * 3, {"window": 64}, f"online softmax: {POSITIONS}"),
        ("h100:1x8", 8, (SEQUENCE,) * 3, {}, "cuDNN"),
        ("h100:1x8", 8, (SEQUENCE,) * 3, {"segment_ids": True}, "online softmax: segments"),
    ],
)
def test_a_plan_says_which_kernel_computes(
    machine: str, axes: int, specs: Any, how: dict[str, Any], kernel: str
) -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 4, 64), "bfloat16")
    ids = jnp.zeros((1, 4096), np.int32)
    static: dict[str, Any] = {k: ids if k == "segment_ids" else v for k, v in how.items()}
    fn = jshard.op(lambda q, k, v: jshard.ops.attention(q, k, v, **static), in_strategy=specs)
    mesh = jshard.topology(machine, {"x": axes}, compiles=False)
    plan = jshard.shard(fn, mesh=mesh).plan(x, x, x)
    (row,) = [o for o in plan.operators if o.primitive == "jshard_attention"]
    assert row.kernel == kernel
    assert kernel[:40] in str(plan)
    assert jshard.Plan.from_json(plan.to_json()).operators == plan.operators
