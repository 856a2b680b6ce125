"""`remat="auto"` against the enumeration of everything: what is computed again, and every layout of each such program.

Programs are small and run forth and back, as a training step does: values of the first half are read in reverse order by
the second. Each subset of the values between the halves is written out as a program of its own, and of that the cost and
the peak of every assignment: the answer is compared with the least of them all, as `benchmarks/correctness/recompute.py`
does for more programs. Larger programs, whose layouts are too many to write out, are compared with what is found for
each of their choices alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from jshard._core import hardware, jaxcompat as compat
from jshard._core.topology import Topology, from_mesh
from jshard._network.build import build_network
from jshard._plan.recomputation import recompute_weight
from jshard._plan.schedule_cost import schedule_cost
from jshard._program.recompute import recomputing
from jshard._program.residuals import find_sites
from jshard._program.trace import build
from jshard._schedule.schedule import assignment_of, schedule
from tests.laws.enumeration import every_cost, every_peak


CHIP = hardware.get("v5e")
Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def mesh() -> Any:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def there_and_back(seed: int) -> Program:
    """Up to three values, each read once more by the second half in reverse order."""
    rng = np.random.default_rng(seed)
    n, m = int(rng.choice([64, 96, 128])), int(rng.choice([15, 21, 33]))  # only rows can be cut
    forth = rng.permutation([0, 0, 2, 1, 3])[: int(rng.integers(2, 4))]
    back = rng.integers(0, 3, len(forth))

    def fn(x: Any, w: Any) -> Any:
        values, v = [], x
        for p in forth:
            v = (v @ w, jnp.tanh(v), v * v.sum(0), jnp.flip(v, 0))[p]
            values.append(v)
        u = jnp.cumsum(v, 0)
        for p, v in zip(back, reversed(values), strict=True):
            u = (u * v, u + v, u - jnp.sin(v))[p]
        return u @ w

    return fn, (jax.ShapeDtypeStruct((n, m), "float32"), jax.ShapeDtypeStruct((m, m), "float32"))


def every_program(closed: Any) -> list[Any]:
    """The jaxprs in which each subset of the values read late is kept, the one as it was traced first."""
    region = find_sites(closed)
    needed = [(k, v) for k, site in enumerate(region.all_sites) for v in site.needed]
    out = [closed]
    for size in range(len(needed)):
        for chosen in itertools.combinations(needed, size):
            kept = {k: frozenset(v for s, v in chosen if s == k) for k in range(len(region.all_sites))}
            out.append(recomputing(closed, region, kept, recompute_weight))
    return out


def least_costs(
    closed: Any, topology: Topology, level: int, most: int = 4000
) -> list[tuple[float, float]] | None:
    """(cost, peak) of every assignment of every program; None where one has more than `most`."""
    out = []
    for number, jaxpr in enumerate(every_program(closed)):
        program = build(jaxpr, name="fn", input_names=["x", "w"])
        program = dataclasses.replace(program, has_recomputed=number > 0)
        built = build_network(program, topology, {}, level=level, second_copies=False)
        net = built.cost_network
        if net.size > 26 or np.prod([float(net.num_states(v)) for v in range(net.size)]) > 1e6:
            return None
        costs = every_cost(net)
        if np.isfinite(costs).sum() > most:
            return None
        peaks = every_peak(built, costs)
        for a in np.argwhere(np.isfinite(peaks)):
            made = schedule(assignment_of(built, tuple(a.tolist())))
            out.append((schedule_cost(made, built).objective(level), float(peaks[tuple(a)])))
    return out


@pytest.mark.parametrize("level, seed", [(0, 94), (2, 72)])
def test_the_plan_is_the_least_of_every_choice_with_every_layout(level: int, seed: int) -> None:
    fn, shapes = there_and_back(seed)
    every = least_costs(jax.jit(fn).trace(*shapes).jaxpr, from_mesh(mesh(), CHIP), level)
    assert every is not None
    options: Any = dict(mesh=mesh(), level=level, hardware=CHIP)
    free = jshard.shard(fn, memory_budget="1TB", **options).plan(*shapes).cost.peak_bytes
    lowest = min(peak for _, peak in every)
    assert lowest < free
    for share in (0.0, 0.5, 0.9):
        limit = int(lowest + share * (free - lowest)) + 1
        least = min(cost for cost, peak in every if peak <= limit)
        plan = jshard.shard(fn, remat="auto", memory_budget=limit, **options).plan(*shapes)
        assert plan.cost.objective == pytest.approx(least, rel=1e-9)
        assert plan.cost.bound <= least * (1 + 1e-9) and plan.cost.peak_bytes <= limit


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_the_answer_is_the_best_of_all_choices_planned_one_by_one(seed: int) -> None:
    fn, shapes = there_and_back(seed)
    options: Any = dict(mesh=mesh(), level=2, hardware=CHIP)
    free = jshard.shard(fn, memory_budget="1TB", **options).plan(*shapes).cost.peak_bytes
    least, limit = np.inf, int(0.97 * free)
    for jaxpr in every_program(jax.jit(fn).trace(*shapes).jaxpr):
        run = compat.as_function(jaxpr)
        try:
            one = jshard.shard(lambda x, w, run=run: run(x, w), memory_budget=limit, **options)
            least = min(least, one.plan(*shapes).cost.objective)
        except jshard.ShardError:
            continue
    if not np.isfinite(least):
        with pytest.raises(jshard.ShardError, match="no plan fits"):
            jshard.shard(fn, memory_budget=limit, remat="auto", **options).plan(*shapes)
        return
    plan = jshard.shard(fn, memory_budget=limit, remat="auto", **options).plan(*shapes)
    assert plan.cost.objective == pytest.approx(least, rel=1e-9)
