"""`jnp.searchsorted` as one operator: what it traces to, a loop of gathers or two sorts, would gather the array to all.

The number of elements of a sorted array before a value is the sum of those in its blocks
(`_rules/primitives/sorting.py`). `with_searches` finds the calls in a traced program: by the names of JAX's own functions,
and, from JAX 0.12 on, of its primitive.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda a, v: jnp.searchsorted(a, v, side="right"))(jnp.ones(8), jnp.ones(3))
>>> "searchsorted[dtype=int32 method=scan side=right]" in str(with_searches(compat.open_jaxpr(closed)[0]))
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

_BY_SCAN, _BY_SORT = "_searchsorted_scan_impl", "_searchsorted_sort_impl"
_SIDES = {
    "lt_to": "right",
    "le_to": "left",
}  # a query goes before an element that it is less than, or equal to


def run_searchsorted(
    array: jax.Array, queries: jax.Array, *, side: str, method: str, dtype: str
) -> list[jax.Array]:
    """The operator on one device."""
    return [jnp.searchsorted(array, queries, side=side, method=method).astype(dtype)]


def with_searches(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr in which searches in sorted arrays are operators, in inner bodies too."""
    eqns = []
    for eqn in jaxpr.eqns:
        found = _side_and_method(eqn)
        if found is None:
            eqns.append(with_bodies(eqn, lambda _, body: with_searches(body)))
        else:
            params = {"side": found[0], "method": found[1], "dtype": str(eqn.outvars[0].aval.dtype)}
            eqns.append(eqn.replace(primitive=searchsorted_p, params=params))
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _side_and_method(eqn: JaxprEqn) -> tuple[str, str] | None:
    """Side and method of a search of each query in one sorted array; None for any other equation."""
    name = eqn.params.get("name")
    search = eqn.params.get("_prim")
    if type(search).__name__ != "SearchSorted" and name not in (_BY_SCAN, _BY_SORT):
        return None
    if len(eqn.invars) != 2 or len(eqn.outvars) != 1:
        return None
    array, queries = (v.aval for v in eqn.invars)
    if len(array.shape) != 1 or queries.shape != eqn.outvars[0].aval.shape or array.dtype != queries.dtype:
        return None
    if search is not None:  # one equation, as from JAX 0.12 on
        return (search.side, search.method) if (search.dimension, search.batch_dims) == (0, 0) else None
    return _of_sorts(eqn) if name == _BY_SORT else _of_scan(eqn)


def _of_scan(eqn: JaxprEqn) -> tuple[str, str] | None:
    names = _primitives(eqn)
    found = [side for primitive, side in _SIDES.items() if primitive in names]
    return (found[0], "scan") if len(found) == 1 and "transpose" not in names else None


def _of_sorts(eqn: JaxprEqn) -> tuple[str, str] | None:
    """Queries that are sorted before the array's equal elements go to their left."""
    (body,) = bodies_of(eqn)
    joined = [e for e in body.eqns if e.primitive.name == "concatenate"]
    if len(joined) != 1 or sum(e.primitive.name == "sort" for e in body.eqns) != 2:
        return None
    places = [k for k, v in enumerate(joined[0].invars) if v is body.invars[0]]
    return ("right" if places == [0] else "left", "sort") if len(places) == 1 else None


def _primitives(eqn: JaxprEqn) -> set[str]:
    found = {eqn.primitive.name}
    for body in bodies_of(eqn):
        for inner in body.eqns:
            found |= _primitives(inner)
    return found


def _type(
    array: core.ShapedArray, queries: core.ShapedArray, *, side: str, method: str, dtype: str
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
    define_primitive(searchsorted_p, run_searchsorted, _type, "side", "method", "dtype")
    ad.primitive_jvps[searchsorted_p] = _tangents
    batching.primitive_batchers[searchsorted_p] = _batched


_define()
