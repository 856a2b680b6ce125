"""Attention whose biases are as low as their type allows: values and gradients are those of the definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from tests.helpers import attention_cases
from tests.helpers.attention_cases import plain_attention
from tests.laws import rules_validator as validator
from tests.rules.test_attention import run_cut


P = jax.P

ROWS = (0.0, -30.0, -3e5, -3e8, -1e30, -np.inf)
"""Added to all biases of a query, of consecutive queries; the last is the least number of the type."""


def operands(dtype: str, options: dict[str, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
    """Queries, keys, values and biases of grouped heads, and the cotangent."""
    shapes = (2, 24, 4, 8), (2, 24, 2, 8), (2, 24, 2, 8)
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    wide = jnp.promote_types(dtype, "float32")
    low = np.resize(np.maximum(ROWS, float(jnp.finfo(wide).min)), 24)
    bias = np.maximum(rng.normal(size=(2, 1, 24, 24)) + low[:, None], float(jnp.finfo(wide).min))
    return (q, k, v, jnp.asarray(bias, wide)), jnp.asarray(rng.normal(size=shapes[0]), wide)


def gradients(attend: Any, cotangent: Any) -> Any:
    """Gives the result and the gradients of all operands."""

    def loss(*args: Any) -> Any:
        out = attend(*args)
        return (out * cotangent).sum(), out

    def run(*args: Any) -> list[Any]:
        grads, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
        return [out, *grads]

    return run


def assert_equal(got: list[Any], want: list[Any], tolerance: float) -> None:
    """Equal query by query, relative to the largest value."""
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.isfinite(g).all()
        assert abs(g - w).max() <= tolerance * abs(w).max()


CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("float64", 1e-12, {}),
    ("float32", 2e-6, {"causal": True}),
    ("bfloat16", 2e-2, {"window": (5, 3)}),
]


@pytest.mark.parametrize(("dtype", "tolerance", "options"), CASES)
def test_on_one_device(dtype: str, tolerance: float, options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        args, cotangent = operands(dtype, options, np.random.default_rng(23))

        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jshard.ops.attention(q, k, v, bias=bias, **options)

        def plain(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return plain_attention(q, k, v, bias=bias, **options)

        got = jax.jit(gradients(attend, cotangent))(*args)
        assert_equal(got, jax.jit(gradients(plain, cotangent))(*args), tolerance)


@pytest.mark.parametrize(
    ("dtype", "cut", "options"),
    [
        ("float32", (*[P(None, "y")] * 3, P(None, None, "y")), {"causal": True}),  # ring
        ("float64", (*[P(None, "y")] * 3, P(None, None, "y")), {}),
        ("float32", (P(), P(None, "y"), P(None, "y"), P(None, None, None, "y")), {}),  # keys alone
        ("float32", (*[P(None, None, "y")] * 3, P()), {"window": (5, 3)}),  # heads
    ],
)
def test_cut_over_devices(dtype: str, cut: tuple[Any, ...], options: dict[str, Any]) -> None:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("x", "y"), axis_types=kinds, devices=jax.devices()[:2])
    with jax.enable_x64(dtype == "float64"):
        args, cotangent = operands(dtype, options, np.random.default_rng(29))

        run = gradients(lambda q, k, v, b: jshard.ops.attention(q, k, v, bias=b, **options), cotangent)
        plain = gradients(lambda q, k, v, b: plain_attention(q, k, v, bias=b, **options), cotangent)
        got = jshard.shard(jshard.op(run, in_strategy=cut), mesh=mesh)(*args)
        want = jax.jit(plain)(*args)
    assert_equal(got, want, 1e-12 if dtype == "float64" else 3e-6)


def test_causal_order_of_equal_work() -> None:
    """The key biases of a whole example are low, in the ring's zigzag order."""
    with jax.enable_x64(True):
        arrays, static, extra = attention_cases.operands("causal_padding")
        low = jnp.asarray([-3e8, float(jnp.finfo("float64").min)])[:, None, None, None]
        extra["bias"] = jnp.broadcast_to(jnp.maximum(extra["bias"] + low, low), (2, 4, 1, 16))

        def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return (jshard.ops.attention(q, k, v, **static, mask=extra["mask"], bias=bias) ** 2).sum()

        found = validator.cases(jax.value_and_grad(loss, (0, 1, 2, 3)), *arrays, extra["bias"])
        for case in (c for c in found if c.op.primitive.startswith("jshard_attention")):
            run_cut(case, (4,), ("zigzag",))
