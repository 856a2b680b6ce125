"""Sorts without the operands whose sorted elements nobody reads.

The derivative of a sort takes positions along, for the gradient by its operands. Of positions, as `jnp.argsort` returns
them, there is none: so nobody reads that, and XLA drops it. It is no operand that a cut sort should send.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda x, i: jax.lax.sort((x, i, i + 1), num_keys=1)[1])(jnp.ones(8), jnp.arange(8))
>>> opened = compat.without_dead_code(compat.open_jaxpr(closed)[0])
>>> [len(j.eqns[-1].invars) for j in (opened, without_unread_operands(opened))]
[3, 2]
"""

from __future__ import annotations

from collections.abc import Set

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies


def without_unread_operands(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr whose sorts have the operands that are keys or whose results are read; inner bodies too."""
    reads = (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars)
    read = {v for v in reads if not compat.is_literal(v)}
    eqns = [with_bodies(eqn, lambda _, body: without_unread_operands(body)) for eqn in jaxpr.eqns]
    eqns = [_reduced(eqn, read) if eqn.primitive.name == "sort" else eqn for eqn in eqns]
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.without_dead_code(jaxpr.replace(eqns=eqns))


def _reduced(eqn: JaxprEqn, read: Set[JaxprAtom]) -> JaxprEqn:
    kept = [k for k, v in enumerate(eqn.outvars) if k < eqn.params["num_keys"] or v in read]
    if len(kept) == len(eqn.outvars):
        return eqn
    return eqn.replace(invars=[eqn.invars[k] for k in kept], outvars=[eqn.outvars[k] for k in kept])
