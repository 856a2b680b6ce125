"""Shifts written as slices, paddings and concatenations: the rewritten program gives the same values, also of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._program.inlining import with_calls_inlined
from jshard._program.shift_patterns import with_shifts


def _recurrence(a: Any, b: Any) -> Any:
    return a[0] * b[0], b[0] * a[1] + b[1]


def _running(x: Any, **options: Any) -> Any:
    return lax.associative_scan(_recurrence, (jax.nn.sigmoid(x), x), axis=1, **options)[1]


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "roll": (lambda x: jnp.roll(x, 1, 1), {"roll": 1}),
    "roll back": (lambda x: jnp.roll(x, -3, 1), {"roll": 1}),
    "halves": (lambda x: jnp.concatenate([x[:, 8:], x[:, :8]], 1), {"roll": 1}),
    "token shift": (lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))), {"pad": 1}),
    "ahead": (lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)), constant_values=3.0), {"pad": 1}),
    "ends": (lambda x: jnp.pad(x[:, 2:-1], ((0, 0), (1, 2), (0, 0)), constant_values=3.0), {"select_n": 2}),
    "zeros before": (lambda x: jnp.concatenate([jnp.zeros((2, 1, 3)), x[:, :-1]], 1), {"pad": 1}),
    "state before": (lambda x: jnp.concatenate([x[:, :1] * 2, x], 1)[:, :-1], {"pad": 2, "select_n": 1}),
    "wrapped": (lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="wrap")[:, 1:17], {"roll": 1}),
    "causal window": (
        lambda x: sum(
            jnp.pad(x, ((0, 0), (3, 0), (0, 0)))[:, k : k + 16] * (k + 1) for k in range(4)
        ),
        {"pad": 3},
    ),
    "difference": (lambda x: jnp.diff(x, axis=1, prepend=0.0), {"pad": 2, "select_n": 1}),
    "three parts": (lambda x: jnp.concatenate([x[:, :2], x[:, 4:], x[:, 2:4]], 1), {"pad": 2}),
    "one position": (lambda x: jnp.pad(x[:, :1], ((0, 0), (0, 15), (0, 0))), {"select_n": 1}),
    "prefix": (_running, {}),
    "suffix": (lambda x: _running(x, reverse=True), {}),
    "odd prefix": (lambda x: _running(x[:, :13]), {}),
    "in a loop": (lambda x: lax.scan(lambda c, w: (jnp.roll(c, 1, 1) * w, None), x, jnp.arange(3.0) + 1)[0], {}),
    "targets": (lambda x: (x[:, :-1] * jnp.sin(x[:, 1:])).sum(), {}),
    "integers": (lambda x: jnp.roll((x * 9).astype(jnp.int32), 5, 1) * x, {"roll": 1}),
    "signs": (lambda x: jnp.where(jnp.pad(x[:, 1:] > 0, ((0, 0), (0, 1), (0, 0))), x, 0.0), {"pad": 1}),
}  # fmt: skip


def _count(jaxpr: Any) -> Counter[str]:
    return Counter(e.primitive.name for e in with_calls_inlined(jaxpr).eqns)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_stay_and_shifts_are_found(name: str) -> None:
    f, found = PROGRAMS[name]
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.RandomState(0).randn(2, 16, 3))

        def loss(x: Any) -> Any:
            return sum(
                jnp.sum(jnp.cos(y) * jnp.arange(y.size).reshape(y.shape)) for y in jax.tree.leaves(f(x))
            )

        for g in (f, jax.grad(loss)):
            closed = jax.make_jaxpr(g)(x)
            opened, consts = compat.open_jaxpr(closed)
            new = with_shifts(opened)
            shifted = jax.jit(lambda x, new=new, consts=consts: jax.core.eval_jaxpr(new, consts, x))
            for got, want in zip(shifted(x), jax.tree.leaves(jax.jit(g)(x)), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)
            if g is f:
                count = _count(new)
                assert {k: count[k] for k in found} == found
                assert "concatenate" not in count or not found


def test_other_concatenations_and_paddings_stay_as_they_are() -> None:
    """Rotated halves, a class token, a padding for a convolution, a cache: nothing of them is a shift."""
    x = jnp.ones((2, 16, 8))

    def f(x: Any) -> Any:
        half = jnp.concatenate([-x[..., 4:], x[..., :4]], -1)
        token = jnp.concatenate([jnp.ones((2, 1, 8)), x], 1)
        return half, token, jnp.pad(x, ((0, 0), (1, 1), (0, 0))), jnp.concatenate([x, x], 2), x[:, ::2]

    opened, _ = compat.open_jaxpr(jax.make_jaxpr(f)(x))
    assert with_shifts(opened) is opened
