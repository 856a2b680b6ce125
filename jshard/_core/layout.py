"""Layouts: the mesh axes that shard each dimension of a tensor, and the axes on which it is a partial sum.

A `Layout` is a `PartitionSpec` (for each dimension the axes that shard it, major first) with partial axes, which JAX
calls unreduced: the tensor is the sum of the values along them. To the planner a mesh is `MeshAxes`, names with sizes.

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
import itertools
import math
from typing import Literal, Protocol

import numpy as np
from jax.sharding import PartitionSpec


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


class ArrayType(Protocol):
    """Anything with a global shape and a dtype: abstract values of JAX, structs, arrays, tensors of a program."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Names and sizes of the axes of a mesh, in device order (major first)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def size(self, *names: str) -> int:
        """Product of the sizes of the named axes; 1 for none."""
        return math.prod(self.sizes[self.names.index(n)] for n in names)

    @property
    def piece_counts(self) -> list[int]:
        """The numbers of pieces that some of the axes make, ascending.

        >>> MeshAxes(("x", "y", "z"), (2, 4, 1)).piece_counts
        [2, 4, 8]
        """
        sizes = [s for s in self.sizes if s > 1]
        some = (c for k in range(1, len(sizes) + 1) for c in itertools.combinations(sizes, k))
        return sorted({math.prod(c) for c in some})

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) or "1 device"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes that shard each dimension (major first), and axes on which the value is a partial sum."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    # Layouts are keys of the planner's tables, hundreds of thousands of times: the hash is cached.
    def __hash__(self) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            value = self.__dict__["_hash"] = hash((self.dims, self.partial))
            return value

    def __reduce__(self) -> tuple:
        # Without the cached hash: strings hash differently in another process.
        return Layout, (self.dims, self.partial)

    @staticmethod
    def replicated(ndim: int) -> Layout:
        """The layout with no sharded dimension."""
        return Layout(((),) * ndim)

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec`, without trailing `None`s and without the partial axes."""
        dims = list(self.dims)
        while dims and not dims[-1]:
            dims.pop()
        return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in dims))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes over which the local value varies: those of sharded dimensions first, then the partial ones."""
        return tuple(a for d in self.dims for a in d) + self.partial

    def cuts(self, mesh: MeshAxes) -> tuple[int, ...]:
        """Shards per dimension: the strategy of the tensor."""
        return _cuts(self.dims, mesh)

    def pieces(self, mesh: MeshAxes) -> int:
        """Number of different shards of the tensor."""
        return _pieces(self.dims, mesh)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor of global `shape`."""
        return tuple(s // c for s, c in zip(shape, self.cuts(mesh), strict=True))

    def divides(self, shape: tuple[int, ...], mesh: MeshAxes) -> bool:
        """Whether the number of shards divides every dimension."""
        return all(s % c == 0 for s, c in zip(shape, self.cuts(mesh), strict=True))

    def without_partial(self) -> Layout:
        """The layout after an all-reduce over the partial axes."""
        return Layout(self.dims)

    def __str__(self) -> str:
        dims = ", ".join("*".join(d) or "-" for d in self.dims)
        return f"({dims})" + "".join(f"+{a}" for a in self.partial)


# Cached: called hundreds of thousands of times for few distinct layouts.
@functools.lru_cache(maxsize=65536)
def _cuts(dims: tuple[tuple[str, ...], ...], mesh: MeshAxes) -> tuple[int, ...]:
    return tuple(mesh.size(*d) for d in dims)


@functools.lru_cache(maxsize=65536)
def _pieces(dims: tuple[tuple[str, ...], ...], mesh: MeshAxes) -> int:
    return math.prod(_cuts(dims, mesh))
