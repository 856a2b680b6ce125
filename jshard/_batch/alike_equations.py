"""Sequences of equations that a program repeats: which equations are alike, with which period they come again.

Problem.  A Python loop over layers leaves no loop in the traced program, only the equations of one layer after those of the
other; a gradient leaves those of the backward pass the other way round.

Method.  Equations are coded by what they compute on: primitive, parameters, types of operands and results; values of
literals are operands. A sequence of n layers with p equations each has the code at i again at i + p. Candidates for p are
distances between equations of one code, the p of the longest such sequence is taken, of about equal ones the least.

>>> import jax, jax.numpy as jnp
>>> def f(ws, x):
...     for w in ws:
...         x = jnp.sin(x @ w)
...     return x
>>> codes = equation_codes(jax.make_jaxpr(f)([jnp.ones((2, 2))] * 4, jnp.ones((3, 2))).jaxpr.eqns)
>>> codes.tolist(), longest_repetition(codes)
([0, 1, 0, 1, 0, 1, 0, 1], Repetition(begin=0, end=8, period=2))
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import bodies_of


_LAGS = 8  # distances to the next, the next but one, ... equation of the same code are candidates
_CANDIDATES = 60  # most frequent distances that are compared
_NEAR = 0.95  # of the longest sequence, from which on a smaller period is preferred
_NESTING = ("ft_in", "ft_out")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Primitives with functions of a derivative, which a program that is not differentiated any more does not run."""


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Equations `begin` to `end` (excluded), each alike to the one `period` later, as long as that is before `end`."""

    begin: int
    end: int
    period: int

    @property
    def size(self) -> int:
        """The number of equations."""
        return self.end - self.begin


def equation_codes(eqns: Sequence[JaxprEqn]) -> np.ndarray:
    """(equations,) equal numbers for alike equations; those with effects are like no other."""
    numbers: dict[Hashable, int] = {}
    codes = []
    for k, eqn in enumerate(eqns):
        key: Hashable = (
            k if eqn.effects else None, eqn.primitive.name, tuple(map(_type, eqn.invars)), tuple(map(_type, eqn.outvars)),
            tuple((name, _key(value)) for name, value in own_params(eqn) if not _is_rule(eqn, value)),
        )  # fmt: skip
        codes.append(numbers.setdefault(key, len(numbers)))
    return np.array(codes, dtype=np.int64)


def own_params(eqn: JaxprEqn) -> list[tuple[str, object]]:
    """The parameters of an equation by name, without the nesting of operands and results that a loop remembers.

    Which of a loop's operands are constants, carried or sliced follows from their types and those in its body.
    """
    return [(name, value) for name, value in sorted(eqn.params.items()) if name not in _NESTING]


def text_of(value: object) -> str:
    """A jaxpr, or several, as printed (variables are named in order), without such nesting inside."""
    lines = str(value).split("\n")
    return "\n".join(line for line in lines if not line.strip().startswith(tuple(f"{n}=" for n in _NESTING)))


def is_large(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product or has a body: what tells layers from norms between them."""
    return eqn.primitive.name in _PRODUCTS or next(bodies_of(eqn), None) is not None


def longest_repetition(codes: np.ndarray) -> Repetition | None:
    """The longest sequence of at least two periods; None if there is none."""
    found = [r for p in _periods(codes) if (r := _longest_of_period(codes, p)) is not None]
    most = max((r.size for r in found), default=0)
    return min(
        (r for r in found if r.size >= _NEAR * most), key=lambda r: (r.period, -r.size, r.begin), default=None
    )


def _periods(codes: np.ndarray) -> list[int]:
    """Distances between equations of one code, the most frequent ones."""
    order = np.argsort(codes, kind="stable")
    same = codes[order]
    counts: collections.Counter[int] = collections.Counter()
    for lag in range(1, min(_LAGS, len(codes) - 1) + 1):
        is_pair = same[lag:] == same[:-lag]
        distances, number = np.unique((order[lag:] - order[:-lag])[is_pair], return_counts=True)
        counts.update(dict(zip(distances.tolist(), number.tolist(), strict=True)))
    return [p for p, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:_CANDIDATES] if n]


def _longest_of_period(codes: np.ndarray, period: int) -> Repetition | None:
    """The longest sequence with a period."""
    again = np.concatenate([[False], codes[period:] == codes[:-period], [False]])
    edges = np.flatnonzero(again[1:] != again[:-1])
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return None
    k = int(np.argmax(ends - begins))
    if ends[k] - begins[k] < period:
        return None
    return Repetition(int(begins[k]), int(ends[k]) + period, period)


def _is_rule(eqn: JaxprEqn, value: object) -> bool:
    plain = isinstance(value, str | int | tuple | list) or compat.is_jaxpr(value)
    return eqn.primitive.name in _WITH_RULES and not plain


def _type(v: JaxprAtom) -> Hashable:
    return tuple(v.aval.shape) if hasattr(v.aval, "shape") else str(v.aval), str(getattr(v.aval, "dtype", ""))


def _key(value: object) -> Hashable:
    """A parameter for comparison: jaxprs as printed (variables are named in order), other unhashable values by identity."""
    if compat.is_jaxpr(value):
        jaxpr, consts = compat.open_jaxpr(value)
        text = text_of(jaxpr)
        return ("jaxpr", id(value)) if jaxpr.effects or "..." in text else ("jaxpr", text, *map(id, consts))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_key, value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return type(value), value
