"""Shifts written as slices, paddings and concatenations, as operators of which each keeps its dimension's length.

Problem.  `jnp.roll(x, 1)` is traced to a slice of one row, a slice of all others, and a concatenation; a token shift to
`pad(x[:, :-1])`. Rules see one operator at a time, and of a slice of n - 1 rows no cut divides: each such dimension would
be gathered and cut again, to move one row.

Idea.  Along one dimension a value is described by its pieces: intervals of other values, or of a constant
(`shifted_pieces.py`).
Slices crop such a description, paddings and concatenations lengthen it. Where a value of length n amounts to most of another
one of length n, moved, it is computed from that: by `roll`, or by one `pad` with a low padding as long as the high one is
negative, whose rule moves only the edges (`_rules/primitives/shifts.py`); what else is in it is selected by position.
Strided slices and paddings between elements are split in an aligned part and a shift. So `lax.associative_scan`, a tree
of strided slices, shifts and interleavings, and its gradient consist of operators that devices run on their blocks.

>>> import jax, jax.numpy as jnp
>>> def names(f): return [e.primitive.name for e in with_shifts(jax.make_jaxpr(f)(jnp.ones(16)).jaxpr).eqns]
>>> names(lambda x: jnp.concatenate([x[3:], x[:3]])), names(lambda x: jnp.pad(x, (1, 0))[:-1])
(['roll'], ['convert_element_type', 'pad'])
>>> names(lambda x: jnp.concatenate([x[:1] * 2, x[:-1]]))
['slice', 'mul', 'pad', 'pad', 'iota', 'lt', 'select_n']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import fresh, substituted, with_calls_inlined
from jshard._program.loop_invariants import INLINED_CALLS, body_of
from jshard._program.roll_primitive import roll
from jshard._program.shifted_pieces import (
    Group,
    Pieces,
    Segment,
    grouped,
    is_roll,
    kept_most,
    overlaid,
    padding_config,
)


_WITH_BODIES = frozenset(("scan", "while", "cond", "jit", "pjit", "closed_call", "remat2", "checkpoint"))
_LEAST = 8
"""Dimensions shorter than this are left as they are."""

_MOST_GROUPS = 4

_MOST_STRIDE = 4
"""Values of which more than every so many-th element is left out, or zero, are not made in place of single elements."""


def with_shifts(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr in which shifts along one dimension are rolls and paddings, in inner bodies too."""
    jaxpr = _with_inner_bodies(jaxpr)
    if not _may_shift(jaxpr):
        return jaxpr
    flat = with_calls_inlined(jaxpr)
    writer = _Writer()
    for eqn in flat.eqns:
        writer.write(eqn)
    if not writer.changed:
        return jaxpr
    flat = flat.replace(eqns=writer.eqns, outvars=substituted(flat.outvars, writer.env))
    return compat.without_dead_code(flat)


def _with_inner_bodies(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr whose loops, branches and calls have rewritten bodies; the same one if nothing changes."""
    eqns = [
        with_bodies(eqn, lambda _, body: with_shifts(body)) if eqn.primitive.name in _WITH_BODIES else eqn
        for eqn in jaxpr.eqns
    ]
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _may_shift(jaxpr: Jaxpr) -> bool:
    """Whether a body has an equation that makes a value of several pieces, or a slice with a stride, in calls too."""
    pending = [jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            name = eqn.primitive.name
            if name in ("concatenate", "pad") or (
                name == "slice" and set(eqn.params["strides"] or (1,)) != {1}
            ):
                return True
            body = body_of(eqn) if name in INLINED_CALLS else None
            if body is not None:
                pending.append(compat.open_jaxpr(body)[0])
    return False


class _Writer:
    """Writes the equations of a flat body anew; `pieces` describes values of the new body, `scalars` those of one value."""

    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self.env: dict[JaxprAtom, JaxprAtom] = {}
        self.pieces: dict[JaxprAtom, Pieces] = {}
        self.fills: dict[JaxprAtom, JaxprAtom] = {}  # arrays of one scalar -> the scalar
        self.scalars: dict[JaxprAtom, np.ndarray] = {}  # variables with a known value
        self.changed = False
        self.described_by = {
            "slice": self.slice, "pad": self.pad, "concatenate": self.concatenate, "split": self.split,
            "add_any": self.add, "add": self.add, "broadcast_in_dim": self.broadcast,
            "convert_element_type": self.convert,
        }  # fmt: skip

    def write(self, eqn: JaxprEqn) -> None:
        """One equation of the old body."""
        if self.env:
            eqn = eqn.replace(invars=substituted(eqn.invars, self.env))
        describe = self.described_by.get(eqn.primitive.name)
        if describe is not None and not _is_extended(eqn):
            describe(eqn)
        else:
            self.eqns.append(eqn)

    # -- equations that are described ----------------------------------------------------------------------------

    def convert(self, eqn: JaxprEqn) -> None:
        """A scalar of a known value keeps it."""
        value = self.value(eqn.invars[0])
        if value is not None:
            self.scalars[eqn.outvars[0]] = value
        self.eqns.append(eqn)

    def broadcast(self, eqn: JaxprEqn) -> None:
        """An array of one scalar."""
        if not _shape(eqn.invars[0]):
            self.fills[eqn.outvars[0]] = eqn.invars[0]
        self.eqns.append(eqn)

    def slice(self, eqn: JaxprEqn) -> None:
        """A slice along one dimension crops its operand; one with a stride is split in an aligned one and a shift."""
        eqn = self.of_whole(eqn)
        (x,), p = eqn.invars, eqn.params
        strides = p["strides"] or (1,) * len(_shape(x))
        sizes = list(zip(_shape(x), p["start_indices"], p["limit_indices"], strides, strict=True))
        for d, (n, start, _, stride) in enumerate(sizes):
            m = _shape(eqn.outvars[0])[d]
            aligned = m * stride == n and start < stride
            if stride > 1 and n % stride == 0 and not aligned and kept_most(m, n // stride) and n >= _LEAST:
                self.strided(eqn, d, int(start), int(stride), m)
                return
        partial = [d for d, (n, start, limit, _) in enumerate(sizes) if (start, limit) != (0, n)]
        if set(strides) <= {1} and not partial:
            self.replace(eqn, x)
        elif set(strides) <= {1} and len(partial) == 1:
            (d,) = partial
            self.described(eqn, self.along(x, d).cropped(int(sizes[d][1]), int(sizes[d][2])))
        else:
            self.eqns.append(eqn)

    def of_whole(self, eqn: JaxprEqn) -> JaxprEqn:
        """A slice with a stride of what is itself an interval of another value, as one of that."""
        (x,), p = eqn.invars, eqn.params
        known = None if compat.is_literal(x) else self.pieces.get(x)
        if known is None or len(known.segments) != 1 or not p["strides"] or p["strides"][known.dim] == 1:
            return eqn
        (s,), d = known.segments, known.dim
        if s.size is None:
            return eqn
        self.changed = True
        moved = {
            k: (*p[k][:d], p[k][d] + s.start, *p[k][d + 1 :]) for k in ("start_indices", "limit_indices")
        }
        return eqn.replace(invars=[s.source], params={**p, **moved})

    def strided(self, eqn: JaxprEqn, d: int, start: int, stride: int, m: int) -> None:
        """A slice with a stride of which whole strides are left out at an end."""
        (x,), p = eqn.invars, eqn.params
        n = _shape(x)[d]
        starts, limits = list(p["start_indices"]), list(p["limit_indices"])
        starts[d], limits[d] = start % stride, n - stride + start % stride + 1
        aligned = self.traced(lambda a: lax.slice(a, starts, limits, p["strides"]), [x], eqn)
        first = start // stride
        kept = self.traced(lambda a: lax.slice_in_dim(a, first, first + m, axis=d), [aligned], eqn)
        self.pieces[kept] = self.along(aligned, d).cropped(first, first + m)
        self.replace(eqn, kept)

    def split(self, eqn: JaxprEqn) -> None:
        """Each result of a split crops its operand; where one is most of it, they are slices."""
        (x,), d, at = eqn.invars, eqn.params["axis"], 0
        n, sizes = _shape(x)[d], [int(size) for size in eqn.params["sizes"]]
        apart = n >= _LEAST and len(sizes) > 1 and any(kept_most(size, n) for size in sizes)
        for v, size in zip(eqn.outvars, sizes, strict=True):
            pieces = self.along(x, d).cropped(at, at + size)
            if apart:
                first, last = at, at + size
                part = self.traced(lambda a: lax.slice_in_dim(a, first, last, axis=d), [x], eqn)  # noqa: B023
                self.env[v], v = part, part
                self.changed = True
            self.pieces[v] = pieces
            at += size
        if not apart:
            self.eqns.append(eqn)

    def pad(self, eqn: JaxprEqn) -> None:
        """A padding along one dimension adds pieces of its value, or crops; one between elements is split in two."""
        x, fill = eqn.invars
        config = padding_config(eqn.params)
        for d, (low, high, between) in enumerate(config):
            k, n = between + 1, _shape(x)[d]
            if (
                between
                and min(low, high) >= 0
                and low + high > between
                and _shape(eqn.outvars[0])[d] % k == 0
            ):
                if n < _LEAST or not kept_most(n, _shape(eqn.outvars[0])[d] // k):
                    continue
                self.interleaved(eqn, d, config)
                return
        partial = [d for d, c in enumerate(config) if c != (0, 0, 0)]
        if len(partial) == 1 and config[partial[0]][2] == 0:
            (d,) = partial
            low, high, _ = config[d]
            inner = self.along(x, d).cropped(max(0, -low), _shape(x)[d] - max(0, -high))
            around = inner.between(fill, max(0, low), max(0, high))
            self.described(eqn, around)
        elif not partial:
            self.replace(eqn, x)
        else:
            self.eqns.append(eqn)

    def interleaved(self, eqn: JaxprEqn, d: int, config: list[tuple[int, int, int]]) -> None:
        """A padding between elements and by whole strides at the ends."""
        x, fill = eqn.invars
        low, _, between = config[d]
        k, n, m = between + 1, _shape(x)[d], _shape(eqn.outvars[0])[d]
        before = low // k
        moved = [(0, 0, 0)] * len(config)
        moved[d] = (before, m // k - n - before, 0)
        config[d] = (low % k, between - low % k, between)
        shifted = self.shifted(x, d, self.along(x, d).between(fill, before, moved[d][1]), eqn)
        if shifted is None:
            shifted = self.traced(lambda a, v: lax.pad(a, v, moved), [x, fill], eqn)
        self.replace(eqn, self.traced(lambda a, v: lax.pad(a, v, config), [shifted, fill], eqn))

    def concatenate(self, eqn: JaxprEqn) -> None:
        """A concatenation joins the pieces of its operands."""
        d = eqn.params["dimension"]
        self.described(eqn, Pieces.joined(d, [self.along(v, d) for v in eqn.invars]))

    def add(self, eqn: JaxprEqn) -> None:
        """Two values, each zero where the other is not, are joined: the transpose of a roll is traced to this."""
        described = [self.pieces.get(v) if not compat.is_literal(v) else None for v in eqn.invars]
        a, b = described if len(described) == 2 else (None, None)
        if a is not None and b is not None:
            joined = overlaid(a, b, lambda v: self.value(v) is not None and not np.any(self.value(v)))
            if joined is not None and (by := is_roll(joined)) is not None:
                self.rolled(eqn, joined, by)
                return
        self.eqns.append(eqn)

    # -- values in pieces ----------------------------------------------------------------------------------------

    def along(self, v: JaxprAtom, d: int) -> Pieces:
        """The pieces of a value along a dimension: itself, unless it is described."""
        n = _shape(v)[d]
        if not compat.is_literal(v) and v in self.fills:
            return Pieces(d, (Segment(self.fills[v], None, 0, n),))
        known = None if compat.is_literal(v) else self.pieces.get(v)
        return known if known is not None and known.dim == d else Pieces(d, (Segment(v, n, 0, n),))

    def value(self, v: JaxprAtom) -> np.ndarray | None:
        """The value of a scalar, if it is known."""
        if compat.is_literal(v):
            return np.asarray(v.val) if not _shape(v) else None
        return self.scalars.get(v)

    def described(self, eqn: JaxprEqn, pieces: Pieces) -> None:
        """The result of an equation by its pieces: computed as a shift where it is one, else as it was."""
        by = is_roll(pieces)
        if by is not None and pieces.length >= _LEAST:
            self.rolled(eqn, pieces, by)
            return
        (v,) = eqn.outvars
        if len(pieces.segments) == 1 and pieces.segments[0].size == pieces.length:
            self.replace(eqn, pieces.segments[0].source)
            return
        new = self.shifted(v, pieces.dim, pieces, eqn)
        if new is not None:
            self.replace(eqn, new)
            v = new
        else:
            self.eqns.append(eqn)
        self.pieces[v] = pieces

    def rolled(self, eqn: JaxprEqn, pieces: Pieces, by: int) -> None:
        """The result of an equation as a roll."""
        root, d = pieces.segments[0].source, pieces.dim
        self.replace(eqn, self.traced(lambda a: roll(a, d, by), [root], eqn))

    def shifted(self, v: JaxprAtom, d: int, pieces: Pieces, eqn: JaxprEqn) -> JaxprAtom | None:
        """A variable that is computed by shifts of what it consists of; None if that is no gain."""
        n = pieces.length
        if n < _LEAST or len(pieces.segments) < 2:
            return None
        pieces = self.resampled(pieces, eqn)
        whole = [s for s in pieces.segments if s.size is not None]
        if not any(s.size == n for s in whole):
            return None
        constant = sum(s.length for s in pieces.segments if s.size is None)
        if not all(s.size == n for s in whole) and not any(kept_most(s.length, n - constant) for s in whole):
            return None
        groups = grouped(pieces)
        if len(groups) > _MOST_GROUPS or _is_that(eqn, groups):
            return None
        shape = (*_shape(v)[:d], n, *_shape(v)[d + 1 :])
        operands: list[JaxprAtom] = []
        for g in groups:
            operands += [g.source] if g.fill is None else [g.source, g.fill]
        out = self.traced(lambda *arrays: spliced(arrays, groups, d, shape), operands, eqn)
        return out

    def resampled(self, pieces: Pieces, eqn: JaxprEqn) -> Pieces:
        """The pieces with single elements of values of k n or n / k elements taken from values of n elements.

        These are every k-th element of a longer one, or a shorter one with zeros between its elements: blocks suffice.
        """
        d, n, at, out = pieces.dim, pieces.length, 0, []
        for s in pieces.segments:
            if s.length == 1 and s.size is not None and s.size != n:
                if s.size % n == 0 and s.size // n <= _MOST_STRIDE:
                    k, (x, rank) = s.size // n, (s.source, len(_shape(s.source)))
                    place = s.start // k
                    ends = s.start % k, s.size - k + s.start % k + 1
                    config = [(*ends, k) if i == d else (0, _shape(x)[i], 1) for i in range(rank)]
                    starts, limits, strides = zip(*config, strict=True)
                    y = self.traced(lambda a: lax.slice(a, starts, limits, strides), [x], eqn)  # noqa: B023
                    s = Segment(y, n, place, 1)
                elif (
                    n % s.size == 0 and s.size > 1 and 0 <= (r := at - s.start * (n // s.size)) < n // s.size
                ):
                    k, x = n // s.size, s.source
                    if k <= _MOST_STRIDE:
                        config = [
                            (r, k - 1 - r, k - 1) if i == d else (0, 0, 0) for i in range(len(_shape(x)))
                        ]
                        y = self.traced(lambda a: lax.pad(a, np.zeros((), a.dtype), config), [x], eqn)  # noqa: B023
                        s = Segment(y, n, at, 1)
            at += s.length
            out.append(s)
        return Pieces(d, tuple(out))

    # -- equations -----------------------------------------------------------------------------------------------

    def replace(self, eqn: JaxprEqn, new: JaxprAtom) -> None:
        """Let a value stand for the result of an equation."""
        self.env[eqn.outvars[0]] = new
        self.changed = True

    def traced(
        self, fn: Callable[..., jax.Array], operands: Sequence[JaxprAtom], like: JaxprEqn
    ) -> JaxprAtom:
        """The result of a function, as equations."""
        avals = [jax.ShapeDtypeStruct(_shape(v), v.aval.dtype) for v in operands]
        opened, consts = compat.open_jaxpr(compat.make_jaxpr(lambda *xs: [fn(*xs)], *avals))
        assert not consts
        env = dict(zip(opened.invars, operands, strict=True))
        for eqn in opened.eqns:
            results = fresh(eqn.outvars)
            invars = substituted(eqn.invars, env)
            self.eqns.append(eqn.replace(invars=invars, outvars=results, source_info=like.source_info))
            env.update(zip(eqn.outvars, results, strict=True))
        return substituted(opened.outvars, env)[0]


def spliced(
    arrays: Sequence[jax.Array], groups: Sequence[Group], d: int, shape: tuple[int, ...]
) -> jax.Array:
    """The groups along a dimension, each a shift of its array or a constant, selected by position."""
    rest, parts = iter(arrays), []
    for g in groups:
        x = next(rest)
        fill = np.zeros((), x.dtype) if g.fill is None else next(rest)
        if g.size is None:
            parts.append(lax.broadcast(x, shape))
            continue
        low, high = g.low, shape[d] - g.size - g.low
        config = [(low, high, 0) if k == d else (0, 0, 0) for k in range(x.ndim)]
        parts.append(x if low == high == 0 else lax.pad(x, fill, config))
    out = parts[-1]
    if len(parts) > 1:
        position = lax.broadcasted_iota(jnp.int32, shape, d)
        for g, part in zip(groups[-2::-1], parts[-2::-1], strict=True):
            out = lax.select(position < np.int32(g.end), part, out)
    return out


def _is_that(eqn: JaxprEqn, groups: Sequence[Group]) -> bool:
    """Whether an equation is the padding that its groups would be computed by."""
    return eqn.primitive.name == "pad" and len(groups) == 1 and groups[0].source is eqn.invars[0]


def _is_extended(eqn: JaxprEqn) -> bool:
    """Whether an equation is about random keys."""
    return any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.invars)


def _shape(v: JaxprAtom) -> tuple[int, ...]:
    return tuple(v.aval.shape)
