"""A hundred random argument structures; `benchmarks/correctness/calls.py` runs ten thousand."""

from __future__ import annotations

import pytest

from tests.laws.call_structures import check


@pytest.mark.parametrize("block", range(10))
def test_structures(block):
    outcomes = [check(seed) for seed in range(10 * block, 10 * block + 10)]
    assert all(o in ("equal", "refused alike") or o.startswith("refused: ") for o in outcomes), outcomes
    assert outcomes.count("equal") > 5
