"""Layouts: which mesh axes cut which dimension of a tensor, and on which axes it is still a partial sum.

The planner sees a mesh only as named axes with sizes (`MeshAxes`). A `Layout` names, for each dimension,
the axes that cut it, major first. Axes in `partial` hold addends: the tensor is the sum over them.

>>> mesh = MeshAxes(("x", "y"), (2, 4))
>>> a = Layout((("x",), ()), partial=("y",))
>>> a.local_shape((32, 64), mesh), str(a)
((16, 64), '(x, -)+y')
>>> a.cuts(mesh)
(2, 1)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from jax.sharding import PartitionSpec


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The mesh as the planner sees it: axis names and sizes, in device order (major first)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def size(self, *names: str) -> int:
        """Product of the sizes of the named axes; 1 for none."""
        return math.prod(self.sizes[self.names.index(n)] for n in names)

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) or "1 device"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes that cut each dimension (major first) and axes on which the value is a partial sum."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    # Planning keys its tables by layouts, hundreds of thousands of times: the hash is kept.
    def __hash__(self) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            found = self.__dict__["_hash"] = hash((self.dims, self.partial))
            return found

    def __reduce__(self) -> tuple:
        return Layout, (self.dims, self.partial)  # the hash of a string is another in another process

    @staticmethod
    def replicated(ndim: int) -> Layout:
        """The layout that cuts nothing."""
        return Layout(((),) * ndim)

    @staticmethod
    def from_spec(spec: PartitionSpec, ndim: int) -> Layout:
        """Layout of a `PartitionSpec`; missing trailing entries are uncut."""
        entries = tuple(spec) + (None,) * (ndim - len(spec))
        return Layout(tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries))

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec`, without trailing `None`s; partial axes do not show."""
        dims = list(self.dims)
        while dims and not dims[-1]:
            dims.pop()
        return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in dims))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes the local value varies over: cut dimensions first, then partial."""
        return tuple(a for d in self.dims for a in d) + self.partial

    def cuts(self, mesh: MeshAxes) -> tuple[int, ...]:
        """Pieces per dimension: the strategy of the tensor."""
        return _cuts(self.dims, mesh)

    def pieces(self, mesh: MeshAxes) -> int:
        """Number of different blocks the tensor is cut into."""
        return _pieces(self.dims, mesh)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, ...]:
        """Shape of one device's block of a tensor of global `shape`."""
        return tuple(s // c for s, c in zip(shape, self.cuts(mesh), strict=True))

    def divides(self, shape: tuple[int, ...], mesh: MeshAxes) -> bool:
        """Whether every cut divides its dimension."""
        return all(s % c == 0 for s, c in zip(shape, self.cuts(mesh), strict=True))

    def without_partial(self) -> Layout:
        """The same cuts with the partial sum resolved by an all-reduce."""
        return Layout(self.dims)

    def __str__(self) -> str:
        dims = ", ".join("*".join(d) or "-" for d in self.dims)
        return f"({dims})" + "".join(f"+{a}" for a in self.partial)


# Planning asks these for the same few layouts hundreds of thousands of times.
@functools.lru_cache(maxsize=65536)
def _cuts(dims: tuple[tuple[str, ...], ...], mesh: MeshAxes) -> tuple[int, ...]:
    return tuple(mesh.size(*d) for d in dims)


@functools.lru_cache(maxsize=65536)
def _pieces(dims: tuple[tuple[str, ...], ...], mesh: MeshAxes) -> int:
    return math.prod(_cuts(dims, mesh))
