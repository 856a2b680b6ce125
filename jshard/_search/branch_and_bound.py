"""Branch and bound: reduce, eliminate, bound (TRW-S), improve, fix by reduced cost, branch, until the gap is closed.

Each stage makes the next one easier. Exact reductions leave a small core; components whose tables fit are eliminated
exactly; message passing bounds what is left and suggests an answer; local search improves it; states that bound and
answer exclude are removed, after which the reductions work again. When that stalls, the states of the most undecided
variable are split in two (best-first search, Land and Doig 1960); a small core that this does not close soon becomes an
integer program.

Example: a path never gets beyond the reductions; neither does a cycle of three-state variables (degree 2).
"""

from __future__ import annotations

import functools
import heapq

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.bound_and_fix import BoundedCore, WarmStart, bound_and_fix, solve_restricted
from jshard._search.dual.layer_folding import FoldedNetwork, fold_layers, unfold_messages
from jshard._search.dual.message_layout import LayerPositions
from jshard._search.exact.working_network import Contradiction, WorkingNetwork
from jshard._search.integer_program import (
    ENTRIES_PER_COLUMN,
    MAX_COLUMNS,
    num_columns,
    solve_integer_program,
)
from jshard._search.primal.local_search import core_energy, core_problem, energy
from jshard._search.search_state import Reductions, SearchState, reduce_and_eliminate


FOLD_FROM = 1000  # variables of a core from which on its layers are folded
RECOMBINE_WORK = 20_000_000  # entries of all joint tables when layers' answers are recombined
BRANCH_ROUNDS = 60  # of message passing per subproblem
_BRANCHES_FIRST = 200  # before an integer program, whose proof is short of an exact one by a tolerance


def branch_and_bound(
    search: SearchState,
    graph: WorkingNetwork,
    *,
    max_rounds: int = 400,
    may_branch: bool = True,
    answer_only: bool = False,
) -> None:
    """Solve a working network (which is reduced in place); the result is in `search`.

    Arguments:

    - `search`: receives answers and the bound.
    - `graph`: the network.
    - `max_rounds`: rounds of message passing at most.
    - `may_branch`: whether to branch where the bound stalls.
    - `answer_only`: whether an answer of layers that repeat suffices: its bound is that of the reductions.
    """
    variables, states = graph.original_size
    if not variables:
        variables, states = len(graph.core), sum(len(graph.tables.arrays[graph.unary[v]]) for v in graph.core)
    search.effort.spend(variables=search.num_variables)
    reduction, core = reduce_and_eliminate(graph)
    search.spend_on(graph)
    search.report(
        f"reductions: {variables} variables, {states} states -> core of "
        f"{len(graph.core)} variables, {len(reduction.eliminated)} components finished exactly, "
        f"{len(core.core)} variables left; {graph.tables.num_products} distinct products"
    )
    search.bound = core.offset
    solved = not core.core
    start, layers = solve_folded(search, (reduction,), core, max_rounds)
    if answer_only and search.has_answer:
        return
    if start is None and search.similar is not None:
        start = search.similar.restore
    bounded = bound_and_fix(search, (reduction,), core, max_rounds, start, layers)
    search.bound = min(bounded.bound, search.incumbent_cost)
    if not solved:
        search.report("messages and blocks")
    if may_branch and bounded.core is not None and not search.out_of_time and not search.useless:
        search.bound = min(max(search.bound, branch(search, bounded)), search.incumbent_cost)
        search.report("branching")


def branch(search: SearchState, root: BoundedCore) -> float:
    """Split the most undecided variable's states, least bound first, until closed or out of time; the bound proved."""
    count, proved, tried = 0, -np.inf, False
    open_nodes: list[tuple[float, int, BoundedCore]] = [(root.bound, count, root)]
    while open_nodes:
        bound, _, node = open_nodes[0]
        if search.gap_closed(max(bound, proved)) or search.out_of_time or max(bound, proved) > search.most:
            break
        heapq.heappop(open_nodes)
        # What progress says, and an interruption keeps: no node that is still open has a lower bound.
        search.bound = max(search.bound, min(max(bound, proved), search.incumbent_cost))
        v, halves = _split(node)
        for keep in halves:
            child = _child(search, node, v, keep)
            if child is None:
                continue
            count += 1
            if child.core is not None:
                heapq.heappush(open_nodes, (max(child.bound, bound), count, child))
        if count % 20 == 0:
            search.report(f"branching: {count} halves, {len(open_nodes)} open")
        if count >= _BRANCHES_FIRST and not tried:
            tried, (proved, solved) = True, _integer_program(search, root)
            if solved:
                return proved
    return max(proved, min((n[0] for n in open_nodes), default=search.incumbent_cost))


def _integer_program(search: SearchState, node: BoundedCore) -> tuple[float, bool]:
    """The bound of a small core's integer program, whose answer is offered as the incumbent, and whether it was solved.

    -inf of a larger core.
    """
    core = node.core
    assert core is not None
    problem = core_problem(core)
    columns = num_columns(problem)
    effort = ENTRIES_PER_COLUMN * columns
    if columns > MAX_COLUMNS or search.out_of_time or effort > search.effort.limit - search.effort.spent:
        return -np.inf, False
    search.effort.spend(entries=effort)
    solution = solve_integer_program(problem, search.gap, search.deadline)
    if solution.states is not None:
        assignment = np.zeros(len(core.unary), dtype=np.int64)
        for v, s in zip(problem.variables, solution.states, strict=True):
            assignment[v] = core.tables.subsets.arrays[core.states[v]][s]
        cost = energy(problem, solution.states)
        if cost < problem.offset + problem.infeasibility_penalty:
            search.update_incumbent(node.reductions, cost, assignment)
    search.report(f"integer program of {columns} columns")
    return solution.bound, solution.solved


def _split(node: BoundedCore) -> tuple[int, tuple[Ints, Ints]]:
    """The variable to branch on and two halves of its states, the more promising one first.

    It is the variable of the largest regret: its second-least reduced cost is what a wrong decision costs at least.
    """
    regret = {u: float(np.partition(c, 1)[1]) if len(c) > 1 else 0.0 for u, c in node.reduced_costs.items()}
    v = max(regret, key=lambda u: (regret[u], -u))
    costs = node.reduced_costs[v]
    first = np.flatnonzero(costs <= 0.0)
    if len(first) == len(costs):
        first = first[: (len(first) + 1) // 2]
    return v, (first, np.setdiff1d(np.arange(len(costs)), first))


def _child(search: SearchState, node: BoundedCore, v: int, keep: Ints) -> BoundedCore | None:
    """A node with only some states of a variable, bounded; None where it has no answer."""
    assert node.core is not None
    child = node.core.fork()
    try:
        neighbours = list(child.adj[v])
        child.restrict(v, child.tables.subsets(keep))
        reduction, core = reduce_and_eliminate(child, sorted({v, *neighbours}))
        return bound_and_fix(search, (*node.reductions, reduction), core, BRANCH_ROUNDS)
    except Contradiction:
        return None


def solve_folded(
    search: SearchState, reductions: Reductions, core: WorkingNetwork, max_rounds: int
) -> tuple[WarmStart | None, LayerPositions | None]:
    """Solve a short core of the layers that repeat, and offer its answer, unfolded, as the incumbent.

    Returns a start for the whole core's messages and its layers; None where layers do not repeat.
    """
    folded = fold_layers(core) if len(core.core) > FOLD_FROM else None
    if folded is None:
        return None, None
    inner = SearchState(
        search.deadline,
        search.gap,
        lambda _: None,
        search.num_variables,
        for_warm_start=True,
        similar=search.similar,
        effort=search.effort,
    )
    try:
        start = None if search.similar is None else search.similar.restore
        bound_and_fix(inner, (), folded.short, max_rounds, start)
    except Contradiction:
        return None, folded.layers
    if inner.assignment is not None:
        assignment = inner.assignment.copy()
        assignment[folded.representative[:, 0]] = assignment[folded.representative[:, 1]]
        positions = core.tables.subset_positions
        states = {v: positions(core.states[v])[int(assignment[v])] for v in core.core}
        search.update_incumbent(reductions, core_energy(core, states), assignment)
        recombine_layers(search, reductions, core, folded, assignment)
    search.report(f"folding: {len(folded.short.core)} variables stand for {len(core.core)}")
    search.saved = inner.saved if search.keeps_messages else None
    if inner.saved is None:
        return None, folded.layers
    return functools.partial(unfold_messages, folded=folded, saved=inner.saved.messages), folded.layers


def recombine_layers(
    search: SearchState,
    reductions: Reductions,
    core: WorkingNetwork,
    folded: FoldedNetwork,
    assignment: Ints,
) -> None:
    """Solve the core with the states alone that some layer of a short core's answer has at the same place.

    Adjacent layers may differ there (two equal mesh axes alternate), and one of them repeated is then a poor answer;
    but a few states a variable are solved together, exactly.
    """
    states_at: dict[int, set[int]] = {}
    removed = set(folded.representative[:, 0].tolist())
    for v, (place, _, _) in folded.layers.items():
        if v not in removed:
            states_at.setdefault(place, set()).add(int(assignment[v]))
    if max(map(len, states_at.values()), default=0) < 2:
        return
    excluded: dict[int, np.ndarray] = {}  # 0 for the states to keep
    for v in core.core:
        positions = core.tables.subset_positions(core.states[v])
        excluded[v] = np.ones(len(positions))
        states = states_at[folded.layers[v][0]] if v in folded.layers else ()
        kept = (*states, int(assignment[v]))
        excluded[v][[positions[s] for s in kept if s in positions]] = 0.0
    solve_restricted(search, reductions, core, excluded, 0.0, RECOMBINE_WORK)
