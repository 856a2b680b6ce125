"""What primitives of this package share that compute their results from arrays by a function of JAX.

>>> import jax, jax.numpy as jnp
>>> doubled_p = compat.multi_result_primitive("doubled")
>>> define_primitive(doubled_p, lambda x: [2 * x], lambda x: [x])
>>> jax.jit(doubled_p.bind)(jnp.arange(3))[0].tolist()
[0, 2, 4]
>>> define_linear_rules(doubled_p, lambda ct, avals: doubled_p.bind(ct))
>>> jax.grad(lambda x: doubled_p.bind(x)[0] * 5)(1.0).item()
10.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import core
from jax.interpreters import ad, mlir

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


def define_linear_rules(
    primitive: compat.jex.Primitive, transposed: Callable[..., Sequence[jax.Array]], linear: int = 1
) -> None:
    """The derivative rules of a primitive with one result, linear in its first operands together.

    - `transposed`: of the cotangent of the result, the types of the linear operands, the other operands, and parameters: the
      cotangents of the linear operands.
    - `linear`: how many those are.
    """

    def tangents_of(primals: Sequence, tangents: Sequence, **params: object) -> tuple[Sequence, Sequence]:
        out = primitive.bind(*primals, **params)
        if all(isinstance(t, ad.Zero) for t in tangents[:linear]):
            return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
        moved = map(ad.instantiate_zeros, tangents[:linear])
        return out, primitive.bind(*moved, *primals[linear:], **params)

    def cotangents_of(cotangents: Sequence, *operands: object, **params: object) -> list:
        (ct,) = cotangents
        avals = [x.aval if isinstance(x, ad.UndefinedPrimal) else jax.typeof(x) for x in operands[:linear]]
        zero = isinstance(ct, ad.Zero)
        found = map(ad.Zero, avals) if zero else transposed(ct, avals, *operands[linear:], **params)
        of_linear = zip(operands[:linear], found, strict=True)
        out = [x if isinstance(operand, ad.UndefinedPrimal) else None for operand, x in of_linear]
        return [*out, *(None for _ in operands[linear:])]

    ad.primitive_jvps[primitive] = tangents_of
    ad.primitive_transposes[primitive] = cotangents_of
