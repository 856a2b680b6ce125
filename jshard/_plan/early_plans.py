"""Plans before the search under a budget: in one pass over the operators, each as it is cheapest beside those before it.

Problem.  A search under a budget first finds the plan of least time, which exceeds it, and builds a network with memory.
Until then no plan is known that an interruption could return.

Idea.  At a price for every byte that an operator reads or writes on a device, as if it passed so many times through the
device's memory, one greedy pass gives a plan of little memory; which price gives the least differs from program to program.
The passes take little beside any search, and each plan is measured on its schedule. Near the least peak none of these fits:
there the search for that peak begins, and its first answer is combined with the plan of least time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import with_copies
from jshard._plan.memory_ties import assignment_of_solution
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import ScheduledSolution, schedule_solution
from jshard._search import LARGE_NETWORK, CostNetwork, Effort, evaluate
from jshard._search.cost_network import ArrayPool
from jshard._search.primal.greedy import greedy_assignment


_PASSES = (3.0, 10.0, 100.0)  # times that a byte passes through memory: its price in each plan


def is_large_and_limited(network: PlanningNetwork, request: PlanRequest) -> bool:
    """Whether plans are looked for within a budget of a program whose every search takes long."""
    limited = request.memory_limit is not None and request.search_in_budget and request.most == math.inf
    return limited and network.cost_network.size >= LARGE_NETWORK


def early_plan(network: PlanningNetwork, request: PlanRequest) -> ScheduledSolution | None:
    """The first of these plans that is within the budget of the request; None where none is.

    Arguments as for `early_plans`.
    """
    limit = request.memory_limit
    assert limit is not None
    for plan in early_plans(network, request):
        if plan.peak <= limit:
            return plan
    return None


def early_plans(network: PlanningNetwork, request: PlanRequest) -> Iterator[ScheduledSolution]:
    """Plans of little memory, each by one greedy pass; nothing is proved of them.

    Arguments:

    - `network`: of the request, without memory.
    """
    order = [
        v
        for op in network.program.operators
        for v in (op.id, *(network.relay_variable[r] for r in op.results if r in network.relay_variable))
    ]
    nbytes = _bytes_by_state(network)
    for passes in _PASSES:
        price = passes / network.topology.chip.hbm_bandwidth
        assignment = greedy_assignment(_priced(network.cost_network, nbytes, price), order)
        if np.isfinite(evaluate(network.cost_network, assignment)):
            yield schedule_solution(network, request, assignment, 0.0, (), may_break_ties=False)


def low_memory_plans(
    network: PlanningNetwork, memory: CostNetwork, fastest: ScheduledSolution, effort: Effort
) -> tuple[list[ScheduledSolution], list[Ints]]:
    """A plan of little memory, and answers of the estimating memory network that a search can begin with.

    The plan is the first that is within the budget of the request, of the last of those answers where none is.

    Arguments:

    - `network`: with a single shared copy a tensor; `memory`: the memory network of it.
    - `fastest`: a plan of nearly least time, with which answers of little memory are combined.
    """
    from jshard._search.memory.feasible_start import answers_within  # here: the import stays light

    request, size = fastest.request, network.cost_network.size
    assert request.memory_limit is not None and memory.memory is not None
    limited = dataclasses.replace(
        memory, memory=dataclasses.replace(memory.memory, limit=request.memory_limit)
    )
    answers = answers_within(limited, with_copies(memory, assignment_of_solution(fastest)[:size]), effort)
    for x in reversed(answers):
        plan = schedule_solution(network, request, x, fastest.bound, ())
        if plan.peak <= request.memory_limit:
            return [plan], answers
    return [], answers


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
