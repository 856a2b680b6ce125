"""The tensors that rules are about: arguments, results, and named values inside the function.

>>> t = TensorName("params.layers.0.kernel", (8, 4), "float32", "params")
>>> t.nbytes, t.aliases
(128, (('layers', '0', 'kernel'),))
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np

from jshard._core import jaxcompat as compat
from jshard._spec.parameter_plan import name_parts
from jshard._spec.tree_paths import Leaf


@dataclasses.dataclass(frozen=True)
class TensorName:
    """A tensor with the path by which rules find it.

    - `argument`: name of the argument that holds it; empty for results and inner values.
    - `element`, `elements`: of a module's output (`ModuleOutput`). `kind`: "argument", "result", "module", "name", "scope".
    - `layer_axis`: the dimension over which a loop runs, where layers are stacked; None where that is not known.
    - `contracted`: the dimensions over which the first product that reads it sums, where that is known; `product_with`:
        the number of the product's other operand.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype | str
    argument: str = ""
    kind: str = "argument"
    element: int = 0
    elements: int = 0
    layer_axis: int | None = None
    contracted: tuple[int, ...] | None = None
    product_with: int | None = None

    @classmethod
    def of_argument(cls, path: str, shape: tuple[int, ...], dtype: np.dtype | str) -> TensorName:
        """A tensor whose path begins with the name of its argument."""
        return cls(path, shape, dtype, path.partition(".")[0])

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        """The path in parts."""
        return name_parts(self.path)

    @functools.cached_property
    def inner(self) -> tuple[str, ...]:
        """The path without the argument's name."""
        return name_parts(self.path[len(self.argument) + 1 :]) if self.argument else self.parts

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The path without the argument's name and the collections `params` that Flax puts first."""
        inner = self.inner
        while len(inner) > 1 and inner[0] == "params":
            inner = inner[1:]
        return inner

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """The shorter paths by which rules may name it."""
        names, inner = [self.inner], self.inner
        while len(inner) > 1 and inner[0] == "params":
            inner = inner[1:]
            names.append(inner)
        return tuple(n for n in dict.fromkeys(names) if n and n != self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        size = compat.itemsize(jnp.dtype(self.dtype) if isinstance(self.dtype, str) else self.dtype)
        return math.prod(self.shape) * size

    @property
    def key(self) -> str:
        """The name that a rule for it has: with `[i]` for one of several elements of an output."""
        return f"{self.path}[{self.element}]" if self.elements > 1 else self.path


class ProgramFacts(TypedDict, total=False):
    """Fields of `TensorName` that only the program says."""

    layer_axis: int
    contracted: tuple[int, ...]
    product_with: int | None


def arguments(leaves: Sequence[Leaf], facts: Mapping[int, ProgramFacts] | None = None) -> list[TensorName]:
    """The arrays of a call; `facts`: what the program says about some, by number."""
    return [
        TensorName(leaf.path, leaf.shape, leaf.dtype, leaf.argument, **(facts or {}).get(i, ProgramFacts()))
        for i, leaf in enumerate(leaves)
        if leaf.dtype is not None
    ]


_MOMENTS = frozenset(
    "opt_state mu nu m v v_row v_col trace momentum velocity exp_avg exp_avg_sq ema acc_grads nu_hat sum_of_squares".split()
)
"""Names under which optimizers (optax, torch) keep tensors of the shape of a parameter."""

_CONTAINERS = frozenset("params parameters param weights model variables".split())
"""Names under which a state keeps all parameters."""


def is_state(tensor: TensorName) -> bool:
    """Whether a name of optimizers is in a tensor's path; an argument named `m` or `v` may be anything."""
    return bool(_MOMENTS & set(_parts_in_front(tensor.parts[:-1])))


def _parts_in_front(before: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a path in front of a name, without an argument called `m` or `v`."""
    return before[1:] if before[:1] in (("m",), ("v",)) else before


def mirrors(
    tensors: Sequence[TensorName], parameters: Sequence[int], any_shape: bool = False
) -> dict[int, int]:
    """Optimizer state -> the parameter whose path it ends in and whose shape it has (or `any_shape`), by number.

    >>> names = ["params.fc.w", "opt.0.mu.fc.w", "other.fc.b"]
    >>> mirrors([TensorName(n, (4,), "float32", n.split(".")[0]) for n in names], [0])
    {1: 0}

    A tensor counts as state if it is in another argument than the parameter and the whole path of the parameter below
    its argument is the end of its own, or if a name of optimizers is in front of the common part. What the common part
    leaves out of the parameter's path is then that of all parameters (`state.params`): a value projection `att.v.kernel`
    or a head `mu.kernel` is no state of a `head.kernel`.
    """
    if not parameters:
        return {}
    # How many tensors there are under a part of a path.
    below: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for t in tensors:
        if not is_state(t):
            below.update((t.argument, t.own[:depth]) for depth in range(len(t.own)))

    def is_root(parameter: TensorName, end: tuple[str, ...], before: tuple[str, ...]) -> bool:
        left_out = parameter.own[: len(parameter.own) - len(end)]
        if not left_out or left_out[-1] in _CONTAINERS or left_out[-1].isdecimal():
            return True
        siblings = parameter.parts[: len(parameter.parts) - len(end)][:-1] == before[:-1]
        argument = parameter.argument
        return not siblings and 2 * below[argument, left_out] > below[argument, ()]

    by_end: dict[tuple[str, ...], list[int]] = {}
    for i in parameters:
        path = tensors[i].own
        for start in range(len(path)):
            by_end.setdefault(path[start:], []).append(i)
    out: dict[int, int] = {}
    taken = set(parameters)
    for i, t in enumerate(tensors):
        if i in taken or not t.shape:
            continue
        for start in range(len(t.parts)):
            end, before = t.parts[start:], t.parts[:start]
            same = [k for k in by_end.get(end, ()) if any_shape or tensors[k].shape == t.shape]
            whole = [k for k in same if tensors[k].own == end and tensors[k].argument != t.argument]
            named = (
                [k for k in same if is_root(tensors[k], end, before)]
                if _MOMENTS & set(_parts_in_front(before))
                else []
            )
            if whole or named:
                out[i] = (whole or named)[0]
                break
    return out
