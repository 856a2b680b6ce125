"""Neutral elements: what may stand beside the values of a reduction without changing it.

>>> import numpy as np
>>> neutral_element("max", np.dtype("float32")), neutral_element("min", np.dtype("int8"))
(-inf, 127)
>>> neutral_element("max", np.dtype(jnp.float8_e4m3fn)), neutral_element("max", np.dtype(jnp.bfloat16))
(-448.0, -inf)
>>> neutral_element("and", np.dtype("bool")), neutral_element("sum", np.dtype("bfloat16"))
(True, 0)
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jshard._rules.registry import OpView


Scalar = bool | int | float
_SIGNED_NAN = -math.nan  # one object: masks are written once for equal values, and no NaN equals another


def neutral_element(reducer: str, dtype: np.dtype) -> Scalar | None:
    """The neutral element of `sum`, `prod`, `and`, `or`, `max`, `min` on a dtype; None for the order of complex numbers."""
    if reducer in ("sum", "or"):
        return False if dtype == np.bool_ else 0
    if reducer == "prod":
        return 1
    if reducer == "and":
        return True if dtype == np.bool_ else -1 if jnp.issubdtype(dtype, jnp.signedinteger) else _last(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    sign = -1 if reducer == "max" else 1
    if dtype == np.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.floating):
        has_infinity = float(np.asarray(math.inf).astype(dtype)) == math.inf
        return sign * math.inf if has_infinity else sign * float(jnp.finfo(dtype).max)
    return _last(dtype) if sign > 0 else int(jnp.iinfo(dtype).min)


def greatest_key(dtype: np.dtype) -> Scalar | None:
    """What `lax.sort` puts last: NaN where there is one; None for complex numbers.

    >>> greatest_key(np.dtype("float32")), greatest_key(np.dtype("int8")), greatest_key(np.dtype("bool"))
    (nan, 127, True)
    """
    if jnp.issubdtype(dtype, jnp.floating) and np.isnan(
        np.asarray(math.nan).astype(dtype).astype(np.float32)
    ):
        return math.nan
    return neutral_element("min", dtype)


def least_element(dtype: np.dtype) -> Scalar | None:
    """What `lax.top_k` takes last: the NaN with a sign where there is one, which is below minus infinity in its order.

    >>> least_element(np.dtype("float32")), least_element(np.dtype("int8")), least_element(np.dtype("bool"))
    (nan, -128, False)
    """
    if jnp.issubdtype(dtype, jnp.floating):
        value = np.asarray(_SIGNED_NAN).astype(dtype)
        if np.isnan(value.astype(np.float32)) and np.signbit(value):
            return _SIGNED_NAN
    return neutral_element("max", dtype)


def window_identity(op: OpView) -> Scalar | None:
    """What outside the tensor changes no maximum or minimum of its windows; None for sums, which zeros do not change.

    >>> from jax import ShapeDtypeStruct
    >>> values = ShapeDtypeStruct((4,), "float32")
    >>> window_identity(OpView("reduce_window_max", {}, (values,), (values,)))
    -inf
    """
    takes_max = op.primitive == "reduce_window_max" or "ge" in str(op.params.get("select_prim", ""))
    takes_min = op.primitive == "reduce_window_min" or "le" in str(op.params.get("select_prim", ""))
    if not (takes_max or takes_min):
        return None
    value = neutral_element("max" if takes_max else "min", op.ins[-1].dtype)
    assert value is not None, "complex numbers have no order in window reductions"
    return value


def _last(dtype: np.dtype) -> int:
    return int(jnp.iinfo(dtype).max)
