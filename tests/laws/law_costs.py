"""For the law of one cost: plans with the networks they came from, and random assignments of those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jshard
from jshard._network.build import PlanningNetwork
from jshard._plan import level_search, planner
from jshard._plan.schedule_cost import schedule_cost
from jshard._schedule.schedule import assignment_of, schedule
from tests.laws.exact_cost import exact_cost
from tests.laws.fuzz_judge import _loss, mesh_of
from tests.laws.fuzz_programs import Fuzzed


@dataclasses.dataclass
class Searched:
    """The problems that were solved while planning, each with its answers as assignments; the first is the plan's."""

    problems: list[tuple[PlanningNetwork, np.ndarray]]

    def __enter__(self) -> Searched:
        self.real = planner.schedule_solution

        def recorded(built: PlanningNetwork, request: Any, assignment: Any, *rest: Any, **named: Any) -> Any:
            self.problems.append((built, np.asarray(assignment)[: built.cost_network.size]))
            return self.real(built, request, assignment, *rest, **named)

        planner.schedule_solution = level_search.schedule_solution = recorded
        return self

    def __exit__(self, *error: object) -> None:
        planner.schedule_solution = level_search.schedule_solution = self.real


def searched() -> Searched:
    """A context in which everything that is planned is recorded."""
    return Searched([])


def training(p: Fuzzed, **options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A random program as a sharded training step, and the shapes of its arguments."""
    mesh = mesh_of(p.mesh)
    real = [v.real for v in p.inputs]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in p.inputs]
    program = p.function(plain=False, mesh=mesh)
    ins = [[p.parameter_plan.get(v.name, s) for v, s in zip(p.inputs, p.in_strategy, strict=True) if v.real is r]
           for r in (True, False)]  # fmt: skip
    moving = [i for i, r in enumerate(real) if r]
    outs = ((None, p.out_strategy), [None] * len(moving)) if p.out_strategy else None
    step = jshard.shard(_loss(program, moving), tuple(ins), outs, mesh=mesh, **options)
    split = [[s for s, r in zip(shapes, real, strict=True) if r is wanted] for wanted in (True, False)]
    return step, tuple(split)


def random_assignments(
    built: PlanningNetwork, start: np.ndarray, rng: np.random.Generator, count: int, steps: int = 200
) -> Iterator[np.ndarray]:
    """Feasible assignments on a random walk from one: a variable at a time takes any state that its edges allow."""
    net, at = built.cost_network, start.copy()
    edges: list[list[tuple[int, bool, int]]] = [[] for _ in range(net.size)]
    for e, (i, j) in enumerate(net.edges.tolist()):
        edges[i].append((e, True, j))
        edges[j].append((e, False, i))
    for _ in range(count):
        for v in rng.integers(0, net.size, steps).tolist():
            allowed = np.isfinite(net.unary[net.node_table[v]])
            for e, head, other in edges[v]:
                table = net.pairwise[net.edge_table[e]]
                allowed &= np.isfinite(table[:, at[other]] if head else table[at[other], :])
            at[v] = rng.choice(np.flatnonzero(allowed))
        yield at.copy()


def both_costs(built: PlanningNetwork, assignment: np.ndarray) -> tuple[float, float]:
    """What an assignment costs by the network and by its schedule."""
    made = schedule(assignment_of(built, tuple(assignment.tolist())))
    return exact_cost(built, assignment), schedule_cost(made, built).objective(built.level)


def close(a: float, b: float) -> bool:
    """Equal but for the order of summation."""
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-18
