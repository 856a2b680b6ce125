"""Branch and bound: reduce, eliminate, bound (TRW-S), improve, fix by reduced cost, branch, until the gap is closed.

Each stage makes the next one easier. Exact reductions leave a small core; components whose tables fit are eliminated
exactly; message passing bounds what is left and suggests an answer; local search improves it; states that bound and
answer exclude are removed, after which the reductions work again. When that stalls, the states of the most undecided
variable are split in two (best-first search, Land and Doig 1960).

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
from jshard._search.primal.local_search import core_energy
from jshard._search.search_state import Reductions, SearchState, reduce_and_eliminate


FOLD_FROM = 1000  # variables of a core from which on its layers are folded
RECOMBINE_WORK = 20_000_000  # entries of all joint tables when layers' answers are recombined
BRANCH_ROUNDS = 60  # of message passing per subproblem


def branch_and_bound(
    search: SearchState, graph: WorkingNetwork, *, max_rounds: int = 400, may_branch: bool = True
) -> None:
    """Solve a working network (which is reduced in place); the result is in `search`.

    Arguments:

    - `search`: receives answers and the bound.
    - `graph`: the network.
    - `max_rounds`: rounds of message passing at most.
    - `may_branch`: whether to branch where the bound stalls.
    """
    variables, states = graph.original_size
    if not variables:
        variables, states = len(graph.core), sum(len(graph.tables.arrays[graph.unary[v]]) for v in graph.core)
    search.effort.spend(variables=search.num_variables)
    reduction, core = reduce_and_eliminate(graph)
    search.report(
        f"reductions: {variables} variables, {states} states -> core of "
        f"{len(graph.core)} variables, {len(reduction.eliminated)} components finished exactly, "
        f"{len(core.core)} variables left; {graph.tables.num_products} distinct products"
    )
    search.bound = core.offset
    solved = not core.core
    start, layers = solve_folded(search, (reduction,), core, max_rounds)
    if start is None and search.similar is not None:
        start = search.similar.restore
    bounded = bound_and_fix(search, (reduction,), core, max_rounds, start, layers)
    search.bound = min(bounded.bound, search.incumbent_cost)
    if not solved:
        search.report("messages and blocks")
    if may_branch and bounded.core is not None and not search.out_of_time:
        search.bound = min(max(search.bound, branch(search, bounded)), search.incumbent_cost)
        search.report("branching")


def branch(search: SearchState, root: BoundedCore) -> float:
    """Split the most undecided variable's states, least bound first, until closed or out of time; the bound proved."""
    count = 0
    open_nodes: list[tuple[float, int, BoundedCore]] = [(root.bound, count, root)]
    while open_nodes:
        bound, _, node = open_nodes[0]
        if search.gap_closed(bound) or search.out_of_time:
            break
        heapq.heappop(open_nodes)
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
    return min((n[0] for n in open_nodes), default=search.incumbent_cost)


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
