"""Cumulative operators and `top_k` along a cut dimension: values, ties, gradients, and the bytes of what is gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from tests.helpers import rules_examples as examples
from tests.laws import rules_validator as validator


CUMULATIVE = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)


def _cases() -> list[validator.Case]:
    x, i = examples.floats(2, 16), examples.ints(2, 16, low=0, high=4)  # integers with ties

    def run(x: Any, i: Any) -> Any:
        swept = [f(x, 1, reverse=k % 2 == 1) for k, f in enumerate(CUMULATIVE)]
        swept += [lax.cumsum(i, 1, reverse=True), lax.cummin(i, 1)]
        nan = jnp.where(x > 1, jnp.nan, x)
        return swept, lax.cummax(nan, 1), [lax.top_k(a, k) for a, k in ((x, 2), (i, 4), (nan, 3))]

    found = {c.key: c for c in validator.cases(run, x, i)}
    return [c for c in found.values() if c.op.primitive.startswith(("cum", "top_k"))]


@pytest.mark.parametrize("devices, vma", [(2, False), (8, True)])
def test_blocks_with_what_others_add_are_those_of_the_whole(devices: int, vma: bool) -> None:
    tried, wrong = validator.check(_cases(), devices, limit=2, vma=vma, seed=devices)
    assert not wrong, "\n".join(wrong[:3])
    assert tried > 8


def test_top_k_is_cut_where_blocks_have_k_elements() -> None:
    from jshard._core.layout import MeshAxes
    from jshard._rules.lookup import rules_for
    from jshard._rules.rule import candidates

    for k, cut in ((2, 1), (3, 0)):
        case = next(
            c
            for c in validator.cases(lambda x, k=k: lax.top_k(x, k), examples.floats(3, 16))
            if c.op.primitive == "top_k"
        )
        rule, _ = rules_for(case.op)
        found = [c for c in candidates(rule, MeshAxes(("x",), (8,))) if c.axis_codes[0] >= len(rule.sizes)]
        assert len(found) == cut, (k, found)


def test_a_program_of_prefixes_cut_along_time() -> None:
    """Values, outer gradients and emitted bytes of a decay-weighted running sum over a cut dimension."""

    def f(x: Any) -> Any:
        decay = jnp.exp(lax.cumsum(-jnp.abs(x), 0))
        return lax.cumsum(x / (decay + 1), 0, reverse=True), lax.top_k(x[:, 0], 2)[0]

    with jax.enable_x64(True):
        mesh = jax.make_mesh(
            (8,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:8]
        )
        x = jnp.asarray(examples.floats(32, 64), jnp.float64)
        sharded = jshard.shard(f, mesh=mesh, in_strategy=((8, 1),), out_strategy=((8, 1), None))
        for got, want in zip(sharded(x), jax.jit(f)(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
        assert sharded.plan(x).verify(sharded.lower(x).compile()).ok

        def loss(f: Any) -> Any:
            return lambda x: sum((y**2).sum() for y in f(x))

        np.testing.assert_allclose(jax.grad(loss(sharded))(x), jax.grad(loss(f))(x), rtol=1e-10)


def test_a_long_running_sum_gathers_one_element_a_block() -> None:
    mesh = jshard.topology("v5e:4x4", {"t": 16})
    f = jshard.shard(lambda x: lax.cumsum(x, 0), mesh=mesh, in_strategy=((16, 1),), out_strategy=(16, 1))
    plan = f.plan(jax.ShapeDtypeStruct((65536, 1024), jnp.float32))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 15 * 1024 * 4)]
