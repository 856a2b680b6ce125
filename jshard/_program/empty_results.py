"""Equations whose results have no elements, as constants: what they read is not read, as compilers have it.

A window wider than the dimension that it slides along gives no places. Its operand need not be gathered for that, and XLA
drops such a gather, of which a plan would promise the bytes.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda x: (jnp.cumsum(x)[:0], x * 2))(jnp.ones(8))
>>> found = with_empty_constants(compat.open_jaxpr(closed)[0])
>>> [str(eqn.primitive) for eqn in found.eqns]
['broadcast_in_dim', 'mul']
"""

from __future__ import annotations

import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import bodies_of, with_bodies


def with_empty_constants(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr in which equations with empty results alone read nothing; inner bodies too."""
    eqns = [with_bodies(eqn, lambda _, body: with_empty_constants(body)) for eqn in jaxpr.eqns]
    if not any(map(_reads_for_nothing, eqns)):
        same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if same else jaxpr.replace(eqns=eqns)
    out: list[JaxprEqn] = []
    for eqn in eqns:
        out += [_constant(v) for v in eqn.outvars] if _reads_for_nothing(eqn) else [eqn]
    return compat.without_dead_code(jaxpr.replace(eqns=out))


def _reads_for_nothing(eqn: JaxprEqn) -> bool:
    """Whether an equation without a body or effects reads elements and has none in its results."""
    if not eqn.outvars or not all(0 in getattr(v.aval, "shape", ()) for v in eqn.outvars):
        return False
    if eqn.effects or "callback" in eqn.primitive.name or any(True for _ in bodies_of(eqn)):
        return False
    arrays = all(isinstance(v.aval.dtype, np.dtype) for v in eqn.outvars)  # no keys
    return arrays and any(
        not compat.is_literal(v) and 0 not in getattr(v.aval, "shape", ()) for v in eqn.invars
    )


def _constant(v: JaxprAtom) -> JaxprEqn:
    """The equation that makes an empty array."""
    aval = v.aval
    closed = compat.make_jaxpr(lambda: [lax.full(aval.shape, 0, aval.dtype)])
    return compat.open_jaxpr(closed)[0].eqns[-1].replace(outvars=[v])
