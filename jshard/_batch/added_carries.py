"""Carries of a loop that its body only adds to: no layer reads them, so that they need not pass from layer to layer.

The gradient of an encoder's output, which every layer of the decoder reads, is such a carry of the backward loop; so is that
of embeddings which every layer adds again. Each stage of a pipeline keeps its own addends, and they are added once, after
the loop, where they would otherwise be passed on in every tick.

>>> import jax, jax.numpy as jnp
>>> def body(h, total, w):
...     return jnp.tanh(h @ w), total + h
>>> jaxpr = jax.make_jaxpr(body)(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((3, 3))).jaxpr
>>> h, total, _ = jaxpr.invars
>>> [is_only_added_to(jaxpr, v, after) for v, after in zip((h, total), jaxpr.outvars)]
[False, True]
"""

from __future__ import annotations

import jax.numpy as jnp

from jshard._core.jax_types import Jaxpr, JaxprAtom


ADDITIONS = frozenset(("add", "add_any"))
"""Primitives that add two values."""


def is_only_added_to(jaxpr: Jaxpr, before: JaxprAtom, after: JaxprAtom) -> bool:
    """Whether a body uses an input `before` for nothing but additions that end in its result `after`."""
    if not jnp.issubdtype(before.aval.dtype, jnp.number):
        return False
    now = before
    while True:
        readers = [e for e in jaxpr.eqns for v in e.invars if v is now]
        results = sum(v is now for v in jaxpr.outvars)
        if now is after:
            return now is not before and not readers and results == 1
        if len(readers) != 1 or results or readers[0].primitive.name not in ADDITIONS:
            return False
        now = readers[0].outvars[0]
        if (now.aval.shape, now.aval.dtype) != (before.aval.shape, before.aval.dtype):
            return False
