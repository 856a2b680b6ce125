"""`jnp.searchsorted` as one operator: what it traces to, a loop of gathers, would gather the array to every device.

The number of elements of a sorted array before a value is the sum of those in its blocks
(`_rules/primitives/sorting.py`). `with_searches` finds the calls in a traced program: by the names of JAX's own functions,
and, from JAX 0.12 on, of its primitive.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda a, v: jnp.searchsorted(a, v, side="right"))(jnp.ones(8), jnp.ones(3))
>>> "searchsorted[dtype=int32 side=right]" in str(with_searches(compat.open_jaxpr(closed)[0]))
True
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import core
from jax.interpreters import ad, batching

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprEqn
from jshard._program.array_primitive import define_primitive
from jshard._program.equation_bodies import bodies_of, with_bodies


SEARCHSORTED = "searchsorted"

searchsorted_p = compat.multi_result_primitive(SEARCHSORTED)

_OF_JAX = "_searchsorted_scan_impl"
_SIDES = {
    "lt_to": "right",
    "le_to": "left",
}  # a query goes before an element that it is less than, or equal to


def run_searchsorted(array: jax.Array, queries: jax.Array, *, side: str, dtype: str) -> list[jax.Array]:
    """The operator on one device."""
    return [jnp.searchsorted(array, queries, side=side).astype(dtype)]


def with_searches(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr in which searches in sorted arrays are operators, in inner bodies too."""
    eqns = []
    for eqn in jaxpr.eqns:
        side = _side_of(eqn)
        if side is None:
            eqns.append(with_bodies(eqn, lambda _, body: with_searches(body)))
        else:
            params = {"side": side, "dtype": str(eqn.outvars[0].aval.dtype)}
            eqns.append(eqn.replace(primitive=searchsorted_p, params=params))
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _side_of(eqn: JaxprEqn) -> str | None:
    """The side of a search of each query in one sorted array; None for any other equation."""
    name = eqn.params.get("name")
    search = _search_of(eqn)
    if search is None and name != _OF_JAX:
        return None
    if len(eqn.invars) != 2 or len(eqn.outvars) != 1:
        return None
    array, queries = (v.aval for v in eqn.invars)
    if len(array.shape) != 1 or queries.shape != eqn.outvars[0].aval.shape or array.dtype != queries.dtype:
        return None
    if search is not None:
        return search[0] if search[1:] == (0, 0) else None
    names = _primitives(eqn)
    found = [side for primitive, side in _SIDES.items() if primitive in names]
    return found[0] if len(found) == 1 and "transpose" not in names else None


def _search_of(eqn: JaxprEqn) -> tuple[str, int, int] | None:
    """Side, dimension and batch dimensions of a `jnp.searchsorted` that is one equation, as from JAX 0.12 on."""
    found = eqn.params.get("_prim")
    if found is None or type(found).__name__ != "SearchSorted":
        return None
    return found.side, found.dimension, found.batch_dims


def _primitives(eqn: JaxprEqn) -> set[str]:
    found = {eqn.primitive.name}
    for body in bodies_of(eqn):
        for inner in body.eqns:
            found |= _primitives(inner)
    return found


def _type(
    array: core.ShapedArray, queries: core.ShapedArray, *, side: str, dtype: str
) -> list[core.ShapedArray]:
    return [queries.update(dtype=jnp.dtype(dtype), weak_type=False)]


def _tangents(primals: list, tangents: list, **params: str) -> tuple[list, list]:
    out = searchsorted_p.bind(*primals, **params)
    return out, [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]


def _batched(args: list, dims: list, **params: str) -> tuple[list, list]:
    (array, queries), (of_array, of_queries) = args, dims
    if of_array is None:
        return searchsorted_p.bind(array, queries, **params), [of_queries]
    search = jax.vmap(lambda a, q: run_searchsorted(a, q, **params), (of_array, of_queries))
    return search(array, queries), [0]


def _define() -> None:
    define_primitive(searchsorted_p, run_searchsorted, _type, "side", "dtype")
    ad.primitive_jvps[searchsorted_p] = _tangents
    batching.primitive_batchers[searchsorted_p] = _batched


_define()
