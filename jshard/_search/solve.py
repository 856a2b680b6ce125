"""The door of the search floor: one function for both objectives, with or without a memory limit.

Problem.  Callers want an assignment, its cost and a proof, within a time, always the same.

Idea.  Without a limit the ladder does it alone (``branch_and_bound.py``).  With a limit, or when the peak itself is
what counts, multipliers price the bytes and the ladder solves priced networks (``memory.py``).

Worked case.  One variable, states (cost 1, 10 bytes) and (cost 5, 2 bytes): the answer is cost 1; with
limit 4 it is cost 5; with objective "peak" the answer is the peak 2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from jshard._core.errors import SearchError
from jshard._search.branch_and_bound import TOLERANCE, SearchState, branch_and_bound
from jshard._search.cost_network import CostNetwork, Solution, evaluate, peak
from jshard._search.exact.reduce import Contradiction, WorkingNetwork, working_network
from jshard._search.exact.reduce_batched import reduce_batched
from jshard._search.exact.table_pool import TablePool, quantum
from jshard._search.memory.lagrangian import solve_limited
from jshard._search.memory.minimax_peak import solve_peak


BATCHED_FROM = 4000  # variables from which on it is worth reducing many at a time
Progress = Callable[[str, float, float], None]  # stage, best cost, bound


def _working_network(network: CostNetwork) -> WorkingNetwork:
    """The working graph of a network, a large one after its first reductions."""
    if network.size >= BATCHED_FROM:
        try:
            return reduce_batched(network, TablePool(quantum(network)))
        except Contradiction:
            pass  # one by one, for where it is met
    return working_network(network)


def solve(
    network: CostNetwork,
    *,
    objective: str = "cost",
    gap: float = 0.0,
    seconds: float = 60.0,
    on_progress: Progress | None = None,
    break_ties_by_cost: bool = True,
) -> Solution:
    """The best assignment found, its cost and a proved lower bound.

    ``objective="cost"``: least cost, within ``network.memory.limit`` where there is one.
    ``objective="peak"``: least peak memory, ties to the lower cost; ``Solution.cost`` and ``.bound`` are
    then the *peak* and its bound (``evaluate(network, solution.assignment)`` gives the time cost); a
    limit is not looked at.  Without ``ties`` costs are not either: who wants the bound has it sooner.
    Stops when the relative gap is at most ``gap`` or after ``seconds``.
    Raises ``Contradiction`` when nothing is possible, ``MemoryBudgetError`` when nothing fits.
    Ctrl-C returns the best so far, or is raised again when there is none.
    """
    if objective not in ("cost", "peak"):
        raise ValueError(f'objective is "cost" or "peak", not {objective!r}')
    begun = time.monotonic()
    steps: list[str] = []

    def report(text: str) -> None:
        passed = time.monotonic() - begun
        found = (
            f"cost {search.incumbent_cost:.9g}" if math.isfinite(search.incumbent_cost) else "no answer yet"
        )
        proved = f"bound {search.bound:.9g}" if math.isfinite(search.bound) else "no bound yet"
        steps.append(f"{passed:7.2f}s  {text}: {found}, {proved}")
        if on_progress is not None:
            on_progress(text, search.incumbent_cost, search.bound)

    search = SearchState(begun + seconds, gap, report, network.size)
    memory = network.memory
    try:
        if objective == "peak" and memory is not None:
            solve_peak(network, search, break_ties_by_cost)
        elif memory is not None and memory.limit is not None:
            solve_limited(network, search)
        else:
            branch_and_bound(search, (), _working_network(network))
    except KeyboardInterrupt:
        if search.assignment is None:
            raise
        on_progress = None  # it may be what interrupted
        report("interrupted")
    if search.assignment is None:
        raise SearchError(
            f"no feasible assignment found in {seconds} s",
            where=f"{network.size} variables",
            fix="more time (seconds=...), or a larger memory limit",
        )
    held = None if memory is None else peak(network, search.assignment)
    if objective == "peak":
        cost = 0.0 if held is None else held
    else:
        cost = evaluate(network, search.assignment)
    bound = min(search.bound, cost)
    if cost - bound <= TOLERANCE * abs(cost):
        bound = cost
    return Solution(search.assignment, cost, bound, held, time.monotonic() - begun, tuple(steps))
