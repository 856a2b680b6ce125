"""Arrays that are padded at rest: as long as a cut wants them, with the shape that the program knows.

A vocabulary of 50,257 rows is cut by no number of devices. A `PaddedArray` holds them in an array of 50,264 rows, of
which eight devices can have one block each. It is a pytree node with that array as its one leaf, so that `jax.tree.map`,
optimizers and `jax.device_put` work on it; a sharded function reads its true size, and returns new values of it padded
in the same way.

>>> import jax.numpy as jnp
>>> w = PaddedArray.of(jnp.arange(5.0), (8,))
>>> w.shape, w.padded.shape, w.true().tolist()
((5,), (8,), [0.0, 1.0, 2.0, 3.0, 4.0])
>>> float(jnp.sum(w))
10.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from jshard._core.jax_types import PyTree


PADDED_FIELD = "padded"
"""The attribute of a `PaddedArray` with its array; paths of arguments leave it out."""


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedArray:
    """An array with padding at the end of some dimensions; `shape` is its true one.

    >>> import jax, jax.numpy as jnp
    >>> w = PaddedArray.of(jnp.ones((50, 2)), (56, 2))
    >>> jax.tree.map(lambda x: x.shape, w), w.shape
    (PaddedArray(padded=(56, 2), shape=(50, 2)), (50, 2))

    `padded`: the array, or what stands for it in a transformed pytree. What is in the padding never matters.
    """

    padded: jax.Array
    shape: tuple[int, ...]

    @staticmethod
    def of(x: PyTree, padded_shape: Sequence[int]) -> PaddedArray:
        """An array, or the type of one, with zeros up to a shape at least as long in each dimension."""
        shape, width = tuple(x.shape), tuple(padded_shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            return PaddedArray(jax.ShapeDtypeStruct(width, x.dtype), shape)  # pyright: ignore[reportArgumentType]
        config = [(0, m - n, 0) for n, m in zip(shape, width, strict=True)]
        if isinstance(x, np.ndarray):
            grown = np.pad(x, [(0, high) for _, high, _ in config])
            return PaddedArray(grown, shape)  # pyright: ignore[reportArgumentType]
        return PaddedArray(lax.pad(x, jax.numpy.zeros((), x.dtype), config), shape)

    @property
    def dtype(self) -> np.dtype:
        """That of the array."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def true(self) -> jax.Array:
        """The array of the true shape."""
        return (
            self.padded[tuple(slice(0, n) for n in self.shape)]
            if isinstance(self.padded, np.ndarray)
            else (lax.slice(self.padded, (0,) * self.ndim, self.shape))
        )

    @staticmethod
    def true_sizes(tree: PyTree) -> PyTree:
        """A pytree with an array of the true shape in place of each `PaddedArray`: what a checkpoint holds.

        >>> tree = [PaddedArray.of(jax.numpy.ones(5), (8,)), jax.numpy.ones(3)]
        >>> [x.shape for x in PaddedArray.true_sizes(tree)]
        [(5,), (3,)]
        """
        return jax.tree.map(lambda x: x.true() if is_padded(x) else x, tree, is_leaf=is_padded)

    def __jax_array__(self) -> jax.Array:
        return self.true()


jax.tree_util.register_pytree_with_keys(
    PaddedArray,
    lambda x: (((GetAttrKey(PADDED_FIELD), x.padded),), x.shape),
    lambda shape, children: PaddedArray(next(iter(children)), shape),
    lambda x: ((x.padded,), x.shape),
)


def is_padded(x: object) -> bool:
    """Whether a value is a `PaddedArray`."""
    return isinstance(x, PaddedArray)


def holds_padded(tree: PyTree) -> bool:
    """Whether a pytree holds any `PaddedArray`."""
    return any(map(is_padded, jax.tree.leaves(tree, is_leaf=is_padded)))
