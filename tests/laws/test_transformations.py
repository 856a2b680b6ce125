"""A sharded function under JAX's transformations equals the unsharded one: a seeded pairing of `law_functions`.

Each function meets one to three transformations and each transformation several functions;
`benchmarks/correctness/laws.py` runs the whole product.
"""

from __future__ import annotations

import pytest

from tests.laws.law_functions import FUNCTIONS, TRANSFORMATIONS, check


def pairing(each: int, step: int) -> list[tuple[str, str]]:
    """Every function with `each` transformations, evenly spread."""
    names = list(TRANSFORMATIONS)
    return [(f, names[(i * step + j * 5) % len(names)]) for i, f in enumerate(FUNCTIONS) for j in range(each)]


PAIRS = [(f, t, "float64") for k, (f, t) in enumerate(pairing(2, 3)) if k % 4 != 3]
PAIRS += [(f, t, "float32") for f, t in pairing(1, 7)[::3]]


def test_thirty_functions_and_every_transformation():
    assert len(FUNCTIONS) == 30
    assert {t for _, t, _ in PAIRS} == set(TRANSFORMATIONS)


@pytest.mark.parametrize("function, transformation, dtype", PAIRS, ids=map(", ".join, PAIRS))
def test_equal_to_plain(function, transformation, dtype):
    assert check(function, transformation, dtype) in ("equal", "refused")
