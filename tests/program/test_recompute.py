"""Programs that compute values again: results and gradients equal, whatever is kept; effects run once; sites found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._plan.recomputation import recompute_weight
from jshard._program.recompute import is_recomputed, recomputing
from jshard._program.residuals import find_sites, may_run_again


def layer(x: Any, w: Any) -> Any:
    y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x + jax.nn.silu(y @ w) @ w.T


def scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (layer(x, w), x.sum()), x, ws)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (jnp.clip(g * c, -0.5, 0.5),))


def unrolled_loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return (x**2).sum()


def scanned_loss(ws: Any, x: Any) -> Any:
    y, sums = scanned(ws, x)
    return (y**2).sum() + (sums**2).sum()


def two_scans_loss(ws: Any, x: Any) -> Any:
    return (jnp.tanh(scanned(ws[::-1], scanned(ws * 0.5, x)[0])[0]) ** 2).sum()


def dropout_loss(ws: Any, x: Any) -> Any:
    def step(carry: Any, w: Any) -> Any:
        x, key = carry
        key, use = jax.random.split(key)
        y = layer(x, w)
        return (jnp.where(jax.random.bernoulli(use, 0.8, y.shape), y, 0.0), key), None

    return (lax.scan(step, (x, jax.random.key(3)), ws)[0][0] ** 2).sum()


def inner_loop_loss(ws: Any, x: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        return lax.scan(lambda y, _: (jnp.tanh(y @ w @ w.T), y), x, None, length=3)[0], None

    return (lax.scan(step, x, ws)[0] ** 2).sum()


def custom_rule_loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = clipped(layer(clipped(x), w))
    return (x**2).sum()


def branches_loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = lax.cond(x.sum() > 0, lambda x, w: layer(x, w), lambda x, w: jnp.sin(x @ w) @ w.T, x, w)
    return (x**2).sum()


def checkpointed_loss(ws: Any, x: Any) -> Any:
    return (lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)[0] ** 2).sum()


LOSSES = {
    f.__name__.removesuffix("_loss"): f
    for f in (unrolled_loss, scanned_loss, two_scans_loss, dropout_loss, inner_loop_loss, custom_rule_loss,
              branches_loss, checkpointed_loss)
}  # fmt: skip


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return ws - 0.1 * grads, value

    return step


def microbatched(ws: Any, x: Any) -> Any:
    """Gradients of two halves of the batch, added up in a loop."""

    def half(total: Any, x: Any) -> Any:
        return total + jax.grad(scanned_loss)(ws, x), None

    return lax.scan(half, jnp.zeros_like(ws), x.reshape(2, 2, 6))[0]


STEPS = {name: step_of(loss) for name, loss in LOSSES.items()} | {"microbatches": microbatched}


@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients_are_equal_whatever_is_kept(name: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(list(STEPS).index(name))
        ws, x = jnp.asarray(rng.normal(size=(3, 6, 10)) / 3), jnp.asarray(rng.normal(size=(4, 6)))
        step = STEPS[name]
        closed = jax.make_jaxpr(step)(ws, x)
        region = find_sites(closed)
        assert region.all_sites
        want = jax.tree.leaves(jax.jit(step)(ws, x))
        again = 0
        for share in (0.0, 0.4):
            kept = {
                k: frozenset(v for e in site.eqns for v in e.outvars if rng.random() < share)
                for k, site in enumerate(region.all_sites)
            }
            new = recomputing(closed, region, kept, recompute_weight)
            got = jax.jit(compat.as_function(new))(ws, x)
            for a, b in zip(want, got, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
            again += any(is_recomputed("", e) for e in every_equation(new))
        assert again


def every_equation(jaxpr: Any) -> list[Any]:
    opened, _ = compat.open_jaxpr(jaxpr)
    inner = [v for e in opened.eqns for p in e.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [*opened.eqns, *itertools.chain(*(every_equation(j) for j in inner if compat.is_jaxpr(j)))]


def test_all_kept_is_the_program_as_traced() -> None:
    closed = jax.make_jaxpr(step_of(unrolled_loss))(jnp.ones((3, 6, 10)), jnp.ones((4, 6)))
    region = find_sites(closed)
    kept = {k: frozenset(site.needed) for k, site in enumerate(region.all_sites)}
    new = recomputing(closed, region, kept, recompute_weight)
    assert not any(is_recomputed("", e) for e in every_equation(new))


def test_a_residual_that_is_dropped_leaves_the_first_scan() -> None:
    closed = jax.make_jaxpr(jax.grad(scanned_loss))(jnp.ones((3, 6, 10)), jnp.ones((4, 6)))
    region = find_sites(closed)
    (number,) = [k for k, site in enumerate(region.all_sites) if site.kind == "scan"]

    def stacked(jaxpr: Any) -> int:
        first, second = [e for e in compat.open_jaxpr(jaxpr)[0].eqns if e.primitive.name == "scan"]
        return len(second.invars)

    new = recomputing(closed, region, {number: frozenset()}, recompute_weight)
    assert stacked(new) < stacked(region.jaxpr)
    shapes = [v.aval.shape for e in compat.open_jaxpr(new)[0].eqns for v in e.outvars]
    assert (3, 4, 10) not in shapes and (3, 4, 6) in shapes  # the carry stays, no hidden value does


def test_callbacks_and_effects_are_never_run_again() -> None:
    closed = jax.make_jaxpr(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x))(1.0)
    assert [may_run_again(e) for e in closed.eqns] == [False]
    printing = jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(1.0)
    assert [may_run_again(e) for e in printing.eqns] == [False]
