"""Memory networks against schedules: by how much a network counts more bytes than the schedules of some plans hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import jshard
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network
from jshard._plan import least_peak, scheduled_solution
from jshard._plan.live_range_splits import SplitSchedule, after_products
from jshard._program.graph import Program
from jshard._program.memory.live_intervals import LowerBoundIntervals
from jshard._program.memory.liveness import Liveness
from jshard._schedule.peak import peak_bytes, peak_profile
from jshard._schedule.schedule import Schedule, assignment_of, schedule
from jshard._search import CostNetwork, evaluate, peak, solve


MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


class _Built(Exception):
    """Ends planning where the network is there."""


def network_of(fn, args, mesh=MESH, **options) -> PlanningNetwork:
    """The problem that planning a function poses at level 1."""
    seen: list[PlanningNetwork] = []

    def noted(built: PlanningNetwork, **_: bool) -> CostNetwork:
        seen.append(built)
        raise _Built

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Built):
        patch.setattr(least_peak, "memory_network", noted)
        jshard.shard(fn, mesh=mesh, hardware="tpu-v5e", level=1, **options).plan(*args)
    return seen[0]


def random_plans(network: CostNetwork, count: int, seed: int = 7) -> list[np.ndarray]:
    """Assignments that are nobody's best: each is the cheapest under costs of its own."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        unary = tuple(t + rng.random(t.shape) * 1e-3 for t in network.unary)
        pairwise = tuple(t * rng.random() for t in network.pairwise)
        moved = dataclasses.replace(network, unary=unary, pairwise=pairwise)
        out.append(solve(moved, gap=1.0, seconds=20).assignment)
    return out


def with_smallest_copies(problem: PlanningNetwork, x: np.ndarray) -> np.ndarray:
    """The same plan with every tensor kept in the smallest layout that it has in it; an argument as it is given, and
    what lies in a loop's buffer as it is made.

    The schedule makes a copy once that several readers need, and keeps what it needs no more of nothing: of all
    assignments with the same readers this one is the one that the network may count no more for.
    """
    x, program, mesh = x.copy(), problem.program, problem.topology.mesh
    donated = {program.inputs[k] for k in problem.donated}
    live = LowerBoundIntervals(program, problem.liveness, problem.donated)
    for t, variable in problem.relay_variable.items():
        maker, k = program.defs()[t]
        made = problem.candidates[maker].results[k].layout(int(x[maker]))
        read = [problem.candidates[u].operands[i].layout(int(x[u])) for u, i in program.uses()[t]]
        relay = problem.relays[t].layouts
        there = [lay for lay in dict.fromkeys((made, relay[int(x[variable])], *read)) if lay in relay]
        there.sort(key=lambda lay: -lay.pieces(mesh))
        kept = program.operators[maker].kind != "eqn" and maker not in donated
        if kept or live.counted_elsewhere(t) or not problem.liveness.materialized[t]:
            there.sort(key=lambda lay: lay != made)
        for lay in there:
            y = x.copy()
            y[variable] = relay.index(lay)
            if np.isfinite(evaluate(problem.cost_network, y)):
                x = y
                break
    return x


def with_copies(base: CostNetwork, network: CostNetwork, x: np.ndarray) -> np.ndarray:
    """The assignment of the network with copy variables that stands for one of the network without."""
    out = [*x.tolist(), *[-1] * (network.size - base.size)]
    near: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (i, j), k in zip(network.edges.tolist(), network.edge_table.tolist(), strict=True):
        near.setdefault(i, []).append((j, network.pairwise[k]))
        near.setdefault(j, []).append((i, network.pairwise[k].T))
    for v in range(base.size, network.size):
        total = sum(table[:, out[u]] for u, table in near[v] if out[u] >= 0)
        assert np.isfinite(total).sum() == 1
        out[v] = int(np.argmin(total))
    return np.array(out)


def every_read(program: Program) -> frozenset[tuple[int, int]]:
    """(tensor, operator) of every read: with all of them no copy is kept for a later reader."""
    return frozenset((t, u) for t, uses in enumerate(program.uses()) for u, _ in uses)


def relative_excess(problem: PlanningNetwork, xs: list[np.ndarray]) -> Iterator[float]:
    """By how much the sure network counts more than the schedules of some plans, in parts of their peaks."""
    network = memory_network(problem, lower_bound=True)
    for x in xs:
        counted = peak(network, with_copies(problem.cost_network, network, with_smallest_copies(problem, x)))
        choice = assignment_of(problem, tuple(x.tolist()))
        for again in (frozenset(), every_read(problem.program)):
            made = schedule(dataclasses.replace(choice, regather=again))
            yield counted / peak_bytes(made, problem.liveness, problem.donated) - 1


def with_every_live_range_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is kept for a later reader; without loops each is made after the product before, whatever the memory."""

    def split(made: Schedule, life: Liveness, donated: tuple[int, ...], _: float) -> SplitSchedule:
        pairs = every_read(made.assignment.program)
        all_again = schedule(dataclasses.replace(made.assignment, regather=pairs))
        arrays = all_again.arrays
        if arrays is None:
            profile = peak_profile(all_again, life, donated)
            return SplitSchedule(all_again, dataclasses.replace(profile, peak=0.0))
        stored = dataclasses.replace(life, materialized=(True,) * len(life.materialized))
        after = after_products(arrays, stored, np.flatnonzero(arrays.regathered))
        again = schedule(dataclasses.replace(arrays.assignment, regather_after=after))
        return SplitSchedule(again, dataclasses.replace(peak_profile(again, life, donated), peak=0.0))

    monkeypatch.setattr(scheduled_solution, "split_live_ranges", split)
