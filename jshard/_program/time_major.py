"""Time-major inputs: a recurrence takes slices of their first dimension one after the other.

Problem.  The first dimension of a function's data is mostly the batch, the second one where a recurrent network, or
accumulation of gradients, scans over the first. What is said of a batch has to be said of the right one.

Idea.  Values that keep the two leading sizes of an input are followed, through calls, to the scans that slice them. A scan
that carries a state from one slice to the next is over time; one that carries none (`jax.lax.map`) is over examples.

>>> import jax, jax.numpy as jnp
>>> def recurrent(w, x, y):
...     state, states = jax.lax.scan(lambda s, x: (jnp.tanh(s + x @ w),) * 2, jnp.zeros((6, 4)), jnp.exp(x))
...     return ((states - y) ** 2).mean()
>>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 4), (30, 6, 3), (30, 6, 4))]
>>> time_major_inputs(jax.make_jaxpr(recurrent)(*shapes).jaxpr)
{1}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom
from jshard._program.equation_bodies import bodies_of
from jshard._program.loop_invariants import CALLS_WITH_BODY


def time_major_inputs(jaxpr: Jaxpr) -> set[int]:
    """Positions of the inputs over whose first dimension a scan with a carry runs."""
    of = {v: {i} for i, v in enumerate(jaxpr.invars) if len(v.aval.shape) > 1}
    return _scanned(jaxpr, of, [v.aval.shape[:2] for v in jaxpr.invars])


def _scanned(jaxpr: Jaxpr, origins: Mapping[JaxprAtom, set[int]], leading: list[tuple[int, ...]]) -> set[int]:
    """The inputs that scans slice, of those that a value is made from with their two leading sizes, `leading`."""
    origin, found = dict(origins), set[int]()

    def of(values: Iterable[JaxprAtom]) -> set[int]:
        return {i for v in values if not compat.is_literal(v) for i in origin.get(v, ())}

    for eqn in jaxpr.eqns:
        made_from = of(eqn.invars)
        if not made_from:
            continue
        name = eqn.primitive.name
        if name == "scan":
            consts, carry = compat.scan_split(eqn.params)
            found |= of(eqn.invars[consts + carry :]) if carry else set()
        if name in CALLS_WITH_BODY:
            for body in bodies_of(eqn):
                if len(body.invars) == len(eqn.invars):
                    inner = {v: of([u]) for v, u in zip(body.invars, eqn.invars, strict=True)}
                    found |= _scanned(body, inner, leading)
        if name == "transpose" and eqn.params["permutation"][:2] != (0, 1):
            continue
        for v in eqn.outvars:
            kept = {i for i in made_from if getattr(v.aval, "shape", ())[:2] == leading[i]}
            if kept:
                origin[v] = kept
    return found
