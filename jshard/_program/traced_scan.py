"""A scan equation with another body, traced by `lax.scan`, whose parameters differ between versions of JAX.

`lax.scan` makes no result of a slice or a carry that a body returns as it is: the operand is the result. Whoever renames
results needs one each, so the body is traced with a barrier on every result, and the barriers are removed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import substituted


_Arrays = tuple[jax.Array, ...]


def is_plain_scan(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan without effects whose body has no constants of its own."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    jaxpr, consts = compat.open_jaxpr(eqn.params["jaxpr"])
    return not (consts or jaxpr.constvars)


def traced_scan(
    like: JaxprEqn, body: Jaxpr, num_consts: int, num_carry: int, operands: Sequence[JaxprAtom]
) -> tuple[list[JaxprEqn], list[JaxprAtom]]:
    """Equations that scan a body over some operands as the scan `like` does, and the variables of the results.

    Each result has a variable of its own, that one of the equations makes.
    """
    p = like.params

    def run(*args: jax.Array) -> Sequence[jax.Array]:
        consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]

        def step(carry: _Arrays, xs: _Arrays) -> tuple[_Arrays, _Arrays]:
            out = [lax.optimization_barrier(v) for v in compat.run_jaxpr(body, (*consts, *carry, *xs))]
            return tuple(out[:num_carry]), tuple(out[num_carry:])

        carry, ys = lax.scan(
            step, carry, args[num_consts + num_carry :], length=int(p["length"]), reverse=p["reverse"],
            unroll=p["unroll"],
        )  # fmt: skip
        return (*carry, *ys)

    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=bool(getattr(v.aval, "weak_type", False)))
        for v in operands
    ]
    traced, consts = compat.open_jaxpr(compat.make_jaxpr(run, *types))
    assert not consts, "a body without constants traces to an equation without constants"
    env = dict(zip(traced.invars, operands, strict=True))
    eqns = []
    for eqn in traced.eqns:
        if eqn.primitive.name == "scan":
            eqn = with_bodies(eqn, lambda _, body: _without_last_barriers(body))
            eqn = eqn.replace(source_info=like.source_info)
        eqns.append(eqn.replace(invars=substituted(eqn.invars, env)))
    return eqns, substituted(traced.outvars, env)


def _without_last_barriers(body: Jaxpr) -> Jaxpr:
    """A body without the equations that make its results, each a barrier of one operand."""
    results = {v for v in body.outvars if not compat.is_literal(v)}
    barriers = [e for e in body.eqns if len(e.outvars) == 1 and e.outvars[0] in results]
    operand = {e.outvars[0]: e.invars[0] for e in barriers}
    eqns = [e for e in body.eqns if not (len(e.outvars) == 1 and e.outvars[0] in operand)]
    return body.replace(eqns=eqns, outvars=substituted(body.outvars, operand))
