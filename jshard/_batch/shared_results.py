"""Shared results of calls and branches whose other results are per example, computed beside them.

A checkpointed layer is one call: its backward pass returns the cotangent of an auxiliary loss as it came in, its forward
pass the next key of random numbers. Both are carries that no example enters, which a pipeline computes before it begins, so
the equations that make them are written out before the call. The call stays as it was. Of branches these results, which
read no example either, get a `cond` of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from jshard._batch.batch_class import SHARED
from jshard._batch.body_classes import BodyCut
from jshard._batch.operator_cut import OperatorCut
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import Place, with_bodies
from jshard._program.inlining import fresh, substituted
from jshard._program.loop_invariants import CHECKPOINTED


def with_shared_results_outside(jaxpr: Jaxpr, cuts: Mapping[int, OperatorCut]) -> Jaxpr:
    """The jaxpr with such results computed outside; the same object where there are none. `cuts`: by position."""
    env: dict[JaxprAtom, JaxprAtom] = {}
    eqns: list[JaxprEqn] = []
    used = {v for e in jaxpr.eqns for v in e.invars if not compat.is_literal(v)}
    used.update(v for v in jaxpr.outvars if not compat.is_literal(v))
    for k, eqn in enumerate(jaxpr.eqns):
        operands, results = substituted(eqn.invars, env), list(eqn.outvars)
        cut = cuts.get(k)
        classes = () if cut is None else cut.results
        shared = [i for i, c in enumerate(classes) if c == SHARED and results[i] in used]
        if isinstance(cut, BodyCut) and eqn.primitive.name in CHECKPOINTED:
            (body,) = cut.bodies
            if shared and any(c != SHARED for c in classes) and not body.consts:
                inner = dict(zip(body.jaxpr.invars, operands, strict=True))
                _write_out(body.jaxpr, [body.jaxpr.outvars[i] for i in shared], inner, eqns)
                found = substituted([body.jaxpr.outvars[i] for i in shared], inner)
                env.update(zip([results[i] for i in shared], found, strict=True))
        elif isinstance(cut, BodyCut) and eqn.primitive.name == "cond":
            if shared and any(c != SHARED for c in classes):
                alone = _alone(eqn, cut, operands, shared)
                env.update(zip([results[i] for i in shared], alone.outvars, strict=True))
                eqns.append(alone)
        for i in shared:
            if results[i] in env:
                (results[i],) = fresh([results[i]])
        eqns.append(eqn.replace(invars=operands, outvars=results))
    return jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env)) if env else jaxpr


def _alone(eqn: JaxprEqn, cut: BodyCut, operands: list[JaxprAtom], wanted: list[int]) -> JaxprEqn:
    """Branches with some shared results only, of the operands that are shared."""
    read = [n for n, c in enumerate(cut.operands) if c == SHARED]

    def rewrite(place: Place, body: Jaxpr) -> Jaxpr:
        live = compat.without_dead_code(body.replace(outvars=[body.outvars[i] for i in wanted]))
        return live.replace(invars=[live.invars[n - 1] for n in read if n])

    new = with_bodies(eqn, rewrite)
    return new.replace(invars=[operands[n] for n in read], outvars=fresh([eqn.outvars[i] for i in wanted]))


def _write_out(
    body: Jaxpr, wanted: list[JaxprAtom], env: dict[JaxprAtom, JaxprAtom], eqns: list[JaxprEqn]
) -> None:
    """Append the equations of a body that some values need; `env` replaces its inputs, then what they compute."""
    read = {v for v in wanted if not compat.is_literal(v)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(body.eqns):
        if any(v in read for v in eqn.outvars):
            kept.append(eqn)
            read.update(v for v in eqn.invars if not compat.is_literal(v))
    for eqn in reversed(kept):
        operands, results = substituted(eqn.invars, env), fresh(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=results))
