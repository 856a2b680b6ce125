"""Batches of matrices whose number does not divide: values and gradients of linear algebra, and no NaN in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard._core import jaxcompat as compat
from jshard._plan.padded_program import padded_program
from jshard._plan.padding_classes import PaddingClasses


def spd(a: jax.Array) -> jax.Array:
    return a @ a.mT + 4 * jnp.eye(a.shape[-1])


def solved(a: jax.Array) -> jax.Array:
    low = jnp.linalg.cholesky(spd(a))
    return lax.linalg.triangular_solve(low, a[..., :2], left_side=True, lower=True)


def tridiagonal(a: jax.Array) -> jax.Array:
    d = jnp.abs(a[..., 0]) + 4
    return lax.linalg.tridiagonal_solve(d * 0.1, d, d * 0.2, a[..., 1:])


ROUTINES: dict[str, Callable[[jax.Array], Any]] = {
    "cholesky and triangular_solve": solved,
    "eigh": lambda a: jnp.linalg.eigh(spd(a))[0] + jnp.abs(jnp.linalg.eigh(spd(a))[1]).sum(-1),
    "svd": lambda a: jnp.linalg.svd(a, full_matrices=False)[1],
    "qr": lambda a: jnp.linalg.qr(spd(a))[1],
    "lu": lambda a: lax.linalg.lu(spd(a))[0],
    "tridiagonal_solve": tridiagonal,
}

MATRICES = ("cholesky", "triangular_solve", "eigh", "svd", "qr", "geqrf", "lu", "tridiagonal_solve")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def step_of(name: str) -> Callable[[jax.Array], Any]:
    def loss(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(ROUTINES[name](a)))

    return lambda a: (ROUTINES[name](a), jax.grad(loss)(a))


def matrices(n: int) -> np.ndarray:
    return np.random.default_rng(20).standard_normal((n, 3, 3))


@pytest.mark.parametrize(("n", "devices"), [(7, 4), (13, 8)])
@pytest.mark.parametrize("name", ROUTINES)
def test_a_batch_that_does_not_divide_is_cut(name: str, n: int, devices: int) -> None:
    a, step = matrices(n), step_of(name)
    cuts = [(devices, *(1,) * (y.ndim - 1)) for y in jax.eval_shape(step, a)]
    f = jshard.shard(
        step, mesh=f"auto:{devices}", level=0, config={"pad": True}, in_strategy=cuts[1:], out_strategy=cuts
    )
    plan = f.plan(a, verify=True)
    assert plan.padding and plan.verification is not None and plan.verification.ok
    rows = [r for r in plan.operators if r.primitive in MATRICES]
    assert rows and all(r.results[0].dims[0] for r in rows), [str(r.results[0]) for r in rows]
    for got, want in zip(f(a), jax.jit(step)(a), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ROUTINES)
def test_no_nan_stands_in_the_padding(name: str) -> None:
    a = matrices(5)
    closed = jax.make_jaxpr(step_of(name))(a)
    classes = PaddingClasses(closed, frozenset([5]))
    padded = padded_program(closed, {(c.size, c.number): 8 for c in classes.all()}, classes)
    with jax.debug_nans(True):
        compat.as_function(padded)(a)


def test_a_solve_without_a_diagonal_in_the_padding_would_be_nan() -> None:
    zeros = jnp.zeros((2, 2))
    assert np.isnan(jnp.linalg.cholesky(zeros)).any()
    assert not np.isfinite(lax.linalg.triangular_solve(zeros, jnp.ones((2, 1)), left_side=True)).all()
