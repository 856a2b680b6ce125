"""Tracing a function of padded arrays on their true shapes, and the sizes that its program then pads.

The function runs between a slice at its start and a padding at its end, which the padded program leaves out
(`_plan/padded_program.py`). A part of the result that has the structure and the shapes of an argument is its new value,
and padded as it is.

>>> import jax.numpy as jnp
>>> w = PaddedArray.of(jnp.arange(5.0), (8,))
>>> new, total = on_true_sizes(lambda w: (w + 1, jnp.sum(w)))(w)
>>> new.shape, new.padded.tolist(), float(total)
((5,), [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0], 10.0)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Function, PyTree
from jshard._core.padded_array import PaddedArray, holds_padded, is_padded
from jshard._plan.padded_program import Sizes, is_crop
from jshard._plan.padding_classes import PaddingClasses, shape_of
from jshard._spec.tree_paths import one_level


def on_true_sizes(fn: Function) -> Function:
    """A function of padded arrays that runs `fn` on their true shapes, and pads what it returns as their new values."""

    @functools.wraps(fn)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out = fn(*PaddedArray.true_sizes(args), **PaddedArray.true_sizes(kwargs))
        return _with_padding_of(out, [*args, *kwargs.values()])

    return run


def _with_padding_of(out: PyTree, arguments: Sequence[PyTree]) -> PyTree:
    """A result in which every part with the structure and shapes of a part of an argument is padded as that is."""
    known = [
        (jax.tree.structure(PaddedArray.true_sizes(part)), part) for a in arguments for part in _parts(a)
    ]

    def padded(node: PyTree) -> PyTree:
        structure = jax.tree.structure(node)
        for k, (of, part) in enumerate(known):
            likes = jax.tree.leaves(part, is_leaf=is_padded)
            if of == structure and [x.shape for x in likes] == [x.shape for x in jax.tree.leaves(node)]:
                if is_padded(part):
                    del known[k]  # an array in and one out: its new value is the first of this shape
                values = jax.tree.leaves(node)
                new = [_like(x, y) for x, y in zip(values, likes, strict=True)]
                return jax.tree.unflatten(jax.tree.structure(part, is_leaf=is_padded), new)
        children = one_level(node)
        if not children:
            return node
        tree = jax.tree.structure(node, is_leaf=lambda x: x is not node)
        return jax.tree.unflatten(tree, [padded(child) for _, child in children])

    return padded(out)


def _parts(tree: PyTree) -> Iterator[PyTree]:
    """The nodes of a pytree that hold a padded array, the outermost first; bare arrays only where the tree is one."""
    if is_padded(tree):
        yield tree
        return
    nodes = [tree] if holds_padded(tree) else []
    for node in nodes:
        yield node
        nodes += [c for _, c in one_level(node) if not is_padded(c) and holds_padded(c)]


def _like(x: jax.Array, like: PyTree) -> PyTree:
    return PaddedArray.of(x, like.padded.shape) if isinstance(like, PaddedArray) else x


def sizes_at_rest(closed: ClosedJaxpr, arguments: PyTree) -> Sizes:
    """The classes of dimensions that arguments have padded at rest, with their sizes there."""
    if not holds_padded(arguments):
        return {}
    opened = compat.open_jaxpr(closed)[0]
    crops = [e for e in opened.eqns if is_crop(e, opened.invars)]
    lengths = frozenset(n for e in crops for n in shape_of(e.outvars[0]))
    classes = PaddingClasses(closed, lengths)
    sizes: dict[tuple[int, int], int] = {}
    for e in crops:
        for d, (n, m) in enumerate(zip(shape_of(e.outvars[0]), shape_of(e.invars[0]), strict=True)):
            of = classes.class_of(e.outvars[0], d) if n < m else None
            if of is not None and of.carried:
                sizes[of.size, of.number] = max(sizes.get((of.size, of.number), 0), m)
    return sizes
