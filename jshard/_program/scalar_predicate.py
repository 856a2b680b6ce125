"""While loops under `vmap`: an equivalent loop whose condition is one predicate for the whole batch.

>>> import jax
>>> from jax import lax
>>> halved = jax.vmap(lambda x: lax.while_loop(lambda c: c > 1.0, lambda c: c / 2, x))
>>> eqn = jax.make_jaxpr(halved)(jax.numpy.ones(3)).eqns[-1]
>>> def shape_of_predicate(eqn):
...     return compat.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0].aval.shape
>>> shape_of_predicate(eqn), shape_of_predicate(with_scalar_predicate(eqn))
((3,), ())
"""

from __future__ import annotations

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprEqn


def with_scalar_predicate(eqn: JaxprEqn) -> JaxprEqn:
    """An equivalent `while` equation with a scalar condition; under `vmap` conditions are batched.

    As in JAX's lowering: the loop runs while any element is true, and elements that are false keep their carry.
    """
    p = eqn.params
    test, turn, nc = (
        compat.as_function(p["cond_jaxpr"]),
        compat.as_function(p["body_jaxpr"]),
        p["cond_nconsts"],
    )
    shape = compat.open_jaxpr(p["cond_jaxpr"])[0].outvars[0].aval.shape
    if not shape:
        return eqn
    consts = [v.aval for v in eqn.invars[: nc + p["body_nconsts"]]]
    carry = [v.aval for v in eqn.outvars]

    def any_on(*args: jax.Array) -> jax.Array:
        return jax.lax.reduce_or(test(*args)[0], axes=range(len(shape)))

    def selected(*args: jax.Array) -> list[jax.Array]:
        old = args[len(consts) :]
        on = test(*args[:nc], *old)[0]
        new = turn(*args[nc:])
        grown = [jax.lax.broadcast_in_dim(on, o.shape, range(len(shape))) for o in old]
        return [jax.lax.select(g, n, o) for g, n, o in zip(grown, new, old, strict=True)]

    params = {
        **p,
        "cond_jaxpr": jax.make_jaxpr(any_on)(*consts[:nc], *carry),
        "body_jaxpr": jax.make_jaxpr(selected)(*consts, *carry),
        "body_nconsts": len(consts),
    }
    invars = [*eqn.invars[:nc], *eqn.invars]
    return compat.new_equation(eqn.primitive, invars, eqn.outvars, params, eqn.effects, eqn)
