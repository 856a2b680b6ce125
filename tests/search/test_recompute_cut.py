"""The cut that says what is kept and what is run again, where seconds are at the edge of what numbers hold."""

import numpy as np
import pytest

from jshard._search.exact.recompute_cut import RecomputeGraph, cheapest_choice


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("price", [0.1, 1e9])
def test_what_costs_nothing_to_run_again_is_run_again(price: float) -> None:
    """All equations take no time: only what cannot be run again is kept, whatever a byte costs."""
    graph = RecomputeGraph(
        bytes=np.array([8.0, 4.0]),
        keep_seconds=np.zeros(2),
        seconds=np.array([0.0, np.inf]),
        maker=np.array([0, 1]),
        reads=np.array([[0, 1]]),
        needed=np.array([0, 1]),
    )
    choice = cheapest_choice([graph], price)
    assert choice.kept == (frozenset({1}),) and choice.bytes == 4.0 and choice.seconds == 0.0
