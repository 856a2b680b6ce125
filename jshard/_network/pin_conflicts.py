"""Which pins contradict each other, and where they meet, when only the search finds that they do.

A contradiction is met where the last choices of some variables of the network vanish. The pins behind it are the
nearest ones, counted in edges from there; the error names them and the place as the user knows them.
"""

from __future__ import annotations

from collections.abc import Collection

from jshard._core.errors import SearchError
from jshard._network.build import Pins, PlanningNetwork
from jshard._network.candidates import describe_pin
from jshard._program.graph import operator_name
from jshard._search import Contradiction


def explain_contradiction(error: Contradiction, built: PlanningNetwork, pins: Pins) -> SearchError:
    """The contradiction in words of the program."""
    mine = {op: [p for p in each if not isinstance(p[2], str) or "cut" in p[2]] for op, each in pins.items()}
    near = _nearest_pins(error.variables, built, {op for op, each in mine.items() if each})
    said = [f"{_variable_name(built, op)} ({describe_pin(mine[op][0][2])})" for op in near]
    places = dict.fromkeys(_variable_name(built, v) for v in error.variables if v not in near)
    where = "they meet at " + ", ".join(list(places)[:3]) if places else "they meet in one tensor"
    if {tuple(sorted(near))} & {tuple(sorted(e)) for e in built.cost_network.edges.tolist()}:
        where = "a result that is an argument's next value lies as that argument does"
    what = {
        0: "nothing keeps all that the program asks for",
        1: "the pin of " + "".join(said) + " cannot be kept",
    }.get(len(said), "the pins of " + " and ".join(said) + " contradict each other")
    return SearchError(
        what,
        where=where,
        fix="leave one of them None, or free a dimension of it",
    )


def _nearest_pins(variables: Collection[int], built: PlanningNetwork, pinned: Collection[int]) -> list[int]:
    """At most two pinned operators, the nearest to some variables."""
    near: dict[int, set[int]] = {}
    for i, j in built.cost_network.edges.tolist():
        near.setdefault(i, set()).add(j)
        near.setdefault(j, set()).add(i)
    seen, ring, found = set(variables), sorted(v for v in variables if v < built.cost_network.size), []
    while ring and len(found) < 2:
        found += [v for v in ring if v in pinned]
        ring = sorted({w for v in ring for w in near.get(v, ())} - seen)
        seen.update(ring)
    return found[:2]


def _variable_name(built: PlanningNetwork, variable: int) -> str:
    operators = built.program.operators
    if variable < len(operators):
        op = operators[variable]
        kind = {"input": "argument ", "output": "result "}.get(op.kind, "")
        return f"{kind}{operator_name(op)} {op.source}".strip()
    tensor = next((t for t, v in built.relay_variable.items() if v == variable), None)
    return "a copy" if tensor is None else f"{built.program.tensors[tensor].name}, as its readers share it"
