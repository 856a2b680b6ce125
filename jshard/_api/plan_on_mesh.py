"""A plan on a mesh, with what stays where it lies, and the cheapest of the plans on several meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jshard._api.call_pins import PlacedPin
from jshard._api.plan import Plan, plan_program
from jshard._api.shard_request import ShardRequest
from jshard._core.errors import SearchError
from jshard._core.messages import count_of
from jshard._core.topology import Topology
from jshard._plan.request import NoBetterPlan, PlanRequest
from jshard._program.graph import Program
from jshard._schedule.schedule import Schedule
from jshard._spec.mesh_selection import ChosenMesh


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedOnMesh:
    """A plan with its schedule, and the arguments that stay in their committed shardings."""

    plan: Plan
    schedule: Schedule
    committed: frozenset[int] = frozenset()

    def with_steps(self, *steps: str) -> PlannedOnMesh:
        return dataclasses.replace(
            self, plan=dataclasses.replace(self.plan, steps=(*self.plan.steps, *steps))
        )

    def with_budget(self, limit: float | None) -> PlannedOnMesh:
        """A plan that was searched without a budget, as one that is searched again with it."""
        again = self.plan.search_again
        if again is not None:
            again = dataclasses.replace(again, request=dataclasses.replace(again.request, memory_limit=limit))
        return dataclasses.replace(
            self, plan=dataclasses.replace(self.plan, memory_budget=limit, search_again=again)
        )


def plan_with_committed(
    program: Program,
    topology: Topology,
    request: PlanRequest,
    committed: Sequence[PlacedPin],
    on_progress: Callable[..., None] | None,
) -> PlannedOnMesh:
    """A plan that keeps arguments in their committed shardings; if there is none, a plan without these pins."""
    if not committed:
        return PlannedOnMesh(*plan_program(program, topology, request, on_progress))
    names = [program.operators[op].name for op, *_ in committed]
    first = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    try:
        plan, schedule = plan_program(program, topology, request.with_pins(committed), on_progress)
    except SearchError as error:
        planned = PlannedOnMesh(*plan_program(program, topology, request, on_progress))
        return planned.with_steps(f"not as they lie: {first}, since {error.what}")
    number = {op: i for i, op in enumerate(program.inputs)}
    planned = PlannedOnMesh(plan, schedule, frozenset(number[op] for op, *_ in committed))
    return planned.with_steps(f"as they lie: {first}")


def cheapest_mesh(
    meshes: Sequence[tuple[ChosenMesh, ShardRequest]],
    plan_on: Callable[[ChosenMesh, ShardRequest, float], PlannedOnMesh],
) -> tuple[ChosenMesh, PlannedOnMesh]:
    """The mesh of the cheapest plan; the plan's steps list the cost on every mesh. Ctrl-C ends it once a plan is known.

    `plan_on`: plans on a mesh of a request, with a share of the effort that is left.
    """
    plans: list[tuple[ChosenMesh, PlannedOnMesh]] = []
    errors: list[SearchError | NoBetterPlan] = []
    interrupted: tuple[str, ...] = ()
    for number, (chosen, request) in enumerate(meshes):
        try:
            plans.append((chosen, plan_on(chosen, request, 1.0 / (len(meshes) - number))))
            if plans[-1][1].plan.interrupted:
                raise KeyboardInterrupt
        except (SearchError, NoBetterPlan) as error:  # a budget or pin that cannot be kept on this mesh
            errors.append(error)
        except KeyboardInterrupt:
            if not plans:
                raise
            compared = len(plans) + len(errors)
            interrupted = (f"interrupted: {compared} of {count_of(len(meshes), 'mesh', 'meshes')} compared",)
            break
    if not plans:
        ended = [e for e in errors if isinstance(e, NoBetterPlan)]
        raise min(ended, key=lambda e: e.bound, default=errors[-1])
    plans.sort(key=lambda p: p[1].plan.cost.objective)
    costs = [(c.axes, p.plan.cost) for c, p in plans]
    chosen, planned = plans[0]
    rows = [f"mesh {axes}: {c.objective:.4g} {c.unit}" for axes, c in costs]
    return chosen, planned.with_steps(*rows, *interrupted)
