"""Sums over the batch that are made from some inputs of a body alone, and the equations that make them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.body_walk import divided_call, with_call_divided
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.common_subexpressions import ValueNumbering, literal_value
from jshard._program.inlining import fresh, substituted
from jshard._program.loop_invariants import CHECKPOINTED, INLINED_CALLS


WRITTEN_OUT = frozenset((*INLINED_CALLS, *CHECKPOINTED))
"""Calls that are written out in a body whose sums are looked for."""


def free_sums(
    body: Jaxpr, classes: Mapping[JaxprAtom, BatchClass], analysis: Analysis
) -> tuple[Jaxpr, list[JaxprAtom]]:
    """The body with branches divided, and its sums over examples made from the inputs in `classes` alone.

    Only sums that others than such sums read.
    """
    body, classes = with_branches_divided(body, classes, analysis), dict(classes)
    free: list[JaxprEqn] = []
    for eqn in body.eqns:
        if eqn.effects or not all(compat.is_literal(v) or v in classes for v in eqn.invars):
            continue
        try:
            results = analysis.cut(eqn, [class_in(classes, v) for v in eqn.invars]).results
        except CoupledError:
            continue
        classes.update(zip(eqn.outvars, results, strict=True))
        if SUM in results:
            free.append(eqn)
    inside = {id(e) for e in free}
    read = {v for e in body.eqns if id(e) not in inside for v in e.invars if not compat.is_literal(v)}
    read.update(v for v in body.outvars if not compat.is_literal(v))
    return body, [v for e in free for v in e.outvars if v in read and classes[v] == SUM]


def with_branches_divided(
    body: Jaxpr, classes: Mapping[JaxprAtom, BatchClass], analysis: Analysis, finished: bool = False
) -> Jaxpr:
    """The body with branches divided that compute with finished sums, as far as they need the inputs in `classes` alone.

    `finished`: sums are whole where values per example read them.
    """
    known, k = dict(classes), 0
    while k < len(body.eqns):
        eqn, k = body.eqns[k], k + 1
        if eqn.effects or not all(compat.is_literal(v) or v in known for v in eqn.invars):
            continue
        operands = [class_in(known, v) for v in eqn.invars]
        if finished and any(c.is_example for c in operands):
            operands = [SHARED if c == SUM else c for c in operands]
        try:
            known.update(zip(eqn.outvars, analysis.cut(eqn, operands).results, strict=True))
        except CoupledError:
            is_divided = eqn.primitive.name == "cond" and any(c.is_example for c in operands)
            call = divided_call(eqn, operands, analysis) if is_divided else None
            if call is not None:
                body, k = with_call_divided(body, k - 1, call), k - 1
            elif finished:
                known.update(dict.fromkeys(eqn.outvars, SHARED))
    return body


def needed(body: Jaxpr, wanted: Sequence[JaxprAtom]) -> tuple[list[JaxprEqn], set[JaxprAtom]]:
    """The equations that some values need, in order, and all that they read."""
    read, kept = set(wanted), []
    for eqn in reversed(body.eqns):
        if any(v in read for v in eqn.outvars):
            kept.append(eqn)
            read.update(v for v in eqn.invars if not compat.is_literal(v))
    return kept[::-1], read


def written_again(
    made_by: Sequence[JaxprEqn], env: dict[JaxprAtom, JaxprAtom], known: KnownEquations, eqns: list[JaxprEqn]
) -> None:
    """Append equations with their variables replaced by `env`, which gets those of their results.

    An equation equal to a known one is not written again.
    """
    for eqn in made_by:
        same = eqn.replace(invars=substituted(eqn.invars, env), outvars=fresh(eqn.outvars))
        results = known.results_of(same)
        if results is None:
            results = same.outvars
            known.add(same)
            eqns.append(same)
        env.update(zip(eqn.outvars, results, strict=True))


class KnownEquations:
    """The equations of a program or a body, to find one that is equal to another."""

    def __init__(self, eqns: Iterable[JaxprEqn] = ()):
        self.numbering = ValueNumbering()
        self.number: dict[JaxprAtom, int] = {}
        self.variables: list[JaxprAtom] = []
        self.gradients: set[JaxprAtom] = set()
        for eqn in eqns:
            self.add(eqn)

    def add(self, eqn: JaxprEqn) -> None:
        """Record an equation."""
        _, key = self.numbering.lookup(eqn, self._operands(eqn))
        self.numbering.record(eqn, key, [self._number(v) for v in eqn.outvars])
        if compat.is_backward("", eqn):
            self.gradients.update(eqn.outvars)

    def is_gradient(self, v: JaxprAtom) -> bool:
        """Whether an equation of a backward pass made a value."""
        return v in self.gradients

    def results_of(self, eqn: JaxprEqn) -> list[JaxprAtom] | None:
        """The results of an equal equation, if there is one."""
        found, _ = self.numbering.lookup(eqn, self._operands(eqn))
        return None if found is None else [self.variables[k] for k in found if isinstance(k, int)]

    def _operands(self, eqn: JaxprEqn) -> list[Hashable]:
        return [literal_value(v.val, v.aval) if compat.is_literal(v) else self._number(v) for v in eqn.invars]

    def _number(self, v: JaxprAtom) -> int:
        if v not in self.number:
            self.number[v] = len(self.variables)
            self.variables.append(v)
        return self.number[v]
