"""Checkpointed calls that lack results which alike calls have, so that all layers of a backward pass are alike.

The backward pass of a layer under `jax.checkpoint` is one call. That of the first layer, whose input is data, lacks the
gradient of its input, so it is another function with fewer results, perhaps of fewer operands. It becomes the call of the
layer before it in the program, of whose results those are used that it has. An operand that it does not read is that of the
other call: what is computed from it is not used.

>>> import jax, jax.numpy as jnp
>>> def loss(ws, x):
...     for w in ws:
...         x = jax.checkpoint(lambda h, w: h + jnp.tanh(h @ w))(x, w)
...     return jnp.sum(x)
>>> traced = jax.make_jaxpr(jax.grad(loss))([jnp.ones((2, 2))] * 3, jnp.ones((4, 2)))
>>> both = traced.eqns, with_calls_completed(traced.eqns)
>>> [[len(e.outvars) for e in eqns if e.primitive.name == "remat2"] for eqns in both]
[[2, 2, 1], [2, 2, 2]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh
from jshard._program.loop_invariants import CHECKPOINTED


_MOST_MISSING = 2  # results that a call may lack


def with_calls_completed(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations with such calls as calls of the same function as one before them."""
    out: list[JaxprEqn] = []
    earlier: dict[str, JaxprEqn] = {}  # by function, the latest
    for eqn in eqns:
        if eqn.primitive.name in CHECKPOINTED and eqn.params["differentiated"] and not eqn.effects:
            text = str(eqn.params["jaxpr"])
            if text not in earlier:
                found = (_completed(eqn, text, other) for other in reversed(earlier.values()))
                eqn = next((e for e in found if e is not None), eqn)
            earlier[str(eqn.params["jaxpr"])] = eqn
        out.append(eqn)
    return out


def _completed(eqn: JaxprEqn, text: str, other: JaxprEqn) -> JaxprEqn | None:
    """A call as a call of the function of `other`; None if that is not the same with more results."""
    body: Jaxpr = other.params["jaxpr"]
    own, known = ({k: v for k, v in e.params.items() if k != "jaxpr"} for e in (eqn, other))
    if own != known:
        return None
    for used in _kept(list(map(_type, body.outvars)), list(map(_type, eqn.outvars))):
        live, read = compat.live_part(body, used)
        if str(live) == text and sum(read) == len(eqn.invars):
            operands, results = iter(eqn.invars), iter(eqn.outvars)
            return eqn.replace(
                params=other.params,
                invars=[next(operands) if r else v for r, v in zip(read, other.invars, strict=True)],
                outvars=[
                    next(results) if u else fresh([v])[0] for u, v in zip(used, other.outvars, strict=True)
                ],
            )
    return None


def _type(v: JaxprAtom) -> str:
    return v.aval.str_short()


def _kept(types: Sequence[str], wanted: Sequence[str]) -> Iterator[list[bool]]:
    """Which of the results of some types may be those of the types `wanted`, in order."""
    missing = len(types) - len(wanted)
    if not 0 < missing <= _MOST_MISSING:
        return
    for dropped in itertools.combinations(range(len(types)), missing):
        if [t for k, t in enumerate(types) if k not in dropped] == list(wanted):
            yield [k not in dropped for k in range(len(types))]
