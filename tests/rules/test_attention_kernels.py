"""The kernels that stand in for the online softmax, run by Pallas' interpreter on the CPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.kernels import splash_backward, splash_forward, splash_takes
from jshard._rules.attention.online_softmax import backward, forward, summed_delta
from jshard._verify import read_program


@pytest.mark.parametrize(
    ("spec", "queries", "keys"),
    [
        (Attention(0.1, window=(100, 40), has_segments=True), 128, 256),
        (Attention(0.1, True, (64, 0)), 256, 256),
    ],
)
def test_splash_attention_is_the_online_softmax(spec: Attention, queries: int, keys: int) -> None:
    """Grouped; some queries of the first belong to a segment without keys."""
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (
        jnp.asarray(rng.normal(size=d), np.float32)
        for d in ((1, queries, 2, 2, 128), (1, keys, 2, 128), (1, keys, 2, 128), (1, 2, 2, queries, 128))
    )
    segments = [jnp.asarray(rng.integers(low, 3, (1, n)), np.int32) for low, n in ((0, queries), (1, keys))]
    x = Operands(q, k, v, None, None, *(segments if spec.has_segments else (None, None)))
    assert splash_takes(spec, x, 0, 0)
    assert not splash_takes(spec, x, jnp.int32(0), 0)
    assert not splash_takes(dataclasses.replace(spec, has_mask=True), x, 0, 0)
    ours, theirs = forward(spec, x), splash_forward(spec, x, interpret=True)
    np.testing.assert_allclose(theirs.out, ours.out, atol=1e-5)
    lse = [x.largest + jnp.log(x.total) for x in (theirs, ours)]
    np.testing.assert_allclose(lse[0], lse[1], atol=1e-5)
    want = backward(spec, x, ours.largest, ours.total, cotangent, summed_delta(cotangent, ours.out))
    got = splash_backward(spec, x, ours.total > 0, cotangent, interpret=True)
    for g, w in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * float(jnp.abs(w).max()))


def test_other_platforms_compile_the_online_softmax() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), "float32")
    text = jax.jit(lambda x: jshard.ops.attention(x, x, x)).lower(x).as_text()
    assert "tpu_custom_call" not in text


def test_the_metadata_of_a_kernel_may_span_lines() -> None:
    text = """HloModule jit_f, num_partitions=2
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %k = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}
}"""
    assert read_program(text).complete
