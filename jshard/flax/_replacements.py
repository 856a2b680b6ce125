"""What policies change in nnx modules: methods replaced, vocabularies padded; the state keeps its paths.

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
>>> replace_method(dense, "__call__", lambda original, inputs: original(inputs) * 0)
>>> dense(jnp.ones((1, 2))).sum().item(), isinstance(dense, nnx.Linear)
(0.0, True)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import count_of, suggest
from jshard._spec.tree_paths import path_name


def replace_method(module: nnx.Module, name: str, new: Callable[..., PyTree]) -> None:
    """Replace a method of one module by `new(original, *args)`, where `original` is the bound method before.

    The module becomes an instance of a class derived from its own, so its state, paths and `isinstance` stay. Raises
    `ShardError` where there is no such method, or `new` takes other arguments.
    """
    cls = type(module)
    before = getattr(cls, name, None)
    if not callable(before):
        methods = [n for n, m in inspect.getmembers(cls, callable) if not n.startswith("__")]
        raise ShardError(
            f"{cls.__name__} has no method {name!r}", where="replace_method", fix=suggest(name, methods)
        )
    check_same_signature(f"{cls.__name__}.{name}", before, new)

    @functools.wraps(before)
    def method(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return new(types.MethodType(before, self), *args, **kwargs)

    body = {name: method, "__module__": cls.__module__, "__doc__": cls.__doc__}
    object.__setattr__(module, "__class__", type(cls.__name__, (cls,), body))


def check_same_signature(name: str, before: Callable[..., PyTree], new: Callable[..., PyTree]) -> None:
    """Refuse a replacement that takes other arguments than the method, after `original`."""
    wanted, own = (list(inspect.signature(f).parameters.values())[1:] for f in (before, new))
    names, required = [p.name for p in wanted], [p.name for p in wanted if p.default is p.empty]
    fits = [p.name for p in own] == names[: len(own)] and len(own) >= len(required)
    if not fits and not any(p.kind is p.VAR_POSITIONAL for p in own):
        raise ShardError(
            f"the replacement of {name} takes ({', '.join(p.name for p in own)}), "
            f"the method ({', '.join(names)})",
            where="replace_method",
            fix=f"lambda original, {', '.join(required)}: ...",
        )


@dataclasses.dataclass(frozen=True)
class Padding:
    """What `pad_vocabulary` did: the dimension and the original size of each padded parameter, by path."""

    size: int
    padded: int
    dims: Mapping[str, int]

    def crop(self, state: PyTree) -> PyTree:
        """State of the padded model at its original sizes."""

        def one(path: tuple, x: jax.Array) -> jax.Array:
            dim = self._dim(path_name(path), x.shape)
            return x if dim is None else jax.lax.slice_in_dim(x, 0, self.size, axis=dim)

        return jax.tree_util.tree_map_with_path(one, state)

    def pad(self, state: PyTree) -> PyTree:
        """State of the original model at the sizes of the padded one."""

        def one(path: tuple, x: jax.Array) -> jax.Array:
            dim = self.dims.get(path_name(path))
            return x if dim is None or x.shape[dim] != self.size else _padded(x, dim, self.padded)

        return jax.tree_util.tree_map_with_path(one, state)

    def mask(self, scores: jax.Array) -> jax.Array:
        """Scores over the padded vocabulary, with those of added words so low that a softmax gives them 0."""
        if self.size == self.padded:
            return scores
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        return jnp.where(jnp.arange(self.padded) < self.size, scores, lowest)

    def _dim(self, path: str, shape: Sequence[int]) -> int | None:
        """The padded dimension of a parameter, or of state of the same shape whose path ends as its path."""
        for name, dim in self.dims.items():
            if (path == name or path.endswith(f".{name}")) and dim < len(shape) and shape[dim] == self.padded:
                return dim
        return None


def pad_vocabulary(
    model: nnx.Module, size: int, multiple: int, paths: Sequence[str] | None = None
) -> Padding:
    """Pad every parameter with a dimension of the vocabulary's size by zeros to a multiple of devices; in place.

    - `paths`: those to pad; default: all with exactly one dimension of this size. One that is left out although it has
        such a dimension, as a copy of tied weights has, is refused by name.
    """
    if multiple < 1:
        raise ShardError(
            f"multiple={multiple}", where="pad_vocabulary", fix="a number of devices: multiple=8"
        )
    padded = -(-size // multiple) * multiple
    if isinstance(model, linen.Module):
        raise ShardError(
            f"{type(model).__name__} is a linen module, which holds no parameters to pad",
            where="pad_vocabulary",
            fix=f"in prepare, a clone with its field padded, such as model.clone(vocabulary={padded}); for restore, "
            f'the dimension of each parameter by its path: Padding({size}, {padded}, {{"params.embed.embedding": 0}})',
        )
    found: dict[str, tuple[nnx.Variable, int]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape = getattr(variable, "shape", ())
        name = ".".join(map(str, path))
        if shape.count(size) == 1:
            found[name] = variable, shape.index(size)
        elif shape.count(size) > 1:
            raise ShardError(
                f"{name} of shape {tuple(shape)} has {count_of(shape.count(size), 'dimension')} of {size}",
                where="pad_vocabulary",
                fix="paths= without it, and a padding of its own",
            )
    wanted = tuple(found) if paths is None else tuple(paths)
    for name in wanted:
        if name not in found:
            raise ShardError(
                f"{name!r} is no parameter with one dimension of {size}",
                where="pad_vocabulary",
                fix=suggest(name, tuple(found)) if found else f"the size of the vocabulary, not {size}",
            )
    if left := [n for n in found if n not in wanted]:
        raise ShardError(
            f"{', '.join(left)} has the vocabulary's {size} too and would not be padded, so that tied weights differ",
            where="pad_vocabulary",
            fix=f"paths={[*wanted, *left]!r}, or paths=None for all",
        )
    if not wanted:
        raise ShardError(
            f"no parameter has a dimension of {size}",
            where="pad_vocabulary",
            fix="the size of the vocabulary",
        )
    padding = Padding(size, padded, {n: found[n][1] for n in wanted})
    nnx.update(model, padding.pad(nnx.state(model)))
    return padding


def _padded(x: jax.Array, dim: int, size: int) -> jax.Array:
    width = [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)]
    return jnp.pad(x, width)


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """The columns of a fused product (queries, keys and values side by side) in the order of devices' blocks.

    A cut of `[q | k | v]` gives a device some of the queries only; in block order, `[q0 | k0 | v0 | q1 | ...]`, it gives
    each its part of all three. `sizes`: of the fused parts; `blocks`: the number of devices, which divides them.

    >>> order = BlockOrder((4, 2), 2)
    >>> order.apply(jnp.array([0, 1, 2, 3, 10, 11])).tolist()
    [0, 1, 10, 2, 3, 11]
    >>> [x.tolist() for x in order.split(jnp.array([0, 1, 10, 2, 3, 11]))]
    [[0, 1, 2, 3], [10, 11]]
    """

    sizes: tuple[int, ...]
    blocks: int

    def __post_init__(self) -> None:
        if any(size % self.blocks for size in self.sizes):
            raise ShardError(
                f"{self.blocks} blocks do not divide the fused parts {self.sizes}",
                where="BlockOrder",
                fix="blocks that divide the heads of each part",
            )

    def apply(self, x: jax.Array) -> jax.Array:
        """The last dimension, parts side by side, in block order."""
        parts, start = [], 0
        for size in self.sizes:
            part = jax.lax.slice_in_dim(x, start, start + size, axis=x.ndim - 1)
            parts.append(part.reshape(*x.shape[:-1], self.blocks, size // self.blocks))
            start += size
        return jnp.concatenate(parts, axis=-1).reshape(x.shape)

    def split(self, y: jax.Array) -> tuple[jax.Array, ...]:
        """The parts of a result whose last dimension is in block order; a cut into `blocks` stays where it is."""
        of_blocks = y.reshape(*y.shape[:-1], self.blocks, y.shape[-1] // self.blocks)
        out, start = [], 0
        for size in self.sizes:
            stop = start + size // self.blocks
            part = jax.lax.slice_in_dim(of_blocks, start, stop, axis=y.ndim)
            out.append(part.reshape(*y.shape[:-1], size))
            start = stop
        return tuple(out)

    def undo(self, x: jax.Array) -> jax.Array:
        """The last dimension with parts side by side again."""
        return jnp.concatenate(self.split(x), axis=-1)
