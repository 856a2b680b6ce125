"""Where a backward pass through the layers of a pipeline runs outside of it, and why.

The forward loop may become a pipeline and the backward pass not: its layers couple the examples, or are not alike. Such a
program is right, and its backward pass is planned as if there were no stages; the plan says so. An equation of the backward
pass that reads parameters of the layers and makes values per example is one of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jshard._batch.batch_class import SHARED, BatchClass, CoupledError, described
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.loop_parts import loop_parts
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn


_MOVES = frozenset(
    ("slice", "squeeze", "dynamic_slice", "reshape", "broadcast_in_dim", "expand_dims", "concatenate", "stack",
     "convert_element_type", "transpose", "name", "copy")
)  # fmt: skip
"""Primitives whose results are parameters if their operands are."""


def layers_outside(
    jaxpr: Jaxpr, loops: Collection[int], classes: Mapping[JaxprAtom, BatchClass], analysis: Analysis
) -> str:
    """The first equation of such a backward pass, with its line and the reason; empty without one.

    `loops`: positions of the loops over ticks; `classes`: of all values.
    """
    parameters = _parameters(jaxpr, loops, classes)
    for k, eqn in enumerate(jaxpr.eqns):
        if k in loops or eqn.primitive.name in _MOVES or not compat.is_backward("", eqn):
            continue
        operands = [class_in(classes, v) for v in eqn.invars]
        if _variables(eqn.invars).isdisjoint(parameters) or not any(c.is_example for c in operands):
            continue
        if eqn.primitive.name == "scan" or any(classes[v].is_example for v in eqn.outvars):
            return _reason(eqn, operands, analysis)
    return ""


def _reason(eqn: JaxprEqn, operands: list[BatchClass], analysis: Analysis) -> str:
    try:
        analysis.cut(eqn, operands)
        if eqn.primitive.name == "scan":
            loop_parts(eqn, operands, analysis)
    except CoupledError as error:
        return str(error)
    return f"{described(eqn)}: no loop over layers as the forward pass has"


def _parameters(
    jaxpr: Jaxpr, loops: Collection[int], classes: Mapping[JaxprAtom, BatchClass]
) -> set[JaxprAtom]:
    """What the loops read a slice of in each layer, parts of it and what it is made of."""
    out: set[JaxprAtom] = set()
    for k in loops:
        first = sum(compat.scan_split(jaxpr.eqns[k].params))
        out |= {v for v in _variables(jaxpr.eqns[k].invars[first:]) if classes[v] == SHARED}
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    waiting = list(out)
    while waiting:
        eqn = made_by.get(waiting.pop())
        if eqn is not None and eqn.primitive.name in _MOVES:
            new = _variables(eqn.invars) - out
            out |= new
            waiting += new
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVES and not _variables(eqn.invars).isdisjoint(out):
            out.update(eqn.outvars)
    return out


def _variables(atoms: Iterable[JaxprAtom]) -> set[JaxprAtom]:
    return {v for v in atoms if not compat.is_literal(v)}
