"""Elementwise operators: every dimension is a factor shared by all operands and results.

Scalar operands beside larger ones (literals, `select_n` predicates, `clamp` bounds) carry no factor. A table has the
sets of operands through which partial sums pass: `(a1 + a2) + (b1 + b2)` if both operands are partial,
`(a1 + a2) * b` if one is.

>>> from jax import ShapeDtypeStruct as S
>>> x = S((4, 8), "float32")
>>> r = pointwise(OpView("add", {}, (x, x), (x,)))
>>> str(r), r.linear
('a b, a b -> a b', ((0, 1),))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshard._core import jaxcompat as compat
from jshard._core.errors import RuleError
from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors, is_float, linear_sets, summable
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("elementwise")

# Operand sets through which partial sums pass. Integer arithmetic is linear modulo 2**n, so no float test.
_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0, 1),),
    "add_any": ((0, 1),),
    "sub": ((0, 1),),
    "neg": ((0,),),
    "copy": ((0,),),
    "copy_p": ((0,),),
    "stop_gradient": ((0,),),
    "name": ((0,),),
    "real": ((0,),),
    "imag": ((0,),),
    "conj": ((0,),),
    "complex": ((0, 1),),
    "mul": ((0,), (1,)),
    "zeros_like": ((0,),),
}
_FREE = {"copy", "copy_p", "stop_gradient", "name", "real", "imag", "zeros_like"}


def pointwise_dims(op: OpView) -> Rule:
    """Dimensions of an elementwise operator: shared factors, none for scalars and broadcast dimensions."""
    factors = Factors()
    shape = op.outs[0].shape
    dims = factors.dims(shape)

    def of(aval: ArrayType) -> Dims:
        s = aval.shape
        if s == shape:
            return dims
        if s == ():
            return ()
        if len(s) != len(shape):
            raise RuleError(f"operand of shape {s} beside a result of shape {shape}", where=op.primitive)
        return tuple(d if n == m else () for d, n, m in zip(dims, s, shape, strict=True))

    return Rule(tuple(map(of, op.ins)), tuple(map(of, op.outs)), factors.sizes)


def _with(op: OpView, sets: tuple[tuple[int, ...], ...], work: float = 1.0) -> Rule:
    r = pointwise_dims(op)
    return Rule(r.operands, r.results, r.sizes, linear=linear_sets(op, *sets), work=work)


_POINTWISE = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj copy copy_p cos cosh
    digamma erf_inv exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2
    logistic name neg not one_minus_square polynomial population_count real reciprocal reduce_precision
    round rsqrt sign sin sinh sqrt square stop_gradient tan tanh zeros_like add add_any and atan2
    complex eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul mulhi ne nextafter
    or polygamma pow rem shift_left shift_right_arithmetic shift_right_logical sub xor zeta clamp
    regularized_incomplete_beta threefry2x32
""".split()


@rule(*_POINTWISE)
def pointwise(op: OpView) -> Rule:
    """Partial sums pass as in `_LINEAR`."""
    sets = _LINEAR.get(op.primitive, ())
    if op.primitive == "integer_pow" and op.params["y"] == 1:
        sets = ((0,),)
    # A threefry block is 20 rounds of add, rotate, xor on two words (Salmon et al. 2011).
    work = 0.0 if op.primitive in _FREE else 100.0 if op.primitive == "threefry2x32" else 1.0
    return _with(op, sets, work)


def _error_function(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    # In JAX 0.12 `jax.grad` of `jax.shard_map(jax.lax.erf, ...)` raises: the derivative is a polynomial whose coefficients
    # vary over other axes than `x`. So its derivative is defined here.
    if not compat.vma(x):
        return ctx.bind(x)
    slope = (-2.0 if ctx.op.primitive == "erfc" else 2.0) / math.sqrt(math.pi)

    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return ctx.bind(x)[0]

    f.defjvp(lambda p, t: (f(*p), t[0] * (slope * jnp.exp(-jnp.square(p[0])))))
    return [f(x)]


@rule("erf", "erfc", local=_error_function)
def error_function(op: OpView) -> Rule:
    """Elementwise, with a derivative of its own."""
    return _with(op, ())


@rule("div")
def div(op: OpView) -> Rule:
    """Linear in the numerator; integer division rounds, so only for floats."""
    return _with(op, ((0,),) if is_float(op.outs[0]) else ())


@rule("select_n")
def select_n(op: OpView) -> Rule:
    """Linear in all cases together, whatever the predicate."""
    return _with(op, (tuple(range(1, len(op.ins))),))


@rule("convert_element_type")
def convert_element_type(op: OpView) -> Rule:
    """Partial sums pass a lossless cast, from a float type to one at least as wide."""
    a, b = op.ins[0].dtype, op.outs[0].dtype
    floats = is_float(op.ins[0]) and is_float(op.outs[0])
    widens = floats and summable(op.ins[0]) and summable(op.outs[0]) and jnp.promote_types(a, b) == b
    return _with(op, ((0,),) if widens else ())


@rule("select_if_vmap", "nonbatchable")
def _third_party_pointwise(op: OpView) -> Rule:
    # equinox: `select_if_vmap(pred, x, y)` and `nonbatchable(x)` act elementwise.
    r = pointwise_dims(op)
    return Rule(r.operands, r.results, r.sizes, work=0.0)
