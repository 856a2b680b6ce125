"""Pins whose cuts do not divide: which dimensions they pad, and where they hold in the padded program.

Problem.  `in_strategy=((8, 1), None)` on a table of 50,257 rows is a cut that no array of these rows can have.

Idea.  The program pads the rows where the argument is first read, and slices the padding off where a result leaves
(`_plan/padded_program.py`). So the pin holds for the padded values: for what `pad_tail` makes of an argument, and for what
is sliced to make a result. At the boundary the arrays have their true sizes, and these dimensions are left to the search.

>>> pin = Pin((8, 2), None, "in_strategy[0] (argument x)", pads=True)
>>> uneven_dims(pin, (50257, 4))
{0: 8}
>>> str(fitted(pin, (50257, 4))), str(fitted(pin, (50264, 4)))
('(None, 2)', '(8, 2)')
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jax.sharding import PartitionSpec

from jshard._api.call_pins import PlacedPin
from jshard._core import jaxcompat as compat
from jshard._core.errors import StrategyError
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._core.layout import MeshAxes
from jshard._plan.padded_program import Sizes
from jshard._plan.padding_classes import PaddingClasses, inner_bodies, shape_of
from jshard._plan.padding_search import MOST_WASTE
from jshard._program.equation_bodies import every_equation
from jshard._program.graph import Literal, Program
from jshard._program.tail_primitives import PAD_TAIL
from jshard._program.user_shard_map import SHARD_MAP, mesh_axes
from jshard._rules.lookup import rules_for
from jshard._rules.registry import op_view
from jshard._spec.entry import Pin


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenCut:
    """A dimension of a variable of the jaxpr that a pin cuts into so many pieces, which do not divide it."""

    variable: JaxprAtom
    dim: int
    pieces: int
    where: str

    @property
    def size(self) -> int:
        """The true size of the dimension."""
        return shape_of(self.variable)[self.dim]


def uneven_dims(pin: Pin, shape: Sequence[int]) -> dict[int, int]:
    """The dimensions that a resolved pin does not divide, with the pieces that it wants."""
    return {d: cut for d, (cut, n) in enumerate(zip(pin.cuts, shape, strict=True)) if cut and n % cut}


def fitted(pin: Pin, shape: Sequence[int]) -> Pin:
    """The pin with the dimensions left open that it does not divide."""
    uneven = uneven_dims(pin, shape)
    if not uneven:
        return pin
    cuts = tuple(None if d in uneven else c for d, c in enumerate(pin.cuts))
    axes = None if pin.axes is None else tuple(None if d in uneven else a for d, a in enumerate(pin.axes))
    return dataclasses.replace(pin, cuts=cuts, axes=axes)


# -- what is padded --------------------------------------------------------------------------------------------------


def uneven_cuts(closed: ClosedJaxpr, program: Program, pinned: Sequence[PlacedPin]) -> tuple[UnevenCut, ...]:
    """The cuts of a call's resolved pins that do not divide; `program` is built of the jaxpr."""
    opened = compat.open_jaxpr(closed)[0]
    ends = dict(zip(program.inputs, opened.invars, strict=False)) | dict(
        zip(program.outputs, opened.outvars, strict=True)
    )
    out = []
    for op, side, k, pin in pinned:
        eqn = program.operators[op].eqn
        v = ends.get(op)
        if v is None and eqn is not None:
            v = (eqn.invars if side == "operand" else eqn.outvars)[k]
        if v is not None:
            out += [
                UnevenCut(v, d, cut, pin.where)
                for d, cut in uneven_dims(pin, _shape(program, op, side, k)).items()
            ]
    return tuple(out)


def required_sizes(closed: ClosedJaxpr, cuts: Sequence[UnevenCut], mesh: MeshAxes) -> Sizes:
    """The classes of dimensions that some cuts pad, with the sizes they get.

    A multiple of all devices where that adds little, so that the search may cut more; else of what the pins ask for.
    Raises `StrategyError` for a dimension that nothing can carry padded.
    """
    classes = PaddingClasses(closed, frozenset(c.size for c in cuts))
    pieces: dict[tuple[int, int], int] = {}
    for cut in cuts:
        of = None if compat.is_literal(cut.variable) else classes.class_of(cut.variable, cut.dim)
        if of is None or not of.carried:
            raise _cannot_pad(cut, _readers(compat.open_jaxpr(closed)[0], cut.variable, cut.dim))
        key = of.size, of.number
        pieces[key] = math.lcm(cut.pieces, pieces.get(key, 1))
    return {(n, k): _size_for(n, wanted, mesh) for (n, k), wanted in pieces.items()}


def _size_for(size: int, pieces: int, mesh: MeshAxes) -> int:
    every = math.lcm(pieces, mesh.total)
    padded = -(-size // every) * every
    return padded if padded - size <= MOST_WASTE * size else -(-size // pieces) * pieces


def _readers(jaxpr: Jaxpr, v: JaxprAtom, dim: int) -> list[JaxprEqn]:
    """The operators that read a dimension of a variable, inside calls and loops too; else the one that defines it.

    The stacked dimension of a scan, of which each iteration reads a slice, is read by the scan itself.
    """
    found: list[JaxprEqn] = []
    defined: list[JaxprEqn] = []
    for eqn in every_equation(jaxpr):
        for out, side in ((found, eqn.invars), (defined, eqn.outvars)):
            if any(x is v for x in side):
                inner = [
                    (b.jaxpr, x, dim - shift)
                    for b in inner_bodies(eqn)
                    for outer, x, shift in b.bound
                    if outer is v and dim >= shift
                ]
                out += [e for bound in inner for e in _readers(*bound)] if inner else [eqn]
    return found or defined


def _cannot_pad(cut: UnevenCut, equations: Sequence[JaxprEqn]) -> StrategyError:
    padded = -(-cut.size // cut.pieces) * cut.pieces
    whole = f"1 piece there, or an array of {padded} that the function itself masks"
    if not equations:
        return StrategyError(
            f"a cut of {cut.pieces} would pad dimension {cut.dim}, of size {cut.size}, with which nothing is computed",
            where=cut.where,
            fix="1 piece there",
        )
    eqn = equations[0]
    source = compat.source_line(eqn)
    name = f"{eqn.primitive.name} ({source})" if source else eqn.primitive.name
    reason = ""
    if eqn.primitive.name == SHARD_MAP:
        reason, whole = ": its body would see the padding", _shard_map_advice(cut, eqn, padded)
    elif note := _note(cut, eqn):
        reason = f": {note}"
    return StrategyError(
        f"a cut of {cut.pieces} would pad dimension {cut.dim}, of size {cut.size}, and {name} has no padded form{reason}",
        where=cut.where,
        fix=whole,
    )


def _note(cut: UnevenCut, eqn: JaxprEqn) -> str:
    """Why an operator's rule keeps the dimension whole; "" where it does not."""
    rule, _ = rules_for(op_view(eqn))
    sides = ((eqn.invars, rule.operands), (eqn.outvars, rule.results))
    own = {
        f
        for variables, dims in sides
        for v, of in zip(variables, dims, strict=True)
        if v is cut.variable
        for f in of[cut.dim]
    }
    return rule.note if own <= set(rule.blocked) else ""


def _shard_map_advice(cut: UnevenCut, eqn: JaxprEqn, padded: int) -> str:
    """The specs of a user's `shard_map` that would do for a pin, of an array that is padded before it."""
    mesh = mesh_axes(eqn.params["mesh"])
    subsets = (axes for n in range(len(mesh.names)) for axes in itertools.combinations(mesh.names, n + 1))
    wanted = next((axes for axes in subsets if mesh.size(*axes) == cut.pieces), None)
    for side, variables in (("in_specs", eqn.invars), ("out_specs", eqn.outvars)):
        for spec, v in zip(eqn.params[side], variables, strict=True):
            if v is cut.variable and wanted is not None:
                entries = [*spec, *[None] * (len(shape_of(v)) - len(spec))]
                axes = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
                axes = [tuple(a for a in of if a not in wanted) for of in axes]
                axes[cut.dim] = wanted
                would_do = PartitionSpec(*(a if len(a) > 1 else a[0] if a else None for a in axes))
                return (
                    f"1 piece there, as {side}={_text(PartitionSpec(*spec))} says, or an array of {padded} and "
                    f"{side}={_text(would_do)}, whose padding the body masks"
                )
    return "1 piece there"


def _text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def refuse_uneven(cuts: Sequence[UnevenCut]) -> None:
    """Raise `StrategyError` for any cuts that do not divide, where a program cannot be padded."""
    if not cuts:
        return
    cut = cuts[0]
    raise StrategyError(
        f"a cut of {cut.pieces} does not divide dimension {cut.dim}, of size {cut.size}, and this call is not padded: "
        "its mesh has Explicit axes, its function has effects, or its search is by propagation",
        where=cut.where,
        fix="1 piece there, or None to leave the dimension to the search",
    )


# -- where the pins hold ---------------------------------------------------------------------------------------------


def pins_in_padded(program: Program, pinned: Sequence[PlacedPin], is_padded: bool) -> list[PlacedPin]:
    """The pins, each of them where it can hold.

    `is_padded`: whether the program pads what the pins need; else the dimensions that they do not divide are left open.
    """
    out: list[PlacedPin] = []
    for op, side, k, pin in pinned:
        shape = _shape(program, op, side, k)
        if not uneven_dims(pin, shape):
            out.append((op, side, k, pin))
            continue
        if not (own := fitted(pin, shape)).free:
            out.append((op, side, k, own))
        if is_padded:
            places = list(_padded_places(program, op, side, k))
            out += [(*p, fitted(pin, _shape(program, *p))) for p in places]
            if not any(not uneven_dims(pin, _shape(program, *p)) for p in places):
                (dim, cut), *_ = uneven_dims(pin, shape).items()
                operator = program.operators[op]
                unread = side == "result" and not program.uses()[operator.results[k]]
                name = operator.name or operator.primitive
                why = (
                    "with which nothing is computed"
                    if unread
                    else f"and the operator that defines {name} has no padded form"
                )
                raise StrategyError(
                    f"a cut of {cut} would pad dimension {dim}, of size {shape[dim]}, {why}",
                    where=pin.where,
                    fix="1 piece there",
                )
    return out


def _padded_places(program: Program, op: int, side: str, k: int) -> Iterator[tuple[int, str, int]]:
    """Where the padded forms of an argument or result are defined."""
    operator = program.operators[op]
    if side == "result":
        for reader, _ in program.uses()[operator.results[k]]:
            if program.operators[reader].primitive == PAD_TAIL:
                yield reader, "result", 0
                yield from _padded_places(program, reader, "result", 0)
        return
    value = operator.operands[k]
    if isinstance(value, Literal):
        return
    cropped, _ = program.defs()[value]
    if program.operators[cropped].primitive == "slice":
        before = program.operators[cropped].operands[0]
        if not isinstance(before, Literal):
            op, k = program.defs()[before]
            yield op, "result", k


def _shape(program: Program, op: int, side: str, k: int) -> tuple[int, ...]:
    operator = program.operators[op]
    if side == "result":
        return program.tensors[operator.results[k]].shape
    value = operator.operands[k]
    return tuple(value.aval.shape) if isinstance(value, Literal) else program.tensors[value].shape
