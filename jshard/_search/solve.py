"""Entry point of the search: an assignment of least cost or least peak, with or without a memory limit, and a proof.

Without a limit, branch and bound solves the network (`branch_and_bound`). With a limit, Lagrangian prices charge for
the bytes, and branch and bound solves the priced networks (`memory.lagrangian`); so for the least peak
(`memory.minimax_peak`).

Example: one variable with states (cost 1, 10 bytes) and (cost 5, 2 bytes): the answer is cost 1; with limit 4 it is
cost 5; with objective "peak" it is the peak 2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from jshard._core.arrays import Ints
from jshard._core.errors import SearchError
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import CostNetwork, Prices, Solution, evaluate, peak
from jshard._search.effort import Effort
from jshard._search.exact.reduce_batched import starting_network
from jshard._search.search_state import TOLERANCE, SearchState, Wanted


Progress = Callable[[str, float, float], None]  # stage, best cost, bound


def solve(
    network: CostNetwork,
    *,
    objective: str = "cost",
    gap: float = 0.0,
    seconds: float = 60.0,
    on_progress: Progress | None = None,
    break_ties_by_cost: bool = True,
    layers_repeat: bool = False,
    prices: Prices | None = None,
    known: Sequence[Ints] = (),
    unlimited: tuple[float, float] | None = None,
    effort: Effort | None = None,
    on_answer: Callable[[Ints], None] | None = None,
    only: Wanted = None,
    known_cost: float = math.inf,
    bound: float = -math.inf,
    most: float = math.inf,
) -> Solution:
    """The best assignment found, its cost and a proved lower bound.

    Arguments:

    - `network`: the network.
    - `objective`: `"cost"`: least cost, within `network.memory.limit` where there is one. `"peak"`: least peak
        memory; `Solution.cost` and `.bound` are then the *peak* and its bound (`evaluate(network,
        solution.assignment)` gives the time cost), and a limit does not count.
    - `gap`: the relative gap that suffices.
    - `seconds`: time limit.
    - `on_progress`: called with the stage, the best cost and the bound after every stage.
    - `break_ties_by_cost`: of equal peaks look for one of low cost; without it the bound is there sooner.
    - `layers_repeat`: look for prices on few times of a large network first (`memory.price_cuts`).
    - `prices`: those to begin with, of a similar network; with their bound only where they are of this network.
    - `known`: assignments, for prices on few times to begin with.
    - `unlimited`: cost and peak of a good answer without a limit, where one is known: first prices come from it.
    - `on_answer`: called with every better assignment that prices find within the limit.
    - `only`: what is of use under a limit, if not both: the answer (no effort is made for the bound alone), or the bound
        (`known` has a good assignment).
    - `known_cost`: under a limit, that of the plan which the bound is for, where one is known.
    - `bound`: one on the cost that is known, under a limit.
    - `most`: an assignment of higher cost is of no use: a higher bound ends the search.
    - `effort`: ends what improves an answer when it is spent; None for no limit but the seconds.

    Raises `Contradiction` when no assignment has finite cost, `MemoryBudgetError` when nothing fits, `SearchError`
    when nothing was found in time. Ctrl-C returns the best answer so far, or is raised again when there is none.
    """
    if objective not in ("cost", "peak"):
        raise ValueError(f'objective is "cost" or "peak", not {objective!r}')
    begun = time.monotonic()
    steps: list[str] = []

    def report(text: str) -> None:
        passed = time.monotonic() - begun
        incumbent, bound = search.incumbent_cost, search.bound
        cost_text = f"cost {incumbent:.9g}" if math.isfinite(incumbent) else "no answer yet"
        bound_text = f"bound {bound:.9g}" if math.isfinite(bound) else "no bound yet"
        steps.append(f"{passed:7.2f}s  {text}: {cost_text}, {bound_text}")
        if on_progress is not None:
            on_progress(text, incumbent, bound)

    search = SearchState(
        begun + seconds, gap, report, network.size, bound=bound, prices=prices, unlimited=unlimited, known=tuple(known),
        most=most, known_cost=known_cost,
    )  # fmt: skip
    search.effort, search.on_answer = effort or search.effort, on_answer
    memory = network.memory
    try:
        if objective == "peak" and memory is not None:
            # Imported at first use: most plans search without memory, and `import jshard` stays light.
            from jshard._search.memory.minimax_peak import solve_peak

            solve_peak(network, search, break_ties_by_cost, layers_repeat)
        elif memory is not None and memory.limit is not None:
            from jshard._search.memory.lagrangian import solve_limited

            solve_limited(network, search, layers_repeat=layers_repeat, only=only)
        else:
            branch_and_bound(search, starting_network(network))
    except KeyboardInterrupt:
        if search.assignment is None:
            raise
        on_progress = None  # it may be what interrupted
        report("interrupted")
    assignment = search.assignment
    if assignment is None:
        spent = search.effort.exhausted
        raise SearchError(
            f"no feasible assignment found in {'the given effort' if spent else f'{seconds:g} s'}",
            where=f"{network.size} variables",
            fix=f"more {'effort (search_seconds=...)' if spent else 'time (seconds=...)'}, or a larger memory limit",
        )
    reached = None if memory is None else peak(network, assignment)
    if objective == "peak":
        cost = 0.0 if reached is None else reached
    else:
        cost = evaluate(network, assignment)
    bound = min(search.bound, cost)
    if cost - bound <= TOLERANCE * abs(cost):
        bound = cost
    return Solution(
        assignment, cost, bound, reached, time.monotonic() - begun, tuple(steps), search.prices, search.known
    )
