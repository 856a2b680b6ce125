"""Single moves between layouts: what one collective, or one local slice, does to a layout.

A `Step` is exactly one thing that every device can do inside `shard_map`. Dimensions are cut by lists of mesh
axes, major first, and a step can only touch the minor end of a list: appending an axis cuts each block in
place, removing one joins neighbouring blocks. Anything else moves blocks between devices: a permute.

>>> from jshard._core.layout import MeshAxes
>>> mesh = MeshAxes(("x", "y"), (2, 4))
>>> a = Layout((("x", "y"), ()))
>>> for s in successor_steps(a, mesh, (8, 8)):
...     if s.kind != "permute":
...         print(s, "=>", apply_step(s, a))
all_gather[y] 0 => (x, -)
all_to_all[y] 0->1 => (x, y)
all_gather[x*y] 0 => (-, -)
all_to_all[x*y] 0->1 => (-, x*y)

A permute keeps the set of axes: then a value that differs over the same axes before and after, as JAX's types
of varying axes need it. Moving a cut from axis x to axis y costs no more bytes without this: slice by y, swap
x and y, gather x.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from jshard._core.layout import Layout, MeshAxes


Dims = tuple[tuple[str, ...], ...]
StepKind = Literal["slice", "all_gather", "all_to_all", "all_reduce", "reduce_scatter", "permute"]


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One move.

    Arguments:

    - `kind`: `"slice"` appends `axes` to the cut of `dst_dim`; `"all_gather"` removes them from the minor end
        of `src_dim`; `"all_to_all"` moves them from the minor end of `src_dim` to that of `dst_dim`;
        `"reduce_scatter"` turns partial axes into a cut of `dst_dim`; `"all_reduce"` sums them;
        `"permute"` exchanges whole blocks until the layout is `target`.
    - `axes`: mesh axes of the collective's group, major first.
    - `src_dim`, `dst_dim`: dimensions of the tensor.
    - `target`: the cuts after a permute.
    """

    kind: StepKind
    axes: tuple[str, ...]
    src_dim: int | None = None
    dst_dim: int | None = None
    target: Dims | None = None

    def __str__(self) -> str:
        where = f" {self.src_dim}" if self.src_dim is not None else ""
        where += f"->{self.dst_dim}" if self.dst_dim is not None else ""
        where += f" to {Layout(self.target)}" if self.target is not None else ""
        return f"{self.kind}[{'*'.join(self.axes)}]{where}"


def apply_step(step: ReshardStep, layout: Layout) -> Layout:
    """The layout after a step; a step that does not fit the layout raises `ValueError`."""
    dims, partial = list(layout.dims), layout.partial
    if step.kind == "permute":
        if step.target is None or set(Layout(step.target).axes) != {a for d in dims for a in d}:
            raise ValueError(f"{step} does not keep the axes of {layout}")
        return Layout(step.target, partial)
    if step.kind in ("all_gather", "all_to_all"):
        assert step.src_dim is not None
        have = dims[step.src_dim]
        if have[len(have) - len(step.axes) :] != step.axes:
            raise ValueError(f"{step} does not fit {layout}")
        dims[step.src_dim] = have[: len(have) - len(step.axes)]
    if step.kind in ("all_reduce", "reduce_scatter"):
        if not set(step.axes) <= set(partial):
            raise ValueError(f"{step} does not fit {layout}")
        partial = tuple(a for a in partial if a not in step.axes)
    if step.kind == "slice" and set(step.axes) & set(layout.axes):
        raise ValueError(f"{step} does not fit {layout}")
    if step.kind in ("slice", "all_to_all", "reduce_scatter"):
        assert step.dst_dim is not None
        dims[step.dst_dim] = dims[step.dst_dim] + step.axes
    return Layout(tuple(dims), partial)


def successor_steps(layout: Layout, mesh: MeshAxes, shape: tuple[int, ...]) -> Iterator[ReshardStep]:
    """All single steps from a layout whose result divides `shape`; permutes keep every cut."""
    for kind, axes, src, dst, dims, _ in successors(layout, mesh, shape):
        yield ReshardStep(kind, axes, src, dst, dims if kind == "permute" else None)


Transition = tuple[StepKind, tuple[str, ...], int | None, int | None, Dims, tuple[str, ...]]


def successors(layout: Layout, mesh: MeshAxes, shape: tuple[int, ...]) -> Iterator[Transition]:
    """Moves as plain tuples (kind, axes, src_dim, dst_dim, cuts after, partial after): graphs have many."""
    dims, partial = layout.dims, layout.partial
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    room = [s // math.prod([size[a] for a in d]) for s, d in zip(shape, dims, strict=True)]
    used = {a for d in dims for a in d}.union(partial)

    def cut(d: int, axes: tuple[str, ...]) -> Dims:
        return (*dims[:d], dims[d] + axes, *dims[d + 1 :])

    for a in mesh.names:
        if a not in used:
            for d, r in enumerate(room):
                if r % size[a] == 0:
                    yield "slice", (a,), None, d, cut(d, (a,)), partial
    for n in range(1, len(partial) + 1):
        for axes in itertools.permutations(partial, n):
            left, pieces = tuple(a for a in partial if a not in axes), math.prod([size[a] for a in axes])
            for d, r in enumerate(room):
                if r % pieces == 0:
                    yield "reduce_scatter", axes, None, d, cut(d, axes), left
        for axes in itertools.combinations(partial, n):
            yield "all_reduce", axes, None, None, dims, tuple(a for a in partial if a not in axes)
    for s, have in enumerate(dims):
        for i in reversed(range(len(have))):
            axes, pieces = have[i:], math.prod([size[a] for a in have[i:]])
            less = (*dims[:s], have[:i], *dims[s + 1 :])
            yield "all_gather", axes, s, None, less, partial
            for d, r in enumerate(room):
                if d != s and r % pieces == 0:
                    yield "all_to_all", axes, s, d, (*less[:d], dims[d] + axes, *less[d + 1 :]), partial
    if len(used) - len(partial) > 1:
        axes = tuple(a for a in mesh.names if a in used and a not in partial)
        for target in _rearrangements(axes, layout.cuts(mesh), mesh):
            if target != dims:
                yield "permute", permuted_axes(dims, target, mesh), None, None, target, partial


@functools.lru_cache(maxsize=65536)
def _rearrangements(axes: tuple[str, ...], cuts: tuple[int, ...], mesh: MeshAxes) -> tuple[Dims, ...]:
    """All placements of `axes` that cut the dimensions into `cuts`; none with axes of size one."""
    if any(mesh.size(a) == 1 for a in axes):
        return ()

    def fill(left: tuple[str, ...], need: tuple[int, ...]) -> Iterator[Dims]:
        if not need:
            yield ()
        elif need[0] == 1:
            yield from (((), *rest) for rest in fill(left, need[1:]))
        else:
            for a in left:
                if need[0] % mesh.size(a) == 0:
                    others = tuple(o for o in left if o != a)
                    for head, *rest in fill(others, (need[0] // mesh.size(a), *need[1:])):
                        yield ((a, *head), *rest)

    return tuple(fill(axes, cuts))


def permuted_axes(source: Dims, target: Dims, mesh: MeshAxes) -> tuple[str, ...]:
    """Axes whose coordinate means something else after a permute: its group, in mesh order."""
    before, after = _weights(source, mesh), _weights(target, mesh)
    return tuple(a for a in mesh.names if before.get(a) != after.get(a))


@functools.lru_cache(maxsize=65536)
def _weights(dims: Dims, mesh: MeshAxes) -> dict[str, tuple[int, int]]:
    """For each axis the dimension that it cuts, and how many blocks one step along it skips."""
    out = {}
    for i, d in enumerate(dims):
        stride = 1
        for a in reversed(d):
            out[a] = (i, stride)
            stride *= mesh.size(a)
    return out
