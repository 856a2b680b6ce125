"""Layers before and after those that a program repeats, with equations missing.

The first layer of a backward pass has no gradient from a layer after it: a sum with one addend is that addend. The last one
has no gradient of data to compute, and lacks what only that reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jshard._batch.alike_equations import is_large
from jshard._batch.alike_layers import (
    AlikeLayers,
    Carried,
    NotALoopError,
    Own,
    Row,
    Same,
    Source,
    as_loop,
    first_addend,
    identity,
)
from jshard._core.jax_types import JaxprAtom, JaxprEqn


def in_part(eqns: Sequence[JaxprEqn], rows: Sequence[Row]) -> AlikeLayers:
    """The rows as a loop, or without the first or the last, which may read other values; raises `NotALoopError`."""
    error: NotALoopError | None = None
    for part in (rows, rows[1:], rows[:-1], rows[1:-1]):
        if len(part) > 1 and any(None not in row for row in part):
            try:
                return as_loop(eqns, part)
            except NotALoopError as found:
                error = error or found
    raise error or NotALoopError(eqns[rows[0][0] or 0], "it is not repeated in a chain")


def with_ends(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, rows: list[Row], region: tuple[int, int]
) -> list[Row]:
    """The rows with one more before and after where most equations of a layer are there."""
    layers = in_part(eqns, rows)
    rows = list(layers.rows)
    row = _row_after(eqns, codes, layers, region[1])
    if _is_layer(eqns, row, rows[layers.whole]):
        rows.append(row)
    row = _row_before(eqns, codes, layers, region[0])
    return [row, *rows] if _is_layer(eqns, row, layers.rows[layers.whole]) else rows


def _row_after(eqns: Sequence[JaxprEqn], codes: np.ndarray, layers: AlikeLayers, high: int) -> Row:
    """What of a layer follows the layers, before position `high`."""
    return _matched(eqns, codes, layers, layers.end, high, layers.rows[-1])[0]


def _row_before(eqns: Sequence[JaxprEqn], codes: np.ndarray, layers: AlikeLayers, low: int) -> Row:
    """What of a layer leads to the layers, from position `low` on; of several the one that lacks least."""
    begin, size = layers.begin, len(layers.rows[0])
    best: Row = (None,) * size
    for start in range(max(low, begin - size), begin):
        row, after = _matched(eqns, codes, layers, start, begin, None)
        if after == begin and row.count(None) < best.count(None) and _leads_to(eqns, layers, row):
            best = row
    return best


def _is_layer(eqns: Sequence[JaxprEqn], row: Row, whole: Row) -> bool:
    """Whether what there is of a layer is one: a product, and half of its equations or most of its products."""
    large = [row[k] is not None for k, i in enumerate(whole) if i is not None and is_large(eqns[i])]
    has_half = row.count(None) <= len(row) / 2
    return has_half and (any(large) or not large) or sum(large) > len(large) / 2


def with_missing_layer(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, layers: AlikeLayers, region: tuple[int, int]
) -> AlikeLayers:
    """The layers, which are one less than in other sequences, with what there is of another one.

    The first layer of a backward pass whose data needs no gradient may lack most of its equations.
    """
    after = _row_after(eqns, codes, layers, region[1])
    before = _row_before(eqns, codes, layers, region[0])
    for row, rows in ((after, [*layers.rows, after]), (before, [before, *layers.rows])):
        if row.count(None) < len(row):
            try:
                return as_loop(eqns, rows)
            except NotALoopError:
                pass  # it stays outside
    return layers


def _matched(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, layers: AlikeLayers, begin: int, end: int, before: Row | None
) -> tuple[Row, int]:  # fmt: skip
    """The equations from `begin` on as a layer, those that do not follow missing; and the position after them.

    `before`: the layer before; None where that is not among the layers.
    """
    template, row, i = layers.rows[layers.whole], list[int | None](), begin
    for at, like in enumerate(template):
        fits = i < end and codes[i] == codes[like] and all(
            _reads(eqns, layers, layers.operands[at, n], v, row, before) for n, v in enumerate(eqns[i].invars)
        )  # fmt: skip
        row.append(i if fits else None)
        i += int(fits)
    return tuple(row), i


def _reads(
    eqns: Sequence[JaxprEqn], layers: AlikeLayers, source: Source, v: JaxprAtom, row: Sequence[int | None],
    before: Row | None,
) -> bool:  # fmt: skip
    """Whether an operand of a layer comes from where it does in the others."""
    if isinstance(source, Same):
        return identity(source.atom) == identity(v)
    if isinstance(source, Own):
        return True
    if isinstance(source, Carried):
        if before is None:
            return True
        (at, o), made_by = layers.carries[source.carry][0], before
        return (i := made_by[at]) is not None and eqns[i].outvars[o] is v
    at, o = source.place
    if (i := row[at]) is not None:
        return eqns[i].outvars[o] is v
    whole = layers.rows[layers.whole]
    return before is None and first_addend(eqns, whole, tuple(row), at) is v


def _leads_to(eqns: Sequence[JaxprEqn], layers: AlikeLayers, row: Row) -> bool:
    """Whether the first of the layers gets its carries from this one."""
    first = layers.rows[0]
    for (at, n), source in layers.operands.items():
        if isinstance(source, Carried) and (i := first[at]) is not None:
            made_at, o = layers.carries[source.carry][0]
            j, read = row[made_at], eqns[i].invars[n]
            made = (
                first_addend(eqns, layers.rows[layers.whole], row, made_at)
                if j is None
                else eqns[j].outvars[o]
            )
            if made is not read:
                return False
    return True
