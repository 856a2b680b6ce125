"""Edges that one operator has exchanged and another reads again: sent once.

Problem.  A convolution cut along space gets its neighbours' edges, and the gradient of its kernel reads the same rows of the
same tensor. What arrived for the first serves the second, if it is kept until then: a few rows a block. In a network of
convolutions this is a third of all that is sent.

Idea.  Of the operators that read a tensor in one scope (`_program/scopes.py`) with equal windows (`BlockReads`), the
first is the one that sends. A later one sends nothing in the states in which both read the tensor in one layout and
exchange along the same dimensions: its exchange is a table between the two variables, zero there.

Of several later ones each is compared with the first alone, so the cost of a plan is still a sum over pairs: it counts what
its schedule sends (`Assignment.kept_edges`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.layout import MeshAxes
from jshard._core.topology import Topology
from jshard._network.candidates import CandidateSet
from jshard._network.operator_cost import costed_internal_collectives
from jshard._program.graph import Program
from jshard._rules.rule import Rule


class SharedExchange(NamedTuple):
    """Two operators whose exchanges of edges of one tensor may be one; `operand`, `first_operand`: which of theirs it is."""

    op: int
    operand: int
    first: int
    first_operand: int


def shared_exchanges(program: Program, candidates: Sequence[CandidateSet]) -> tuple[SharedExchange, ...]:
    """The pairs of a program, in the order of the later operators; `candidates` are those of each operator."""
    exchanging = {id(s) for s in {id(s): s for s in candidates}.values() if _exchanged_operands(s.rule)}
    first: dict[Hashable, tuple[int, int]] = {}
    out = []
    a, scopes = program.use_def, program.scopes.use_scope
    for op, s in enumerate(candidates):
        if id(s) not in exchanging or program.operators[op].kind != "eqn":
            continue
        for operand, windows in _exchanged_operands(s.rule).items():
            tensor = program.operators[op].operands[operand]
            if not isinstance(tensor, int):
                continue
            uses = range(int(a.use_begin[op]), int(a.use_begin[op + 1]))
            (scope,) = {int(scopes[u]) for u in uses if a.use_operand[u] == operand}
            # What stands outside the tensor, and so in corners, depends on the primitive and what it selects by.
            kind = (s.op.primitive, str(s.op.params.get("select_prim"))) if s.op is not None else None
            sender = first.setdefault((tensor, scope, windows, kind), (op, operand))
            if sender[0] != op:
                out.append(SharedExchange(op, operand, *sender))
    return tuple(out)


def _exchanged_operands(rule: Rule) -> Mapping[int, frozenset[Hashable]]:
    """The operands of which a rule sends edges and nothing else, with the windows that read them."""
    sent: dict[int, set[Hashable]] = {}
    for one in rule.internal:
        if one.operand is not None:
            sent.setdefault(one.operand, set()).add(None if one.reads is None else (one.dim, one.reads))
    return {k: frozenset(windows) for k, windows in sent.items() if None not in windows}


def exchange_in_state(s: CandidateSet, operand: int, state: int, mesh: MeshAxes) -> Hashable:
    """What is exchanged of an operand in a state: its layout, and the axes of each dimension; None for nothing."""
    candidate = s.candidates[state]
    if candidate is None:
        return None
    cuts = [
        (one.dim, one.reads, candidate.cut(one.over, mesh))
        for one in s.rule.internal
        if one.operand == operand and one.over is not None
    ]
    sent = tuple((dim, reads, axes) for dim, reads, axes in cuts if mesh.size(*axes) > 1)
    return (s.operands[operand].layout(state), sent) if sent else None


def exchange_seconds(s: CandidateSet, operand: int, topology: Topology) -> np.ndarray:
    """(states,) seconds of exchanging an operand's edges in one run."""
    out = np.zeros(len(s))
    assert s.op is not None
    for k, c in enumerate(s.candidates):
        if c is not None and exchange_in_state(s, operand, k, topology.mesh) is not None:
            sent = costed_internal_collectives(s.rule, c, s.op, topology)
            out[k] = sum(cost.seconds * one.count for one, cost in sent if one.operand == operand)
    return out


def shared_exchange_table(
    pair: SharedExchange, candidates: Sequence[CandidateSet], topology: Topology
) -> np.ndarray:
    """Seconds of the later operator's exchange in one run, zero where the first has sent the same.

    Of the shape (states of the first, states of the later one).
    """
    first, later = candidates[pair.first], candidates[pair.op]
    sent = [exchange_in_state(first, pair.first_operand, k, topology.mesh) for k in range(len(first))]
    read = [exchange_in_state(later, pair.operand, k, topology.mesh) for k in range(len(later))]
    ids: dict[Hashable, int] = {}
    a = np.array([ids.setdefault(x, len(ids)) for x in sent])
    b = np.array([ids.setdefault(x, len(ids)) for x in read])
    return np.where(a[:, None] == b[None, :], 0.0, exchange_seconds(later, pair.operand, topology)[None, :])
