"""What primitives of this package share that compute their results from arrays by a function of JAX.

>>> import jax, jax.numpy as jnp
>>> doubled_p = compat.multi_result_primitive("doubled")
>>> define_primitive(doubled_p, lambda x: [2 * x], lambda x: [x])
>>> jax.jit(doubled_p.bind)(jnp.arange(3))[0].tolist()
[0, 2, 4]
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import core
from jax.interpreters import mlir

from jshard._core import jaxcompat as compat


def define_primitive(
    primitive: compat.jex.Primitive,
    run: Callable[..., list[jax.Array]],
    types: Callable[..., list[core.ShapedArray]],
    *parameters: str,
) -> None:
    """Make a primitive run and lower by `run`; `types`: of its results; `parameters`: the names of its own."""
    primitive.def_impl(jax.jit(run, static_argnames=parameters))
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
