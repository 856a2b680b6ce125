"""Layer norm, RMS norm, and a product with an activation before it, that keep less for their gradient.

Problem.  JAX keeps, for the gradient of a norm, the normalized values, and for that of `gelu(x) @ w`, what the activation
computed and its derivative: arrays as large as the input, several times.

Idea.  Each function has its derivative written down. A norm keeps its input and two numbers a row; a product keeps the
input of its activation, which is computed again, elementwise, where the gradient needs it. Inside, there are ordinary
operators: the search cuts them as any others, and XLA makes one kernel of each pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jshard._core.errors import ShardError
from jshard._core.jax_types import Function


def layer_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *, epsilon: float = 1e-6
) -> jax.Array:
    """Layer normalization over the last dimension: (x - mean) / sqrt(variance + epsilon) * scale + bias.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.full(2, 0.5), epsilon=0.0).tolist()
    [[-0.5, 1.5]]

    Arguments:

    - `x`: (..., features). `scale`, `bias`: (features,), or none.
    - `epsilon`: added to the variance.

    Statistics are in float32 at least, the result has the type of `x`. Derivatives in reverse mode, for which `x`, the
    mean and the deviation are kept.

    Raises `ShardError` for shapes that do not fit.
    """
    return _normalized(x, scale, bias, float(epsilon), True, "layer_norm")


def rms_norm(x: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6) -> jax.Array:
    """Normalization by the root mean square of the last dimension: x / sqrt(mean(x^2) + epsilon) * scale.

    >>> import jax.numpy as jnp
    >>> [round(float(y), 3) for y in rms_norm(jnp.array([3.0, 4.0]), epsilon=0.0)]
    [0.849, 1.131]

    Arguments and types as for `layer_norm`.
    """
    return _normalized(x, scale, None, float(epsilon), False, "rms_norm")


def _normalized(
    x: ArrayLike, scale: ArrayLike | None, bias: ArrayLike | None, epsilon: float, centred: bool, name: str
) -> jax.Array:
    x = jnp.asarray(x)
    given = [None if p is None else jnp.asarray(p) for p in (scale, bias)]
    for what, p in zip(("scale", "bias"), given, strict=True):
        if x.ndim == 0 or p is not None and p.shape != x.shape[-1:]:
            shape = "no scale" if p is None else f"a {what} of shape {p.shape}"
            raise ShardError(
                f"x of shape {x.shape} with {shape}",
                where=f"jshard.ops.{name}",
                fix="x (..., features), scale and bias (features,)",
            )
    return _norm(x, *given, epsilon, centred)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, epsilon: float, centred: bool
) -> jax.Array:
    return _norm_forward(x, scale, bias, epsilon, centred)[0]


def _norm_forward(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, epsilon: float, centred: bool
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True) if centred else None
    shifted = wide if mean is None else wide - mean
    inverse = jax.lax.rsqrt((shifted * shifted).mean(-1, keepdims=True) + epsilon)
    y = shifted * (inverse if scale is None else inverse * scale)
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _norm_backward(
    epsilon: float, centred: bool, kept: tuple[jax.Array | None, ...], cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, scale, bias, mean, inverse = kept
    assert x is not None and inverse is not None
    g = cotangent.astype(inverse.dtype)
    wide = x.astype(inverse.dtype)
    normal = (wide if mean is None else wide - mean) * inverse
    rows = tuple(range(x.ndim - 1))
    of_scale = None if scale is None else (g * normal).sum(rows).astype(scale.dtype)
    of_bias = None if bias is None else g.sum(rows).astype(bias.dtype)
    g = g if scale is None else g * scale
    of_x = g - normal * (g * normal).mean(-1, keepdims=True)
    of_x = of_x - g.mean(-1, keepdims=True) if centred else of_x
    return (of_x * inverse).astype(x.dtype), of_scale, of_bias


_norm.defvjp(_norm_forward, _norm_backward)


def activated_product(
    x: ArrayLike,
    w: ArrayLike,
    *,
    activation: Function = jax.nn.gelu,
    times: ArrayLike | None = None,
) -> jax.Array:
    """The product `activation(x) @ w`, or `(activation(x) * times) @ w` of a gated layer.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jnp.array([[-1.0, 2.0]]), jnp.ones((2, 1))
    >>> activated_product(x, w, activation=jax.nn.relu, times=2 * x).tolist()
    [[8.0]]

    Arguments:

    - `x`: (..., features). `w`: (features, outputs). `times`: of the shape of `x`, the other factor of a gated layer.
    - `activation`: an elementwise function.

    Derivatives in reverse mode, for which only `x`, `times` and `w` are kept; the activation is computed again.

    Raises `ShardError` for shapes that do not fit.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    other = None if times is None else jnp.asarray(times)
    if (
        x.ndim == 0
        or w.ndim != 2
        or x.shape[-1] != w.shape[0]
        or other is not None
        and other.shape != x.shape
    ):
        shown = f"x {x.shape}, w {w.shape}" + ("" if other is None else f", times {other.shape}")
        raise ShardError(
            f"operands of shapes {shown}",
            where="jshard.ops.activated_product",
            fix="x (..., features), w (features, outputs), times of the shape of x",
        )
    return _activated_product(activation, x, other, w)


def _factor(activation: Function, x: jax.Array, other: jax.Array | None) -> jax.Array:
    out = activation(x)
    return out if other is None else out * other


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated_product(
    activation: Function, x: jax.Array, other: jax.Array | None, w: jax.Array
) -> jax.Array:
    return _factor(activation, x, other) @ w


def _product_forward(
    activation: Function, x: jax.Array, other: jax.Array | None, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    return _activated_product(activation, x, other, w), (x, other, w)


def _product_backward(
    activation: Function, kept: tuple[jax.Array | None, ...], cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, other, w = kept
    assert x is not None and w is not None
    left, pull = jax.vjp(functools.partial(_factor, activation), x, other)
    of_left = (cotangent @ w.T).astype(left.dtype)
    rows = tuple(range(x.ndim - 1))
    of_w = jnp.tensordot(left, cotangent, (rows, rows)).astype(w.dtype)
    of_x, of_other = pull(of_left)
    return of_x, of_other, of_w


_activated_product.defvjp(_product_forward, _product_backward)
