"""The equations of a body that run on pieces of the batch, and those that wait for its finished sums.

A checkpointed layer is one call. If of its results only some wait for finished sums (the auxiliary loss of its experts, a
product of two sums over the batch; an extreme over it), the call is divided: what is per example stays in a checkpointed
call, which returns the sums, and what is computed from them follows it. So are branches (`divided_branches.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.divided_branches import DividedCall, WalkedBranch, divided_branches
from jshard._batch.extremes import extreme_of_each, is_extreme
from jshard._batch.operator_cut import OperatorCut
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh, substituted
from jshard._program.loop_invariants import CHECKPOINTED


class DividedCallError(Exception):
    """Signals that the call at a position couples the examples, and does not once divided; handled inside this package."""

    def __init__(self, position: int, call: DividedCall):
        super().__init__(f"the call at {position} is divided")
        self.position, self.call = position, call


class Walk:
    """The body's equations in order: their cuts, or late, computed from finished sums.

    Raises `CoupledError` where an equation couples the examples, `DividedCallError` where only a part of a call does.
    """

    def __init__(
        self, jaxpr: Jaxpr, inputs: Sequence[BatchClass], late: Iterable[JaxprAtom], analysis: Analysis
    ):
        self.jaxpr = jaxpr
        self.classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
        self.classes.update(zip(jaxpr.invars, inputs, strict=True))
        self.late = set(late)
        self.late_eqns: set[int] = set()
        self.cuts: dict[int, OperatorCut] = {}
        for k, eqn in enumerate(jaxpr.eqns):
            self._add(k, eqn, analysis)

    def _add(self, k: int, eqn: JaxprEqn, analysis: Analysis) -> None:
        classes = [class_in(self.classes, v) for v in eqn.invars]
        reads_late = any(v in self.late for v in eqn.invars if not compat.is_literal(v))
        if reads_late and any(c.is_example for c in classes):
            late = [not compat.is_literal(v) and v in self.late for v in eqn.invars]
            call = divided_call(eqn, classes, analysis, late)
            if call is not None:
                raise DividedCallError(k, call)
            raise CoupledError(eqn, "it combines a sum over all examples with values per example")
        if not reads_late:
            try:
                cut = analysis.cut(eqn, classes)
            except CoupledError:
                if any(c.is_example for c in classes) or eqn.effects:
                    call = extreme_of_each(eqn, classes) or divided_call(eqn, classes, analysis)
                    if call is not None:
                        raise DividedCallError(k, call) from None
                    if not is_extreme(eqn, classes):
                        raise
            else:
                self.cuts[k] = cut
                self.classes.update(zip(eqn.outvars, cut.results, strict=True))
                return
        if eqn.effects:
            raise CoupledError(eqn, "it has effects, and reads a sum over examples")
        self.late_eqns.add(k)
        self.late.update(eqn.outvars)
        self.classes.update(dict.fromkeys(eqn.outvars, SHARED))

    def maker(self, v: JaxprAtom, loop: JaxprEqn) -> JaxprEqn:
        """The equation that makes a value; the loop itself for an input of its body."""
        return next((e for e in self.jaxpr.eqns if v in e.outvars), loop)

    def crossing(self) -> tuple[JaxprAtom, ...]:
        """The sums that late equations read."""
        read = [v for k in sorted(self.late_eqns) for v in self.jaxpr.eqns[k].invars]
        return tuple(dict.fromkeys(v for v in read if class_in(self.classes, v) == SUM))

    def crossing_examples(self) -> tuple[JaxprAtom, ...]:
        """The values per example that late equations read, extremes over the batch."""
        read = [v for k in sorted(self.late_eqns) for v in self.jaxpr.eqns[k].invars]
        return tuple(dict.fromkeys(v for v in read if class_in(self.classes, v).is_example))


def divided_call(
    eqn: JaxprEqn, operands: Sequence[BatchClass], analysis: Analysis, late: Sequence[bool] = ()
) -> DividedCall | None:
    """A checkpointed call or branches with operands of some classes, divided; None for others and what stays coupled.

    `late`: which operands of a checkpointed call are computed from finished sums; empty for none.
    """
    if any(late) and eqn.primitive.name not in CHECKPOINTED:
        return None
    if eqn.primitive.name == "cond" and operands[0] == SHARED and not eqn.effects:
        walks = [_walked(b, operands[1:], analysis) for b in eqn.params["branches"]]
        if any(w is not None and w.crossing_examples() for w in walks):
            return None
        branches = [WalkedBranch(w.jaxpr, w.classes, frozenset(w.late_eqns)) for w in walks if w is not None]
        waits = len(branches) == len(walks) and any(b.late_eqns for b in branches)
        return divided_branches(eqn, operands, branches) if waits else None
    if eqn.primitive.name not in CHECKPOINTED:
        return None
    walk = _walked(eqn.params["jaxpr"], operands, analysis, late)
    if walk is None or not walk.late_eqns:
        return None
    body = walk.jaxpr
    waiting = [e for k, e in enumerate(body.eqns) if k in walk.late_eqns]
    given = {*body.invars, *(v for e in waiting for v in e.outvars)}
    read = [v for vs in (body.outvars, *(e.invars for e in waiting)) for v in vs if not compat.is_literal(v)]
    returned = [v for v in dict.fromkeys(read) if v not in given]
    per_example = body.replace(
        eqns=[e for k, e in enumerate(body.eqns) if k not in walk.late_eqns], outvars=returned
    )
    per_example, read_of = compat.live_part(per_example, [True] * len(returned))
    env: dict[JaxprAtom, JaxprAtom] = dict(zip(body.invars, eqn.invars, strict=True))
    env.update(zip(returned, fresh(returned), strict=True))
    eqns = [
        eqn.replace(
            params={**eqn.params, "jaxpr": per_example}, invars=list(itertools.compress(eqn.invars, read_of)),
            outvars=[env[v] for v in returned],
        )
    ]  # fmt: skip
    for inner in waiting:
        env.update(zip(inner.outvars, fresh(inner.outvars), strict=True))
        eqns.append(
            inner.replace(invars=substituted(inner.invars, env), outvars=[env[v] for v in inner.outvars])
        )
    return DividedCall(tuple(eqns), tuple(substituted(body.outvars, env)))


def _walked(
    body: Jaxpr | ClosedJaxpr, operands: Sequence[BatchClass], analysis: Analysis, late: Sequence[bool] = ()
) -> Walk | None:
    """A body walked through, calls in it divided where that is needed; None with constants or where it stays coupled."""
    opened, consts = analysis.open(body)
    if consts or opened.constvars:
        return None
    while True:
        try:
            return Walk(opened, operands, itertools.compress(opened.invars, late), analysis)
        except DividedCallError as error:
            opened = with_call_divided(opened, error.position, error.call)
        except CoupledError:
            return None


def with_call_divided(jaxpr: Jaxpr, position: int, call: DividedCall) -> Jaxpr:
    """The jaxpr with the equation at a position divided."""
    env = dict(zip(jaxpr.eqns[position].outvars, call.results, strict=True))
    rest = [e.replace(invars=substituted(e.invars, env)) for e in jaxpr.eqns[position + 1 :]]
    return jaxpr.replace(
        eqns=[*jaxpr.eqns[:position], *call.eqns, *rest], outvars=substituted(jaxpr.outvars, env)
    )
