"""Slices of stacked values moved before a program's layers, and their gradients' sums behind them.

`w[i]` in a Python loop is a slice with parameters of its own in every layer (of keys, `jax.random.split(key, n)[i]`, too),
and its gradient a pad that is added to those of the other layers: between them the layers are alike. Neither depends on
where between its operands and its readers it is.

>>> import jax, jax.numpy as jnp
>>> traced = jax.make_jaxpr(lambda w, x: jnp.sin(x @ w[0]) @ w[1])(jnp.ones((2, 3, 3)), jnp.ones((4, 3)))
>>> [e.primitive.name for e in with_slices_moved(traced.jaxpr).eqns]
['slice', 'squeeze', 'slice', 'squeeze', 'dot_general', 'sin', 'dot_general']
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn


_SLICES = frozenset(("slice", "squeeze", "dynamic_slice"))
_SUMS = frozenset(("pad", "add_any"))
_RESHAPES = frozenset(("reshape", "broadcast_in_dim", "expand_dims"))


def with_slices_moved(jaxpr: Jaxpr, passes_on: Callable[[JaxprAtom], bool] = lambda v: False) -> Jaxpr:
    """The jaxpr with slices right behind what they slice, and pads and sums of gradients right before what reads them.

    Those of inputs come first. `passes_on`: says of values that pass from layer to layer, whose slices stay.
    """
    made_at: dict[JaxprAtom, int] = {}
    behind: dict[int, list[JaxprEqn]] = collections.defaultdict(list)
    for k, eqn in enumerate(jaxpr.eqns):
        read = [v for v in eqn.invars if not compat.is_literal(v)]
        is_slice = eqn.primitive.name in _SLICES and bool(read) and not any(map(passes_on, read))
        place = max(made_at.get(v, -1) for v in read) if is_slice else k
        made_at.update(dict.fromkeys(eqn.outvars, place))
        behind[place].append(eqn)
    eqns = [e for place in sorted(behind) for e in behind[place]]
    first = len(behind.get(-1, ()))
    return jaxpr.replace(eqns=eqns[:first] + _sums_last(eqns[first:]))


def _sums_last(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """The equations in an order in which pads, sums and what only they read come as late as their readers allow."""
    readers: dict[JaxprAtom, list[int]] = collections.defaultdict(list)
    for k, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not compat.is_literal(v):
                readers[v].append(k)
    position: dict[int, int] = {}  # of those moved: the equation before which each comes
    for k in range(len(eqns) - 1, -1, -1):
        eqn, read_by = eqns[k], [n for v in eqns[k].outvars for n in readers[v]]
        only_sums = bool(read_by) and all(n in position for n in read_by)
        if eqn.primitive.name in _SUMS or eqn.primitive.name in _RESHAPES and only_sums:
            position[k] = min((position.get(n, n) for n in read_by), default=len(eqns))
    return [
        eqns[k] for k in sorted(range(len(eqns)), key=lambda k: (position.get(k, k), k not in position, k))
    ]
