"""Float64 in every test of this folder: sums over microbatches are compared with the plain step's to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
