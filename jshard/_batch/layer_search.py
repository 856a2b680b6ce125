"""The sequences of alike layers of a program, and where a layer of each begins.

Problem.  A repetition of equations does not say where a layer begins, and the first or last layer may lack equations: the
first one the gradient of data, the last one a key that no layer uses, or a sum of gradients that has one addend there.

Method.  A layer may begin at any of the p equations of a period. Of the places where the equations are a loop
(`alike_layers.py`), that with most products in layers is taken, then with the fewest bytes that pass on or are read of
another sequence's layers otherwise than layer by layer, then with most whole layers: a norm after the last layer looks like
the beginning of one more, but a layer that ended in it would pass on its statistics too. A layer before and one after are
added with equations missing, if half of them or most products are there and nothing reads what is missing. Sequences that do
not fit the others, forward and backward, are looked at again once all are known.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jshard._batch.alike_equations import Repetition, equation_codes, is_large, longest_repetition
from jshard._batch.alike_layers import AlikeLayers, NotALoopError, Row, as_loop, stacked_values
from jshard._batch.partial_layers import in_part, with_ends, with_missing_layer
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn


Indexes = dict[JaxprAtom, list[int]]
"""Of which layers of their sequences values are."""

_MOST_PLACES = 6  # beginnings of a layer that are compared in full


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """Layers with the repetition that they were found in."""

    layers: AlikeLayers
    repetition: Repetition


def find_layers(
    eqns: Sequence[JaxprEqn], passes_on: Callable[[JaxprAtom], bool]
) -> tuple[list[AlikeLayers], list[NotALoopError]]:
    """The sequences of alike layers in which some carry fulfils `passes_on`, in order; and why others are none.

    Sequences whose layers have no parameters are left as they are.
    """
    codes, literals = equation_codes(eqns), _made_of_literals(eqns)
    regions, found, errors = [(0, len(eqns))], list[_Found](), list[NotALoopError]()
    while regions:
        low, high = regions.pop(0)
        repetition = longest_repetition(codes[low:high]) if high - low > 1 else None
        if repetition is None:
            continue
        one = Repetition(low + repetition.begin, low + repetition.end, repetition.period)
        begin, end = one.begin, one.end
        try:
            layers = _best(eqns, codes, one, (low, high), [f.layers for f in found])
        except NotALoopError as error:
            errors.append(error)
        else:
            if _passes(eqns, layers, passes_on) and _has_parameters(layers, passes_on, literals):
                found.append(_Found(layers, one))
                begin, end = layers.begin, layers.end
        regions[:0] = [(low, begin), (end, high)]
    found.sort(key=lambda one: one.layers.begin)
    return _aligned(eqns, codes, found), errors


def _aligned(eqns: Sequence[JaxprEqn], codes: np.ndarray, found: Sequence[_Found]) -> list[AlikeLayers]:
    """The sequences, each with as many layers as the others and beginning where theirs do, if it can.

    The backward pass of a loss after each layer follows that layer's and precedes that of the layer before: alone, a
    sequence may as well begin with the one as with the other.
    """
    layers = [one.layers for one in found]
    most = max((len(each.rows) for each in layers), default=0)
    for k, one in enumerate(found):
        others = [*layers[:k], *layers[k + 1 :]]
        rows = one.layers.rows
        is_whole = len(rows) == most and not any(None in row for row in rows)
        if is_whole and not _misaligned(one.layers, _indexes(eqns, others)):
            continue
        low = layers[k - 1].end if k else 0
        high = layers[k + 1].begin if k + 1 < len(layers) else len(eqns)
        layers[k] = _best(eqns, codes, one.repetition, (low, high), others, most)
    return layers


def _passes(eqns: Sequence[JaxprEqn], layers: AlikeLayers, passes_on: Callable[[JaxprAtom], bool]) -> bool:
    row = layers.rows[layers.whole]
    return any(passes_on(eqns[row[at]].outvars[o]) for (at, o), _ in layers.carries)  # type: ignore[index]


def _has_parameters(
    layers: AlikeLayers, passes_on: Callable[[JaxprAtom], bool], literals: set[JaxprAtom]
) -> bool:
    """Whether each layer has numbers of its own that no layer passes on; `literals`: values that are no parameters."""
    firsts = [next(v for v in slots if v is not None) for slots in layers.stacks]
    return any(
        jnp.issubdtype(v.aval.dtype, jnp.inexact) and not passes_on(v)
        for v in firsts
        if not compat.is_literal(v) and v not in literals
    )


def _made_of_literals(eqns: Sequence[JaxprEqn]) -> set[JaxprAtom]:
    """Values that no input of the program enters."""
    made: set[JaxprAtom] = set()
    for eqn in eqns:
        if all(compat.is_literal(v) or v in made for v in eqn.invars):
            made.update(eqn.outvars)
    return made


def _best(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, one: Repetition, region: tuple[int, int], known: Sequence[AlikeLayers],
    count: int = 0,
) -> AlikeLayers:  # fmt: skip
    """The layers of a repetition, from the best beginning; raises `NotALoopError`. `count`: of the layers, if known."""
    indexes = _indexes(eqns, known)
    p, full = one.period, one.size // one.period
    costs: dict[int, float] = {}
    error: NotALoopError | None = None
    for first in range(min(p, one.size - 2 * p + 1) if full > 1 else 0):
        rows = _rows(one.begin + first, min(4, (one.size - first) // p), p)
        try:
            costs[first] = _cost(eqns, as_loop(eqns, rows), indexes)
        except NotALoopError as found:
            error = error or found
    places = dict.fromkeys(sorted(costs, key=lambda f: (costs[f], f))[:_MOST_PLACES])
    best: tuple[tuple[float, ...], AlikeLayers] | None = None
    for first in places:
        rows = _rows(one.begin + first, (one.size - first) // p, p)
        try:
            layers = in_part(eqns, with_ends(eqns, codes, rows, region))
        except NotALoopError as found:
            error = error or found
            continue
        if len(layers.rows) == count - 1:
            layers = with_missing_layer(eqns, codes, layers, region)
        whole, cost = sum(None not in row for row in layers.rows), _cost(eqns, layers, indexes)
        there = [i for row in layers.rows for i in row if i is not None]
        large = sum(is_large(eqns[i]) for i in there)
        fits = (len(layers.rows) == count, large, -cost, len(there), whole, -first)
        rank = fits if count else (large, -cost, whole, len(there), len(layers.rows), -first)
        if best is None or rank > best[0]:
            best = rank, layers
    if best is None:
        raise error or NotALoopError(eqns[one.begin], "it is not repeated in a chain")
    return best[1]


def _rows(begin: int, count: int, period: int) -> list[Row]:
    return [tuple(range(begin + k * period, begin + (k + 1) * period)) for k in range(count)]


def _cost(eqns: Sequence[JaxprEqn], layers: AlikeLayers, indexes: Indexes) -> float:
    """Bytes that pass on, and those that are misaligned."""
    row = layers.rows[layers.whole]
    carried = sum(_nbytes(eqns[row[at]].outvars[o]) for (at, o), _ in layers.carries)  # type: ignore[index]
    return carried + _misaligned(layers, indexes)


def _misaligned(layers: AlikeLayers, indexes: Indexes) -> float:
    """Bytes read of other sequences' layers that are not those of the layer that most are."""
    shifts: collections.Counter[int] = collections.Counter()
    total = 0.0
    for slots in layers.stacks:
        there = [(k, v) for k, v in enumerate(slots) if v is not None and not compat.is_literal(v)]
        known = [(k, v) for k, v in there if v in indexes]
        if not known:
            continue  # the other sequences may also lack a layer that these have
        total += (size := _nbytes(known[0][1]))
        agreed = set.intersection(*({n + k for n in indexes[v]} for k, v in known))
        shifts.update(dict.fromkeys(agreed, int(size)))
    return total - max(shifts.values(), default=0)


def _indexes(eqns: Sequence[JaxprEqn], known: Sequence[AlikeLayers]) -> Indexes:
    """For values of layers found before: of which layer they are."""
    out: Indexes = {}
    for layers in known:
        for slots in stacked_values(eqns, layers):
            for k, v in enumerate(slots):
                if v is not None and not compat.is_literal(v):
                    out.setdefault(v, []).append(k)
    return out


def _nbytes(v: JaxprAtom) -> float:
    shape = getattr(v.aval, "shape", ())
    return math.prod(shape) * compat.itemsize(v.aval.dtype)
