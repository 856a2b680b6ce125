"""Gathers and scatters whose indices along a dimension are its positions in order, with that dimension shared instead.

`logits[jnp.arange(n), labels]` gathers from every example by the position of the example, so an index of one example may
name another, as far as a rule can see, and neither this gather nor the scatter of its gradient has a part for some examples.
Indices that are an `iota` along a dimension of theirs say that both go through that dimension together: a batching dimension
of the operator, as `jnp.take_along_axis` writes it.

>>> import jax, jax.extend, jax.numpy as jnp
>>> f = lambda logits, labels: logits[jnp.arange(4), labels]
>>> logits, labels = jnp.arange(12.0).reshape(4, 3), jnp.array([0, 2, 1, 1])
>>> traced = jax.make_jaxpr(f)(logits, labels)
>>> shared = with_positions_shared(traced)
>>> [e.params["dimension_numbers"].operand_batching_dims for e in shared.jaxpr.eqns if e.primitive.name == "gather"]
[(0,)]
>>> jax.extend.core.jaxpr_as_fun(shared)(logits, labels)[0].tolist()
[0.0, 5.0, 7.0, 10.0]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import with_calls_inlined


MadeBy = Mapping[JaxprAtom, JaxprEqn]


@dataclasses.dataclass(frozen=True)
class _Names:
    """What dimension numbers call the dimensions that are dropped, those that are indexed, and those that are shared."""

    dropped: str
    indexed: str
    shared: str


_NAMES = {
    "gather": _Names("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    "scatter": _Names(
        "inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims"
    ),
}


def with_positions_shared(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with such gathers and scatters rewritten, outside of loops; the same object if it has none."""
    jaxpr = with_calls_inlined(compat.open_jaxpr(closed)[0], lines=True)
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    eqns = [new for eqn in jaxpr.eqns for new in _shared(eqn, made_by)]
    same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=False))
    return closed if same else closed.replace(jaxpr=jaxpr.replace(eqns=eqns))


def _shared(eqn: JaxprEqn, made_by: MadeBy) -> list[JaxprEqn]:
    """The equation with a dimension shared for each column of its indices that is positions; before it, its new indices."""
    names = _NAMES.get(eqn.primitive.name.partition("-")[0])
    joined = made_by.get(eqn.invars[1]) if names and len(eqn.invars) > 1 else None
    if names is None or joined is None or joined.primitive.name != "concatenate":
        return [eqn]
    columns, last = list(joined.invars), len(eqn.invars[1].aval.shape) - 1
    if joined.params["dimension"] != last or any(v.aval.shape[last] != 1 for v in columns):
        return [eqn]
    numbers = eqn.params["dimension_numbers"]
    pairs = list(zip(numbers.operand_batching_dims, getattr(numbers, names.shared), strict=True))
    rest: list[tuple[JaxprAtom, int]] = []
    for column, dim in zip(columns, getattr(numbers, names.indexed), strict=True):
        along = _positions(column, made_by)
        free = dim in getattr(numbers, names.dropped) and along not in [d for _, d in pairs]
        if along is not None and free and eqn.invars[0].aval.shape[dim] == column.aval.shape[along]:
            pairs.append((dim, along))
        else:
            rest.append((column, dim))
    if not rest or len(rest) == len(columns):
        return [eqn]
    pairs.sort()
    new = {
        "operand_batching_dims": tuple(dim for dim, _ in pairs),
        names.shared: tuple(along for _, along in pairs),
        names.indexed: tuple(dim for _, dim in rest),
        names.dropped: tuple(
            d for d in getattr(numbers, names.dropped) if d not in [dim for dim, _ in pairs]
        ),
    }
    params = {**eqn.params, "dimension_numbers": numbers._replace(**new)}
    indices, before = rest[0][0], list[JaxprEqn]()
    if len(rest) > 1:
        aval = eqn.invars[1].aval
        indices = compat.VARIABLE(aval.update(shape=(*aval.shape[:-1], len(rest))))
        before = [joined.replace(invars=[v for v, _ in rest], outvars=[indices])]
    return [*before, eqn.replace(params=params, invars=[eqn.invars[0], indices, *eqn.invars[2:]])]


def _positions(v: JaxprAtom, made_by: MadeBy) -> int | None:
    """The dimension along which a value is its own index, 0, 1, 2, ...; None for other values."""
    eqn = None if compat.is_literal(v) else made_by.get(v)
    if eqn is None:
        return None
    name, p = eqn.primitive.name, eqn.params
    if name == "iota":
        return int(p["dimension"])
    if name == "select_n":  # negative indices count from the end: `x < 0 ? x + n : x`
        test = None if compat.is_literal(eqn.invars[0]) else made_by.get(eqn.invars[0])
        is_sign = test is not None and test.primitive.name == "lt" and test.invars[0] is eqn.invars[1]
        return _positions(eqn.invars[1], made_by) if is_sign and _is_zero(test.invars[1]) else None  # type: ignore[union-attr]
    if name not in ("convert_element_type", "broadcast_in_dim", "reshape"):
        return None
    along = _positions(eqn.invars[0], made_by)
    if along is None or name == "convert_element_type":
        return along
    shape = eqn.invars[0].aval.shape
    if name == "broadcast_in_dim":
        to = p["broadcast_dimensions"][along]
        return to if v.aval.shape[to] == shape[along] else None
    return _after_reshape(shape, v.aval.shape, along)


def _is_zero(v: JaxprAtom) -> bool:
    return compat.is_literal(v) and not v.val  # type: ignore[attr-defined]


def _after_reshape(before: Sequence[int], after: Sequence[int], along: int) -> int | None:
    """Where a dimension is after a reshape that adds or drops dimensions of size 1 only.

    >>> _after_reshape((4, 3), (1, 4, 3, 1), 1), _after_reshape((4, 3), (12,), 1)
    (2, None)
    """
    old, new = ([d for d, n in enumerate(shape) if n != 1] for shape in (before, after))
    if [before[d] for d in old] != [after[d] for d in new] or along not in old:
        return None
    return new[old.index(along)]
