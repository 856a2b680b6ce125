"""Operators that only add, drop or move dimensions of size 1, or do nothing: which dimension of which value each keeps.

`jnp.unique` takes its keys from a transposed, reversed and sliced array of one row, and so sorts what it started from.
XLA sees that both are one array and gathers it once. Value numbering (`common_subexpressions.py`) finds such a value by
the source of its dimensions.

>>> import jax, jax.numpy as jnp
>>> dims = dims_of(jnp.ones(8))
>>> for eqn in jax.make_jaxpr(lambda x: x.reshape(8, 1).T[::-1].reshape(8))(jnp.ones(8)).eqns:
...     dims = viewed(eqn, dims)
...     print(eqn.primitive, dims)
reshape (0, None)
transpose (None, 0)
rev (None, 0)
reshape (0,)
"""

from __future__ import annotations

import numpy as np

from jshard._core.jax_types import JaxprEqn
from jshard._core.layout import ArrayType


Dims = tuple[int | None, ...]
"""The dimension of another value that each dimension is; None for one of size 1."""


def dims_of(aval: ArrayType | np.ndarray) -> Dims:
    """The dimensions of a value, as its own.

    >>> dims_of(np.ones((4, 1, 8)))
    (0, None, 2)
    """
    return tuple(None if n == 1 else d for d, n in enumerate(aval.shape))


def viewed(eqn: JaxprEqn, dims: Dims) -> Dims | None:
    """The dimensions of an equation's result, given those of its operand; None if its elements are others, or elsewhere."""
    name, p = eqn.primitive.name, eqn.params
    if name not in _VIEWS or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return None
    old, new = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
    if name == "transpose":
        return tuple(dims[d] for d in p["permutation"])
    if name == "rev":
        return dims if all(old[d] == 1 for d in p["dimensions"]) else None
    if name == "slice":
        return dims if old == new else None
    if [n for n in old if n != 1] != [n for n in new if n != 1] or (
        name == "reshape" and p.get("dimensions")
    ):
        return None
    rest = iter([d for d in dims if d is not None])
    return tuple(None if n == 1 else next(rest) for n in new)


_VIEWS = frozenset(
    "reshape broadcast_in_dim squeeze expand_dims transpose rev slice stack unstack concatenate split".split()
)
