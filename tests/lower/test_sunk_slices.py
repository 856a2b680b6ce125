"""Slices of values that readers compute are computed of slices: compiled programs hold no whole copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


ROWS, WORDS = 512, 256


def smoothed(labels):
    return 0.9 * jax.nn.one_hot(labels, WORDS) + 0.1 / WORDS


def by_rows_and_columns(labels, logits, w):
    soft = smoothed(labels)
    return (soft * logits).sum(-1), soft.T @ w


def in_a_scan(labels, logits, w):
    def body(total, x):
        rows, columns = by_rows_and_columns(labels + x, logits, w)
        return (total[0] + rows, total[1] + columns), rows.sum()

    start = jnp.zeros(ROWS), jnp.zeros((WORDS, w.shape[1]))
    return jax.lax.scan(body, start, jnp.arange(3))


def of_an_argument(labels, logits, w):
    """What is sliced is computed of an array in memory, which is sliced itself."""
    soft = jnp.tanh(logits) + smoothed(labels)
    return (soft * 2).sum(-1), soft.T @ w


@pytest.mark.parametrize("fn", [by_rows_and_columns, in_a_scan, of_an_argument])
def test_readers_of_different_parts_compute_those_alone(fn):
    rng = np.random.default_rng(0)
    args = rng.integers(0, WORDS, ROWS), rng.normal(size=(ROWS, WORDS)), rng.normal(size=(ROWS, 64))
    args = tuple(jnp.asarray(a, "int32" if a.ndim == 1 else "float32") for a in args)
    f = jshard.shard(
        fn,
        (None, (8, None) if fn is not of_an_argument else None, None),
        mesh=jax.make_mesh((2, 4), ("x", "y")),
        level=2,
    )
    whole = f"[{ROWS},{WORDS}]"
    lines = f.lower(*args).compile().as_text().splitlines()
    if fn is not of_an_argument:
        assert not [line for line in lines if whole in line]
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
