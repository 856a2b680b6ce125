"""Equal operators of a program, found while it is walked: compilers compute them once, and so does the plan.

Problem.  `x.var()` takes the mean that `x.mean()` took, a weight is cast in two places, a stencil transforms one field
three times. Compilers merge such operators and, with them, the collectives that a plan would count for each.

Idea.  Value numbering: an operator that was met before, with equal parameters on the same values, gives the results
that it gave then instead of being written again. Values that come from constants alone, such as masks and positions,
are written wherever they are computed: each reader has its own, cut as it likes, and nothing need be moved. They stand
for one value all the same, so that what is reshaped, reduced or multiplied on the way is written once.

Source: J. Cocke and J. T. Schwartz, "Programming languages and their compilers", 1970 (value numbering); XLA's CSE pass.

>>> import jax
>>> eqns = jax.make_jaxpr(lambda x: (jax.numpy.sin(x) + 1, jax.numpy.sin(x) + 2))(1.0).eqns
>>> known = ValueNumbering()
>>> known.lookup(eqns[0], [0])[0] is None
True
>>> known.record(eqns[0], known.lookup(eqns[0], [0])[1], [1])       # x is value 0, its sine value 1
>>> known.lookup(eqns[2], [0])[0]
[1]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jshard import _jaxcompat as compat


# What may do more than give results, is asked for where it stands, or keeps values apart on purpose.
_APART = frozenset("optimization_barrier shard_map pallas_call custom_linear_solve call_hi_primitive".split())
_OUTSIDE = (
    "callback", "ffi", "custom_call", "jshard_", "sharding_constraint", "reshard", "layout_constraint", "infeed",
)  # fmt: skip
# Of constants alone, these are written once: what they read may have to be moved, or they take time.
_HEAVY = (
    "reduce_", "arg", "cum", "dot_general", "conv_", "sort", "fft", "gather", "scatter", "top_k", "random_bits",
    "reshape", "rev", "slice", "dynamic_", "concatenate", "pad", "split", "tile",
)  # fmt: skip
_WITH_BODIES = frozenset((
    "scan", "while", "cond", "jit", "pjit", "closed_call", "call", "core_call", "eval_jaxpr", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vmap_call",
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LiteralValue:
    """A literal by what it holds."""

    dtype: str
    shape: tuple[int, ...]
    weak: bool
    bits: bytes


def literal_value(value: Any, aval: Any) -> LiteralValue:
    """A literal of a jaxpr, to be compared by what it holds."""
    weak = bool(getattr(aval, "weak_type", False))
    return LiteralValue(str(aval.dtype), tuple(aval.shape), weak, np.asarray(value).tobytes())


class ValueNumbering:
    """What was computed so far in one block; of inner blocks, whose bodies run by themselves, each has its own."""

    def __init__(self) -> None:
        self._stands_for: dict[
            Hashable, Hashable
        ] = {}  # values that were computed again, by the first of them
        self._operators: dict[Hashable, list[tuple[Any, Sequence[Any]]]] = {}
        self._constant: set[Hashable] = set()

    def lookup(self, eqn: Any, operands: Sequence[Hashable]) -> tuple[Sequence[Any] | None, Hashable]:
        """The results of an equal operator, None where this one is to be written; and its key, for `keep`.

        `operands` are numbers of tensors, `Written` literals, or anything else that is equal where operands are.
        """
        name = eqn.primitive.name
        if eqn.effects or never_merged(name) or runs_custom_vjp(eqn):
            return None, None
        key = (name, *[self._stands_for.get(o, o) for o in operands])
        for params, results in self._operators.get(key, ()):
            if _same(params, eqn.params):
                if not results or results[0] in self._constant and not name.startswith(_HEAVY):
                    return None, key
                return results, key
        return None, key

    def record(self, eqn: Any, key: Any, results: Sequence[Any]) -> None:
        """Remember an operator that was written."""
        if key is None:
            return
        known = self._operators.setdefault(key, [])
        for params, first in known:
            if _same(params, eqn.params):
                self._stands_for.update(zip(results, first, strict=True))
                return
        known.append((eqn.params, results))
        if all([type(o) is LiteralValue or o in self._constant for o in key[1:]]):
            self._constant.update(results)


@functools.cache
def never_merged(name: str) -> bool:
    """Whether operators of this name are kept apart, each where it stands."""
    return name in _APART or any(s in name for s in _OUTSIDE)


def runs_custom_vjp(eqn: Any) -> bool:
    """Whether an equation is a `jax.custom_vjp` function, or runs one.

    Such a rule need not be linear (one that clips gradients is not): applied once to the sum of what several calls or
    turns hand back, it gives something else than applied to each.
    """
    name = eqn.primitive.name
    if name not in _WITH_BODIES:
        return name.startswith("custom_vjp")
    inner = [j for v in eqn.params.values() for j in (v if isinstance(v, tuple | list) else (v,))]
    return any(runs_custom_vjp(e) for j in inner if compat.is_jaxpr(j) for e in compat.open_jaxpr(j)[0].eqns)


def _same(a: Any, b: Any) -> bool:
    """Whether two equations have the same parameters; arrays among them count as different."""
    return a is b or a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if compat.is_jaxpr(a) and compat.is_jaxpr(b):  # as they are printed: with variables named in order
        (x, xs), (y, ys) = compat.open_jaxpr(a), compat.open_jaxpr(b)
        same = len(xs) == len(ys) and all(p is q for p, q in zip(xs, ys, strict=True))
        return same and not x.effects and (text := str(x)) == str(y) and "..." not in text
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False
