"""`jshard.ops.attention` on one device: values and gradients of the definition, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._rules.attention import online_softmax
from tests.helpers.attention_cases import KINDS, operands, plain_attention


def value_and_grads(fn: Any, arrays: Any, static: Any, extra: Any) -> list[np.ndarray]:
    """The result, and the gradients of a weighted sum of it with respect to q, k, v and a bias."""
    bias = {k: v for k, v in extra.items() if k == "bias"}
    rest = {k: v for k, v in extra.items() if k != "bias"}

    def loss(arrays: Any, bias: Any) -> Any:
        out = fn(*arrays, **static, **rest, **bias)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weights).sum().astype(jnp.float32 if out.dtype.itemsize < 8 else out.dtype), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, bias)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves((out, grads))]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_definition(kind: str) -> None:
    with jax.enable_x64(True):
        arrays, static, extra = operands(kind)
        want = value_and_grads(plain_attention, arrays, static, extra)
        got = value_and_grads(jshard.ops.attention, arrays, static, extra)
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * max(1.0, np.abs(w).max()))


@pytest.mark.parametrize(
    ("kind", "queries", "keys", "kv_heads", "block"),
    [
        ("causal", 37, 37, 2, 8),
        ("window", 40, 24, 1, 16),
        ("full", 9, 31, 4, 4),
        ("window_both", 64, 64, 4, 16),
    ],
)
def test_sizes_that_blocks_do_not_divide(
    kind: str, queries: int, keys: int, kv_heads: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_softmax, "BLOCK", block)
    with jax.enable_x64(True):
        arrays, static, extra = operands(kind, (3, queries, 4, 8), kv_heads, keys, seed=queries)
        want = value_and_grads(plain_attention, arrays, static, extra)
        got = value_and_grads(jshard.ops.attention, arrays, static, extra)
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * max(1.0, np.abs(w).max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_equals_that_of_jax(dtype: str) -> None:
    arrays, _, extra = operands("bias", (2, 16, 4, 8), 2, dtype=jnp.dtype(dtype))
    mask = jnp.asarray(np.random.default_rng(3).random((2, 1, 1, 16)) > 0.3).at[..., 0].set(True)
    ours = jshard.ops.attention(*arrays, causal=True, window=(6, 2), mask=mask, scale=0.4, **extra)
    q, k, v = arrays
    theirs = jax.nn.dot_product_attention(
        q, k, v, extra["bias"], mask, is_causal=True, local_window_size=(6, 2), scale=0.4
    )
    eps = float(jnp.finfo(dtype).eps)
    reaches = np.asarray(  # a query without a key: zeros here, the mean of all values there
        plain_attention(*arrays, causal=True, window=(6, 2), mask=mask).astype(jnp.float32)
    ).any(-1, keepdims=True)
    assert ours.dtype == theirs.dtype == jnp.dtype(dtype) and reaches.mean() > 0.5
    np.testing.assert_allclose(
        np.where(reaches, np.asarray(ours, np.float32), 0),
        np.where(reaches, np.asarray(theirs, np.float32), 0),
        rtol=8 * eps, atol=8 * eps,
    )  # fmt: skip


def test_no_array_of_all_pairs_is_made() -> None:
    x = jax.ShapeDtypeStruct((1, 8192, 2, 16), "float32")
    fn = jax.value_and_grad(lambda x: jshard.ops.attention(x, x, x, causal=True).sum())
    text = jax.jit(fn).lower(x).as_text()
    assert "8192x8192" not in text and "512x512" in text


def test_a_query_without_keys_gives_zeros_and_zero_gradients() -> None:
    x = jnp.ones((1, 4, 1, 2))
    mask = jnp.zeros((1, 1, 4, 4), bool).at[0, 0, 1, 1].set(True)
    fn = lambda x: jshard.ops.attention(x, x, x, mask=mask)  # noqa: E731
    assert np.array_equal(np.asarray(fn(x))[0, :, 0, 0], [0, 1, 0, 0])
    assert np.isfinite(jax.grad(lambda x: fn(x).sum())(x)).all()


def test_it_maps_and_takes_any_number_of_batch_dimensions() -> None:
    with jax.enable_x64(True):
        (q, k, v), static, extra = operands("bias_heads", (2, 16, 4, 8))
        bias = extra["bias"]
        mapped = jax.vmap(lambda q, k: jshard.ops.attention(q, k, v, bias=bias), (0, None), 1)
        many = jnp.stack([q, q + 1, q * 2])
        want = jnp.stack([plain_attention(x, k, v, bias=bias) for x in many], 1)
        np.testing.assert_allclose(mapped(many, k), want, atol=1e-12)
        alone = jshard.ops.attention(q[0], k[0], v[0], bias=bias[0])
        np.testing.assert_allclose(alone, plain_attention(q[:1], k[:1], v[:1], bias=bias)[0], atol=1e-12)

        def loss(fn: Any) -> Any:
            return lambda q, b: sum((fn(x, k, v, bias=b) ** 2).sum() for x in q)

        ours = jax.grad(
            lambda q, b: (jax.vmap(lambda x: jshard.ops.attention(x, k, v, bias=b))(q) ** 2).sum(), (0, 1)
        )(many, bias)
        for x, y in zip(ours, jax.grad(loss(plain_attention), (0, 1))(many, bias), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-11)


def test_types_are_promoted() -> None:
    (q, k, v), _, _ = operands("full", dtype=np.float32)
    out = jshard.ops.attention(q.astype(jnp.bfloat16), k, v.astype(jnp.float16))
    assert out.dtype == jnp.float32


def test_the_number_of_groups_is_checked() -> None:
    (q, k, v), _, _ = operands("full", dtype=np.float32)
    assert jshard.ops.attention(q, k, v, kv_groups=2).shape == q.shape


Q = np.zeros((2, 16, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("q", "k", "keywords", "text"),
    [
        (Q, Q[:, :, :3], {}, "4 query heads and 3 heads of keys and values"),
        (Q, Q, {"kv_groups": 2}, "kv_groups=2 for 4 query heads and 4 heads"),
        (Q, Q[:1], {}, "equal batch dimensions"),
        (Q[0, 0], Q[0, 0], {}, "q \\(batch..., T, N, H\\)"),
        (Q.astype(int), Q.astype(int), {}, "of a floating point type"),
        (Q, Q, {"mask": np.ones((2, 4, 16, 8), bool)}, "here \\(2, 4, 16, 16\\), in which any dimension may be 1"),
        (Q, Q, {"mask": np.ones((16, 16), np.float32)}, "mask= for booleans, bias= for what is added"),
        (Q, Q, {"bias": np.ones((16, 16), bool)}, "mask= for booleans, bias= for what is added"),
        (Q, Q, {"segment_ids": np.zeros((2, 8), int)}, "integers of shape \\(2, 16\\)"),
        (Q, Q, {"window": (1, -2)}, "how many keys before and after"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(q: Any, k: Any, keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(jshard.ShardError, match=text):
        jshard.ops.attention(q, k, k, **keywords)
