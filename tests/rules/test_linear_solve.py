"""Separate systems of `custom_linear_solve`, cut over devices: `jnp.linalg.solve`, `inv`, and solvers of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


R = np.random.default_rng(20)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def matrices(*shape: int) -> np.ndarray:
    return R.normal(size=shape) + 4 * np.eye(shape[-1])


def mesh() -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2)


def running_sums(a: Any, b: Any) -> Any:
    """A solver whose columns depend on each other: differences along a row."""
    return lax.custom_linear_solve(
        lambda v: jnp.diff(v, prepend=0.0, axis=1) * a,
        b,
        lambda _, v: jnp.cumsum(v / a, 1),
        lambda _, v: jnp.flip(jnp.cumsum(jnp.flip(v, 1), 1), 1) / a,
    )


def scaled(a: Any, b: Any) -> Any:
    return lax.custom_linear_solve(lambda v: a * v, b, lambda _, v: v / a, symmetric=True)


def iterative(a: Any, b: Any) -> Any:
    return jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ (a.T @ v) + v, b, maxiter=9)[0])(
        a, b
    )


# (function, arguments, cuts of the arguments, cut of the solver's result)
CUT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]] = {
    "batch": (jnp.linalg.solve, (matrices(8, 4, 4), R.normal(size=(8, 4, 3))), ((8, 1, 1), (8, 1, 1)), (8, 1, 1)),
    "columns": (jnp.linalg.solve, (matrices(4, 4), R.normal(size=(4, 8))), ((1, 1), (1, 8)), (8, 1)),
    "both": (jnp.linalg.solve, (matrices(8, 4, 4), R.normal(size=(8, 4, 6))), ((4, 1, 1), (4, 1, 2)), (4, 2, 1)),
    "inverse": (jnp.linalg.inv, (matrices(8, 3, 3),), ((8, 1, 1),), (8, 1, 1)),
    "elements": (scaled, (R.random(8) + 1, R.normal(size=8)), ((8,), (8,)), (8,)),
    "rows only": (running_sums, (R.random((8, 1)) + 1, R.normal(size=(8, 8))), ((8, 1), (8, 1)), (8, 1)),
}  # fmt: skip


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (f(*args) ** 2).sum()


@pytest.mark.parametrize("name", CUT)
def test_each_device_solves_its_own_systems(name: str) -> None:
    f, args, cuts, result = CUT[name]
    step = jshard.shard(f, cuts, mesh=mesh())
    plan = step.plan(*args, verify=True)
    (row,) = [r for r in plan.operators if r.primitive == "custom_linear_solve"]
    assert row.strategy[-1] == result
    assert plan.verification is not None and plan.verification.ok and plan.verification.predicted == 0
    np.testing.assert_allclose(step(*args), f(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["both", "rows only"])
def test_derivatives_of_separate_systems(name: str) -> None:
    f, args, cuts, _ = CUT[name]
    numbers = tuple(range(len(args)))
    want = jax.grad(loss(f), numbers)(*args)
    for found in (
        jshard.shard(jax.grad(loss(f), numbers), cuts, mesh=mesh())(*args),
        jax.grad(loss(jshard.shard(f, cuts, mesh=mesh())), numbers)(*args),
    ):
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


def test_systems_that_depend_on_each_other_stay_whole() -> None:
    args = R.random((8, 1)) + 1, R.normal(size=(8, 8))
    step = jshard.shard(running_sums, (None, (1, 8)), mesh=mesh())
    (row,) = [r for r in step.plan(*args).operators if r.primitive == "custom_linear_solve"]
    assert row.strategy[-1][1] == 1
    np.testing.assert_allclose(step(*args), running_sums(*args), rtol=1e-12)


def test_an_iterative_solver_keeps_its_systems_together() -> None:
    args, cuts = (matrices(8, 3, 3), R.normal(size=(8, 3))), ((8, 1, 1), (8, 1))
    step = jshard.shard(iterative, cuts, mesh=mesh())
    (row,) = [r for r in step.plan(*args).operators if r.primitive == "custom_linear_solve"]
    assert row.strategy[-1] == (1, 1) and row.note
    (value, found), (wanted, want) = (jax.value_and_grad(loss(f), (0, 1))(*args) for f in (step, iterative))
    assert float(value) == pytest.approx(float(wanted), rel=1e-12)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("shapes", "cuts"),
    [(((13, 3, 3), (13, 3, 2)), ((8, 1, 1), None)), (((3, 3), (3, 13)), (None, (1, 8)))],
    ids=["batch", "columns"],
)
def test_systems_that_the_devices_do_not_divide_are_padded(shapes: Any, cuts: Any) -> None:
    args = matrices(*shapes[0]), R.normal(size=shapes[1])
    value = jax.value_and_grad(loss(jnp.linalg.solve), (0, 1))
    step = jshard.shard(value, cuts, mesh=mesh(), config={"pad": True})
    plan = step.plan(*args, verify=True)
    assert (13, 0, 16) in plan.padding
    assert plan.verification is not None and plan.verification.ok
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(value(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
