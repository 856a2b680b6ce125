"""Which pins contradict each other, and where, when only the search finds that they do.

A contradiction appears where some variables of the network have no state left. The pins behind it are the nearest ones,
counted in edges from there; the error names them and the place as the user knows them.
"""

from __future__ import annotations

from collections.abc import Collection

from jshard._core.errors import SearchError
from jshard._network.build import Pins, PlanningNetwork
from jshard._network.candidates import describe_pin
from jshard._program.graph import operator_name
from jshard._search import Contradiction


def explain_contradiction(error: Contradiction, network: PlanningNetwork, pins: Pins) -> SearchError:
    """The error for a contradiction that the search found, in terms of the program."""
    # Keys that are text are the planner's own ("no partial sum"), except the cuts that `Plan.why` forces.
    by_user = {
        op: [key for _, _, key, _ in of_op if not isinstance(key, str) or "cut" in key]
        for op, of_op in pins.items()
    }
    nearest = _nearest_pins(error.variables, network, {op for op, keys in by_user.items() if keys})
    names = [f"{_variable_name(network, op)} ({describe_pin(by_user[op][0])})" for op in nearest]
    places = dict.fromkeys(_variable_name(network, v) for v in error.variables if v not in nearest)
    where = "they meet at " + ", ".join(list(places)[:3]) if places else "they meet in one tensor"
    if {tuple(sorted(nearest))} & {tuple(sorted(e)) for e in network.cost_network.edges.tolist()}:
        where = "a result that is an argument's next value lies as that argument does"
    what = {
        0: "nothing keeps all that the program asks for",
        1: "the pin of " + "".join(names) + " cannot be kept",
    }.get(len(names), "the pins of " + " and ".join(names) + " contradict each other")
    return SearchError(
        what,
        where=where,
        fix="leave one of them None, or free a dimension of it",
    )


def _nearest_pins(variables: Collection[int], network: PlanningNetwork, pinned: Collection[int]) -> list[int]:
    """At most two pinned operators, the nearest to some variables by breadth-first search."""
    neighbours: dict[int, set[int]] = {}
    for i, j in network.cost_network.edges.tolist():
        neighbours.setdefault(i, set()).add(j)
        neighbours.setdefault(j, set()).add(i)
    nearest: list[int] = []
    seen, ring = set(variables), sorted(v for v in variables if v < network.cost_network.size)
    while ring and len(nearest) < 2:
        nearest += [v for v in ring if v in pinned]
        ring = sorted({w for v in ring for w in neighbours.get(v, ())} - seen)
        seen.update(ring)
    return nearest[:2]


def _variable_name(network: PlanningNetwork, variable: int) -> str:
    operators = network.program.operators
    if variable < len(operators):
        op = operators[variable]
        kind = {"input": "argument ", "output": "result "}.get(op.kind, "")
        return f"{kind}{operator_name(op)} {op.source}".strip()
    tensor = next((t for t, v in network.relay_variable.items() if v == variable), None)
    return "a copy" if tensor is None else f"{network.program.tensors[tensor].name}, as its readers share it"
