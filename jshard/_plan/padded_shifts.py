"""Slices, paddings and reversals along a dimension that is padded at its end: a shift between the padded lengths.

`x[1:]` of 16 rows has 15, which no cut divides; padded to 16 it is x moved by one row, `pad(x, low=-1, high=1)`, whose rule
sends the edges of blocks. What stands in the padding of a result is not known; what a padding at the end would show of an
operand's own padding is overwritten first. A padded dimension that is
reversed begins with its padding, and is moved to the front.

>>> import jax, jax.numpy as jnp
>>> (eqn,) = jax.make_jaxpr(lambda x: x[1:])(jnp.ones(16)).eqns
>>> moved_dims(eqn, lambda v, d: 16 if v.aval.shape[d] == 15 else None)
(Move(dim=0, low=-1, high=1, mask=None),)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn, Params
from jshard._program.roll_primitive import ROLL, roll
from jshard._program.shift_patterns import spliced
from jshard._program.shifted_pieces import Group, kept_most, padding_config
from jshard._rules.neutral_element import Scalar


_MOST_JOINED = 4


@dataclasses.dataclass(frozen=True)
class Move:
    """A dimension of a slice, padding or reversal between padded lengths: as a padding by `low` and `high`.

    `mask`: what the operand must hold in its padding; None where that does not show.
    """

    dim: int
    low: int
    high: int
    mask: Scalar | None = None


def shifted_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dimensions along which a slice, padding, join, reversal or roll moves elements, or drops some: not of keys."""
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars):
        return ()
    if eqn.primitive.name == "concatenate":
        return (eqn.params["dimension"],)
    if eqn.primitive.name == ROLL:
        return (eqn.params["dim"],)
    if eqn.primitive.name == "rev":
        return tuple(eqn.params["dimensions"])
    if eqn.primitive.name not in ("slice", "pad"):
        return ()
    sizes = enumerate(zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True))
    return tuple(d for d, (n, m) in sizes if (low := _low(eqn, d)) is not None and (low != 0 or n != m))


def moved_dims(eqn: JaxprEqn, padded: Callable[[JaxprAtom, int], int | None]) -> tuple[Move, ...]:
    """The dimensions along which a slice or padding moves elements and its operand or result is padded.

    Arguments:

    - `padded`: the padded length of a variable's dimension; None where it keeps its own.
    """
    if eqn.primitive.name in ("concatenate", ROLL):
        return ()
    found = []
    for d in shifted_dims(eqn):
        x, out = eqn.invars[0], eqn.outvars[0]
        (n, m), (long_n, long_m) = (x.aval.shape[d], out.aval.shape[d]), (padded(x, d), padded(out, d))
        if long_n is None and long_m is None:
            continue
        if eqn.primitive.name == "rev":
            low = n - (long_n or n)
            found.append(Move(d, low, (long_m or m) - n))
            continue
        low = _low(eqn, d)
        if low is None:
            continue
        mask: Scalar | None = None
        if (
            m - n - low > 0 and long_n is not None
        ):  # the end of the operand shows, and behind it the padding's value
            if not compat.is_literal(eqn.invars[1]):
                continue
            mask = np.asarray(eqn.invars[1].val).item()
        found.append(Move(d, low, (long_m or m) - (long_n or n) - low, mask))
    return tuple(found)


def _low(eqn: JaxprEqn, d: int) -> int | None:
    """The position of the first element in the result; None where elements do not stay neighbours."""
    if eqn.primitive.name == "pad":
        low, _, between = eqn.params["padding_config"][d]
        return None if between else int(low)
    strides = eqn.params["strides"]
    return None if strides and strides[d] != 1 else -int(eqn.params["start_indices"][d])


def run_moved(eqn: JaxprEqn, moves: Sequence[Move], shape: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """The equation on a padded operand, as a function of its operands; `shape`: of the operand."""
    by_dim = {move.dim: (move.low, move.high, 0) for move in moves}
    if eqn.primitive.name == "rev":
        dims, config = eqn.params["dimensions"], [by_dim.get(d, (0, 0, 0)) for d in range(len(shape))]
        return lambda x: [lax.pad(lax.rev(x, dims), np.zeros((), x.dtype), config)]
    if eqn.primitive.name == "pad":
        config = [by_dim.get(d, c) for d, c in enumerate(padding_config(eqn.params))]
        return lambda x, fill: [lax.pad(x, fill, config)]
    p, old, kept = eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # Few positions stay a slice: by its rule the device adds them that has them.
    few = {
        m.dim
        for m in moves
        if shape[m.dim] + m.low + m.high == kept[m.dim] and not kept_most(kept[m.dim], old[m.dim])
    }
    by_dim = {d: c for d, c in by_dim.items() if d not in few}
    starts = [0 if d in by_dim else i for d, i in enumerate(p["start_indices"])]
    limits = [
        new if d in by_dim or (limit == n and d not in few) else limit
        for d, (limit, n, new) in enumerate(zip(p["limit_indices"], old, shape, strict=True))
    ]
    config = [by_dim.get(d, (0, 0, 0)) for d in range(len(old))]

    def run(x: jax.Array) -> list[jax.Array]:
        return [lax.pad(lax.slice(x, starts, limits, p["strides"]), np.zeros((), x.dtype), config)]

    return run


def run_cropped(
    eqn: JaxprEqn, params: Params, operands: Sequence[JaxprAtom]
) -> Callable[..., list[jax.Array]] | None:
    """A gradient of windows that read less than its padded operand, as a function of its operands; None for all others.

    JAX refuses the negative padding that leaves out the rest.
    """
    if eqn.primitive.name != "select_and_scatter_add":
        return None
    rest = [max(-high, 0) for _, high in params["padding"]]
    if not any(rest):
        return None
    shape = [n - r for n, r in zip(operands[1].aval.shape, rest, strict=True)]
    inside = {**params, "padding": tuple((low, max(high, 0)) for low, high in params["padding"])}

    def run(source: jax.Array, operand: jax.Array) -> list[jax.Array]:
        (found,) = [eqn.primitive.bind(source, lax.slice(operand, [0] * len(shape), shape), **inside)]
        return [lax.pad(found, np.zeros((), found.dtype), [(0, r, 0) for r in rest])]

    return run


def run_joined(
    eqn: JaxprEqn, padded: Callable[[JaxprAtom, int], int | None]
) -> Callable[..., list[jax.Array]] | None:
    """A concatenation or roll of which an operand or the result is padded, as a function of its operands; None for others.

    Each operand is moved to its place, and the positions say which is read where.
    """
    if eqn.primitive.name == ROLL:
        return _run_rolled(eqn, padded)
    if eqn.primitive.name != "concatenate" or any(map(compat.is_literal, eqn.invars)):
        return None
    d, out, at, groups = eqn.params["dimension"], eqn.outvars[0], 0, []
    long = [padded(v, d) for v in (*eqn.invars, out)]
    if not any(long) or len(eqn.invars) > _MOST_JOINED or not jnp.issubdtype(out.aval.dtype, np.generic):
        return None
    for v, size in zip(eqn.invars, long, strict=False):
        groups.append(Group(v, size or v.aval.shape[d], at, at + v.aval.shape[d]))
        at += v.aval.shape[d]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        shape = list(arrays[0].shape)
        shape[d] = long[-1] or out.aval.shape[d]
        return [spliced(arrays, groups, d, tuple(shape))]

    return run


def _run_rolled(
    eqn: JaxprEqn, padded: Callable[[JaxprAtom, int], int | None]
) -> Callable[..., list[jax.Array]] | None:
    """A roll along a padded dimension: two of the padded length, one of them for what goes over the end of the true one."""
    (v,), d, by = eqn.invars, eqn.params["dim"], eqn.params["by"]
    size = padded(v, d)
    if size is None:
        return None
    more = size - v.aval.shape[d]

    def run(x: jax.Array) -> list[jax.Array]:
        wrapped = lax.broadcasted_iota(jnp.int32, x.shape, d) < by
        return [lax.select(wrapped, roll(x, d, by + more), roll(x, d, by))]

    return run
