"""Exchange of edges between neighbours: what a device's block of a result reads of an operand, by permutes.

`with_neighbours` runs the exchanges that a rule lists as `internal` collectives with `reads`, one dimension after the
other, so that corners come along with the second. Rows outside the tensor are zeros, or what `masked` puts there.

>>> import jax, numpy as np
>>> from jshard._rules.block_reads import WindowReads
>>> mesh, reads = MeshAxes(("x",), (4,)), WindowReads(size=8, points=8, low=1, span=2)
>>> run = lambda x: read_interval(x, 0, reads, ("x",), mesh, lambda k: contextlib.nullcontext())
>>> on = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
>>> f = jax.jit(jax.shard_map(run, mesh=on, in_specs=jax.P("x"), out_specs=jax.P("x")))
>>> f(np.arange(1, 9)).reshape(4, 4).tolist()
[[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 0]]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Index
from jshard._core.layout import MeshAxes
from jshard._rules.block_reads import BlockReads, Exchange, Piece, exchange
from jshard._rules.registry import Edges, LocalContext, block_index


Scope = Callable[[int], contextlib.AbstractContextManager[object]]


def with_neighbours(
    ctx: LocalContext, operands: Sequence[jax.Array], fills: Sequence[ArrayLike | None] = ()
) -> list[jax.Array]:
    """The operands with all that this device's block of the result reads, as the rule's exchanges say.

    Arguments:

    - `fills`: per operand what is outside the tensor; None for zeros.
    """
    out, number = list(operands), 0
    for one in ctx.rule.internal:
        assert one.reads is not None and one.operand is not None and one.over is not None
        axes = ctx.axes(one.over)
        if ctx.mesh.size(*axes) == 1:
            continue
        first, k = number, one.operand
        edges = ctx.edges.get(k)
        known = edges is not None and any(dim == one.dim for dim, _ in edges)
        x = read_interval(
            out[k],
            one.dim,
            one.reads,
            axes,
            ctx.mesh,
            lambda i, first=first: ctx.collective_scope(first + i),
            edges,
            ctx.exchanged_before.get(k, 0),
        )
        fill = fills[k] if k < len(fills) else None
        out[k] = x if fill is None else masked(x, one.dim, one.reads, axes, ctx.mesh, fill)
        sent = exchange(one.reads, ctx.mesh.size(*axes)).pieces
        number += 0 if known else sum(bool(p.pairs) for p in sent)
    return out


def read_interval(
    x: jax.Array,
    dim: int,
    reads: BlockReads,
    axes: Sequence[str],
    mesh: MeshAxes,
    scope: Scope,
    edges: Edges | None = None,
    before: int = 0,
) -> jax.Array:
    """The interval of a dimension that this device reads, given its block of it; zeros outside the tensor.

    Arguments:

    - `axes`: mesh axes that cut the dimension, major first.
    - `scope`: the name scope of the k-th permute.
    - `edges`, `before`: as in `received_pieces`.
    """
    e, device = exchange(reads, mesh.size(*axes)), block_index(axes, mesh)
    arrived = received_pieces(x, dim, reads, axes, mesh, scope, edges, before=before)
    if e.aligned:
        return arrived[0] if len(arrived) == 1 else jnp.concatenate(compat.to_common_vma(arrived), dim)
    return _placed(arrived, dim, e, device)


def received_pieces(
    x: jax.Array,
    dim: int,
    reads: BlockReads,
    axes: Sequence[str],
    mesh: MeshAxes,
    scope: Scope,
    edges: Edges | None = None,
    reverse: int | None = None,
    before: int = 0,
) -> list[jax.Array]:
    """The pieces of the exchange, as they arrive at this device; its own rows among them.

    Arguments:

    - `edges`: what has arrived before, or where to put what arrives.
    - `reverse`: a dimension in whose reverse order rows travel, so that compilers find no equal permute to merge with:
        the plan counts each.
    - `before`: how many operators have exchanged edges of the same value: of each the rows travel reversed along other
        dimensions, since XLA for CPU removes barriers before it looks for equal instructions.
    """
    e, device = exchange(reads, mesh.size(*axes)), block_index(axes, mesh)
    arrived, number = [], 0
    for k, piece in enumerate(e.pieces):
        if edges is not None and (dim, k) in edges:
            arrived.append(edges[dim, k])
            continue
        part = _rows(x, dim, piece, device)
        if piece.pairs:
            turned = _turned(part.shape, before) if reverse is None else (reverse,)
            with scope(number):
                part = lax.rev(lax.ppermute(lax.rev(part, turned), tuple(axes), piece.pairs), turned)
            number += 1
            if edges is not None:
                edges[dim, k] = part
        arrived.append(part)
    return arrived


def _turned(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The dimensions longer than one that the bits of a number select.

    >>> [_turned((2, 1, 3), k) for k in range(5)]
    [(), (2,), (0,), (0, 2), ()]
    """
    long = [d for d in reversed(range(len(shape))) if shape[d] > 1]
    return tuple(sorted(d for k, d in enumerate(long) if number >> k & 1))


def _rows(x: jax.Array, dim: int, piece: Piece, device: Index) -> jax.Array:
    """The rows of this device's block that belong to a piece."""
    if piece.hop is None and not piece.pairs:
        shape = (*x.shape[:dim], piece.rows, *x.shape[dim + 1 :])
        return compat.to_common_vma([jnp.zeros(shape, x.dtype), x])[0]
    if piece.rows == x.shape[dim]:
        return x
    start = at_device(piece.begins, device)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + piece.rows, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, piece.rows, dim)


def _placed(parts: Sequence[jax.Array], dim: int, e: Exchange, device: Index) -> jax.Array:
    """Pieces put where they belong: places depend on the device, and may be partly outside the interval."""
    most = max(p.rows for p in e.pieces)
    shape = list(parts[0].shape)
    shape[dim] = e.length + 2 * most
    canvas, *parts = compat.to_common_vma([jnp.zeros(shape, parts[0].dtype), *parts])
    for piece, part in zip(e.pieces, parts, strict=True):
        place = at_device([p + most for p in piece.places], device)
        canvas = lax.dynamic_update_slice_in_dim(canvas, part, place, dim)
    return lax.slice_in_dim(canvas, most, most + e.length, axis=dim)


def masked(
    x: jax.Array, dim: int, reads: BlockReads, axes: Sequence[str], mesh: MeshAxes, fill: ArrayLike
) -> jax.Array:
    """The interval that `read_interval` gives, with `fill` where it is outside the tensor."""
    n, device = mesh.size(*axes), block_index(axes, mesh)
    starts, length = reads.starts(n), reads.length(n)
    if starts.min() >= 0 and (starts + length).max() <= reads.size:
        return x
    position = at_device(starts.tolist(), device) + lax.broadcasted_iota(jnp.int32, x.shape, dim)
    inside = (position >= 0) & (position < reads.size)
    return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def at_device(values: Sequence[int], device: Index) -> Index:
    """A number of each device: static where all have the same, else looked up."""
    if len(set(values)) == 1:
        return int(values[0])
    steps = set(np.diff(values).tolist())
    if len(steps) == 1:  # linear in the device
        return values[0] + jnp.asarray(device, jnp.int32) * steps.pop()
    return jnp.asarray(np.array(values, np.int32))[device]
