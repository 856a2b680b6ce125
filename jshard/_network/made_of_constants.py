"""Values made of constants, such as zeros, positions and masks of them: no plan gathers one from its pieces.

Every device can make such a value whole for less than a gather takes, and compilers do: they leave out a gather of one
number, and merge gathers of equal positions. A plan that holds the zeros of a scatter in pieces until they are gathered
would promise bytes that nobody sends, and count less memory than the program takes.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> def f(x):
...     return x + jnp.zeros(8).astype("int32") + (jnp.arange(8) < x)
>>> program = build(jax.make_jaxpr(f)(1), name="f", input_names=["x"])
>>> [program.tensors[t].name.split(".")[0] for t in sorted(made_of_constants(program))]
['broadcast_in_dim', 'convert_element_type', 'iota']
"""

from __future__ import annotations

import numpy as np

from jshard._core.arrays import Floats
from jshard._program.graph import Literal, Program
from jshard._rules.registry import REGISTRY


_RESHAPED = frozenset("iota broadcast_in_dim reshape squeeze expand_dims transpose".split())


def made_of_constants(program: Program) -> frozenset[int]:
    """The tensors that elementwise operators make of numbers and positions that stand in the program."""
    found: set[int] = set()
    for op in program.operators:
        constant = op.kind == "eqn" and all(isinstance(x, Literal) or x in found for x in op.operands)
        if constant and _is_cheap(op.primitive):
            found.update(op.results)
    return frozenset(found)


def _is_cheap(primitive: str) -> bool:
    entry = REGISTRY.get(primitive)
    return primitive in _RESHAPED or (entry is not None and entry.family == "elementwise")


def without_gathers(seconds: Floats) -> Floats:
    """A table of resharding with infinity where something is sent.

    >>> without_gathers(np.array([[0.0, 2e-6], [0.0, 0.0]]))
    array([[ 0., inf],
           [ 0.,  0.]])
    """
    return np.where(seconds > 0, np.inf, seconds)
