"""The layers of a Python loop in a traced program: alike equations, and which values pass from one layer to the next.

Problem.  A sequence of equations that is repeated (`alike_equations.py`) is a chain of layers only if its values flow as
those of a loop do. The repetition also does not say where a layer begins, and the first or last layer may lack equations:
the first one the gradient of data, the last one a key that no layer uses.

Method.  A layer may begin at any of the p equations of a period. For each place the operands are compared over the layers:
an operand is made in its own layer, comes from the layer before (carried), is the same value in all layers, or another
value made outside in each. All else is no loop. Of the places that remain, that with most whole layers is taken, then that
with the fewest bytes that pass on or are read of another sequence's layers otherwise than layer by layer. A layer before and
one after are added with equations missing, if at least half of them are there and nothing reads the missing ones.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jshard._batch.alike_equations import Repetition, equation_codes, longest_repetition
from jshard._batch.batch_class import described
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn
from jshard._program.common_subexpressions import literal_value


Place = tuple[int, int]
"""An equation of a layer, by number, and one of its operands or results."""

Row = tuple[int | None, ...]
"""The equations of one layer by position in the program, in the order of a layer; None for one that is missing."""

_MOST_PLACES = 6  # beginnings of a layer that are compared in full
_LEAST_SHARE = 0.5  # of the equations of a layer that must be there


@dataclasses.dataclass(frozen=True)
class Inner:
    """An operand made by an equation of the same layer."""

    place: Place


@dataclasses.dataclass(frozen=True)
class Carried:
    """An operand that the layer before made: carry number `carry`."""

    carry: int


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """An operand that is the same value in all layers."""

    atom: JaxprAtom


@dataclasses.dataclass(frozen=True)
class Own:
    """An operand of which each layer has its own value, made outside: stack number `stack`."""

    stack: int


Source = Inner | Carried | Same | Own
Slots = tuple[JaxprAtom | None, ...]
"""The values of an operand in each layer, in the order in which they run; None where the equation is missing."""


@dataclasses.dataclass(frozen=True, eq=False)
class AlikeLayers:
    """Layers as a loop.

    - `rows`: the equations of each layer. `whole`: the number of a layer that lacks none.
    - `operands`: where each operand of a layer's equations comes from.
    - `carries`: what passes on: the result that is carried, and its value before the first layer, None if not read.
    - `stacks`: values that each layer has of its own.
    """

    rows: tuple[Row, ...]
    whole: int
    operands: Mapping[Place, Source]
    carries: tuple[tuple[Place, JaxprAtom | None], ...]
    stacks: tuple[Slots, ...]

    @property
    def begin(self) -> int:
        """The position of the first equation."""
        return min(i for row in self.rows for i in row if i is not None)

    @property
    def end(self) -> int:
        """The position after the last equation."""
        return 1 + max(i for row in self.rows for i in row if i is not None)


class NotALoopError(Exception):
    """Signals that alike equations do not form a loop; handled inside this package. `eqn`: where, `why`: the reason."""

    def __init__(self, eqn: JaxprEqn, why: str):
        super().__init__(f"{described(eqn)}: {why}")


def identity(v: JaxprAtom) -> Hashable:
    """Equal for variables that are the same and for literals of the same value."""
    return literal_value(v.val, v.aval) if compat.is_literal(v) else v  # type: ignore[attr-defined, arg-type]


def results_of(eqns: Sequence[JaxprEqn], rows: Sequence[Row], place: Place) -> Slots:
    """A result of each layer."""
    at, o = place
    return tuple(None if (i := row[at]) is None else eqns[i].outvars[o] for row in rows)


def as_loop(eqns: Sequence[JaxprEqn], rows: Sequence[Row]) -> AlikeLayers:
    """Rows of alike equations as layers; raises `NotALoopError`."""
    whole = next(k for k, row in enumerate(rows) if None not in row)
    made: dict[JaxprAtom, list[tuple[int, Place]]] = {}
    for k, row in enumerate(rows):
        for at, i in enumerate(row):
            for o, v in enumerate(() if i is None else eqns[i].outvars):
                made[v] = [(k, (at, o))]
    for at, i in enumerate(rows[0]):
        if i is None and (v := _first_addend(eqns, rows[whole], rows[0], at)) is not None:
            made[v].append((0, (at, 0)))
    operands: dict[Place, Source] = {}
    carries: list[tuple[Place, JaxprAtom | None]] = []
    stacks: dict[tuple[Hashable, ...], int] = {}
    slots_of: list[Slots] = []
    for at, i in enumerate(rows[whole]):
        assert i is not None
        for n in range(len(eqns[i].invars)):
            slots = tuple(None if (e := row[at]) is None else eqns[e].invars[n] for row in rows)
            after_first = [_from(v, k, made) for k, v in enumerate(slots) if k and v is not None]
            if not after_first:
                raise NotALoopError(eqns[i], "only the first layer has it")
            later = set.intersection(*after_first)
            first = later if slots[0] is None else _from(slots[0], 0, made)
            inner, carried = (sorted(p for back, p in later if back == b) for b in (0, 1))
            if OUTSIDE in later & first:
                operands[at, n] = _outside(slots, stacks, slots_of)
            elif inner and (0, inner[0]) in first:
                operands[at, n] = Inner(inner[0])
            elif carried and (slots[0] is None or OUTSIDE in first):
                operands[at, n] = Carried(_carry(carried[0], slots[0], carries))
            else:
                raise NotALoopError(eqns[i], "it does not read the same values in every layer")
    return AlikeLayers(tuple(rows), whole, operands, tuple(carries), tuple(slots_of))


From = tuple[int, Place]
"""How many layers before an operand was made, and by what; (-1, (-1, -1)) outside."""

OUTSIDE: From = (-1, (-1, -1))


def _from(v: JaxprAtom, layer: int, made: Mapping[JaxprAtom, Sequence[tuple[int, Place]]]) -> set[From]:
    """What a value read in a layer may be."""
    if compat.is_literal(v) or v not in made:
        return {OUTSIDE}
    return {(layer - k, place) for k, place in made[v]}


def _first_addend(eqns: Sequence[JaxprEqn], whole: Row, first: Row, at: int) -> JaxprAtom | None:
    """What stands for a sum that the first layer lacks, as it adds to nothing: the addend that the layer makes itself."""
    eqn = eqns[whole[at]]  # type: ignore[index]
    if eqn.primitive.name != "add_any":
        return None
    for n, i in enumerate(whole[:at]):
        for o, v in enumerate(eqns[i].outvars):  # type: ignore[index]
            if any(v is w for w in eqn.invars) and (own := first[n]) is not None:
                return eqns[own].outvars[o]
    return None


def _outside(slots: Slots, stacks: dict[tuple[Hashable, ...], int], slots_of: list[Slots]) -> Source:
    key = tuple(None if v is None else identity(v) for v in slots)
    present = [v for v in slots if v is not None]
    if len({k for k in key if k is not None}) == 1:
        return Same(present[0])
    if key not in stacks:
        stacks[key] = len(slots_of)
        slots_of.append(slots)
    return Own(stacks[key])


def _carry(place: Place, first: JaxprAtom | None, carries: list[tuple[Place, JaxprAtom | None]]) -> int:
    for n, (known, initial) in enumerate(carries):
        if known == place and (initial is None or first is None or identity(initial) == identity(first)):
            carries[n] = place, first if initial is None else initial
            return n
    carries.append((place, first))
    return len(carries) - 1


def find_layers(
    eqns: Sequence[JaxprEqn], passes_on: Callable[[JaxprAtom], bool]
) -> tuple[list[AlikeLayers], list[NotALoopError]]:
    """The sequences of alike layers in which some carry fulfils `passes_on`, in order; and why others are none.

    Sequences whose layers have no parameters are left as they are.
    """
    codes, literals = equation_codes(eqns), _made_of_literals(eqns)
    regions, found, errors = [(0, len(eqns))], list[AlikeLayers](), list[NotALoopError]()
    while regions:
        low, high = regions.pop(0)
        repetition = longest_repetition(codes[low:high]) if high - low > 1 else None
        if repetition is None:
            continue
        one = Repetition(low + repetition.begin, low + repetition.end, repetition.period)
        begin, end = one.begin, one.end
        try:
            layers = _best(eqns, codes, one, (low, high), found)
        except NotALoopError as error:
            errors.append(error)
        else:
            if _passes(eqns, layers, passes_on) and _has_parameters(layers, passes_on, literals):
                found.append(layers)
                begin, end = layers.begin, layers.end
        regions[:0] = [(low, begin), (end, high)]
    return _completed(eqns, codes, sorted(found, key=lambda layers: layers.begin)), errors


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
    eqns: Sequence[JaxprEqn], codes: np.ndarray, one: Repetition, region: tuple[int, int], known: Sequence[AlikeLayers]
) -> AlikeLayers:  # fmt: skip
    """The layers of a repetition, from the best beginning; raises `NotALoopError`."""
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
            layers = _in_part(eqns, _with_ends(eqns, codes, rows, region))
        except NotALoopError as found:
            error = error or found
            continue
        whole = sum(None not in row for row in layers.rows)
        rank = (whole, -_cost(eqns, layers, indexes), len(layers.rows), -first)
        if best is None or rank > best[0]:
            best = rank, layers
    if best is None:
        raise error or NotALoopError(eqns[one.begin], "it is not repeated in a chain")
    return best[1]


def _rows(begin: int, count: int, period: int) -> list[Row]:
    return [tuple(range(begin + k * period, begin + (k + 1) * period)) for k in range(count)]


def _in_part(eqns: Sequence[JaxprEqn], rows: Sequence[Row]) -> AlikeLayers:
    """The rows as a loop, or without the first or the last, which may read other values; raises `NotALoopError`."""
    error: NotALoopError | None = None
    for part in (rows, rows[1:], rows[:-1], rows[1:-1]):
        if len(part) > 1 and any(None not in row for row in part):
            try:
                return as_loop(eqns, part)
            except NotALoopError as found:
                error = error or found
    raise error or NotALoopError(eqns[rows[0][0] or 0], "it is not repeated in a chain")


def _cost(eqns: Sequence[JaxprEqn], layers: AlikeLayers, indexes: Mapping[JaxprAtom, Sequence[int]]) -> float:
    """Bytes that pass on, and bytes read of other sequences' layers that are not those of the layer that most are."""
    row = layers.rows[layers.whole]
    carried = sum(_nbytes(eqns[row[at]].outvars[o]) for (at, o), _ in layers.carries)  # type: ignore[index]
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
    return carried + total - max(shifts.values(), default=0)


def _indexes(eqns: Sequence[JaxprEqn], known: Sequence[AlikeLayers]) -> dict[JaxprAtom, list[int]]:
    """For values of layers found before: of which layer they are."""
    out: dict[JaxprAtom, list[int]] = {}
    for layers in known:
        for slots in stacked_values(eqns, layers):
            for k, v in enumerate(slots):
                if v is not None and not compat.is_literal(v):
                    out.setdefault(v, []).append(k)
    return out


def stacked_values(eqns: Sequence[JaxprEqn], layers: AlikeLayers) -> Iterable[Slots]:
    """What a loop over the layers can stack or has stacked: own values, results of each, carries as a layer gets them."""
    yield from layers.stacks
    row = layers.rows[layers.whole]
    for at, i in enumerate(row):
        for o in range(len(eqns[i].outvars)):  # type: ignore[index]
            yield results_of(eqns, layers.rows, (at, o))
    for place, initial in layers.carries:
        yield (initial, *results_of(eqns, layers.rows, place)[:-1])


def _nbytes(v: JaxprAtom) -> float:
    shape = getattr(v.aval, "shape", ())
    return math.prod(shape) * compat.itemsize(v.aval.dtype)


# -- layers that lack equations ------------------------------------------------------------------------------------------


def _with_ends(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, rows: list[Row], region: tuple[int, int]
) -> list[Row]:
    """The rows with one more before and after where most equations of a layer are there."""
    layers = _in_part(eqns, rows)
    rows = list(layers.rows)
    row = _row_after(eqns, codes, layers, region[1])
    if _share(row) >= _LEAST_SHARE:
        rows.append(row)
    row = _row_before(eqns, codes, layers, region[0])
    return [row, *rows] if _share(row) >= _LEAST_SHARE else rows


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


def _share(row: Row) -> float:
    return 1 - row.count(None) / len(row)


def _completed(
    eqns: Sequence[JaxprEqn], codes: np.ndarray, found: Sequence[AlikeLayers]
) -> list[AlikeLayers]:
    """The sequences; those with one layer less than others, with what there is of it.

    The first layer of a backward pass whose data needs no gradient may lack most of its equations.
    """
    most = max((len(layers.rows) for layers in found), default=0)
    out = list[AlikeLayers]()
    for k, layers in enumerate(found):
        out.append(layers)
        if len(layers.rows) != most - 1:
            continue
        after = _row_after(eqns, codes, layers, found[k + 1].begin if k + 1 < len(found) else len(eqns))
        before = _row_before(eqns, codes, layers, found[k - 1].end if k else 0)
        for row, rows in ((after, [*layers.rows, after]), (before, [before, *layers.rows])):
            if row.count(None) < len(row):
                try:
                    out[-1] = as_loop(eqns, rows)
                    break
                except NotALoopError:
                    pass  # it stays outside
    return out


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
        i += fits
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
    else:
        (at, o), made_by = source.place, tuple(row)
    i = made_by[at]
    return i is not None and eqns[i].outvars[o] is v


def _leads_to(eqns: Sequence[JaxprEqn], layers: AlikeLayers, row: Row) -> bool:
    """Whether the first of the layers gets its carries from this one."""
    first = layers.rows[0]
    for (at, n), source in layers.operands.items():
        if isinstance(source, Carried) and (i := first[at]) is not None:
            made_at, o = layers.carries[source.carry][0]
            j, read = row[made_at], eqns[i].invars[n]
            made = (
                _first_addend(eqns, layers.rows[layers.whole], row, made_at)
                if j is None
                else eqns[j].outvars[o]
            )
            if made is not read:
                return False
    return True
