"""The jaxprs among an equation's parameters: bodies of loops, branches and calls, to be read or replaced.

>>> import jax
>>> eqn = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, lambda y: y + 1, lambda y: y * 2, x))(1.0).eqns[-1]
>>> [(place, [e.primitive.name for e in body.eqns]) for place, body in numbered_bodies(eqn)]
[(('branches', 0), ['mul']), (('branches', 1), ['add'])]
>>> with_bodies(eqn, lambda place, body: body) is eqn
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprEqn


Place = tuple[str, int]
"""A parameter of an equation, and the position in it; -1 where the parameter is the jaxpr."""


def numbered_bodies(eqn: JaxprEqn) -> Iterator[tuple[Place, Jaxpr]]:
    """The open jaxprs in an equation's parameters, with their places."""
    for name, value in eqn.params.items():
        if isinstance(value, (tuple, list)):  # of every equation: faster than `tuple | list`
            for i, inner in enumerate(value):
                if compat.is_jaxpr(inner):
                    yield (name, i), compat.open_jaxpr(inner)[0]
        elif compat.is_jaxpr(value):
            yield (name, -1), compat.open_jaxpr(value)[0]


def bodies_of(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The open jaxprs in an equation's parameters."""
    return (body for _, body in numbered_bodies(eqn))


def every_equation(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of an open jaxpr, each before those of its bodies.

    >>> import jax
    >>> closed = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
    >>> [e.primitive.name == "add" for e in every_equation(closed.jaxpr)]
    [False, True]
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn):
            yield from every_equation(body)


def with_bodies(eqn: JaxprEqn, rewrite: Callable[[Place, Jaxpr], Jaxpr]) -> JaxprEqn:
    """An equation with rewritten open jaxprs, closed ones with their constants; the same if `rewrite` changes none."""
    params: dict[str, object] = dict(eqn.params)
    changed = False
    for (name, i), body in numbered_bodies(eqn):
        new = rewrite((name, i), body)
        if new is body:
            continue
        changed, value = True, params[name]
        if isinstance(value, tuple | list):
            parts = [_replaced(old, new) if j == i else old for j, old in enumerate(value)]
            params[name] = type(value)(parts)
        else:
            params[name] = _replaced(value, new)
    return eqn.replace(params=params) if changed else eqn


def rewritten(closed: ClosedJaxpr, rewrite: Callable[[Jaxpr], Jaxpr]) -> ClosedJaxpr:
    """A jaxpr, open or closed, with its equations rewritten; the same one if `rewrite` changes none."""
    opened, _ = compat.open_jaxpr(closed)
    new = rewrite(opened)
    return closed if new is opened else cast("ClosedJaxpr", _replaced(closed, new))


def _replaced(old: object, new: Jaxpr) -> object:
    """A jaxpr, open or closed, with another body."""
    closed = cast("ClosedJaxpr", old)
    return new if compat.open_jaxpr(closed)[0] is closed else closed.replace(jaxpr=new)
