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


def values_and_gradients(arrays: Any, static: Any, extra: Any) -> list[list[np.ndarray]]:
    """Of the operator and of the definition: the result, and gradients of a weighted sum by q, k, v and a bias.

    Both are compiled as one program.
    """
    bias = {k: v for k, v in extra.items() if k == "bias"}
    rest = {k: v for k, v in extra.items() if k != "bias"}
    weights = np.cos(np.arange(arrays[0].size, dtype=np.float32)).reshape(arrays[0].shape)

    def both(arrays: Any, bias: Any) -> Any:
        def loss(fn: Any, arrays: Any, bias: Any) -> Any:
            out = fn(*arrays, **static, **rest, **bias)
            return (out * weights).sum(), out

        graded = jax.value_and_grad(loss, (1, 2), has_aux=True)
        return [graded(fn, arrays, bias) for fn in (jshard.ops.attention, plain_attention)]

    found = jax.jit(both)(arrays, bias)
    return [[np.asarray(x) for x in jax.tree.leaves((out, grads))] for (_, out), grads in found]


# The others are in the next test, which has them in sizes that blocks do not divide.
MASKED = [k for k, how in KINDS.items() if {"mask", "bias", "segment_ids"} & set(how)]


@pytest.mark.parametrize("kind", MASKED)
def test_values_and_gradients_are_those_of_the_definition(kind: str) -> None:
    with jax.enable_x64(True):
        got, want = values_and_gradients(*operands(kind))
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
        got, want = values_and_gradients(arrays, static, extra)
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * max(1.0, np.abs(w).max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_equals_that_of_jax(dtype: str) -> None:
    arrays, _, extra = operands("bias", (2, 16, 4, 8), 2, dtype=jnp.dtype(dtype))
    mask = np.random.default_rng(3).random((2, 1, 1, 16)) > 0.3
    mask[..., 0] = True

    @jax.jit
    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        how = {"causal": True, "window": (6, 2), "mask": mask}
        # A query without a key: zeros here, the mean of all values in JAX's.
        reaches = plain_attention(q, k, v, **how).any(-1, keepdims=True)
        return jshard.ops.attention(q, k, v, bias=bias, scale=0.4, **how), reaches

    ours, reaches = run(*arrays, extra["bias"])
    theirs = jax.nn.dot_product_attention(
        *arrays, extra["bias"], jnp.asarray(mask), is_causal=True, local_window_size=(6, 2), scale=0.4
    )
    eps = float(jnp.finfo(dtype).eps)
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
        many = np.stack([q, q + 1, q * 2])

        def ours(many: Any, bias: Any) -> Any:
            mapped = jax.vmap(lambda q, k: jshard.ops.attention(q, k, v, bias=bias), (0, None), 1)(many, k)
            return (mapped**2).sum(), mapped

        def plain(many: Any, bias: Any) -> Any:
            each = jnp.stack([plain_attention(x, k, v, bias=bias) for x in many], 1)
            return (each**2).sum(), each

        @jax.jit
        def run(many: Any, bias: Any) -> Any:
            alone = jshard.ops.attention(q[0], k[0], v[0], bias=bias[0])
            return alone, [jax.value_and_grad(f, (0, 1), has_aux=True)(many, bias) for f in (ours, plain)]

        alone, (((_, got), gradients), ((_, want), plain_gradients)) = run(many, bias)
        np.testing.assert_allclose(got, want, atol=1e-12)
        np.testing.assert_allclose(alone, want[0, 0], atol=1e-12)
        for x, y in zip(gradients, plain_gradients, strict=True):
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
