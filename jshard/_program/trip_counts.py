"""How often a `while` runs, where its program says so: a counter with a first value, a step and a limit in numbers.

>>> import jax
>>> from jax import lax
>>> def f(n, x):
...     return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 3, c[1] * 2), (1, x))
>>> def turns(n):
...     eqn = jax.make_jaxpr(lambda x: f(n, x))(1.0).eqns[-1]
...     return trip_count_of(eqn, [literal_int(v) for v in eqn.invars])
>>> turns(12), turns(0)
(4, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard import _jaxcompat as compat


_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def trip_count_of(eqn: Any, given: Sequence[int | None]) -> int | None:
    """Turns of a `while` equation; None when they are not written in the program.

    `given` are its operands where they are whole numbers, None for the others.
    """
    p = eqn.params
    n_test, n_body = p["cond_nconsts"], p["body_nconsts"]
    test, body = (compat.open_jaxpr(p[k])[0] for k in ("cond_jaxpr", "body_jaxpr"))
    outer = {v: given[k] for k, v in enumerate(test.invars[:n_test])}
    carries, start = test.invars[n_test:], given[n_test + n_body :]
    compared = _made(test, test.outvars[0])
    if compared is None or compared.primitive.name not in _FLIPPED:
        return None
    (counter, limit), way = compared.invars, compared.primitive.name
    if counter not in carries:
        (counter, limit), way = (limit, counter), _FLIPPED[way]
    if counter not in carries:
        return None
    k = carries.index(counter)
    step, last = _step(body, n_body, k), literal_int(limit)
    if last is None and not compat.is_literal(limit):
        last = outer.get(limit)
        if limit in carries and _kept(body, n_body, carries.index(limit)):
            last = start[carries.index(limit)]
    if step is None or last is None or start[k] is None:
        return None
    return _count(start[k], step, last, way)


def literal_int(v: Any) -> int | None:
    """The value of a variable of a jaxpr that is a literal whole number."""
    return as_int(v.val) if compat.is_literal(v) else None


def as_int(value: Any) -> int | None:
    """A value as a whole number; None if it is none."""
    integer = not np.ndim(value) and np.issubdtype(np.asarray(value).dtype, np.integer)
    return int(value) if integer else None


def _made(jaxpr: Any, v: Any) -> Any:
    """The equation that makes a variable, if one does."""
    return None if compat.is_literal(v) else next((e for e in jaxpr.eqns if v in e.outvars), None)


def _step(body: Any, consts: int, k: int) -> int | None:
    """What a turn adds to carry `k`."""
    e = _made(body, body.outvars[k])
    if e is None or e.primitive.name not in ("add", "sub"):
        return None
    a, b = e.invars
    carried = body.invars[consts + k]
    if a is carried:
        by = literal_int(b)
        return by if by is None or e.primitive.name == "add" else -by
    return literal_int(a) if b is carried and e.primitive.name == "add" else None


def _kept(body: Any, consts: int, k: int) -> bool:
    return body.outvars[k] is body.invars[consts + k]


def _count(start: int, step: int, last: int, way: str) -> int | None:
    """Turns of `for (i = start; i way last; i += step)`; None for a loop that does not end by its counter."""
    if way == "ne":
        whole, rest = divmod(last - start, step) if step else (0, 1)
        return whole if rest == 0 and whole >= 0 else None
    if way in ("gt", "ge"):
        start, step, last = -start, -step, -last
    if way in ("le", "ge"):
        last += 1
    if start >= last:
        return 0
    return -(-(last - start) // step) if step > 0 else None
