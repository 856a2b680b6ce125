"""Attention whose batch, heads or sequences a cut does not divide, padded: values and gradients, planned bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._rules.attention.definition import Attention, may_attend
from jshard._rules.lookup import rules_for
from jshard._rules.padding import padded_factors
from jshard._rules.registry import OpView
from tests.helpers.attention_cases import plain_attention


P = jax.P
SEQUENCE = P(None, "x")


def both_passes(attention: Any, how: dict[str, Any]) -> Any:
    def run(q: Any, k: Any, v: Any, bias: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v, bias: attention(q, k, v, bias=bias, **how), q, k, v, bias)
        return out, *pull(cotangent)

    return run


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "specs", "how"),
    [
        (1, 18, 18, 4, (SEQUENCE, SEQUENCE), {"causal": True}),
        (1, 17, 26, 4, (SEQUENCE, SEQUENCE), {"window": (9, 14)}),
        (1, 18, 13, 4, (P(), SEQUENCE), {"causal": True}),
        (5, 8, 8, 6, (P("x", None, None), P("x")), {}),
        (2, 8, 8, 6, (P(None, None, "x"), P(None, None, "x")), {"segment_ids": True}),
    ],
)
def test_padded_attention_is_attention(
    batch: int, queries: int, keys: int, heads: int, specs: Any, how: dict[str, Any]
) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = (batch, queries, heads, 8), *[(batch, keys, heads, 8)] * 2, (1, heads, 1, keys)
        *arrays, bias, cotangent = (jnp.asarray(rng.normal(size=s)) for s in (*shapes, shapes[0]))
        if "segment_ids" in how:
            how = {"segment_ids": jnp.asarray(rng.integers(0, 2, (batch, queries)))}
        sharded = jshard.shard(
            both_passes(jshard.ops.attention, how), (specs[0], specs[1], specs[1], P(), specs[0]),
            mesh=mesh, config={"pad": True},
        )  # fmt: skip
        args = (*arrays, bias, cotangent)
        plan = sharded.plan(*args)
        assert plan.padding
        assert plan.verify(sharded.lower(*args).compile()).ok
        wanted = jax.jit(both_passes(plain_attention, how))(*args)
        for got, want in zip(sharded(*args), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_what_padding_means_for_attention() -> None:
    q, k = (jax.ShapeDtypeStruct((3, 18, n, 8), "float32") for n in (4, 2))
    softmax = jax.ShapeDtypeStruct((3, 4, 18), "float32")
    op = OpView("jshard_attention", {"spec": Attention(1.0)}, (q, k, k), (q, softmax, softmax))
    found = {rules_for(op)[0].sizes[f]: p for f, p in padded_factors(op, rules_for(op)[0]).items()}
    assert set(found) == {3, 18}  # batch and sequences; neither heads in groups nor the size of a head
    padded = Attention(1.0, num_keys=18)
    assert may_attend(padded, (0, 3), (16, 19)) and not may_attend(padded, (0, 3), (18, 19))
