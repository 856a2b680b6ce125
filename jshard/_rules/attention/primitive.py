"""The primitives of attention: forward, with what the backward pass reads of its softmax, and backward.

`attend(spec, operands)` is differentiable in reverse mode: the forward pass keeps its result and two numbers a query
and head, the largest logit and the sum of exp(logit - largest); the backward pass is a primitive of its own, which
computes probabilities again block by block. So a sharding rule covers both, and no array of all pairs is made in either.

Operands: queries, keys, values, then, as `spec` says, bias, mask, segments of queries and of keys. The backward pass
takes them, the results and the cotangent, and gives the gradients of queries, keys, values and bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.interpreters import batching, mlir

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import PyTree
from jshard._rules.attention.blocks import arranged, arranged_back, as_result, by_head
from jshard._rules.attention.definition import Attention, softmax_dtype
from jshard._rules.attention.kernels import Softmax, local_backward, local_forward


FORWARD, BACKWARD = "jshard_attention", "jshard_attention_backward"

forward_p = compat.multi_result_primitive(FORWARD)
backward_p = compat.multi_result_primitive(BACKWARD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: Attention, *operands: jax.Array) -> jax.Array:
    """Attention of operands in the order of this module's docstring: (batch..., T, N, E)."""
    return forward_p.bind(*operands, spec=spec)[0]


def _attend_forward(spec: Attention, *operands: CustomVJPPrimal) -> tuple[jax.Array, PyTree]:
    values = tuple(x.value for x in operands)
    out, *softmax = forward_p.bind(*values, spec=spec)
    # A constant bias has no gradient, which would be as large as itself.
    return out, (values, out, softmax, spec.has_bias and bool(operands[3].perturbed))


def _attend_backward(
    spec: Attention, residuals: PyTree, cotangent: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, ...]:
    operands, out, softmax, bias_gradient = residuals
    if isinstance(cotangent, SymbolicZero):
        return (None,) * len(operands)
    gradients = backward_p.bind(
        *operands, out, *softmax, cotangent, spec=spec, bias_gradient=bool(bias_gradient)
    )
    return (*gradients, *[None] * (len(operands) - len(gradients)))


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def run_forward(*operands: jax.Array, spec: Attention, kernels: bool) -> list[jax.Array]:
    """The result, the largest logit and the sum (batch..., N, T), on one device."""
    x, batch = arranged(spec, operands), operands[0].shape[:-3]
    part = local_forward(spec, x, kernels=kernels)
    out = as_result(part.out, batch).astype(operands[0].dtype)
    return [out, *(y.reshape(*batch, -1, y.shape[-1]) for y in (part.largest, part.total))]


def run_backward(
    *operands: jax.Array, spec: Attention, bias_gradient: bool, kernels: bool
) -> list[jax.Array]:
    """The gradients of queries, keys, values and, if wanted, the bias, on one device."""
    inputs, (out, largest, total, cotangent) = operands[: spec.num_operands], operands[spec.num_operands :]
    x = arranged(spec, inputs)
    heads = x.k.shape[2]
    largest, total = (y.reshape(*x.q.shape[:1], *x.q.shape[2:4], -1) for y in (largest, total))
    softmax = Softmax(largest, total, by_head(out, heads), by_head(cotangent, heads))
    gradients = local_backward(spec, x, softmax, bias_gradient=bias_gradient, kernels=kernels)
    back = arranged_back(spec, gradients, inputs)
    return [g.astype(a.dtype) for g, a in zip(back, inputs, strict=False)]


def _lowered(
    run: Callable[..., list[jax.Array]],
    context: mlir.LoweringRuleContext,
    *operands: object,
    **params: object,
) -> PyTree:
    """One device's program; kernels cannot be partitioned by XLA, and are left out where it would have to."""
    kernels = not compat.is_partitioned(context)
    return mlir.lower_fun(functools.partial(run, kernels=kernels), multiple_results=True)(
        context, *operands, **params
    )


def _forward_types(*avals: core.ShapedArray, spec: Attention) -> list[core.ShapedArray]:
    q, _, v = avals[:3]
    *batch, t, n, _ = q.shape
    return [
        core.ShapedArray((*batch, t, n, v.shape[-1]), q.dtype),
        *[core.ShapedArray((*batch, n, t), softmax_dtype(q.dtype))] * 2,
    ]


def _backward_types(*avals: core.ShapedArray, spec: Attention, bias_gradient: bool) -> list[core.ShapedArray]:
    return [core.ShapedArray(a.shape, a.dtype) for a in avals[: 3 + bias_gradient]]


def _batched(
    args: Sequence[jax.Array], dims: Sequence[int | None], bind: Callable[..., list[jax.Array]], loose: range
) -> tuple[list[jax.Array], list[int]]:
    """Under `vmap` all operands have one more batch dimension; those in `loose` of length one, if not mapped."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    grown = []
    for i, (x, d) in enumerate(zip(args, dims, strict=True)):
        if d is not None:
            grown.append(jnp.moveaxis(x, d, 0))
        else:
            grown.append(jnp.broadcast_to(x, (1 if i in loose else size, *x.shape)))
    out = bind(*grown)
    return out, [0] * len(out)


def _batch_forward(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, spec: Attention
) -> tuple[list[jax.Array], list[int]]:
    loose = range(3, 3 + spec.has_bias + spec.has_mask)
    return _batched(args, dims, functools.partial(forward_p.bind, spec=spec), loose)


def _batch_backward(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, spec: Attention, bias_gradient: bool
) -> tuple[list[jax.Array], list[int]]:
    # JAX sums the gradients of operands that are not mapped, so the bias needs one for each.
    bind = functools.partial(backward_p.bind, spec=spec, bias_gradient=bias_gradient)
    first = 3 + (spec.has_bias and bias_gradient)
    return _batched(args, dims, bind, range(first, 3 + spec.has_bias + spec.has_mask))


for _p, _run, _types, _batch, _params in (
    (forward_p, run_forward, _forward_types, _batch_forward, ("spec",)),
    (backward_p, run_backward, _backward_types, _batch_backward, ("spec", "bias_gradient")),
):
    _p.def_impl(jax.jit(_p.bind, static_argnames=_params))
    _p.def_abstract_eval(_types)
    batching.primitive_batchers[_p] = _batch
    mlir.register_lowering(_p, functools.partial(_lowered, _run))
