"""Single reshard steps: what one collective, or one local slice, does to a layout.

A dimension is sharded over a list of mesh axes, major first. All steps but a permute change the minor end of such a
list: appending an axis slices each shard in place, removing one joins neighbouring shards. A permute exchanges whole
shards between devices.

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

A permute keeps the set of axes, so that the value varies over the same axes before and after, as JAX's types of varying
axes require. Resharding a dimension from axis x to axis y needs no other permute: slice by y, exchange x and y, gather
x, with as many bytes.
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
    """One step.

    Arguments:

    - `kind`: `"slice"` appends `axes` to those of `dst_dim`; `"all_gather"` removes them from the minor end of
        `src_dim`; `"all_to_all"` moves them from the minor end of `src_dim` to that of `dst_dim`;
        `"reduce_scatter"` sums over partial axes and shards `dst_dim` by them; `"all_reduce"` sums over them;
        `"permute"` exchanges whole shards so that the dimensions are sharded as in `target`.
    - `axes`: mesh axes of the collective's groups, major first.
    - `src_dim`, `dst_dim`: dimensions of the tensor.
    - `target`: the axes of each dimension after a permute.
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
    """The layout after a step; raises `ValueError` for a step that is not possible from the layout."""
    dims, partial = list(layout.dims), layout.partial
    if step.kind == "permute":
        if step.target is None or set(Layout(step.target).axes) != {a for d in dims for a in d}:
            raise ValueError(f"{step} does not keep the axes of {layout}")
        return Layout(step.target, partial)
    if step.kind in ("all_gather", "all_to_all"):
        assert step.src_dim is not None
        src_axes = dims[step.src_dim]
        kept = len(src_axes) - len(step.axes)
        if src_axes[kept:] != step.axes:
            raise ValueError(f"{step} does not fit {layout}")
        dims[step.src_dim] = src_axes[:kept]
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
    """All single steps from a layout to one that divides `shape`; permutes keep the shards per dimension."""
    for kind, axes, src, dst, dims, _ in successors(layout, mesh, shape):
        yield ReshardStep(kind, axes, src, dst, dims if kind == "permute" else None)


Transition = tuple[StepKind, tuple[str, ...], int | None, int | None, Dims, tuple[str, ...]]


def successors(layout: Layout, mesh: MeshAxes, shape: tuple[int, ...]) -> Iterator[Transition]:
    """The same as plain tuples (kind, axes, src_dim, dst_dim, dims after, partial after), for speed."""
    dims, partial = layout.dims, layout.partial
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    local = [s // math.prod([size[a] for a in d]) for s, d in zip(shape, dims, strict=True)]
    used = {a for d in dims for a in d}.union(partial)

    def append(d: int, axes: tuple[str, ...]) -> Dims:
        return (*dims[:d], dims[d] + axes, *dims[d + 1 :])

    for a in mesh.names:
        if a not in used:
            for d, length in enumerate(local):
                if length % size[a] == 0:
                    yield "slice", (a,), None, d, append(d, (a,)), partial
    for n in range(1, len(partial) + 1):
        for axes in itertools.permutations(partial, n):
            remaining, shards = tuple(a for a in partial if a not in axes), math.prod([size[a] for a in axes])
            for d, length in enumerate(local):
                if length % shards == 0:
                    yield "reduce_scatter", axes, None, d, append(d, axes), remaining
        for axes in itertools.combinations(partial, n):
            yield "all_reduce", axes, None, None, dims, tuple(a for a in partial if a not in axes)
    for src, src_axes in enumerate(dims):
        for i in reversed(range(len(src_axes))):
            axes, shards = src_axes[i:], math.prod([size[a] for a in src_axes[i:]])
            gathered = (*dims[:src], src_axes[:i], *dims[src + 1 :])
            yield "all_gather", axes, src, None, gathered, partial
            for dst, length in enumerate(local):
                if dst != src and length % shards == 0:
                    after = (*gathered[:dst], dims[dst] + axes, *gathered[dst + 1 :])
                    yield "all_to_all", axes, src, dst, after, partial
    if len(used) - len(partial) > 1:
        axes = tuple(a for a in mesh.names if a in used and a not in partial)
        for target in _rearrangements(axes, layout.cuts(mesh), mesh):
            if target != dims:
                yield "permute", permuted_axes(dims, target, mesh), None, None, target, partial


@functools.lru_cache(maxsize=65536)
def _rearrangements(axes: tuple[str, ...], cuts: tuple[int, ...], mesh: MeshAxes) -> tuple[Dims, ...]:
    """All assignments of `axes` to dimensions with `cuts` shards each; none with axes of size one."""
    if any(mesh.size(a) == 1 for a in axes):
        return ()

    def assign(unused: tuple[str, ...], shards: tuple[int, ...]) -> Iterator[Dims]:
        if not shards:
            yield ()
        elif shards[0] == 1:
            yield from (((), *others) for others in assign(unused, shards[1:]))
        else:
            for a in unused:
                if shards[0] % mesh.size(a) == 0:
                    remaining = tuple(b for b in unused if b != a)
                    for first, *others in assign(remaining, (shards[0] // mesh.size(a), *shards[1:])):
                        yield ((a, *first), *others)

    return tuple(assign(axes, cuts))


def permuted_axes(source: Dims, target: Dims, mesh: MeshAxes) -> tuple[str, ...]:
    """The axes of a permute's groups, in mesh order: those whose coordinate indexes other shards afterwards."""
    before, after = _block_strides(source, mesh), _block_strides(target, mesh)
    return tuple(a for a in mesh.names if before.get(a) != after.get(a))


@functools.lru_cache(maxsize=65536)
def _block_strides(dims: Dims, mesh: MeshAxes) -> dict[str, tuple[int, int]]:
    """For each axis the dimension that it shards, and the distance in shards of neighbours along it."""
    out = {}
    for i, d in enumerate(dims):
        stride = 1
        for a in reversed(d):
            out[a] = (i, stride)
            stride *= mesh.size(a)
    return out
