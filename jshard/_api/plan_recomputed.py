"""`remat="auto"` and `remat="policy"`: a call whose values may be computed again, planned within its budget.

Values are computed again only where the plan of least time exceeds the budget. Equations with effects and callbacks
always run once: the plan's steps name those whose results are kept for that reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from jax import core

from jshard._api.plan import Plan
from jshard._core import jaxcompat as compat
from jshard._core.errors import MemoryBudgetError, PlanMismatchError
from jshard._core.hardware import Chip
from jshard._core.jax_types import ClosedJaxpr
from jshard._core.messages import count_of
from jshard._plan.memory_refusal import with_other_bound
from jshard._plan.recomputation import Choice, Recomputation
from jshard._plan.recompute_search import Effort, RecomputeSearch, Trial
from jshard._plan.remat_policy import policy_text


_MAX_NAMED = 6  # values named in the steps

Call = TypeVar("Call")  # a planned call


def least_argument_bytes(avals: Sequence[core.ShapedArray], devices: int) -> float:
    """Bytes of a device that arguments need at least, cut over all devices."""
    return sum(math.prod(a.shape) * compat.itemsize(a.dtype) for a in avals) / devices


def plan_recomputed(
    closed: ClosedJaxpr,
    plan_jaxpr: Callable[[ClosedJaxpr | None, bool, float, Effort], Call],
    plan_in: Callable[[Call], Plan],
    chip: Chip,
    limit: float,
    donated: tuple[int, ...],
    original: Call,
    seconds: float | None,
    traced_is_refused: bool = False,
) -> tuple[Call, tuple[tuple[int, ...], ...] | None, tuple[str, ...], tuple[float, str]]:
    """The best call found, its kept values, the steps of the search, and (bound, which plans that is about).

    Arguments:

    - `closed`: the traced jaxpr.
    - `plan_jaxpr`: `plan_jaxpr(jaxpr, limited, most, effort)` plans a jaxpr within the budget, or without; `most`: of no
        use is a plan that costs as much.
    - `plan_in`: the plan of what it returns.
    - `donated`: flat indices of the donated arguments.
    - `limit`: the budget, in bytes a device, that `original`, planned without, exceeds.
    - `seconds`: effort for all choices together; None for as much as the proofs take.
    - `traced_is_refused`: whether the call that computes nothing again was refused.
    """
    recomputation = Recomputation(closed, chip, donated)
    programs: dict[Choice, ClosedJaxpr] = {}

    def plan_of(choice: Choice | None, limited: bool, most: float, effort: Effort) -> Call:
        if choice is None:
            return plan_jaxpr(None, limited, most, effort)
        if choice not in programs:
            programs[choice] = recomputation.program(choice)
        return plan_jaxpr(programs[choice], limited, most, effort)

    if not recomputation.can_recompute:
        if traced_is_refused:  # it is all that there is
            raise _refused_before(limit)
        call = plan_jaxpr(None, True, math.inf, Effort.of_seconds(seconds))
        cost = plan_in(call).cost
        return (
            call,
            None,
            ("remat: no value is read late that could be computed again",),
            (cost.bound, cost.space),
        )
    search = RecomputeSearch(recomputation, plan_of, plan_in, limit, seconds, traced_is_refused)
    best = search.run(original)
    if best is None:
        call = _original_within_budget(search, plan_jaxpr, seconds)
        cost = plan_in(call).cost
        return call, None, ("remat: nothing is computed again",), (cost.bound, cost.space)
    assert best.planned is not None
    numbers = None if best.choice is None else recomputation.numbers(best.choice)
    return best.planned, numbers, _steps(search, best), _bound(search, plan_in(best.planned))


def _original_within_budget(
    search: RecomputeSearch[Call],
    plan_jaxpr: Callable[[ClosedJaxpr | None, bool, float, Effort], Call],
    seconds: float | None,
) -> Call:
    """The program as traced within the budget, or the refusal of the choice that keeps least.

    It has the effort of a call that computes nothing again: what that finds is not refused. `seconds`: that effort.
    """
    if search.refusal is not None and search.traced_is_settled:
        raise with_other_bound(search.refusal, search.proved_least)
    if search.traced_is_refused:
        raise _refused_before(search.limit)
    try:
        return plan_jaxpr(None, True, math.inf, Effort.of_seconds(seconds))
    except MemoryBudgetError as error:
        least = [e for e in (search.refusal, error) if e is not None]
        # What is proved of one choice does not hold for the others.
        raise with_other_bound(min(least, key=lambda e: e.least_found), search.proved_least) from None


def _refused_before(limit: float) -> MemoryBudgetError:
    """The error of a call that computes nothing again and was refused, where no choice of what is kept was."""
    return MemoryBudgetError(
        f"no plan fits {limit:,.0f} bytes a device, whatever is computed again of what was tried",
        where="memory_budget with remat=", fix="a larger memory_budget=, or more devices",
    )  # fmt: skip


def _bound(search: RecomputeSearch[Call], plan: Plan) -> tuple[float, str]:
    if plan.level == 1:
        return plan.cost.bound, "the plans that compute the same values again"
    others = f" and {plan.cost.space}" if plan.cost.space else ""
    if search.complete:
        return search.bound, plan.cost.space
    planned = search.choices_planned
    return (
        search.bound,
        f"the plans of the {count_of(planned, 'choice')} of what is kept that were tried{others}",
    )


def _steps(search: RecomputeSearch[Call], best: Trial[Call]) -> tuple[str, ...]:
    """What was searched, and what is computed again."""
    recomputation = search.recomputation
    planned = search.choices_planned
    steps = [
        f"remat: {count_of(planned, 'choice')} of what is kept {'were' if planned > 1 else 'was'} planned"
    ]
    if search.interrupted:
        steps.append("remat: interrupted, other choices were not planned")
    if best.choice is None:
        steps.append("remat: nothing is computed again")
    else:
        names = recomputation.names_of(best.choice)
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        steps.append(f"remat: computed again {', '.join(names[:_MAX_NAMED])}{more}")
    if stays := recomputation.stays():
        steps.append(f"remat: never run twice, so their results are kept: {', '.join(stays[:_MAX_NAMED])}")
    return tuple(steps)


def replayed(closed: ClosedJaxpr, plan: Plan, chip: Chip, name: str) -> ClosedJaxpr:
    """The jaxpr of a saved plan that computes values again."""
    assert plan.kept is not None
    recomputation = Recomputation(closed, chip)
    choice = recomputation.from_numbers(plan.kept)
    if choice is None:
        raise PlanMismatchError(
            f"the plan computes values of another program again: {plan.name}, this one is {name}",
            where=f"plan= of {name}",
            fix="load the plan of this function, shapes and dtypes, or plan again",
        )
    return recomputation.program(choice)


def with_recomputation(
    plan: Plan, kept: tuple[tuple[int, ...], ...] | None, steps: tuple[str, ...], bound: tuple[float, str]
) -> Plan:
    """The plan with what the search over choices found."""
    cost = dataclasses.replace(plan.cost, bound=min(bound[0], plan.cost.objective), space=bound[1])
    return dataclasses.replace(plan, kept=kept, steps=(*plan.steps, *steps), cost=cost)


def equivalent_policy(closed: ClosedJaxpr, plan: Plan, chip: Chip) -> tuple[str, ...]:
    """The steps of `remat="policy"`: the equivalent policy of `jax.checkpoint`."""
    if plan.kept is None:
        return ("jax.checkpoint policy: none needed, nothing is computed again",)
    recomputation = Recomputation(closed, chip)
    choice = recomputation.from_numbers(plan.kept)
    assert choice is not None
    return policy_text(recomputation, choice)
