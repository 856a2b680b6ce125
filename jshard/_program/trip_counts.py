"""Trip counts of `while` loops with a counter whose start, step and limit are constants of the program.

>>> import jax
>>> from jax import lax
>>> def f(n, x):
...     return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 3, c[1] * 2), (1, x))
>>> def trip_count(n):
...     eqn = jax.make_jaxpr(lambda x: f(n, x))(1.0).eqns[-1]
...     return trip_count_of(eqn, [literal_int(v) for v in eqn.invars])
>>> trip_count(12), trip_count(0)
(4, 0)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def trip_count_of(eqn: JaxprEqn, operands: Sequence[int | None]) -> int | None:
    """Iterations of a `while` equation; None if its program does not determine them.

    `operands` are the values of its operands that are constant integers, None for the others.
    """
    p = eqn.params
    n_test, n_body = p["cond_nconsts"], p["body_nconsts"]
    test, body = (compat.open_jaxpr(p[k])[0] for k in ("cond_jaxpr", "body_jaxpr"))
    outer = {v: operands[k] for k, v in enumerate(test.invars[:n_test])}
    carries, start = test.invars[n_test:], operands[n_test + n_body :]
    comparison = _def_equation(test, test.outvars[0])
    if comparison is None or comparison.primitive.name not in _MIRRORED:
        return None
    (counter, limit), relation = comparison.invars, comparison.primitive.name
    if counter not in carries:
        (counter, limit), relation = (limit, counter), _MIRRORED[relation]
    if counter not in carries:
        return None
    k = carries.index(counter)
    step, last = _step(body, n_body, k), literal_int(limit)
    if last is None and not compat.is_literal(limit):
        last = outer.get(limit)
        if limit in carries and _is_unchanged(body, n_body, carries.index(limit)):
            last = start[carries.index(limit)]
    first = start[k]
    if step is None or last is None or first is None:
        return None
    return _count(first, step, last, relation)


def literal_int(v: JaxprAtom) -> int | None:
    """The value of an atom of a jaxpr that is a literal integer, else None."""
    return as_int(v.val) if compat.is_literal(v) else None


def as_int(value: ArrayLike) -> int | None:
    """A scalar of integer type as an `int`; None for anything else."""
    integer = not np.ndim(value) and np.issubdtype(np.asarray(value).dtype, np.integer)
    return int(np.asarray(value)) if integer else None


def _def_equation(jaxpr: Jaxpr, v: JaxprAtom) -> JaxprEqn | None:
    """The equation that defines a variable; None for literals and inputs."""
    return None if compat.is_literal(v) else next((e for e in jaxpr.eqns if v in e.outvars), None)


def _step(body: Jaxpr, consts: int, k: int) -> int | None:
    """The constant that an iteration adds to carry `k`, or None."""
    e = _def_equation(body, body.outvars[k])
    if e is None or e.primitive.name not in ("add", "sub"):
        return None
    a, b = e.invars
    carried = body.invars[consts + k]
    if a is carried:
        step = literal_int(b)
        return step if step is None or e.primitive.name == "add" else -step
    return literal_int(a) if b is carried and e.primitive.name == "add" else None


def _is_unchanged(body: Jaxpr, consts: int, k: int) -> bool:
    """Whether an iteration leaves carry `k` as it is."""
    return body.outvars[k] is body.invars[consts + k]


def _count(start: int, step: int, last: int, relation: str) -> int | None:
    """Iterations of `for (i = start; i <relation> last; i += step)`; None if the counter does not end the loop."""
    if relation == "ne":
        count, remainder = divmod(last - start, step) if step else (0, 1)
        return count if remainder == 0 and count >= 0 else None
    if relation in ("gt", "ge"):
        start, step, last = -start, -step, -last
    if relation in ("le", "ge"):
        last += 1
    if start >= last:
        return 0
    return -(-(last - start) // step) if step > 0 else None
