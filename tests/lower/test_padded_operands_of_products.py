"""A padded operand that products alone read cut is sliced once, of the padded whole, which their kernels on TPUs fuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


WORDS, PADDED, WIDTH, ROWS = 1009, 1016, 64, 2048


def head(table, x):
    """Two products read the same blocks of the table."""
    logits = x @ table.T
    return jnp.tanh(logits) @ table, logits


def update(table, x):
    """Products read blocks of rows of the table, an update its columns."""
    logits = x @ table.T
    gradient = jnp.tanh(logits).T @ x
    return table - 0.1 * gradient, logits


def sliced(fn, hardware):
    """Shapes of the arrays that are sliced; the results are those of the plain function."""
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=s), "float32") for s in ((WORDS, WIDTH), (ROWS, WIDTH)))
    f = jshard.shard(
        fn, (None, (1, 1)), (None, (1, 8)), mesh=jax.make_mesh((8,), ("x",)), level=2, hardware=hardware,
        config={"pad": True},
    )  # fmt: skip
    assert f.plan(*args).padding
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
    lines = [line for line in f.lower(*args).as_text().splitlines() if "stablehlo.dynamic_slice" in line]
    return {line.partition(": (tensor<")[2].partition(">")[0] for line in lines}


@pytest.mark.parametrize("fn", [head, update])
def test_products_on_tpus_read_slices_of_the_padded_whole(fn):
    assert f"{PADDED}x{WIDTH}xf32" in sliced(fn, "v5e")


@pytest.mark.parametrize("fn", [head, update])
def test_other_compilers_slice_the_operand_itself(fn):
    found = sliced(fn, "h100")
    assert f"{WORDS}x{WIDTH}xf32" in found
    assert f"{PADDED}x{WIDTH}xf32" not in found
