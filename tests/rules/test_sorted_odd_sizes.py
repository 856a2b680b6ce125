"""Sorts, searches and what is made of them at sizes that do not divide: values, gradients, and bytes as planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard


def weights(x: Any) -> Any:
    return jnp.arange(x.shape[0]) ** 2 % 7


PROGRAMS: dict[str, Any] = {
    "lexsort": jax.value_and_grad(lambda a, b: (a[jnp.lexsort((a, b))] * weights(a)).sum(), (0, 1)),
    "argsort": lambda a, b: (jnp.argsort(a), jnp.argsort(b, descending=True)),
    "unique": lambda a, b: jnp.unique(a, size=6, fill_value=-1),
    "unique and where": lambda a, b: jnp.unique(
        b, size=b.shape[0], return_index=True, return_inverse=True, return_counts=True
    ),
    "searchsorted": jax.value_and_grad(
        lambda a, b: (b * jnp.searchsorted(jnp.sort(a), b, method="sort")).sum(), (0, 1)
    ),
    "top_k": jax.value_and_grad(lambda a, b: (lax.top_k(a * b, 4)[0] * jnp.arange(4)).sum(), (0, 1)),
    "argmax": jax.value_and_grad(lambda a, b: a[jnp.argmax(b)] ** 2 + b.max() ** 2, (0, 1)),
    "sort of three": lambda a, b: lax.sort((b, a, jnp.arange(a.shape[0])), num_keys=2),
    "sort": jax.value_and_grad(lambda a, b: (jnp.sort(a * b) * weights(a)).sum(), (0, 1)),
}

# The first five each had a gather that the compiler left out: of zeros, of positions, or of what was one array.
CASES = [
    ("lexsort", 331, 8, 1, True), ("unique", 7, 4, 1, True), ("unique", 50, 2, 1, False),
    ("searchsorted", 50, 4, 1, False), ("unique and where", 13, 4, 1, True), ("argsort", 331, 8, 1, True),
    ("searchsorted", 331, 8, 1, True), ("top_k", 331, 8, 1, True), ("argmax", 13, 4, 2, True),
    ("sort of three", 50, 8, 1, True), ("sort", 331, 4, 1, True), ("lexsort", 13, 2, 0, True),
]  # fmt: skip


@pytest.mark.parametrize("name, size, devices, level, pads", CASES, ids=str)
def test_values_and_bytes_as_planned(name: str, size: int, devices: int, level: int, pads: bool) -> None:
    rng = np.random.default_rng(size)
    mesh = jax.make_mesh(
        (devices,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    with jax.enable_x64(True):
        a = jnp.asarray(rng.permutation(size) // 2 * 0.5 - size / 5)
        b = jnp.asarray(rng.integers(0, max(3, size // 4), size).astype(float))
        f = jshard.shard(PROGRAMS[name], mesh=mesh, level=level, config={"pad": True} if pads else None)
        compiled = f.lower(a, b).compile()
        verified = f.plan(a, b).verify(compiled)
        assert verified.ok, str(verified)
        found, plain = (jax.tree.leaves(run(a, b)) for run in (compiled, jax.jit(PROGRAMS[name])))
        for got, want in zip(found, plain, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
