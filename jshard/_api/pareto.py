"""`pareto`: the time-memory frontier of a function's plans.

Its ends are the fastest plan and the plan of least memory. In between, the function is planned for speed under memory
budgets, each in the middle of the widest remaining gap (on a logarithmic scale), so that a few searches show the whole
curve. A plan that is slower and no smaller than another is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jshard._api.plan import Plan
from jshard._api.shard import Sharded, shard
from jshard._api.shard_request import ShardRequest
from jshard._api.sweep import plan_with_options
from jshard._core.argument_checks import checked
from jshard._core.errors import SearchError, ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.text_files import write_file
from jshard._report import comparison_table as report, plots
from jshard._report.comparison_table import PlanPoint
from jshard._report.format_units import format_bytes
from jshard._report.progress import progress


MIN_PEAK_RATIO = 1.02  # between peaks closer than this factor, no search is made


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans from the fastest to the smallest, none of them dominated in both time and memory.

    `tried`: how many plans were made to find them. `interrupted`: whether Ctrl-C ended that.
    """

    name: str
    plans: tuple[Plan, ...]
    tried: int = 0
    interrupted: bool = False

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(step seconds, peak bytes a device) of each plan."""
        return tuple((p.step_seconds, p.cost.peak_bytes) for p in self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        return report.table(self._title, self._rows)

    def _repr_html_(self) -> str:
        return report.html_table(self._title, self._rows)

    def to_html(self, path: str | Path) -> None:
        """Write the table as one self-contained page."""
        write_file(path, report.html_page(self._title, self._rows), "Frontier.to_html")

    def to_pandas(self) -> Any:
        """One row a plan as a `pandas.DataFrame`."""
        return report.to_dataframe(self._rows, "Frontier.to_pandas")

    def plot(self, *others: Frontier) -> Any:
        """A matplotlib figure of peak memory against step time; other frontiers go into the same picture."""
        curves = [(_machine(f.plans[0]), f.points) for f in (self, *others)]
        title = f"time and memory of {self.name}" + ("" if others else f" on {curves[0][0]}")
        return plots.frontier(title, curves, "Frontier.plot")

    @property
    def _title(self) -> str:
        ended = ", interrupted" if self.interrupted else ""
        return f"time and memory of {self.name} on {_machine(self.plans[0])}{ended}"

    @property
    def _rows(self) -> list[PlanPoint]:
        return [PlanPoint((("budget", _budget(p)),), p) for p in self.plans]


@checked
def pareto(
    fn: Function,
    *args: PyTree,
    points: int = 12,
    show_progress: bool | None = None,
    **kwargs: PyTree,
) -> Frontier:
    """Plans of a function for these arguments, from the fastest to the one of least memory.

    >>> import jax, jshard
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> len(jshard.pareto(lambda x, w: x @ w, x, x, points=2).plans) >= 1
    True

    Arguments:

    - `fn`: a function, or a sharded one, whose pins and mesh are kept.
    - `args`, `kwargs`: arrays or `ShapeDtypeStruct`s.
    - `points`: number of plans to try, at least two; fewer if no gap is left to search.
    - `show_progress`: whether to show a progress bar; None: on a terminal and in Jupyter only.

    Raises the error of planning if not even the plan of least memory keeps to the memory budget.
    """
    if not isinstance(points, int) or points < 2:
        raise ShardError(f"points={points!r} gives no frontier", where="pareto", fix="points=2 or more")
    sharded = fn if isinstance(fn, Sharded) else shard(fn)
    sharded.check_arguments(args, kwargs, "pareto", ("points", "show_progress"))
    with sharded.as_array_function(args, kwargs) as (function, args, kwargs):
        return _frontier(function.request, args, kwargs, points, show_progress)


def _frontier(
    request: ShardRequest, args: tuple, kwargs: dict[str, PyTree], points: int, show_progress: bool | None
) -> Frontier:
    plans: list[Plan] = []
    interrupted = False
    try:
        for plan in _plans(request, args, kwargs, points, show_progress):
            plans.append(plan)
            if plan.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not plans:
            raise
        interrupted = True
    return Frontier(request.name, _pareto_front(plans), len(plans), interrupted)


def _plans(
    request: ShardRequest, args: tuple, kwargs: dict[str, PyTree], points: int, show_progress: bool | None
) -> Iterator[Plan]:
    """The plans of a frontier as they are found: of each level, then within budgets where its gaps are widest."""
    plans: list[Plan] = []
    with progress(f"frontier of {request.name}", points, shown=show_progress) as show:
        last_error: SearchError | None = None
        for level in (2, 1, 0)[:points]:
            show(len(plans), f"level {level}")
            try:
                plans.append(plan_with_options(request, args, kwargs, level=level))
            except SearchError as error:  # the chip's memory does not suffice
                last_error = error
            else:
                yield plans[-1]
        if not plans:
            assert last_error is not None
            raise last_error
        searched: set[tuple[float, float]] = set()  # gaps between peaks in which a search found no plan
        while len(plans) < points:
            gap = _widest_gap(plans, searched)
            if gap is None:
                break
            budget = int(math.sqrt(gap[0] * gap[1]))
            show(len(plans), f"under {format_bytes(budget)}")
            try:
                plan = plan_with_options(request, args, kwargs, level=2, memory_budget=budget)
            except SearchError:  # no plan within this budget
                searched.add(gap)
                points -= 1
                continue
            peak = plan.cost.peak_bytes
            if not gap[0] * 1.001 < peak < gap[1] / 1.001:
                searched.add(gap)
            plans.append(plan)
            yield plan


def _pareto_front(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """The plans that no other dominates in both time and memory, fastest first."""
    frontier: list[Plan] = []
    for p in sorted(plans, key=lambda p: (p.step_seconds, p.cost.peak_bytes)):
        if not frontier or p.cost.peak_bytes < frontier[-1].cost.peak_bytes:
            frontier.append(p)
    return tuple(frontier)


def _widest_gap(plans: list[Plan], searched: set[tuple[float, float]]) -> tuple[float, float] | None:
    """The neighbouring peaks of the frontier with the largest ratio; None if all are close or were searched."""
    peaks = sorted({p.cost.peak_bytes for p in _pareto_front(plans)})
    gaps = [
        g
        for g in zip(peaks, peaks[1:], strict=False)
        if g[1] > MIN_PEAK_RATIO * g[0] > 0 and g not in searched
    ]
    return max(gaps, key=lambda g: g[1] / g[0], default=None)


def _machine(p: Plan) -> str:
    return f"{p.mesh} ({p.chip})"


def _budget(p: Plan) -> str:
    return "none" if p.memory_budget is None else format_bytes(p.memory_budget)
