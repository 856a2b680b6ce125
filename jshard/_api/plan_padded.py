"""A call planned with dimensions of its program padded, where no cut divides them and that makes the plan better.

The program as traced is planned first: it is what the padded one has to beat, and where nothing is communicated and
nothing repeated, or next to nothing touches the dimensions, there is nothing to win. A program whose large dimensions
all divide is planned once, as ever.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from jshard._api.plan import Plan
from jshard._config.recipes.recipe_pins import RecipeError
from jshard._core.errors import SearchError
from jshard._core.jax_types import ClosedJaxpr
from jshard._plan.padded_program import Sizes, padded_program
from jshard._plan.padding_classes import PaddingClasses
from jshard._plan.padding_gain import PaddingGain, padding_gain
from jshard._plan.padding_search import (
    LEAST_BYTES,
    LEAST_GAIN,
    LEAST_POSSIBLE_GAIN,
    MOST_WASTE,
    SCARCE,
    cut_sizes,
    large_sizes,
    padded_sizes,
)
from jshard._plan.padding_trials import PaddingTrials
from jshard._plan.record import PlanRecord
from jshard._plan.request import NoBetterPlan
from jshard._plan.scheduled_solution import ROUNDING
from jshard._report.format_units import format_bytes, format_seconds
from jshard._schedule.schedule import Assignment, Schedule


class Planned(Protocol):
    """What is planned, with its plan and schedule."""

    @property
    def plan(self) -> Plan: ...
    @property
    def schedule(self) -> Schedule: ...


T = TypeVar("T", bound=Planned)

_INTERRUPTED = "the search was interrupted"


@dataclasses.dataclass(frozen=True, eq=False)
class Padded(Generic[T]):
    """A padded program, planned, with the sizes that it pads."""

    planned: T
    jaxpr: ClosedJaxpr
    sizes: Sizes


def plan_padded(
    closed: ClosedJaxpr,
    assignment: Assignment,
    original: Plan | None,
    plan_jaxpr: Callable[[ClosedJaxpr, float], T],
    small_too: bool = False,
    required: Sizes | None = None,
) -> tuple[Padded[T] | None, float, PaddingTrials]:
    """The best plan of a padded program, None where that of the program as traced is as good; the least bound; the trials.

    Arguments:

    - `assignment`: of a plan of `closed`.
    - `original`: the plan of the program as traced; None if none fits the budget.
    - `plan_jaxpr`: plans another jaxpr of the function; raises `NoBetterPlan` where no objective is below the second
        argument.
    - `small_too`: dimensions of small tensors are padded as well, with whatever waste.
    - `required`: what pins pad: the program as traced is no answer then, and `SearchError` is raised if this has no plan.
    """
    required, program, topology = required or {}, assignment.program, assignment.topology
    mesh = topology.mesh
    bound = original.cost.bound if original is not None else 0.0
    if original is not None and original.interrupted:
        return None, bound, PaddingTrials(skipped=_INTERRUPTED, unproved=True, interrupted=True)
    if not required and (mesh.total < 2 or (original is not None and not _may_gain(original))):
        return None, bound, PaddingTrials(skipped="next to nothing is sent or computed twice")
    least_bytes, most_waste = (0, 1.0) if small_too else (LEAST_BYTES, MOST_WASTE)
    lengths = large_sizes(program, least_bytes)
    sizes, classes = padded_sizes(closed, lengths, mesh, least_bytes, most_waste)
    if required:
        sizes = {**sizes, **required}
        classes = PaddingClasses(closed, frozenset(n for n, _ in sizes))
    if classes is None:
        return None, bound, PaddingTrials(small_too=small_too)
    if original is not None and not required and not small_too:
        if not can_gain(original, padding_gain(program, topology, {n for n, _ in sizes})):
            skipped = f"it can gain less than {LEAST_POSSIBLE_GAIN:.0%} of the step"
            return None, bound, PaddingTrials(skipped=skipped, unproved=True)
    trials: list[Padded[T]] = []
    skipped, ended, interrupted = "", {}, False
    while sizes:
        try:
            jaxpr = padded_program(closed, sizes, classes)
            most = _ends_above(original, trials, sizes)
            trials.append(Padded(plan_jaxpr(jaxpr, most), jaxpr, sizes))
            if trials[-1].planned.plan.interrupted:
                raise KeyboardInterrupt
        except NoBetterPlan as found:  # nor is one of use in which fewer of the dimensions are padded
            padded = "" if len(sizes) == 1 else f" that pads all {len(sizes)} sizes tried"
            ended = _costs(sizes, f"no plan{padded} costs less than {format_seconds(found.bound)}")
            break
        except (
            RecipeError
        ):  # what it looks for is not in the padded program, where a padded batch has no argument
            if required:
                raise
            skipped = "" if trials else "the recipe does not apply to the padded program"
            break
        except KeyboardInterrupt:
            if original is None and not trials:
                raise
            skipped, interrupted = "" if trials else _INTERRUPTED, True
            break
        except SearchError:
            if not required or trials:
                break
            if len(sizes) == len(required):
                raise
            sizes = required
            continue
        cut = cut_sizes(trials[-1].planned.schedule)
        fewer = {key: size for key, size in sizes.items() if size in cut or key in required}
        if len(fewer) == len(sizes):
            break
        sizes = fewer
    unproved = interrupted or any(not _has_bound(t.planned.plan) for t in trials)
    notes = PaddingTrials(ended | _costs_of(trials), skipped, small_too, unproved, interrupted)
    if not trials:
        return None, bound, notes
    plans = [t.planned.plan for t in trials] + ([original] if original is not None else [])
    if original is None or _has_bound(
        original
    ):  # else the bound of plans with and without padding is that: none
        plans = [p for p in plans if _has_bound(p)]
    bound = min((p.cost.bound for p in plans), default=0.0)
    best = min(trials, key=lambda t: _rank(t.planned.plan))
    if original is not None and _rank(original) <= _rank(best.planned.plan):
        return None, bound, notes
    return best, bound, notes


def _costs_of(trials: Sequence[Padded[T]]) -> dict[int, str]:
    """For each true size that was padded, the least cost of a plan in which it was, as text."""
    out: dict[int, str] = {}
    for t in sorted(trials, key=lambda t: t.planned.plan.cost.objective):
        cost = t.planned.plan.cost
        show = format_bytes if cost.unit == "B" else format_seconds
        out = _costs(t.sizes, f"the whole plan costs {show(cost.objective)}") | out
    return out


def _costs(sizes: Sizes, text: str) -> dict[int, str]:
    """What is known of a program with these sizes, for each true size."""
    return {n: f"to {padded:,}: {text}" for (n, _), padded in sizes.items()}


def _ends_above(original: Plan | None, trials: Sequence[Padded[T]], sizes: Sizes) -> float:
    """The objective above which a plan of a program with these sizes padded is of no use; infinite where none is known.

    A plan in which fewer of them are padded is one of this program that costs less, by at most what padding adds to a
    size: where that is no more than what a search is worth, it is left out of account.
    """
    plans = [t.planned.plan for t in trials] + ([original] if original is not None else [])
    searched = [p.search_again.request for p in plans if p.search_again is not None]
    if any(p.level == 1 for p in plans) or any(r.overlap == "search" for r in searched):
        return math.inf  # these compare bytes, or steps of which there is no bound
    waste = max((padded / n - 1 for (n, _), padded in sizes.items()), default=0.0)
    least = min((p.cost.objective for p in plans), default=math.inf)
    return least * (1 + (waste if waste > LEAST_GAIN else ROUNDING))


def with_trials(plan: Plan, trials: PaddingTrials, bound: float) -> Plan:
    """The plan with a bound on those with and without padding; its `why` says what is known of padding.

    Where no bound is known of a padded program, the bound is one on plans without padding, and the plan says so.
    """
    again = plan.search_again and dataclasses.replace(plan.search_again, padding=trials)
    space = (
        f"{plan.cost.space or 'plans'} without padding" if trials.unproved and bound > 0 else plan.cost.space
    )
    cost = dataclasses.replace(plan.cost, bound=min(bound, plan.cost.objective), space=space)
    ended = trials.interrupted and not plan.interrupted
    steps = (
        (*plan.steps, "interrupted: padded sizes were not planned, or not to the end")
        if ended
        else plan.steps
    )
    return dataclasses.replace(plan, cost=cost, search_again=again, steps=steps)


def can_gain(plan: Plan, most: PaddingGain) -> bool:
    """Whether the most that padding can gain is worth a search: of memory only where bytes are asked for, or scarce."""
    if most.seconds >= LEAST_POSSIBLE_GAIN * plan.step_seconds:
        return True
    scarce = plan.memory_budget is not None and plan.cost.peak_bytes > SCARCE * plan.memory_budget
    return (scarce or plan.cost.unit == "B") and most.nbytes >= LEAST_POSSIBLE_GAIN * plan.cost.peak_bytes


def _may_gain(plan: Plan) -> bool:
    """Whether more cuts could make a plan better: it communicates, repeats work, or is about memory."""
    lost = plan.cost.communication + plan.cost.redundant
    return plan.level == 1 or lost > LEAST_GAIN * plan.step_seconds


def _has_bound(plan: Plan) -> bool:
    """Whether a search proved anything of the plan's program; `_with_valid_bound` of the planner drops a wrong bound."""
    return plan.cost.bound > 0 or plan.cost.objective <= 0


def _rank(plan: Plan) -> tuple[float, float]:
    return plan.cost.objective, plan.step_seconds


def with_padding(plan: Plan, sizes: Sizes) -> Plan:
    """The plan with what it pads."""
    rows = tuple((n, k, padded) for (n, k), padded in sorted(sizes.items()))
    return dataclasses.replace(plan, padding=rows, steps=(*plan.steps, *padding_steps(rows)))


def padding_steps(rows: tuple[tuple[int, int, int], ...]) -> tuple[str, ...]:
    """One line for each size that is padded.

    >>> padding_steps(((197, 0, 200), (197, 2, 200), (50257, 0, 50272)))
    ('padded: 197 to 200 (1.5% padding)', 'padded: 50,257 to 50,272 (0.03% padding)')
    """
    return tuple(
        f"padded: {n:,} to {padded:,} ({100 * (padded - n) / n:.2g}% padding)"
        for n, padded in dict.fromkeys((n, padded) for n, _, padded in rows)
    )


def padded_as_planned(closed: ClosedJaxpr, plan: PlanRecord) -> ClosedJaxpr:
    """The program of a saved plan: with the same dimensions padded."""
    if not plan.padding:
        return closed
    return padded_program(closed, {(n, k): padded for n, k, padded in plan.padding})
