"""Small random programs: the search's answer against every possible answer, at all three levels.

The whole table of costs is written out, one array axis for each variable of the network, so nothing of the
search or of its `evaluate` is used to judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from jshard._core.topology import from_mesh
from jshard._memory.liveness import liveness
from jshard._network.build import PlanningNetwork, build_network
from jshard._program.trace import build
from jshard._schedule.peak import peak_bytes
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import CostNetwork


def every_cost(net: CostNetwork) -> np.ndarray:
    """Cost of every assignment: one axis for each variable."""
    sizes = [net.num_states(v) for v in range(net.size)]
    total = np.zeros(sizes)
    for v in range(net.size):
        total += _along(net.unary[net.node_table[v]], (v,), net.size)
    for (i, j), k in zip(net.edges, net.edge_table, strict=True):
        total += _along(net.pairwise[k], (int(i), int(j)), net.size)
    return total


def every_peak(built: PlanningNetwork, cost: np.ndarray, most: int = 4000) -> np.ndarray:
    """True peak of every assignment that is possible, counted over its schedule; inf elsewhere."""
    possible = np.argwhere(np.isfinite(cost))
    assert len(possible) <= most
    life = liveness(built.program, built.donated)
    out = np.full(cost.shape, np.inf)
    for a in possible:
        out[tuple(a)] = peak_bytes(schedule(assignment_of(built, tuple(a.tolist()))), life, built.donated)
    return out


def _along(table: np.ndarray, axes: tuple[int, ...], n: int) -> np.ndarray:
    if axes[0] > axes[-1]:
        table, axes = table.T, axes[::-1]
    shape = [1] * n
    for a, s in zip(axes, table.shape, strict=True):
        shape[a] = s
    return np.asarray(table).reshape(shape)


def random_program(seed: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Two to six operators on two arrays; the last value and sometimes one more are the results."""
    rng = np.random.default_rng(seed)
    n, m = (int(s) for s in rng.choice([4, 6, 8], 2))
    picks = rng.integers(0, 7, int(rng.integers(2, 6)))
    second = bool(rng.random() < 0.3)

    def fn(x: Any, w: Any) -> Any:
        values = [x]
        for p in picks:
            v = values[-1]
            if p == 0:
                v = v @ w if v.shape[-1] == w.shape[0] else v @ w.T
            elif p == 1:
                v = jnp.tanh(v)
            elif p == 2:
                v = v + values[int(p) % len(values)] if v.shape == values[int(p) % len(values)].shape else -v
            elif p == 3:
                v = v.T @ v
                v = v if v.shape[0] == w.shape[0] else v @ w.T
            elif p == 4:
                v = v * v.sum(0)
            elif p == 5:
                v = v - v.max()
            else:
                v = jnp.flip(v, 0)
            values.append(v)
        return (values[-1], values[1]) if second else values[-1]

    return fn, [jax.ShapeDtypeStruct((n, m), "float32"), jax.ShapeDtypeStruct((m, m), "float32")]


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


SEEDS = range(400)  # of which 200 are small enough to write out


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
        seen += 1
    assert seen >= 200


def test_no_plan_has_a_peak_below_the_bound_and_few_have_one_below_the_answer():
    seen = exact = cheap = 0
    for seed in SEEDS[:160]:
        found = written_out(seed, 1)
        if found is None:
            continue
        plan, built = found
        costs = every_cost(built.cost_network)
        if np.isfinite(costs).sum() > 1000:
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
    assert seen >= 40, seen
    assert exact >= 0.9 * seen and cheap >= 0.9 * seen, (seen, exact, cheap)


def test_the_plan_adds_up_to_what_the_network_says():
    for seed in SEEDS:
        found = written_out(seed, 0)
        if found is not None:
            cost = found[0].cost
            assert cost.communication + cost.redundant + cost.price == pytest.approx(
                cost.objective, rel=1e-9, abs=1e-18
            ), seed
