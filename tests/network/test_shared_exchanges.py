"""Edges that the gradient of a kernel reads are those that the convolution has exchanged: sent, costed and counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from tests.laws.law_costs import both_costs, close, random_assignments, searched


IMAGES = ("NHWC", "HWIO", "NHWC")


def layer(w: Any, x: Any, stride: int = 1) -> Any:
    return jnp.tanh(lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=IMAGES))


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


def scanned(ws: Any, x: Any) -> Any:
    return (lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack(ws))[0] ** 2).mean()


def recomputed(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(layer)(w, x)
    return (x**2).mean()


def branches(ws: Any, x: Any) -> Any:
    """Three convolutions of one tensor, two of them with equal windows, and one that skips points."""
    ys = [layer(w, x, stride) for w, stride in zip(ws, (1, 1, 2), strict=True)]
    return sum((y**2).mean() for y in ys)


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def run(ws: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    return run


def arguments(size: int, dtype: str = "float32") -> Any:
    return [jax.ShapeDtypeStruct((3, 3, 8, 8), dtype)] * 3, jax.ShapeDtypeStruct((1, size, size, 8), dtype)


def test_each_edge_is_sent_once() -> None:
    """Rows of 1,024 pixels of 8 features: three exchanges forward, and two of gradients; none for those of kernels."""
    machine = jshard.topology("v5e:4x4", {"x": 4, "y": 4})
    plan = jshard.shard(step(deep), mesh=machine, level=2).plan(*arguments(1024))
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert {c.bytes for c in sent} == {1024 * 8 * 4} and len(sent) == 2 * 5
    assert plan.cost.gap == 0


def test_where_memory_is_minimised_no_edge_is_kept() -> None:
    machine = jshard.topology("v5e:2x4", {"x": 8})
    ws, x = arguments(64)
    for level in (1, 2):
        with searched() as found:
            jshard.shard(step(deep), mesh=machine, level=level).plan(ws[:2], x)
        assert found.problems
        assert all(bool(built.shared_exchanges) == (level == 2) for built, _ in found.problems)


@pytest.mark.parametrize("loss", [deep, branches])
def test_the_network_and_schedules_count_shared_edges_alike(loss: Callable[..., Any]) -> None:
    machine, rng = jshard.topology("v5e:2x4", {"x": 2, "y": 4}), np.random.default_rng(0)
    with searched() as found:
        plan = jshard.shard(step(loss), mesh=machine, level=2).plan(*arguments(256))
    built, best = found.problems[0]
    assert built.shared_exchanges and close(plan.cost.objective, both_costs(built, best)[1])
    for other in [best, *random_assignments(built, best, rng, 6)]:
        by_network, by_schedule = both_costs(built, other)
        assert close(by_network, by_schedule)
        assert by_schedule >= plan.cost.bound * (1 - 1e-9)


@pytest.mark.parametrize("pieces", [(1, 8, 1, 1), (1, 2, 4, 1)])
@pytest.mark.parametrize("loss", [deep, scanned, recomputed, branches])
def test_a_step_is_as_plain_and_sends_what_is_planned(
    loss: Callable[..., Any], pieces: tuple[int, ...]
) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        ws, x = jax.tree.map(lambda a: rng.standard_normal(a.shape), arguments(32, "float64"))
        sharded = jshard.shard(step(loss), mesh="auto:8", in_strategy=(None, pieces), level=2)
        plan = sharded.plan(ws, x, verify=True)
        assert plan.verification is not None and plan.verification.ok
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
            sharded(ws, x), jax.jit(step(loss))(ws, x),
        )  # fmt: skip


def test_a_saved_plan_sends_the_same() -> None:
    args, mesh = arguments(64), jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    plan = jshard.shard(step(deep), mesh=mesh, in_strategy=(None, (1, 8, 1, 1)), level=2).plan(*args)
    again = jshard.shard(step(deep), mesh=mesh, plan=plan).plan(*args, verify=True)
    assert again.verification is not None and again.verification.ok
    assert [(c.kind, c.bytes) for c in again.collectives] == [(c.kind, c.bytes) for c in plan.collectives]


def strided(w: Any, x: Any) -> Any:
    x = lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = x + lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME")
    return (lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2).sum()


def test_edges_that_are_exchanged_again_are_sent_again() -> None:
    """XLA for CPU removes barriers before it merges equal permutes; the plan at level 1 counts each of them."""
    rng = np.random.default_rng(0)
    args = rng.normal(size=(3, 4, 4)), rng.normal(size=(2, 101, 4))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jshard.shard(step(strided), mesh=mesh, level=1, config={"pad": True})
    plan = f.plan(*args)
    assert sum(c.kind == "permute" for c in plan.collectives) > 2
    assert plan.verify(f.lower(*args).compile()).ok
    for mine, plain in zip(
        jax.tree.leaves(f(*args)), jax.tree.leaves(jax.jit(step(strided))(*args)), strict=True
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-3, atol=1e-3)
