"""The layers of a Python loop in a traced program as a loop: which values pass from one layer to the next.

Problem.  A sequence of equations that is repeated (`alike_equations.py`) is a chain of layers only if its values flow as
those of a loop do.

Method.  The operands of an equation are compared over the layers: an operand is made in its own layer, comes from the layer
before (carried), is the same value in all layers, or another value made outside in each. All else is no loop. Equations may
be missing in a layer where nothing reads their results; `partial_layers.py` finds such layers, `layer_search.py` where a
layer begins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence

from jshard._batch.batch_class import described
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn
from jshard._program.common_subexpressions import literal_value


Place = tuple[int, int]
"""An equation of a layer, by number, and one of its operands or results."""

Row = tuple[int | None, ...]
"""The equations of one layer by position in the program, in the order of a layer; None for one that is missing."""


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

    @functools.cached_property
    def begin(self) -> int:
        """The position of the first equation."""
        return min(i for row in self.rows for i in row if i is not None)

    @functools.cached_property
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
        if i is None and (v := first_addend(eqns, rows[whole], rows[0], at)) is not None:
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


def first_addend(eqns: Sequence[JaxprEqn], whole: Row, first: Row, at: int) -> JaxprAtom | None:
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


def stacked_values(eqns: Sequence[JaxprEqn], layers: AlikeLayers) -> Iterable[Slots]:
    """What a loop over the layers can stack or has stacked: own values, results of each, carries as a layer gets them."""
    yield from layers.stacks
    row = layers.rows[layers.whole]
    for at, i in enumerate(row):
        for o in range(len(eqns[i].outvars)):  # type: ignore[index]
            yield results_of(eqns, layers.rows, (at, o))
    for place, initial in layers.carries:
        yield (initial, *results_of(eqns, layers.rows, place)[:-1])
