"""One entry: what a user may write for one tensor, turned into a `Pin`.

An entry is `None` (derive), a tuple of pieces per dimension, a `PartitionSpec` or a `NamedSharding`.
A tuple says how many pieces, a spec says which mesh axes; both end as a `Pin`, the only thing later
floors see. A spec's sizes are unknown until the mesh is chosen, so its `cuts` stay `None` until then.

>>> parse_entry((4, None), (32, 128), "in_strategy[0] (argument x)")
Pin(cuts=(4, None), axes=None, where='in_strategy[0] (argument x)', mesh=None)
>>> str(parse_entry(PartitionSpec("data"), (32, 128), "here"))
"P('data', None)"
>>> satisfies(parse_entry((4, None), (32, 128), "here"), Layout((("x",), ())), MeshAxes(("x", "y"), (4, 2)))
True
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard._core.errors import StrategyError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.messages import count_of, join_choices, type_with_article
from jshard._spec.mesh_factorization import divisors


EVERY_DEVICE = 0
"""In `Pin.cuts`: as many pieces as there are devices ("data_parallel"); users cannot write a cut of 0."""

ENTRY_FORMS = "None, a tuple of pieces per dimension such as (4, 2), a PartitionSpec or a NamedSharding"


@dataclasses.dataclass(frozen=True)
class Pin:
    """What the user fixed for one tensor.

    `cuts`: pieces per dimension; None = left to the search (or, for a spec, known once the mesh is).
    `axes`: exact mesh axes per dimension, major first, when the user wrote a spec; a None dimension is free.
    `where`: what the user wrote, for messages. `mesh`: the mesh of a `NamedSharding`, until it is resolved.
    """

    cuts: tuple[int | None, ...]
    axes: tuple[tuple[str, ...] | None, ...] | None
    where: str
    mesh: Mesh | AbstractMesh | None = None

    def same_constraint(self, other: Pin) -> bool:
        """Whether both pins ask for the same thing, wherever they were written."""
        mine, theirs = (p.mesh if p.axes is not None else None for p in (self, other))
        return (self.cuts, self.axes, mine) == (other.cuts, other.axes, theirs)

    @property
    def free(self) -> bool:
        """Whether the pin fixes nothing: every dimension is left to the search."""
        return all(c is None for c in self.cuts) and (self.axes is None or all(a is None for a in self.axes))

    def batched(self, dim: int) -> Pin:
        """The same wish for a tensor with one more dimension, left to the search: what `vmap` makes of it.

        >>> str(Pin((4, 2), None, "x").batched(1))
        '(4, None, 2)'
        """
        cuts = (*self.cuts[:dim], None, *self.cuts[dim:])
        axes = None if self.axes is None else (*self.axes[:dim], None, *self.axes[dim:])
        return dataclasses.replace(self, cuts=cuts, axes=axes)

    def __str__(self) -> str:
        if self.axes is None:
            cuts = ["every device" if c == EVERY_DEVICE else str(c) for c in self.cuts]
            return f"({', '.join(cuts)}{',' if len(cuts) == 1 else ''})"
        entries = [
            "UNCONSTRAINED" if a is None else repr(a[0]) if len(a) == 1 else repr(a) if a else "None"
            for a in self.axes
        ]
        return f"P({', '.join(entries)})"


def satisfies(pin: Pin | None, layout: Layout, mesh: MeshAxes) -> bool:
    """Whether a tensor with `layout` honours the pin.

    A pinned tensor is never a partial sum: the user asked for its pieces, not for addends. Axes of size 1
    cut nothing and are ignored. The axes of a spec must be the axes of `mesh` (see `resolve_pin`).
    """
    if pin is None:
        return True
    if len(pin.cuts) != len(layout.dims) or any(mesh.size(a) > 1 for a in layout.partial):
        return False
    for have, want in zip(layout.dims, pin.axes or (), strict=False):
        if want is not None and _without_unit_axes(have, mesh) != _without_unit_axes(want, mesh):
            return False
    wanted = (mesh.total if c == EVERY_DEVICE else c for c in pin.cuts)
    return all(want is None or have == want for have, want in zip(layout.cuts(mesh), wanted, strict=True))


def is_strategy(entry: Any) -> bool:
    """Whether a value is one strategy: a tuple that holds only ints, and perhaps None beside them.

    >>> [is_strategy(e) for e in ((4, 2), (), (4, None), (None, None), ((4, 2),), [4, 2])]
    [True, True, True, False, False, False]
    """
    if type(entry) is not tuple:
        return False
    return entry == () or (
        any(_is_integer(c) for c in entry) and all(c is None or _is_integer(c) for c in entry)
    )


def looks_like_strategy(entry: Any) -> bool:
    """Whether a tuple was meant as a strategy: it holds numbers, strings or bools, though not only ints."""
    return type(entry) is tuple and any(isinstance(c, numbers.Number | str | np.generic) for c in entry)


def is_entry(entry: Any) -> bool:
    """Whether a value is meant for one tensor (or, as a prefix, for all tensors below), not a container."""
    return (
        entry is None
        or isinstance(entry, PartitionSpec | NamedSharding)
        or is_strategy(entry)
        or looks_like_strategy(entry)
    )


def parse_entry(entry: Any, shape: Sequence[int], where: str, devices: int | None = None) -> Pin | None:
    """Turn one entry into a `Pin` for a tensor of `shape`; None stays None.

    Raises a `StrategyError` that names `where` for anything that cannot be: a wrong type, rank, or cut. Whether cuts
    divide is checked where the number of `devices` is known, since that decides which others are offered: here, or
    when the mesh is chosen (`mesh.choose_mesh`, `mesh.resolve_pin`).
    """
    shape = tuple(shape)
    if entry is None:
        return None
    if isinstance(entry, NamedSharding):
        return dataclasses.replace(_parse_spec(entry.spec, shape, where), mesh=entry.mesh)
    if isinstance(entry, PartitionSpec):
        return _parse_spec(entry, shape, where)
    if isinstance(entry, list) and (is_strategy(tuple(entry)) or looks_like_strategy(tuple(entry))):
        raise StrategyError(
            f"a list is not a strategy: {entry!r}",
            where=where,
            fix=f"a tuple, {nearest_strategy(entry, shape, devices)!r}",
        )
    if _is_integer(entry) or isinstance(entry, numbers.Number):
        cut = 1
        if isinstance(entry, int | float) and math.isfinite(entry):
            cut = int(entry)
        raise StrategyError(
            f"{entry!r} is not an entry",
            where=where,
            fix=f"a tuple, {nearest_strategy((cut,), shape, devices)!r}" if shape else "() for a scalar",
        )
    if isinstance(entry, str):
        raise StrategyError(
            f"{entry!r} is not an entry", where=where, fix=f"P({entry!r}) for a mesh axis of that name"
        )
    if type(entry) is not tuple:
        raise StrategyError(f"{type_with_article(entry)} is not an entry", where=where, fix=ENTRY_FORMS)
    return _parse_cuts(entry, shape, where, devices)


def check_divides(cuts: Sequence[int | None], shape: Sequence[int], where: str, devices: int) -> None:
    """Raise a `StrategyError` when a cut does not divide its dimension; it offers what a grid of `devices` has.

    >>> check_divides((8, 2), (10, 4), "argument x", devices=8)
    Traceback (most recent call last):
    ...
    jshard._core.errors.StrategyError: a cut of 8 does not divide dimension 0, of size 10
      where: argument x
      write instead: 1 or 2 pieces there, or None to leave the dimension to the search
    """
    for dim, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
        if cut and size % cut:
            raise StrategyError(
                f"a cut of {cut} does not divide dimension {dim}, of size {size}",
                where=where,
                fix=f"{format_pieces(possible_cuts(cuts, shape, dim, devices))} there, or None to leave the dimension to the "
                "search",
            )


def possible_cuts(
    cuts: Sequence[int | None], shape: Sequence[int] | None, dim: int, devices: int, count: int = 6
) -> list[int]:
    """The cuts of a dimension nearest to its own that a grid of `devices` has beside the tensor's other cuts.

    They divide the dimension, and all cuts together divide the devices. Other cuts that are wrong themselves do not
    count.

    >>> possible_cuts((8, 2), (10, 4), 0, 8), possible_cuts((8, 2), (96, 4), 0, 24), possible_cuts((5,), None, 0, 8)
    ([1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8])
    """
    others = 1
    for d, cut in enumerate(cuts):
        if d == dim or not cut or (shape is not None and shape[d] % cut):
            continue
        if devices % (others * cut) == 0:
            others *= cut
    left = devices // others
    every = divisors(left if shape is None or shape[dim] == 0 else math.gcd(left, shape[dim]))
    wanted = cuts[dim] or 1
    return sorted(sorted(every, key=lambda d: (abs(d - wanted), d))[:count])


def nearest_strategy(
    cuts: Sequence[Any], shape: Sequence[int] | None, devices: int | None
) -> tuple[int | None, ...]:
    """A strategy for `shape` that a grid of `devices` has: each cut as asked, or the next smaller one that is possible.

    Dimensions beyond those cuts are whole; all are left to the search where the number of devices is unknown.

    >>> nearest_strategy((8, 4), (32, 128), 16), nearest_strategy((4,), (6, 8), 8), nearest_strategy((4,), (8, 8), None)
    ((8, 2), (2, 1), (None, None))
    """
    rank = len(cuts) if shape is None else len(shape)
    if devices is None:
        return (None,) * rank
    left, out = devices, []
    for d in range(rank):
        cut = cuts[d] if d < len(cuts) else 1
        if cut is not None:
            fits = math.gcd(left, shape[d]) if shape is not None and shape[d] else left
            asked = int(cut) if _is_integer(cut) else 1
            cut = max([n for n in divisors(fits) if n <= asked], default=1)
            left //= cut
        out.append(cut)
    return tuple(out)


def format_pieces(choices: Sequence[int]) -> str:
    """Numbers of pieces as prose: "1, 2 or 4 pieces"."""
    return join_choices(choices) + (" piece" if list(choices) == [1] else " pieces")


def _parse_cuts(entry: tuple, shape: tuple[int, ...], where: str, devices: int | None) -> Pin:
    if len(entry) == 1 and (is_strategy(entry[0]) or isinstance(entry[0], PartitionSpec)):
        inner = entry[0]
        if not isinstance(inner, PartitionSpec) and devices is not None:
            inner = nearest_strategy(inner, shape, devices)
        raise StrategyError(
            f"{format_entry(entry)} holds one entry, for a tensor that is not a container",
            where=where,
            fix=f"without the outer brackets: {format_entry(inner)}",
        )
    for dim, cut in enumerate(entry):
        if cut is not None and not _is_integer(cut):
            fix = "a positive int for each dimension, or None to leave it to the search"
            if all(c is None or isinstance(c, str) for c in entry):
                fix = f"P{entry!r} for mesh axes of that name".replace(",)", ")")
            raise StrategyError(
                f"cut {dim} of {format_entry(entry)} is {format_entry(cut)}, {type_with_article(cut)}", where=where, fix=fix
            )
        if cut is not None and cut < 1:
            raise StrategyError(
                f"cut {dim} of {entry!r} is {cut!r}; a dimension has at least 1 piece",
                where=where,
                fix="1 to leave the dimension whole, None to leave it to the search",
            )
    if len(entry) != len(shape):
        raise StrategyError(
            f"strategy {entry!r} has {count_of(len(entry), 'cut')}, but the tensor has "
            f"{count_of(len(shape), 'dimension')}, {shape}",
            where=where,
            fix=f"one cut per dimension: {nearest_strategy(entry, shape, devices)!r}",
        )
    cuts = tuple(None if c is None else operator.index(c) for c in entry)
    if devices is not None:
        check_divides(cuts, shape, where, devices)
    return Pin(cuts, None, where)


def _parse_spec(spec: PartitionSpec, shape: tuple[int, ...], where: str) -> Pin:
    for kind in ("unreduced", "reduced"):
        if getattr(spec, kind, None):
            raise StrategyError(
                f"spec {format_entry(spec)} has {kind} axes; a pinned tensor is whole, not a sum of parts",
                where=where,
                fix=f"the spec without {kind}={{...}}",
            )
    if len(spec) > len(shape):
        raise StrategyError(
            f"spec {format_entry(spec)} has {count_of(len(spec), 'entry', 'entries')}, but the tensor has "
            f"{count_of(len(shape), 'dimension')}, {shape}",
            where=where,
            fix=f"at most {count_of(len(shape), 'entry', 'entries')}: {format_entry(PartitionSpec(*tuple(spec)[: len(shape)]))}",
        )
    axes: list[tuple[str, ...] | None] = []
    for entry in (*spec, *(None,) * (len(shape) - len(spec))):
        if entry is PartitionSpec.UNCONSTRAINED:
            axes.append(None)
            continue
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            if not isinstance(name, str):
                raise StrategyError(
                    f"spec {format_entry(spec)} holds {name!r}, which is not the name of a mesh axis",
                    where=where,
                    fix="axis names; to say how many pieces, write a plain tuple such as (4, 2)",
                )
        axes.append(tuple(names))
    used = [a for dim in axes for a in dim or ()]
    for name in used:
        if used.count(name) > 1:
            raise StrategyError(
                f"spec {format_entry(spec)} uses axis {name!r} {used.count(name)} times",
                where=where,
                fix="each mesh axis at most once in a spec",
            )
    # A spec that names no axis says how many, not where: the same wish as a tuple of ones.
    return Pin(tuple(1 if a == () else None for a in axes), tuple(axes) if used else None, where)


def format_entry(entry: Any) -> str:
    """An entry as the user would write it: `P('x', None)` for a spec, also inside tuples."""
    if isinstance(entry, PartitionSpec):
        parts = getattr(entry, "partitions", entry)  # iterating a spec with unreduced axes raises
        names = ("P.UNCONSTRAINED" if e is PartitionSpec.UNCONSTRAINED else repr(e) for e in parts)
        return f"P({', '.join(names)})"
    if type(entry) is tuple:
        return f"({', '.join(map(format_entry, entry))}{',' if len(entry) == 1 else ''})"
    return "NamedSharding(...)" if isinstance(entry, NamedSharding) else repr(entry)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def _without_unit_axes(axes: Sequence[str], mesh: MeshAxes) -> tuple[str, ...]:
    return tuple(a for a in axes if mesh.size(a) > 1)
