"""Sorts along a dimension that is padded: the padding's keys are the greatest, and end behind all elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as S, lax

import jshard
from jshard._rules.lookup import rules_for
from jshard._rules.neutral_element import greatest_key
from jshard._rules.padding import padded_factors
from jshard._rules.registry import OpView
from tests.helpers import rules_examples as examples
from tests.laws.padding_judge import judge, judge_gradient
from tests.laws.rules_validator import cases


def on_devices(n: int) -> Any:
    return jax.make_mesh((n,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])


def _same(got: Any, want: Any, **tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (
            np.asarray(y, np.float64) if jnp.issubdtype(y.dtype, jnp.floating) else np.asarray(y)
            for y in (a, b)
        )
        np.testing.assert_allclose(a, b, **tolerance) if tolerance else np.testing.assert_array_equal(a, b)


def _hostile(n: int, dtype: str) -> jax.Array:
    """n keys with ties, and several of what a sort puts last."""
    x = examples.ints(n, low=-3, high=4, seed=n)
    if dtype == "bool":
        return x > 0
    if dtype == "int32":
        return x.at[1:4].set(jnp.iinfo(dtype).max).at[4].set(jnp.iinfo(dtype).min)
    if dtype == "uint8":
        return (x + 3).astype(dtype).at[1:4].set(255)
    x = x.astype(dtype)
    return x.at[1].set(jnp.nan).at[2].set(jnp.inf).at[3].set(-jnp.nan).at[4].set(-jnp.inf).at[5].set(-0.0)


DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_greater_than_what_stands_in_the_padding(dtype: str) -> None:
    """A stable sort leaves a last element that is the greatest where it is, whatever the others are."""
    greatest = greatest_key(np.dtype(dtype))
    x = jnp.concatenate([_hostile(13, dtype), jnp.asarray([greatest], dtype)])
    assert int(jnp.argsort(x, stable=True)[-1]) == 13


def _sorts(x: Any, i: Any, h: Any) -> Any:
    """Along either dimension; by one key, two or three, of which some are narrow and some have ties."""
    keys = [jnp.sort(x, 1), jnp.sort(h, 0), lax.sort((i, x), dimension=1, num_keys=2, is_stable=False)]
    stable = [jnp.argsort(x, 1), lax.sort((i, x), dimension=1)]
    return keys, stable, [lax.sort((i > 0, i, x, h), dimension=1, num_keys=k) for k in (1, 3)]


@pytest.mark.parametrize("n", [7, 50])
def test_an_operator_that_reads_hostile_padding(n: int) -> None:
    x = jnp.round(3 * examples.floats(3, n)).at[0, 3].set(jnp.nan).at[1, 5].set(-0.0)
    i, h = examples.ints(3, n, low=0, high=3, dtype=np.int8), x.astype("bfloat16")
    tried = 0
    for case in cases(_sorts, x, i, h):
        if case.op.primitive == "sort":
            for verdict in (judge(case), judge_gradient(case)):
                assert not verdict.wrong, verdict.wrong[0]
                tried += verdict.tried
    assert tried > 20


def _sorted_ways(x: Any, v: Any) -> Any:
    """Sorts of one array of keys alone, with positions, with another operand, and with two keys."""
    i = jnp.arange(x.size, dtype="int32") % 3
    own = [jnp.sort(x), jnp.sort(x, descending=True), jnp.argsort(x), jnp.argsort(x, descending=True)]
    more = [
        lax.sort((x, v, i)),
        lax.sort((i, x, v), num_keys=2),
        lax.sort((x, i), num_keys=2, is_stable=False),
    ]
    return own, more, lax.top_k(v, 3), jnp.argmax(v), jnp.argmin(x)


@pytest.mark.parametrize(
    "n, devices, dtype, level",
    [(7, 2, "float32", 0), (7, 4, "bool", 2), (13, 8, "int32", 1), (13, 4, "bfloat16", 0), (50, 8, "uint8", 1),
     (50, 4, "float16", 2)],
)  # fmt: skip
def test_a_pinned_cut_that_does_not_divide(n: int, devices: int, dtype: str, level: int) -> None:
    x, v = _hostile(n, dtype), jnp.round(3 * examples.floats(n, seed=n))
    pins = ((devices,), (devices,))
    f = jshard.shard(
        _sorted_ways, mesh=on_devices(devices), in_strategy=pins, level=level, config={"pad": True}
    )
    plan = f.plan(x, v, verify=True)
    assert plan.verification is not None and plan.verification.ok, str(plan.verification)
    _same(f(x, v), jax.jit(_sorted_ways)(x, v))


def _loss(x: Any, w: Any) -> Any:
    n = x.size
    order = jnp.argsort(w)
    first, second = lax.sort((x * w, w), num_keys=1)
    return (
        (jnp.sort(x * w) * jnp.cos(jnp.arange(n))).sum()
        + (x[order] * jnp.arange(n)).sum()
        + (first * jnp.sin(second))[: n // 2].sum()
    )


@pytest.mark.parametrize("n, devices", [(7, 2), (13, 8), (50, 4), (1001, 8)])
def test_gradients(n: int, devices: int) -> None:
    with jax.enable_x64(True):
        args = [jnp.asarray(examples.floats(n, seed=seed), jnp.float64) for seed in (n, devices)]
        step: Callable[..., Any] = jax.value_and_grad(_loss, (0, 1))
        pins = ((devices,), (devices,))
        f = jshard.shard(step, mesh=on_devices(devices), in_strategy=pins, level=n % 3, config={"pad": True})
        plan = f.plan(*args, verify=True)
        assert plan.verification is not None and plan.verification.ok, str(plan.verification)
        _same(f(*args), jax.jit(step)(*args), rtol=1e-10, atol=1e-12)


def test_it_is_sorted_by_blocks_of_the_padded_size() -> None:
    """1001 on 8 devices: a block of 126 keys in each round, and the result alone is gathered."""
    mesh = on_devices(8)
    f = jshard.shard(lambda x: jnp.sort(x), mesh=mesh, in_strategy=((8,),), level=1, config={"pad": True})
    plan = f.plan(S((1001,), "float32"))
    assert {(c.kind, c.bytes) for c in plan.collectives if c.kind == "permute"} == {("permute", 126 * 4)}
    assert [c.bytes for c in plan.collectives if c.kind == "all_gather"] == [7 * 126 * 4]


def test_a_sort_that_may_exchange_equal_keys_is_not_padded() -> None:
    """Where other operands tell equal keys apart, the padding's might come before those of an element."""
    x = S((13,), "float32")

    def padded(keys: int, stable: bool, dtype: str = "float32") -> bool:
        some = (S((13,), dtype), x)
        op = OpView("sort", {"dimension": 0, "is_stable": stable, "num_keys": keys}, some, some)
        return bool(padded_factors(op, rules_for(op)[0]))

    assert padded(1, True) and padded(2, True) and padded(2, False)
    assert not padded(1, False)
    assert not padded(1, True, "complex64")  # their order has no greatest element that all compilers agree on
