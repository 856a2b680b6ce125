"""A value along one dimension as pieces of other values: what slices, paddings and concatenations make of them.

>>> x = Segment("x", 16, 0, 16)
>>> shifted = Pieces(0, (x,)).cropped(0, 15).between("0", 1, 0)
>>> [(s.source, s.start, s.length) for s in shifted.segments], grouped(shifted)
([('0', 0, 1), ('x', 0, 15)], [Group(source='x', size=16, low=1, end=16, fill='0')])
>>> back = Pieces.joined(0, [Pieces(0, (x,)).cropped(13, 16), Pieces(0, (x,)).cropped(0, 13)])
>>> is_roll(back)
3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jshard._core.jax_types import JaxprAtom, Params
from jshard._core.jaxcompat import is_literal


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Positions `start` to `start + length` of a value of length `size`; of a scalar, which has none, copies."""

    source: JaxprAtom
    size: int | None
    start: int
    length: int

    def is_of(self, other: Segment) -> bool:
        """Whether both are of the same value, or of equal literals."""
        if self.source is other.source:
            return self.size == other.size
        return self.size is None and other.size is None and _literal(self.source) == _literal(other.source)


def _literal(v: JaxprAtom) -> Hashable:
    """The value of a literal; of a variable itself."""
    value = np.asarray(v.val) if is_literal(v) else None
    return (id(v),) if value is None or value.ndim else value.item()


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """The segments of a value along a dimension, one after another."""

    dim: int
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Length of the dimension."""
        return sum(s.length for s in self.segments)

    def cropped(self, start: int, stop: int) -> Pieces:
        """Positions `start` to `stop` of it."""
        out, at = [], 0
        for s in self.segments:
            first, last = max(start, at), min(stop, at + s.length)
            if last > first:
                skipped = 0 if s.size is None else first - at
                out.append(dataclasses.replace(s, start=s.start + skipped, length=last - first))
            at += s.length
        return Pieces(self.dim, tuple(out))

    def between(self, fill: JaxprAtom, before: int, after: int) -> Pieces:
        """It with so many copies of a scalar before and after it."""
        sides = [Pieces(self.dim, (Segment(fill, None, 0, n),) if n else ()) for n in (before, after)]
        return Pieces.joined(self.dim, [sides[0], self, sides[1]])

    @staticmethod
    def joined(dim: int, parts: Sequence[Pieces]) -> Pieces:
        """One after another; a segment that goes on in the next one is one with it."""
        out: list[Segment] = []
        for s in (s for p in parts for s in p.segments):
            last = out[-1] if out else None
            if last is not None and s.is_of(last) and (s.size is None or last.start + last.length == s.start):
                out[-1] = dataclasses.replace(last, length=last.length + s.length)
            else:
                out.append(s)
        return Pieces(dim, tuple(out))


def kept_most(length: int, of: int) -> bool:
    """Whether so much of a dimension is worth an exchange of edges: three quarters."""
    return 4 * length >= 3 * of > 0


def is_roll(pieces: Pieces) -> int | None:
    """By how much another value of this length is rolled; None if it is not."""
    if len(pieces.segments) != 2:
        return None
    a, b = pieces.segments
    n = pieces.length
    whole = a.size == n and a.is_of(b)
    return a.length if whole and a.start + a.length == n and b.start == 0 and a.length < n else None


def overlaid(a: Pieces, b: Pieces, is_zero: Callable[[JaxprAtom], bool]) -> Pieces | None:
    """The sum of two values, each zero where the other is not; None if they are not so."""
    if a.dim != b.dim or a.length != b.length:
        return None
    ends = sorted({e for p in (a, b) for e in _ends(p)})
    out, start = [], 0
    for end in ends:
        ((s,), (t,)) = (p.cropped(start, end).segments for p in (a, b))
        zero = [u.size is None and is_zero(u.source) for u in (s, t)]
        if not any(zero):
            return None
        out.append(Pieces(a.dim, (t if zero[0] else s,)))
        start = end
    return Pieces.joined(a.dim, out)


def _ends(pieces: Pieces) -> list[int]:
    out, at = [], 0
    for s in pieces.segments:
        at += s.length
        out.append(at)
    return out


@dataclasses.dataclass(frozen=True)
class Group:
    """Positions up to `end` that one shift gives: a value with its first element at position `low`, `fill` outside of it.

    `size`: None for copies of the scalar `source`.
    """

    source: JaxprAtom
    size: int | None
    low: int
    end: int
    fill: JaxprAtom | None = None


def grouped(pieces: Pieces) -> list[Group]:
    """The segments, each with the copies of a scalar beside it that a padding would put there."""
    segments, out, at = list(pieces.segments), [], 0
    taken = [False] * len(segments)
    ends = _ends(pieces)
    fills: dict[int, JaxprAtom] = {}
    for k, s in enumerate(segments):
        if s.size is None:
            continue
        for beside, edge in ((k - 1, s.start == 0), (k + 1, s.start + s.length == s.size)):
            if (
                not edge
                or not 0 <= beside < len(segments)
                or segments[beside].size is not None
                or taken[beside]
            ):
                continue
            if k in fills and not segments[beside].is_of(Segment(fills[k], None, 0, 0)):
                continue
            fills.setdefault(k, segments[beside].source)
            taken[beside] = True
    for k, s in enumerate(segments):
        start, at = at, ends[k]
        if taken[k] and k and segments[k - 1].size is not None and out and _covers(out[-1], segments[k - 1]):
            out[-1] = dataclasses.replace(out[-1], end=at)  # behind the segment that takes it
        elif not taken[k]:
            low = start - s.start
            out.append(Group(s.source, s.size, 0 if s.size is None else low, at, fills.get(k)))
    return out


def _covers(group: Group, segment: Segment) -> bool:
    return group.source is segment.source and segment.start + segment.length == segment.size


def padding_config(params: Params) -> list[tuple[int, int, int]]:
    """The low, high and inner padding of each dimension, of a `pad`."""
    return [(int(low), int(high), int(between)) for low, high, between in params["padding_config"]]
