"""Common-subexpression elimination by value numbering, during the walk over the jaxpr.

XLA merges equal operators (the mean of `x.var()` and that of `x.mean()`, a weight cast in two places) and with them
the collectives that a plan would count for each. So an operator with the primitive, parameters and operands of an
earlier one is not added again: it gets the earlier one's results. Operators on constants alone, such as masks and
positions, are an exception: each is added, so that every user may have its own sharding without a reshard. They get
equal value numbers all the same, so that expensive operators on them are merged, and then what is made of those: a copy
would move what XLA moves once (a mask beside a cumulative sum of positions, in each layer).
A chain of operators that only adds and drops dimensions of size 1 and gives an earlier value again is that value.

Source: J. Cocke and J. T. Schwartz, "Programming languages and their compilers", 1970 (value numbering); XLA's `HloCSE`.

>>> import jax
>>> eqns = jax.make_jaxpr(lambda x: (jax.numpy.sin(x) + 1, jax.numpy.sin(x) + 2))(1.0).eqns
>>> values = ValueNumbering()
>>> values.lookup(eqns[0], [0])[0] is None
True
>>> values.record(eqns[0], values.lookup(eqns[0], [0])[1], [1])       # x is value 0, its sine value 1
>>> values.lookup(eqns[2], [0])[0]
[1]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import numpy as np
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprEqn, Params
from jshard._core.layout import ArrayType
from jshard._program.operators import Atom
from jshard._program.unit_views import Dims, dims_of, viewed


# Never merged: operators with effects or foreign code, placement, and barriers.
_NEVER_MERGED = frozenset(
    "optimization_barrier shard_map pallas_call custom_linear_solve call_hi_primitive".split()
)
_NEVER_MERGED_PARTS = (
    "callback", "ffi", "custom_call", "jshard_", "sharding_constraint", "reshard", "layout_constraint", "infeed",
)  # fmt: skip
_CONSTRAINT = "sharding_constraint"  # merged with equal ones of the same value, but never hoisted
# Merged even on constants alone: they take time, or their operands may need a reshard. Prefixes of names.
_EXPENSIVE = (
    "reduce_", "arg", "cum", "dot_general", "conv_", "sort", "fft", "gather", "scatter", "top_k", "random_bits",
    "reshape", "rev", "slice", "dynamic_", "concatenate", "pad", "split", "tile",
)  # fmt: skip
_WITH_BODIES = frozenset((
    "scan", "while", "cond", "jit", "pjit", "closed_call", "call", "core_call", "eval_jaxpr", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vmap_call",
))  # fmt: skip


Key = tuple[Hashable, ...]  # the primitive and the operands


@dataclasses.dataclass(frozen=True)
class LiteralValue:
    """The value of a literal, for comparison."""

    dtype: str
    shape: tuple[int, ...]
    weak: bool
    bits: bytes


def literal_value(value: ArrayLike, aval: ArrayType) -> LiteralValue:
    """The value of a literal of a jaxpr, for comparison."""
    weak = bool(getattr(aval, "weak_type", False))
    return LiteralValue(str(aval.dtype), tuple(aval.shape), weak, np.asarray(value).tobytes())


class ValueNumbering:
    """The operators added so far in one body; loops and branches have a value numbering of their own."""

    def __init__(self) -> None:
        self._first_equal: dict[Hashable, Hashable] = {}  # value -> the first value equal to it
        self._operators: dict[Hashable, list[tuple[Params, Sequence[Atom]]]] = {}
        self._constant: set[Hashable] = set()
        self._shared: set[Hashable] = set()  # constants that are merged, by the first equal value
        # Values of which others differ by dimensions of size 1 at most: the value, and where its dimensions are.
        self._source: dict[Hashable, tuple[Hashable, Dims]] = {}
        self._views: dict[Hashable, Atom] = {}

    def lookup(self, eqn: JaxprEqn, operands: Sequence[Hashable]) -> tuple[Sequence[Atom] | None, Key | None]:
        """The results of an equal operator, or None if this one must be added; and its key, for `record`.

        `operands` are tensor ids, `LiteralValue`s, or anything hashable that is equal if and only if operands are.
        """
        name = eqn.primitive.name
        if eqn.effects or never_merged(name) and name != _CONSTRAINT or runs_custom_vjp(eqn):
            return None, None
        key: Key = (name, *[self._first_equal.get(o, o) for o in operands])
        for params, results in self._operators.get(key, ()):
            if _same(params, eqn.params):
                if not results or results[0] in self._constant and results[0] not in self._shared:
                    return None, key
                return results, key
        view = self._view(eqn, key)
        same = None if view is None else self._views.get(view)
        return (None if same is None else [same]), key

    def first_equal(self, value: Hashable) -> Hashable:
        """The first value equal to this one, constants among them."""
        return self._first_equal.get(value, value)

    def _view(self, eqn: JaxprEqn, key: Key) -> tuple[Hashable, Dims, Hashable, bool] | None:
        """What a result is a view of, and how; None unless it is one of a value that is no constant."""
        if len(key) != 2 or type(key[1]) is not int or key[1] in self._constant:
            return None
        operand, aval = key[1], eqn.invars[0].aval
        source, dims = self._source.setdefault(operand, (operand, dims_of(aval)))
        found = viewed(eqn, dims)
        if found is None:
            return None
        self._views.setdefault((source, dims, *_type(aval)), operand)
        return (source, found, *_type(eqn.outvars[0].aval))

    def record(self, eqn: JaxprEqn, key: Key | None, results: Sequence[Atom]) -> None:
        """Record an operator that was added, under the key that `lookup` returned."""
        if key is None:
            return
        view = self._view(eqn, key)
        if view is not None:
            self._views.setdefault(view, results[0])
            self._source[results[0]] = view[:2]
        same_key = self._operators.setdefault(key, [])
        for params, first in same_key:
            if _same(params, eqn.params):
                self._first_equal.update(zip(results, first, strict=True))
                return
        same_key.append((eqn.params, results))
        if all([type(o) is LiteralValue or o in self._constant for o in key[1:]]):
            self._constant.update(results)
            if eqn.primitive.name.startswith(_EXPENSIVE) or any([o in self._shared for o in key[1:]]):
                self._shared.update(results)


@functools.cache
def never_merged(name: str) -> bool:
    """Whether operators of this primitive are neither merged nor hoisted."""
    return name in _NEVER_MERGED or any(part in name for part in _NEVER_MERGED_PARTS)


def runs_custom_vjp(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.custom_vjp` function, or runs one.

    Such a rule need not be linear (gradient clipping is not): applied once to the sum of the cotangents of several
    calls or iterations, it differs from the sum of its applications to each.
    """
    name = eqn.primitive.name
    if name not in _WITH_BODIES:
        return name.startswith("custom_vjp")
    inner = [j for v in eqn.params.values() for j in (v if isinstance(v, tuple | list) else (v,))]
    return any(runs_custom_vjp(e) for j in inner if compat.is_jaxpr(j) for e in compat.open_jaxpr(j)[0].eqns)


def _type(aval: ArrayType) -> tuple[Hashable, bool]:
    return aval.dtype, bool(getattr(aval, "weak_type", False))


def _same(a: Params, b: Params) -> bool:
    """Whether two equations have equal parameters; arrays count as different."""
    return a is b or a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)


def _equal(a: object, b: object) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if compat.is_jaxpr(a) and compat.is_jaxpr(b):  # compared as printed: variables are named in order
        (x, xs), (y, ys) = compat.open_jaxpr(a), compat.open_jaxpr(b)
        same_consts = len(xs) == len(ys) and all(p is q for p, q in zip(xs, ys, strict=True))
        return same_consts and not x.effects and (text := str(x)) == str(y) and "..." not in text
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False
