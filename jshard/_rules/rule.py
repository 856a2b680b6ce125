"""The rule of an operator: its loop indices (factors) and where each appears. A rule is data.

`dot_general` on `x[m, k]` and `w[k, n]` is `m k, k n -> m n` with factors m, k, n; k is a reduction
factor: cutting it leaves a partial sum. From a rule everything else follows, once and for all operators:
the candidates (which mesh axis cuts which factor), the layouts of operands and results, the work per device.

Several factors on one dimension, major first, express reshapes: `(64,) -> (8, 8)` is `(a b) -> a b`.
The idea is Shardy's op sharding rule.

>>> r = Rule(operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), sizes=(32, 128, 10),
...          reduction=(1,), work=2.0)
>>> print(r)
a b, b c -> a c  (reduce b)
>>> mesh = MeshAxes(("x", "y"), (4, 2))
>>> c = Candidate((0, 1))          # x cuts factor 0, y cuts factor 1
>>> [str(l) for l in operand_layouts(r, c, mesh)], [str(l) for l in result_layouts(r, c, mesh)]
(['(x, y)', '(y, -)'], ['(x, -)+y'])
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jshard._core.layout import CollectiveKind, Layout, MeshAxes
from jshard._jaxcompat import itemsize


NONE = -1  # the mesh axis cuts nothing here: the operator is replicated along it
_PARTIAL = -2  # _PARTIAL - k: the axis carries a partial sum through the k-th linear set

Dims = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class InternalCollective:
    """A collective that an operator's local function writes itself: of one block of result `result`.

    `itemsize` is the bytes of an element as it is sent, `everywhere` whether all axes of the mesh take part and not
    only those that cut a reduction factor.
    """

    kind: CollectiveKind
    itemsize: float
    result: int = 0
    all_axes: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """Factors of an operator.

    Arguments:

    - `operands`, `results`: for each tensor, for each dimension, the factors on it, major first; an empty
        tuple is a dimension that is never cut (broadcast, size one).
    - `sizes`: length of each factor.
    - `reduction`: cutting one leaves every result that does not carry it partial (`reducer="sum"`),
        or is finished by the operator itself at once (`"max"`, `"min"`, `"prod"`, `"and"`, `"or"`).
    - `blocked`: factors that are never cut (the operator needs them whole).
    - `linear`: sets of operands the operator is jointly linear in: if exactly those are partial sums on
        an axis and nothing is cut by it, the results are partial sums on it.
    - `work`: arithmetic operations per point of the iteration space (2: multiply-add, 0: data movement).
    - `note`: why something is blocked; printed by the reports.
    - `opaque`: nothing is known about the operator: it runs replicated and the report names it.
    - `own`: the collectives that its local function writes, in order; where a reducer other than a sum states none,
        one all-reduce of each result. Cost, predicted collectives and verification read this one statement.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduction: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()
    reducer: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    work: float = 1.0
    note: str = ""
    opaque: bool = False
    internal: tuple[InternalCollective, ...] = ()

    def __str__(self) -> str:
        order = list(dict.fromkeys(f for t in self.operands + self.results for d in t for f in d))
        letters = {
            f: string.ascii_letters[i % 52] + (str(i // 52) if i >= 52 else "") for i, f in enumerate(order)
        }

        def dim(d: tuple[int, ...]) -> str:
            return letters[d[0]] if len(d) == 1 else "(" + " ".join(letters[f] for f in d) + ")"

        def tensor(dims: Dims) -> str:
            return " ".join(map(dim, dims))

        text = ", ".join(map(tensor, self.operands)) + " -> " + ", ".join(map(tensor, self.results))
        if self.reduction:
            text += "  (reduce " + ", ".join(letters[f] for f in self.reduction if f in letters) + ")"
        return text


@dataclasses.dataclass(frozen=True)
class Candidate:
    """For each mesh axis the factor it cuts, or `NONE`, or `_PARTIAL - k` (through linear set k)."""

    axis_codes: tuple[int, ...]

    def cut(self, factor: int, mesh: MeshAxes) -> tuple[str, ...]:
        """Mesh axes that cut `factor`, major first."""
        return tuple(n for n, f in zip(mesh.names, self.axis_codes, strict=True) if f == factor)


def candidates(rule: Rule, mesh: MeshAxes) -> Iterator[Candidate]:
    """All candidates of a rule on a mesh: every cut divides, every dimension stays a block partition."""
    return map(Candidate, map(tuple, candidate_codes(rule, mesh).tolist()))


def candidate_codes(rule: Rule, mesh: MeshAxes) -> np.ndarray:
    """The axes of all candidates, `(candidates, mesh axes)`: planning handles hundreds of rules at once."""
    choices = [NONE] + [_PARTIAL - k for k in range(len(rule.linear))]
    choices += [f for f, s in enumerate(rule.sizes) if s > 1 and f not in rule.blocked]
    axes = np.array(choices, dtype=np.int64)[_places(len(choices), len(mesh.sizes))]
    every, sizes = np.arange(len(rule.sizes)), np.array(rule.sizes, dtype=np.int64)
    pieces = np.where(axes == every[:, None, None], np.array(mesh.sizes, dtype=np.int64), 1).prod(axis=2)
    fine = (sizes[:, None] % pieces == 0).all(axis=0)
    # A minor factor of a dimension may be cut only when all factors before it are cut to single points.
    for f, before in _major_factors(rule):
        for m in before:
            fine &= (pieces[f] == 1) | (pieces[m] == rule.sizes[m])
    return axes[fine]


@functools.lru_cache(maxsize=256)
def _places(choices: int, axes: int) -> np.ndarray:
    """Every way to choose once for each mesh axis."""
    out = np.indices((choices,) * axes).reshape(axes, choices**axes).T
    out.flags.writeable = False
    return out


def _major_factors(rule: Rule) -> list[tuple[int, tuple[int, ...]]]:
    pairs = []
    for dims in rule.operands + rule.results:
        for d in dims:
            pairs += [(f, d[:i]) for i, f in enumerate(d) if i]
    return pairs


def operand_layouts(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[Layout, ...]:
    """The layout each operand must have under a candidate."""
    return tuple(
        a[0] for a, _ in layouts_of_candidates(rule, np.array([c.axis_codes], dtype=np.int64), mesh)[0]
    )


def result_layouts(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[Layout, ...]:
    """The layout each result has under a candidate, partial sums unresolved."""
    return tuple(
        a[0] for a, _ in layouts_of_candidates(rule, np.array([c.axis_codes], dtype=np.int64), mesh)[1]
    )


IndexedLayouts = tuple[
    tuple[Layout, ...], np.ndarray
]  # distinct layouts, and which of them each candidate means


def layouts_of_candidates(
    rule: Rule, axes: np.ndarray, mesh: MeshAxes
) -> tuple[tuple[IndexedLayouts, ...], tuple[IndexedLayouts, ...]]:
    """Layouts of operands and of results under candidates given by their `axes`, in order of first use.

    Few layouts of a tensor are distinct: those factors that it does not carry do not count.
    """
    low = _PARTIAL - max(0, len(rule.linear) - 1)
    sums = rule.reduction if rule.reducer == "sum" else ()

    known: dict[tuple, IndexedLayouts] = {}  # operands and results of an elementwise operator are cut alike

    def listed(dims: Dims, partial: Sequence[int]) -> IndexedLayouts:
        if (dims, *partial) not in known:
            known[dims, *partial] = made(dims, partial)
        return known[dims, *partial]

    def made(dims: Dims, partial: Sequence[int]) -> IndexedLayouts:
        means = np.full(len(rule.sizes) - low, NONE, dtype=np.int64)  # by value - low
        for f in {f for d in dims for f in d}:
            means[f - low] = f
        for f in partial:
            means[f - low] = _PARTIAL
        codes = means[axes - low]
        key = np.zeros(len(axes), dtype=np.int64)
        for k in range(axes.shape[1]):
            key = key * (len(rule.sizes) - _PARTIAL) + codes[:, k] - _PARTIAL
        seen: dict[Layout, int] = {}
        number: dict[int, int] = {}
        index = []
        for at, k in enumerate(key.tolist()):
            found = number.get(k)
            if found is None:
                lay = _layout(dims, tuple(codes[at].tolist()), mesh.names)
                found = number[k] = seen.setdefault(lay, len(seen))
            index.append(found)
        return tuple(seen), np.array(index, dtype=np.int64)

    through = [_PARTIAL - k for k in range(len(rule.linear))]
    operands = tuple(
        listed(dims, [f for f in through if i in rule.linear[_PARTIAL - f]])
        for i, dims in enumerate(rule.operands)
    )
    results = tuple(
        listed(dims, [*through, *(f for f in sums if not any(f in d for d in dims))]) for dims in rule.results
    )
    return operands, results


@functools.lru_cache(maxsize=65536)
def _layout(dims: Dims, axes: tuple[int, ...], names: tuple[str, ...]) -> Layout:
    cut = tuple(tuple(n for f in d for n, g in zip(names, axes, strict=True) if g == f) for d in dims)
    return _one(cut, tuple(n for n, g in zip(names, axes, strict=True) if g == _PARTIAL))


@functools.lru_cache(maxsize=65536)
def _one(dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> Layout:
    """One object for a layout, so that comparing it ends at once."""
    return Layout(dims, partial)


def reduced_axes(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[str, ...]:
    """Mesh axes over which the operator itself finishes a reduction that is not a sum."""
    if rule.reducer == "sum":
        return ()
    return tuple(n for n, f in zip(mesh.names, c.axis_codes, strict=True) if f in rule.reduction)


@dataclasses.dataclass(frozen=True)
class SentCollective:
    """An own collective under a candidate: `held` bytes a device gives, of result `result`, over `axes`."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    local_bytes: float
    result: int


def internal_collectives(
    rule: Rule, c: Candidate, mesh: MeshAxes, results: Sequence[Any]
) -> tuple[SentCollective, ...]:
    """What an operator's local function sends under a candidate, in the order in which it is written.

    `results` have the global `shape` and the `dtype` of each result.

    >>> import numpy as np
    >>> r = Rule(operands=(((0,), (1,)),), results=(((0,),),), sizes=(8, 6), reduction=(1,), reducer="max")
    >>> mesh, y = MeshAxes(("x", "y"), (4, 2)), np.zeros(8, np.float32)
    >>> internal_collectives(r, Candidate((0, 1)), mesh, [y]), internal_collectives(r, Candidate((0, NONE)), mesh, [y])
    ((SentCollective(kind='all_reduce', axes=('y',), local_bytes=8.0, result=0),), ())
    """
    reduced = reduced_axes(rule, c, mesh)
    own = rule.internal
    if not own and reduced:
        own = tuple(InternalCollective("all_reduce", itemsize(a.dtype), k) for k, a in enumerate(results))
    out, layouts = [], result_layouts(rule, c, mesh) if own else ()
    for o in own:
        axes = mesh.names if o.all_axes else reduced
        if mesh.size(*axes) > 1:
            held = math.prod(results[o.result].shape) * o.itemsize / layouts[o.result].pieces(mesh)
            out.append(SentCollective(o.kind, tuple(axes), held, o.result))
    return tuple(out)


def local_work(rule: Rule, axes: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """Arithmetic operations of one device under candidates given by their axes."""
    pieces = np.where(axes >= 0, np.array(mesh.sizes, dtype=np.int64), 1).prod(axis=1)
    return rule.work * math.prod(rule.sizes) / pieces
