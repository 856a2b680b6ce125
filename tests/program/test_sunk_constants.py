"""Constants of loops made again in their bodies: values and gradients equal, only what is cheap and much larger sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jshard
from jshard._core import jaxcompat as compat
from jshard._plan.recomputation import is_cheap
from jshard._program.sunk_constants import with_constants_sunk


LENGTH, LAYERS = 21, 3


def attention(x: Any, w: Any, mask: Any, fill: Any) -> Any:
    scores = jnp.einsum("btd,bsd->bts", x @ w, x)
    return x + jax.nn.softmax(jnp.where(mask, scores, fill)) @ x


def masked(ws: Any, x: Any) -> Any:
    shape = (x.shape[0], x.shape[1], x.shape[1])
    mask = jnp.broadcast_to(jnp.tril(jnp.ones(shape[1:], bool)), shape)
    fill = jnp.full(shape, -1e30, x.dtype)
    return lax.scan(lambda x, w: (attention(x, w, mask, fill), None), x, ws)[0].sum()


def nested(ws: Any, x: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        y = (
            masked(w[None], x)
            + lax.scan(lambda c, _: (attention(c, w, True, 0.0), None), x, None, length=2)[0]
        )
        return jnp.tanh(y), None

    bias = jnp.cos(jnp.arange(x.shape[1] * x.shape[2], dtype=x.dtype)).reshape(x.shape[1:])
    return lax.scan(lambda x, w: (step(x, w)[0] + bias, bias.sum()), x, ws)[0].sum()


def random_fill(ws: Any, x: Any) -> Any:
    fill = jax.random.normal(jax.random.key(1), (x.shape[0], x.shape[1], x.shape[1]))
    return lax.scan(lambda x, w: (attention(x, w, True, 0.0) + fill @ x, None), x, ws)[0].sum()


def shapes(dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    w = (rng.normal(size=(LAYERS, 8, 8)) / 4).astype(dtype)
    return w, rng.normal(size=(7, LENGTH, 8)).astype(dtype)


def largest_constant(jaxpr: Any) -> int:
    """The most elements of a constant of any scan, in any body."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            sizes += [v.aval.size for v in eqn.invars[: compat.scan_split(eqn.params)[0]]]
            sizes.append(largest_constant(compat.open_jaxpr(eqn.params["jaxpr"])[0]))
    return max(sizes)


@pytest.mark.parametrize("fn, dtype", [(masked, "bfloat16"), (nested, "float32")])
def test_values_and_gradients_are_equal_and_no_large_constant_is_left(
    fn: Callable[..., Any], dtype: str
) -> None:
    args = shapes(dtype)
    closed = jax.make_jaxpr(jax.value_and_grad(fn, (0, 1)))(*args)
    sunk = with_constants_sunk(closed.jaxpr, is_cheap)
    assert largest_constant(closed.jaxpr) >= 7 * LENGTH**2 > 8 * largest_constant(sunk)
    got = jax.jit(compat.as_function(closed.replace(jaxpr=sunk)))(*args)
    want = jax.tree.leaves(jax.jit(jax.value_and_grad(fn, (0, 1)))(*args))
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, "float32"),
            np.asarray(b, "float32"),
            rtol=1e-5 if dtype == "float32" else 4e-2,
            atol=1e-2,
        )


def test_random_bits_and_products_stay_where_they_are() -> None:
    closed = jax.make_jaxpr(random_fill)(*shapes())
    assert with_constants_sunk(closed.jaxpr, is_cheap) is closed.jaxpr
    closed = jax.make_jaxpr(lambda w, x: lax.scan(lambda c, _: (c + w @ w, None), x, None, length=3)[0])(
        np.zeros((8, 8)), np.zeros((8, 8))
    )
    assert with_constants_sunk(closed.jaxpr, is_cheap) is closed.jaxpr


def test_a_budget_that_only_sunk_constants_meet() -> None:
    def step(ws: Any, x: Any) -> Any:
        fill = jnp.full((50, *x.shape), -1e30, x.dtype)
        return lax.scan(lambda c, w: (jnp.where(c * w > 0, c, fill).max(0) + c, None), x, ws)[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w, x = np.ones(LAYERS, "float32"), np.random.default_rng(2).normal(size=(64, 17)).astype("float32")
    options: Any = dict(mesh=mesh, hardware="v5e", memory_budget=6 * x.nbytes)
    with pytest.raises(jshard.ShardError, match="no plan fits"):
        jshard.shard(step, **options).plan(w, x)
    f = jshard.shard(step, remat="auto", **options)
    plan = f.plan(w, x)
    assert plan.cost.peak_bytes <= plan.memory_budget and plan.kept is not None
    np.testing.assert_allclose(f(w, x), step(w, x), rtol=1e-6)
