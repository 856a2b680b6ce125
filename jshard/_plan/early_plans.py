"""Plans before the search under a budget: of least time where every byte that an operator reads or writes has a price.

Problem.  A search under a budget first finds the plan of least time, which exceeds it, and builds a network with memory.
Until then no plan is known that an interruption could return.

Idea.  At a price for every byte that an operator reads or writes on a device, as if it passed some times more through the
device's memory, the network without memory has an answer of little memory, whose time is often within a hundredth or two
of the least; it is measured on its schedule. Combined with the plan of least time it is mostly as good as what the search
under the budget finds. Near the least peak it does not fit: there the search for that peak begins, and its first answer is
combined with the plan of least time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network, with_copies
from jshard._plan.memory_ties import assignment_of_solution
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import ScheduledSolution, best_within, schedule_solution
from jshard._program.graph import Program
from jshard._program.memory.list_scheduling import live_bytes_curve
from jshard._program.memory.liveness import liveness
from jshard._search import LARGE_NETWORK, CostNetwork, Effort, Prices, evaluate, peak
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import ArrayPool
from jshard._search.exact.reduce_batched import starting_network
from jshard._search.primal.greedy import greedy_assignment
from jshard._search.search_state import SearchState


_PASSES = 3.0  # times that a byte passes through memory: its price
_GAP = 0.001  # of the answer's cost at these prices, which are a guess
_ROUNDS = 6  # of message passing
# Of a budget: where a device's share of all arrays is less, the plan of least time is likely to fit, and where it is more,
# few plans do: this one held 4 to 7% more than that share in four language models of 8 to 70 billion weights, GPT 83% more.
_LOOSE, _TIGHT = 0.5, 0.96


def is_large_and_limited(program: Program, request: PlanRequest) -> bool:
    """Whether plans are looked for within a budget of a program whose every search takes long."""
    limited = request.memory_limit is not None and request.search_in_budget and request.most == math.inf
    return limited and len(program.operators) >= LARGE_NETWORK


def is_estimated(program: Program, request: PlanRequest) -> bool:
    """Whether the early plan will do: an estimate was asked for, of a program whose every search takes long."""
    return request.estimate and request.level != 1 and len(program.operators) >= LARGE_NETWORK


def least_share(network: PlanningNetwork, request: PlanRequest) -> float:
    """Of a request's budget: what a device holds at the peak if every array is cut over all devices."""
    program, mesh = network.program, network.topology.mesh
    whole = live_bytes_curve(program, liveness(program, request.donated)).max(initial=0.0)
    return float(whole) / mesh.size(*mesh.names) / (request.memory_limit or math.inf)


def early_plan(network: PlanningNetwork, request: PlanRequest, effort: Effort) -> ScheduledSolution | None:
    """A plan of little memory; nothing is proved of it. None where none was found, or is likely to be within the budget.

    Where the budget may bind, or is below each device's share of all arrays (the plan is then for the refusal), it is
    searched for a while, and so is an estimate; else one pass over the operators gives it, each as it is cheapest beside
    those before it.

    Arguments:

    - `network`: of the request, without memory.
    - `effort`: ends the search when it is spent.
    """
    share = least_share(network, request)
    if _TIGHT < share <= 1.0 and not request.estimate:
        return None
    priced = _priced(
        network.cost_network, _bytes_by_state(network), _PASSES / network.topology.chip.hbm_bandwidth
    )
    if share > _LOOSE or request.estimate:
        search = SearchState(math.inf, _GAP, lambda _: None, priced.size, effort=effort, forest_moves=0)
        graph = starting_network(priced)
        branch_and_bound(search, graph, max_rounds=_ROUNDS, may_branch=False, answer_only=True)
        assignment = search.assignment
    else:
        order = [
            v
            for op in network.program.operators
            for v in (
                op.id, *(network.relay_variable[r] for r in op.results if r in network.relay_variable)
            )
        ]  # fmt: skip
        assignment = greedy_assignment(priced, order)
    if assignment is None or not np.isfinite(evaluate(network.cost_network, assignment)):
        return None
    return schedule_solution(network, request, assignment, 0.0, (), may_break_ties=False)


@dataclasses.dataclass(frozen=True, eq=False)
class BudgetStart:
    """What a search under a budget begins with.

    - `estimating`: the estimating memory network, if it was built.
    - `plans`: known so far, within the budget. `answers`: of the estimating network, the last the best.
    - `prices`: with what they prove of the lower-bound network; None where none were tried.
    - `bound`: that no plan within the budget costs less than.
    """

    estimating: CostNetwork | None = None
    plans: tuple[ScheduledSolution, ...] = ()
    answers: tuple[Ints, ...] = ()
    prices: Prices | None = None
    bound: float = -math.inf

    def near_bound(self, limit: float, gap: float) -> ScheduledSolution | None:
        """The cheapest plan within a limit if its cost is within a relative gap of the bound."""
        best = best_within(self.plans, limit)
        near = best is not None and best.cost <= self.bound * (1 + gap)
        return dataclasses.replace(best, bound=self.bound) if best is not None and near else None


def budget_start(
    network: PlanningNetwork,
    fastest: ScheduledSolution,
    known: ScheduledSolution | None,
    gap: float,
    effort: Effort,
    bounding: Callable[[], CostNetwork],
) -> BudgetStart:
    """A plan of little memory, and answers of the estimating memory network that a search can begin with.

    The plan is the first that is within the budget of the request, of the last of those answers where none is. Prices are
    tried on the lower-bound memory network, whose bound holds for every plan, and on the estimating one only where none of
    those answers, combined, keeps the budget by that.

    Arguments:

    - `network`: with a single shared copy a tensor.
    - `bounding`: gives its lower-bound memory network, which need not be built where a plan is known.
    - `fastest`: a plan of nearly least time, with which answers of little memory are combined.
    - `known`: a plan within the budget, where there is one; of a cost within `gap` of the bound nothing more is looked for.
    """
    if known is not None and known.cost <= fastest.bound * (1 + gap):
        return BudgetStart(plans=(known,), bound=fastest.bound)
    from jshard._search.memory.feasible_start import (  # here: the import stays light
        answers_within,
        first_answers,
        with_better_prices,
    )
    from jshard._search.memory.price_cuts import PricedNetworks

    request, size = fastest.request, network.cost_network.size
    assert request.memory_limit is not None
    limit, memory = request.memory_limit, memory_network(network)
    limited, bound, prices = memory.within(limit), fastest.bound, None
    cheapest = assignment_of_solution(fastest)[:size]
    free = with_copies(memory, cheapest)
    solver: PricedNetworks | None = None

    def combined(given: Sequence[Ints], prices_only: bool = False) -> list[Ints]:
        given = [with_copies(memory, x[:size]) for x in given]
        return answers_within(limited, free, given, effort=effort, bound=bound, prices_only=prices_only)

    if known is None:
        solver = PricedNetworks(bounding().within(limit))
        first = first_answers(solver, fastest.cost, effort=effort)
        given, prices = first
        bound = max(bound, prices.proved_cost(limit))
        answers = combined(given, prices_only=True)
        if not _is_near(limited, answers, bound, gap):
            unlimited = with_copies(solver.network, cheapest)
            given, prices = with_better_prices(solver, unlimited, first, gap, effort=effort)
            bound = max(bound, prices.proved_cost(limit))
            answers = combined(given)
    else:
        given = [assignment_of_solution(known)]
        answers = combined(given)
    if not effort.exhausted and all(peak(limited, x) > limit for x in answers):
        of_limited = PricedNetworks(limited, begun=solver)
        more = first_answers(of_limited, fastest.cost, effort=effort, prices=prices)
        answers = combined([*given, *more.assignments])
    plans = [known] if known is not None else []
    for x in reversed(answers):
        plan = schedule_solution(network, request, x, bound, ())
        if plan.peak <= limit:
            plans.append(plan.after(fastest))
            break
    return BudgetStart(memory, tuple(plans), tuple(answers), prices, bound)


def _is_near(network: CostNetwork, answers: Sequence[Ints], bound: float, gap: float) -> bool:
    """Whether one of some answers keeps the limit at a cost near a bound."""
    memory = network.memory
    assert memory is not None and memory.limit is not None
    fitting = [evaluate(network, x) for x in answers if peak(network, x) <= memory.limit]
    return min(fitting, default=math.inf) <= bound * (1 + gap)


def _bytes_by_state(network: PlanningNetwork) -> list[Floats]:
    """For every variable, by state, the bytes that its operator reads and writes on a device, or that it stores."""
    mesh, tensors = network.topology.mesh, network.program.tensors
    out: list[Floats] = [np.zeros(0)] * network.cost_network.size
    known: dict[tuple, Floats] = {}
    for op in network.program.operators:
        candidates = network.candidates[op.id]
        sizes = [tensors[a].nbytes if isinstance(a, int) else 0 for a in op.operands]
        sizes += [tensors[r].nbytes for r in op.results]
        key = (id(candidates), *sizes)
        if key not in known:
            sides = (*candidates.operands, *candidates.results)
            blocks = [n / side.num_shards(mesh) for n, side in zip(sizes, sides, strict=True)]
            known[key] = np.sum([np.zeros(len(candidates)), *blocks], axis=0)
        out[op.id] = known[key]
    for tensor, v in network.relay_variable.items():
        relay, size = network.relays[tensor], tensors[tensor].nbytes
        key = (id(relay), size)
        if key not in known:
            known[key] = size / relay.num_shards(mesh)
        out[v] = known[key]
    return out


def _priced(network: CostNetwork, nbytes: list[Floats], price: float) -> CostNetwork:
    """The network with a price on the bytes of every variable's states."""
    unary = ArrayPool()
    known: dict[tuple[int, int], int] = {}
    nodes = []
    for node, of_variable in zip(network.node_table.tolist(), nbytes, strict=True):
        key = (node, id(of_variable))
        if key not in known:
            known[key] = unary(network.unary[node] + price * of_variable)
        nodes.append(known[key])
    return dataclasses.replace(network, unary=tuple(unary.arrays), node_table=np.array(nodes, dtype=np.int64))
