"""`config={"pipeline": "auto"}`: whether a step runs as a pipeline, over which axis, in how many microbatches and rounds.

Problem.  A pipeline sends little, and idles for S - 1 of its R M + S - 1 ticks; data parallelism idles never, and sums all
gradients. Which is better depends on the links of each axis, on the layers and on the batch.

Idea.  Each choice is another program, planned under the same objective with a proof of its own. The idle ticks are part
of the loops that are planned, so they are in a plan's compute; level 0, which counts only what is beyond an even share of
a program's own compute, is compared with that share added. The least of the bounds is the bound of the answer. Once a plan
is known, the search of another pipeline ends when a bound on all its plans is not below that plan's cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jshard._api.plan import Plan
from jshard._core.errors import MemoryBudgetError, ShardError
from jshard._core.layout import MeshAxes
from jshard._core.messages import count_of, format_seconds
from jshard._report.format_units import format_bytes
from jshard._spec.pipeline_option import PipelineOption


Call = TypeVar("Call")

_MULTIPLES = (8, 4, 2, 1)
_MOST_COUNTS = 2
"""Microbatches that are tried on an axis of S stages: the two most of 8 S, 4 S, 2 S and S that divide the batch; and the
most of them in two rounds. With 8 S an eighth of the ticks is idle or less. Stages need not divide the layers."""


def choices(axes: MeshAxes, batch: tuple[int, ...]) -> Iterator[PipelineOption]:
    """The pipelines that are tried; `batch` are the numbers of pieces that divide it.

    >>> [(c.axis, c.microbatches, c.rounds) for c in choices(MeshAxes(("x", "y"), (4, 1)), (1, 2, 4, 8, 16))]
    [('x', 16, 1), ('x', 8, 1), ('x', 16, 2)]
    """
    for axis, stages in zip(axes.names, axes.sizes, strict=True):
        counts = [k * stages for k in _MULTIPLES if k * stages in batch and stages > 1][:_MOST_COUNTS]
        yield from (PipelineOption(axis, m, uneven=True) for m in counts)
        yield from (PipelineOption(axis, m, rounds=2, uneven=True) for m in counts[:1])


@dataclasses.dataclass(frozen=True)
class _Outbid:
    """A pipeline of which every plan costs at least `bound`, seconds with the even share of the compute."""

    option: PipelineOption | None
    bound: float


def cheapest_pipeline(
    options: Iterable[tuple[PipelineOption, float]],
    planned_with: Callable[[PipelineOption | None, float], Call],
    plan_of: Callable[[Call], Plan], with_plan: Callable[[Call, Plan], Call],
) -> Call:  # fmt: skip
    """The cheapest of the plans with these pipelines and of that without one (`None`); its steps list them all.

    Pipelines with fewer idle ticks are planned first, so that the others' searches end at their first bounds. An
    interruption (Ctrl-C) ends it once a plan is known.

    Arguments: pipelines, each with its idle share of the ticks; how a call is planned where a plan of some cost is known;
    how its plan is read and replaced.

    Raises the refusal of the plan without a pipeline if none fits the memory budget.
    """
    from jshard._plan.request import NoBetterPlan  # here, so that `import jshard` stays light

    planned: list[Call] = []
    outbid: list[_Outbid] = []
    refused: list[str] = []
    over_budget: MemoryBudgetError | None = None
    every = (None, *(o for o, _ in sorted(options, key=lambda o: o[1])))
    left: list[str] = []
    for option in every:
        most = min((_cost(plan_of(call)) for call in planned), default=math.inf)
        try:
            planned.append(planned_with(option, most))
            if plan_of(planned[-1]).interrupted:
                raise KeyboardInterrupt
        except NoBetterPlan as found:
            outbid.append(_Outbid(option, found.bound))
        except KeyboardInterrupt:
            if not planned:
                raise
            left = [_name(o) for o in every[len(planned) + len(outbid) + len(refused) :]]
            break
        except MemoryBudgetError as error:
            over_budget = over_budget or error
            refused.append(f"{_name(option)}: exceeds the budget")
        except ShardError as error:
            if option is None:
                raise
            refused.append(f"{_name(option)}: {error.what}")
    if not planned:
        assert over_budget is not None
        raise over_budget
    best = min(planned, key=lambda call: _cost(plan_of(call)))
    plan, plans = plan_of(best), sorted(map(plan_of, planned), key=_cost)
    bound = min((*(p.cost.bound + _beside(p) for p in plans), *(o.bound for o in outbid))) - _beside(plan)
    tried = count_of(len(plans) + len(outbid) + len(refused) - 1, "pipeline")
    space = plan.cost.space or f"plans with no pipeline or one of the {tried} tried"
    cost = dataclasses.replace(plan.cost, bound=min(plan.cost.bound, bound), space=space)
    ended = [
        f"{_name(o.option)}: at least {format_seconds(o.bound)}, so its search ended"
        for o in sorted(outbid, key=lambda o: o.bound)
    ]
    steps = (
        *plan.steps,
        *map(_row, plans),
        *ended,
        *dict.fromkeys(refused),
        *(f"{name}: not planned, interrupted" for name in left),
    )
    return with_plan(best, dataclasses.replace(plan, cost=cost, steps=steps))


def _beside(plan: Plan) -> float:
    """What plans of different programs differ in beside the objective: at level 0 the even share of the compute."""
    return plan.cost.compute - plan.cost.redundant if plan.level == 0 else 0.0


def _cost(plan: Plan) -> float:
    return plan.cost.objective + _beside(plan)


def _name(option: PipelineOption | None) -> str:
    if option is None:
        return "no pipeline"
    return (
        f"pipeline over {option.axis}, {option.microbatches} microbatches, {count_of(option.rounds, 'round')}"
    )


def _row(plan: Plan) -> str:
    """One line of the comparison: idle share of the ticks, step, bytes received and peak of a device."""
    p = plan.pipeline
    name = _name(None if p is None else PipelineOption(p.axis, p.microbatches, p.rounds))
    idle = 0.0 if p is None else p.bubble
    received = format_bytes(sum(plan.bytes_by_kind.values()))
    return (
        f"{name}: {idle:.0%} of the ticks idle, step {format_seconds(plan.step_seconds)}, received {received}, "
        f"peak {format_bytes(plan.cost.peak_bytes)}"
    )
