"""Equations with bodies that lack results which alike ones have, so that the layers of a program are alike.

The first layer, whose input is data, needs no gradient of it. Under `jax.checkpoint` its backward pass is one call that
lacks this result; a branch or a loop in its forward pass lacks what the backward passes of the others read. Each is another
function with fewer results, perhaps of fewer operands. It becomes the function of another layer, of whose results those are
used that it has. An operand that it does not read is that of the other equation: what is computed from it is not used. One
that would be zero (`zero_operands.py`) is zeros.

>>> import jax, jax.numpy as jnp
>>> def loss(ws, x):
...     for w in ws:
...         x = jax.checkpoint(lambda h, w: h + jnp.tanh(h @ w))(x, w)
...     return jnp.sum(x)
>>> traced = jax.make_jaxpr(jax.grad(loss))([jnp.ones((2, 2))] * 3, jnp.ones((4, 2))).jaxpr
>>> both = traced, with_calls_completed(traced)
>>> [[len(e.outvars) for e in j.eqns if e.primitive.name == "remat2"] for j in both]
[[2, 2, 1], [2, 2, 2]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jshard._batch.alike_equations import own_params, text_of
from jshard._batch.zero_operands import with_zero_operands
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh
from jshard._program.loop_invariants import CHECKPOINTED


_WITH_BODIES = frozenset((*CHECKPOINTED, "cond", "scan", "while"))
_MOST_TRIED = 64  # choices of the results that an equation may have of another one's


def with_calls_completed(jaxpr: Jaxpr) -> Jaxpr:
    """The open jaxpr with such equations as equations of the same function as another one."""
    alone = {
        k: _alone(jaxpr, eqn)
        for k, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name in _WITH_BODIES and not eqn.effects
    }
    positions: dict[str, list[int]] = {}  # by function
    for k, one in alone.items():
        positions.setdefault(_text(one), []).append(k)
    out = [[eqn] for eqn in jaxpr.eqns]
    for text, own in positions.items():
        for k in own:
            nearest = (min(each, key=lambda n, k=k: abs(n - k)) for t, each in positions.items() if t != text)
            for n in sorted(nearest, key=lambda n, k=k: abs(n - k)):
                completed = _completed(jaxpr.eqns, k, n, text, alone[n])
                if completed is None:
                    written = with_zero_operands(jaxpr.eqns[k], jaxpr.eqns[n])
                else:
                    written = [completed]
                if written is not None:
                    out[k] = written
                    break
    return jaxpr.replace(eqns=[eqn for each in out for eqn in each])


def _alone(jaxpr: Jaxpr, eqn: JaxprEqn) -> Jaxpr:
    """The equation as a jaxpr of its own."""
    operands, results = fresh(eqn.invars), fresh(eqn.outvars)
    one = eqn.replace(invars=operands, outvars=results)
    return jaxpr.replace(constvars=[], invars=operands, outvars=results, eqns=[one])


def _text(alone: Jaxpr) -> str:
    """The function of an equation as text."""
    each = [[e.primitive.name, *((n, text_of(v)) for n, v in own_params(e))] for e in alone.eqns]
    return str(each)


def _completed(eqns: Sequence[JaxprEqn], k: int, n: int, text: str, function: Jaxpr) -> JaxprEqn | None:
    """The equation at `k`, whose function is `text`, as one of the function of that at `n`; None if it is no part of it."""
    eqn, other = eqns[k], eqns[n]
    if eqn.primitive is not other.primitive:
        return None
    for used in _kept(list(map(_type, other.outvars)), list(map(_type, eqn.outvars))):
        live, read = compat.live_part(function, used)
        if _text(live) == text and sum(read) == len(eqn.invars) and (all(read) or n < k):
            operands, results = iter(eqn.invars), iter(eqn.outvars)
            return other.replace(
                invars=[next(operands) if r else v for r, v in zip(read, other.invars, strict=True)],
                outvars=[
                    next(results) if u else fresh([v])[0] for u, v in zip(used, other.outvars, strict=True)
                ],
            )
    return None


def _type(v: JaxprAtom) -> str:
    return v.aval.str_short()


def _kept(types: Sequence[str], wanted: Sequence[str]) -> Iterator[list[bool]]:
    """Which of the results of some types may be those of the types `wanted`, in order; the last ones lack first."""
    missing = len(types) - len(wanted)
    if missing <= 0:
        return
    choices = itertools.combinations(reversed(range(len(types))), missing)
    for dropped in itertools.islice(choices, _MOST_TRIED):
        if [t for k, t in enumerate(types) if k not in dropped] == list(wanted):
            yield [k not in dropped for k in range(len(types))]
