"""The answer of the search against the enumeration of all assignments of small random programs, at all three levels.

The whole table of costs is written out, one array axis for each variable of the network, so nothing of the
search or of its `evaluate` is used.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from jshard._core.topology import from_mesh
from jshard._network.build import PlanningNetwork, build_network
from jshard._program.trace import build
from tests.laws.enumeration import every_cost, every_peak, random_program


def written_out(seed: int, level: int) -> tuple[jshard.Plan, PlanningNetwork] | None:
    """The plan of a random program and its network, when that is small enough to write out."""
    fn, shapes = random_program(seed)
    sizes = (4,) if seed % 3 else (2, 2)
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes),
                         devices=jax.devices()[:4])  # fmt: skip
    program = build(jax.jit(fn).trace(*shapes).jaxpr, name="fn", input_names=["x", "w"])
    built = build_network(program, from_mesh(mesh), {}, level=level)
    if (
        np.prod([float(built.cost_network.num_states(v)) for v in range(built.cost_network.size)]) > 2e6
        or built.cost_network.size > 30
    ):
        return None
    return jshard.shard(fn, mesh=mesh, level=level).plan(*shapes), built


SEEDS = range(200)  # of which 100 are small enough to write out


@pytest.mark.parametrize("level", [0, 2])
def test_no_assignment_costs_less(level):
    seen = 0
    for seed in SEEDS:
        found = written_out(seed, level)
        if found is None:
            continue
        plan, built = found
        least = every_cost(built.cost_network).min()
        assert plan.cost.objective == pytest.approx(least, rel=1e-9, abs=1e-18), seed
        assert plan.cost.bound <= least * (1 + 1e-9), seed
        if level == 0:
            parts = plan.cost.communication + plan.cost.redundant + plan.cost.price
            assert parts == pytest.approx(plan.cost.objective, rel=1e-9, abs=1e-18), seed
        seen += 1
    assert seen >= 100


def test_no_plan_has_a_peak_below_the_bound_and_few_have_one_below_the_answer():
    seen = exact = cheap = 0
    for seed in SEEDS[:60]:
        found = written_out(seed, 1)
        if found is None:
            continue
        plan, built = found
        costs = every_cost(built.cost_network)
        if np.isfinite(costs).sum() > 500:
            continue
        peaks = every_peak(built, costs)
        least = peaks.min()
        assert plan.cost.objective == plan.cost.peak_bytes
        assert plan.cost.bound <= least * (1 + 1e-9), seed
        # A partial sum that passes through a fused operator is the one size the network does not see.
        assert least <= plan.cost.peak_bytes <= 1.5 * least, seed
        cheapest = costs[peaks <= plan.cost.peak_bytes * (1 + 1e-12)].min()
        seen += 1
        exact += plan.cost.peak_bytes <= least
        cheap += plan.cost.communication + plan.cost.compute <= cheapest * (1 + 1e-9) + 1e-18
    assert seen >= 12, seen
    assert exact >= 0.9 * seen and cheap >= 0.9 * seen, (seen, exact, cheap)
