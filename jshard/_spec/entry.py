"""One strategy entry: what a user may write for one tensor, parsed into a `Pin`, a sharding constraint.

An entry is `None` (left to the search), a tuple of shards per dimension ("cuts" in messages), a `PartitionSpec` or a
`NamedSharding`. A tuple fixes numbers of shards, a spec fixes mesh axes; both become a `Pin`. The axis sizes of a spec
are unknown until the mesh is chosen, so its `cuts` are `None` until then.

>>> parse_entry((4, None), (32, 128), "in_strategy[0] (argument x)")
Pin(cuts=(4, None), axes=None, where='in_strategy[0] (argument x)', mesh=None, all_devices_dim=None)
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


ENTRY_FORMS = "None, a tuple of pieces per dimension such as (4, 2), a PartitionSpec or a NamedSharding"


@dataclasses.dataclass(frozen=True)
class Pin:
    """The sharding constraint that the user put on one tensor.

    - `cuts`: shards per dimension; None where the search decides, and for a spec until the mesh is chosen.
    - `axes`: for a spec, the mesh axes per dimension, major first; None where the search decides.
    - `where`: what the user wrote, for messages.
    - `mesh`: the mesh of a `NamedSharding`, until the pin is resolved on the chosen mesh.
    - `all_devices_dim`: the dimension that is sharded over all devices ("data_parallel"), until it is resolved; its
        entry in `cuts` is None.
    - `pads`: whether a dimension that a cut does not divide is padded; else such a cut is an error.
    - `of_cotangent`: whether it holds for tangents and cotangents of the tensor as well.
    """

    cuts: tuple[int | None, ...]
    axes: tuple[tuple[str, ...] | None, ...] | None
    where: str
    mesh: Mesh | AbstractMesh | None = None
    all_devices_dim: int | None = None
    pads: bool = dataclasses.field(default=False, repr=False)
    of_cotangent: bool = dataclasses.field(default=False, repr=False)

    def same_constraint(self, other: Pin) -> bool:
        """Whether both pins constrain a tensor in the same way, wherever they were written."""

        def constraint(p: Pin) -> tuple:
            return p.cuts, p.axes, p.mesh if p.axes is not None else None, p.all_devices_dim

        return constraint(self) == constraint(other)

    @property
    def free(self) -> bool:
        """Whether every dimension is left to the search."""
        undecided = all(c is None for c in self.cuts) and self.all_devices_dim is None
        return undecided and (self.axes is None or all(a is None for a in self.axes))

    def cuts_on(self, devices: int) -> tuple[int | None, ...]:
        """The cuts on a mesh of so many devices.

        >>> Pin((None, 1), None, "out_strategy", all_devices_dim=0).cuts_on(8)
        (8, 1)
        """
        return tuple(devices if d == self.all_devices_dim else c for d, c in enumerate(self.cuts))

    def batched(self, dim: int) -> Pin:
        """The constraint after `vmap`: dimension `dim` is new and left to the search.

        >>> str(Pin((4, 2), None, "x").batched(1))
        '(4, None, 2)'
        """
        cuts = (*self.cuts[:dim], None, *self.cuts[dim:])
        axes = None if self.axes is None else (*self.axes[:dim], None, *self.axes[dim:])
        moved = self.all_devices_dim
        if moved is not None and moved >= dim:
            moved += 1
        return dataclasses.replace(self, cuts=cuts, axes=axes, all_devices_dim=moved)

    def __str__(self) -> str:
        if self.axes is None:
            cuts = ["every device" if d == self.all_devices_dim else str(c) for d, c in enumerate(self.cuts)]
            return f"({', '.join(cuts)}{',' if len(cuts) == 1 else ''})"
        entries = [
            "UNCONSTRAINED" if a is None else repr(a[0]) if len(a) == 1 else repr(a) if a else "None"
            for a in self.axes
        ]
        return f"P({', '.join(entries)})"


def satisfies(pin: Pin | None, layout: Layout, mesh: MeshAxes) -> bool:
    """Whether a tensor with `layout` satisfies the pin.

    A pinned tensor is never a partial sum. Axes of size 1 shard nothing and are ignored. The axes of a spec must be
    axes of `mesh` (`resolve_pin`).
    """
    if pin is None:
        return True
    if len(pin.cuts) != len(layout.dims) or any(mesh.size(a) > 1 for a in layout.partial):
        return False
    for have, want in zip(layout.dims, pin.axes or (), strict=False):
        if want is not None and _without_unit_axes(have, mesh) != _without_unit_axes(want, mesh):
            return False
    wanted = pin.cuts_on(mesh.total)
    return all(want is None or have == want for have, want in zip(layout.cuts(mesh), wanted, strict=True))


@dataclasses.dataclass(frozen=True)
class JointConstraint:
    """Pins that one operator must keep at once: each of its loop indices takes mesh axes of its own.

    - `cuts`: shards of every loop index that a pin fixes by number, like the strategy of one tensor.
    - `specs`: which of the call's pins (by number) are specs on this operator; their axes are not available to `cuts`.
    - `what`, `where`: for messages.

    A product whose operands are pinned to (2, 1) and (1, 2) shards its rows and its columns: `JointConstraint((2, 2))`
    needs two axes of size 2, where each pin alone needs one.
    """

    cuts: tuple[int, ...]
    specs: tuple[int, ...] = ()
    what: str = ""
    where: str = ""


def is_strategy(entry: object) -> bool:
    """Whether a value is a strategy of one tensor: a tuple of ints, or of ints and None.

    >>> [is_strategy(e) for e in ((4, 2), (), (4, None), (None, None), ((4, 2),), [4, 2])]
    [True, True, True, False, False, False]
    """
    if type(entry) is not tuple:
        return False
    return entry == () or (
        any(_is_integer(c) for c in entry) and all(c is None or _is_integer(c) for c in entry)
    )


def looks_like_strategy(entry: object) -> bool:
    """Whether a tuple was meant as a strategy, right or wrong: it contains numbers, strings or bools."""
    return type(entry) is tuple and any(isinstance(c, numbers.Number | str | np.generic) for c in entry)


def is_entry(entry: object) -> bool:
    """Whether a value is an entry for one tensor (or, as a prefix, for all leaves below), not a container."""
    return (
        entry is None
        or isinstance(entry, PartitionSpec | NamedSharding)
        or is_strategy(entry)
        or looks_like_strategy(entry)
    )


def parse_entry(entry: object, shape: Sequence[int], where: str, devices: int | None = None) -> Pin | None:
    """Parse one entry into a `Pin` for a tensor of `shape`; None stays None.

    Raises a `StrategyError` that names `where` for a wrong type, rank or cut. Whether cuts divide their dimensions is
    checked here if the number of `devices` is given, since the alternatives in the message depend on it, and else when
    the mesh is chosen (`mesh_selection.choose_mesh`, `resolve_pin`).
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


def check_divides(
    cuts: Sequence[int | None], shape: Sequence[int], where: str, devices: int, pads: bool = False
) -> None:
    """Raise a `StrategyError` if a cut does not divide its dimension, with cuts that a mesh of `devices` allows.

    With `pads`, only if it makes more pieces than the dimension has elements.

    >>> check_divides((8, 2), (10, 4), "argument x", devices=8)
    Traceback (most recent call last):
    ...
    jshard._core.errors.StrategyError: a cut of 8 does not divide dimension 0, of size 10
      where: argument x
      write instead: 1 or 2 pieces there, or None to leave the dimension to the search
    """
    made = math.prod(c or 1 for c in cuts)
    for dim, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
        if not cut or size % cut == 0:
            continue
        if pads:
            check_not_all_padding(cut, size, dim, where, devices)
            continue
        raise StrategyError(
            f"a cut of {cut} does not divide dimension {dim}, of size {size}",
            where=where,
            fix=f"{format_pieces(possible_cuts(cuts, shape, dim, devices))} there, or None to leave the "
            "dimension to the search",
            padded=pad_advice(cut, size) if devices % made == 0 else "",
        )


def check_not_all_padding(cut: int, size: int, dim: int, where: str, devices: int) -> None:
    """Raise a `StrategyError` for a cut that makes more pieces than the dimension has elements, which padding cannot fill.

    >>> check_not_all_padding(8, 7, 0, "argument x", devices=8)
    Traceback (most recent call last):
    ...
    jshard._core.errors.StrategyError: a cut of 8 is larger than dimension 0, of size 7: some pieces would be padding only
      where: argument x
      write instead: 1, 2 or 4 pieces there, or None to leave the dimension to the search
    """
    if size and cut > size:
        fewer = [n for n in divisors(devices) if n <= size]
        raise StrategyError(
            f"a cut of {cut} is larger than dimension {dim}, of size {size}: some pieces would be padding only",
            where=where,
            fix=f"{format_pieces(fewer)} there, or None to leave the dimension to the search",
        )


def pad_advice(cut: int, size: int) -> str:
    """The end of an advice that names the option under which a cut that does not divide is legal; "" where none would be.

    >>> pad_advice(8, 10), pad_advice(8, 7)
    (', or config={"pad": True} to pad it to 16', '')
    """
    return f', or config={{"pad": True}} to pad it to {-(-size // cut) * cut}' if cut <= size else ""


def possible_cuts(
    cuts: Sequence[int | None],
    shape: Sequence[int] | None,
    dim: int,
    devices: int,
    count: int = 6,
    pads: bool = False,
) -> list[int]:
    """The `count` cuts of a dimension closest to the wrong one that a mesh of `devices` allows.

    They divide the dimension, or with `pads` are no more than its elements, and their product with the tensor's other
    cuts divides the devices; other cuts that are wrong themselves are left out.

    >>> possible_cuts((8, 2), (10, 4), 0, 8), possible_cuts((8, 2), (96, 4), 0, 24), possible_cuts((5,), None, 0, 8)
    ([1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8])
    >>> possible_cuts((5,), (45,), 0, 8), possible_cuts((5,), (45,), 0, 8, pads=True)
    ([1], [1, 2, 4, 8])
    """
    others = 1
    for d, cut in enumerate(cuts):
        if d == dim or not cut or (shape is not None and shape[d] % cut and not (pads and cut <= shape[d])):
            continue
        if devices % (others * cut) == 0:
            others *= cut
    left = devices // others
    every = divisors(left if shape is None or shape[dim] == 0 or pads else math.gcd(left, shape[dim]))
    if pads and shape is not None and shape[dim]:
        every = [n for n in every if n <= shape[dim]]
    wanted = cuts[dim] or 1
    return sorted(sorted(every, key=lambda d: (abs(d - wanted), d))[:count])


def nearest_strategy(
    cuts: Sequence[Any], shape: Sequence[int] | None, devices: int | None
) -> tuple[int | None, ...]:
    """A valid strategy for `shape` on `devices`: every cut as given, or the next smaller possible one.

    Dimensions without a cut get 1. Without a number of devices, all dimensions are left to the search.

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
            given = int(cut) if _is_integer(cut) else 1
            cut = max([n for n in divisors(fits) if n <= given], default=1)
            left //= cut
        out.append(cut)
    return tuple(out)


def format_pieces(choices: Sequence[int]) -> str:
    """Numbers of shards for a message: "1, 2 or 4 pieces"."""
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
                f"cut {dim} of {format_entry(entry)} is {format_entry(cut)}, {type_with_article(cut)}",
                where=where,
                fix=fix,
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
            fix=f"at most {count_of(len(shape), 'entry', 'entries')}: "
            f"{format_entry(PartitionSpec(*tuple(spec)[: len(shape)]))}",
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
    # A spec without axes constrains numbers of shards only, like a tuple of ones.
    return Pin(tuple(1 if a == () else None for a in axes), tuple(axes) if used else None, where)


def format_entry(entry: object) -> str:
    """An entry as the user writes it: `P('x', None)` for a spec, also inside tuples."""
    if isinstance(entry, PartitionSpec):
        parts = getattr(entry, "partitions", entry)  # iterating a spec with unreduced axes raises
        names = ("P.UNCONSTRAINED" if e is PartitionSpec.UNCONSTRAINED else repr(e) for e in parts)
        return f"P({', '.join(names)})"
    if type(entry) is tuple:
        return f"({', '.join(map(format_entry, entry))}{',' if len(entry) == 1 else ''})"
    return "NamedSharding(...)" if isinstance(entry, NamedSharding) else repr(entry)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def _without_unit_axes(axes: Sequence[str], mesh: MeshAxes) -> tuple[str, ...]:
    return tuple(a for a in axes if mesh.size(a) > 1)
