"""Extremes over the batch in a layer, which only results need: of every example in the layer, of all after the pipeline.

Problem.  A layer returns the largest of its activations, as a metric. No piece of the batch has an addend of it, so the
layer would couple its examples, though nothing in a layer reads it.

Method.  `reduce_max`, `reduce_min`, `reduce_or` and `reduce_and` over the batch and other dimensions are divided in two, the
others first. What is left, one number an example, leaves the pipeline; of it the batch's is taken there.

>>> import jax, jax.numpy as jnp
>>> from jshard._batch.batch_class import per_example
>>> eqn = jax.make_jaxpr(lambda x: jnp.max(x, (0, 2)))(jnp.ones((8, 3, 4))).eqns[-1]
>>> call = extreme_of_each(eqn, [per_example(0)])
>>> [tuple(e.params["axes"]) for e in call.eqns], call.eqns[0].outvars[0].aval.shape
([(2,), (0,)], (8, 3))
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import core

from jshard._batch.batch_class import BatchClass
from jshard._batch.divided_branches import DividedCall
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprEqn


_EXTREMES = ("reduce_max", "reduce_min", "reduce_or", "reduce_and")


def is_extreme(eqn: JaxprEqn, operands: Sequence[BatchClass]) -> bool:
    """Whether an equation is an extreme over the examples and nothing else."""
    return _over_examples(eqn, operands) and len(eqn.params["axes"]) == 1


def extreme_of_each(eqn: JaxprEqn, operands: Sequence[BatchClass]) -> DividedCall | None:
    """An extreme over the examples and other dimensions as two; None for other equations."""
    if not _over_examples(eqn, operands) or len(eqn.params["axes"]) == 1:
        return None
    (x,), dim = eqn.invars, operands[0].dim
    others = tuple(a for a in eqn.params["axes"] if a != dim)
    shape = tuple(n for k, n in enumerate(x.aval.shape) if k not in others)
    each = compat.VARIABLE(core.ShapedArray(shape, x.aval.dtype))
    after = dim - sum(a < dim for a in others)
    return DividedCall(
        (
            eqn.replace(params={**eqn.params, "axes": others}, outvars=[each]),
            eqn.replace(params={**eqn.params, "axes": (after,)}, invars=[each]),
        ),
        tuple(eqn.outvars),
    )


def _over_examples(eqn: JaxprEqn, operands: Sequence[BatchClass]) -> bool:
    if eqn.primitive.name not in _EXTREMES or not operands[0].is_example or operands[0].inner > 1:
        return False
    return operands[0].dim in eqn.params["axes"]
