"""Window reductions and their gradients (pooling).

Dimensions without windows, such as batch and features, may be sharded; adjacent windows are `(o k) -> o`. Dimensions
with other windows are cut with a halo: the edges that a block's windows read are exchanged. In the gradient of a maximum
each device repeats the windows at its edges, whose gradients go to two blocks.

>>> from jax import ShapeDtypeStruct as S
>>> p = dict(window_dimensions=(1, 2), window_strides=(1, 2), padding=((0, 0), (0, 0)))
>>> print(reduce_window(OpView("reduce_window_max", p, (S((4, 8), "float32"),), (S((4, 4), "float32"),))))
a (b c) -> a b
>>> p = dict(window_dimensions=(1, 3), window_strides=(1, 1), padding=((0, 0), (1, 1)))
>>> print(reduce_window(OpView("reduce_window_max", p, (S((4, 8), "float32"),), (S((4, 8), "float32"),))))
a b -> a b  (halo: b)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard._rules.block_reads import ReadsOfWindows, WindowReads
from jshard._rules.factors import HALO, Factors, linear_sets
from jshard._rules.halo import Halo, local_windows, with_halos
from jshard._rules.neighbour_exchange import at_device, with_neighbours
from jshard._rules.neutral_element import window_identity
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import WHOLE, Dims, JointCut, Rule


rule = family("window")


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The factors of a window operator.

    - `many`, `one`: dimensions of the tensor with windows, and of the one with a value per window.
    - `overlapping`: (dimension, its factor in `many`, its factor in `one`) of windows that a halo allows to cut.
    - `work`: operations per point, since some factors are no loop indices of their own.
    """

    sizes: tuple[int, ...]
    many: Dims
    one: Dims
    blocked: tuple[int, ...]
    overlapping: tuple[tuple[int, int, int], ...]
    work: float

    def rule(
        self, operands: tuple[Dims, ...], results: tuple[Dims, ...], linear: tuple[tuple[int, ...], ...] = ()
    ) -> Rule:
        """The rule of operands and results with these factors, without halos."""
        return Rule(
            operands, results, self.sizes, blocked=self.blocked, work=self.work, linear=linear, note=HALO
        )


def _windows(op: OpView, big: tuple[int, ...], small: tuple[int, ...]) -> _Windows:
    """The factors, given the shape of the tensor with windows and of the one with a value per window."""
    f = Factors()
    many, one, blocked, overlapping, work = [], [], [], [], 1.0
    for d, (m, n) in enumerate(zip(big, small, strict=True)):
        size, stride, padding, base, dilation = window_of(op, d)
        plain = padding == (0, 0) and base == dilation == 1
        if plain and size == stride and m == n * size and n > 0:
            place = f.new(n)
            one.append((place,))
            window = (f.new(size),) if size > 1 else ()
            many.append((place, *window))
            blocked += window
        else:
            # A factor without a dimension, so that the work counts every element of every window.
            place, window = f.new(n), f.new(size)
            position = place
            if m != n:
                position, work = f.new(m), work / max(1, m)
            blocked += list(dict.fromkeys((place, window, position)))
            one.append((place,))
            many.append((position,))
            if min(m, n) > 0:
                overlapping.append((d, position, place))
    return _Windows(f.sizes, tuple(many), tuple(one), tuple(blocked), tuple(overlapping), work)


def window_of(op: OpView, d: int) -> tuple[int, int, tuple[int, int], int, int]:
    """Size, stride, padding, base dilation and window dilation along a dimension."""
    p = op.params
    base, dilation = p.get("base_dilation"), p.get("window_dilation")
    return (
        p["window_dimensions"][d], p["window_strides"][d], tuple(p["padding"][d]),
        base[d] if base else 1, dilation[d] if dilation else 1,
    )  # fmt: skip


def _reads(op: OpView, d: int, size: int, places: int) -> WindowReads:
    """What the windows of blocks of the result read."""
    window, stride, (low, _), base, dilation = window_of(op, d)
    return WindowReads(size, places, stride, low, (window - 1) * dilation, base)


def _with_halos(op: OpView, r: Rule, w: _Windows, windowed: tuple[int, ...]) -> Rule:
    """The rule with a halo for each dimension with overlapping windows, of the operands `windowed`."""
    halos = []
    for d, position, place in w.overlapping:
        _, _, padding, base, _ = window_of(op, d)
        if op.primitive == "reduce_window" and (padding != (0, 0) or base != 1):
            continue  # what the user's function makes of elements outside the tensor is the compiler's choice
        reads = _reads(op, d, op.ins[windowed[0]].shape[d], op.outs[0].shape[d])
        carried = tuple(position if i in windowed else WHOLE for i in range(len(op.ins)))
        cut = JointCut("halo", carried, (place,) * len(op.outs))
        halos.append(Halo(cut, tuple((i, d, reads) for i in windowed)))
    return with_halos(r, op.ins, halos)


def _reduce_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    """The windows of this device's block, applied to what they read; no padding is left along a cut."""
    if not ctx.rule.internal:
        return ctx.bind(*operands)
    op, n = ctx.op, len(ctx.op.outs)
    fills: list[ArrayLike | None] = [window_identity(op)] * n
    if op.primitive == "select_and_gather_add":
        n, fills = 2, [None, window_identity(op)]
    blocks = with_neighbours(ctx, operands, fills)
    ndim = len(op.ins[0].shape)
    padding = [window_of(op, d)[2] for d in range(ndim)]
    base = [window_of(op, d)[3] for d in range(ndim)]
    for one in ctx.rule.internal:
        assert one.over is not None and one.operand is not None and isinstance(one.reads, WindowReads)
        axes, k = ctx.axes(one.over), one.operand
        if ctx.mesh.size(*axes) > 1:
            between = fills[k]
            fill = 0 if between is None else between
            blocks[k], padding[one.dim], base[one.dim] = local_windows(
                blocks[k], one.dim, one.reads, axes, ctx.mesh, fill
            )
    changed: dict[str, object] = {"padding": tuple(padding)}
    if "base_dilation" in op.params:
        changed["base_dilation"] = tuple(base)
    return ctx.bind(*blocks[:n], *operands[n:], **changed)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", local=_reduce_local)
def reduce_window(op: OpView) -> Rule:
    """One result per window; `reduce_window` takes several operands and their initial scalars."""
    w = _windows(op, op.ins[0].shape, op.outs[0].shape)
    n = len(op.outs)
    linear = linear_sets(op, (0,)) if op.primitive == "reduce_window_sum" else ()
    r = w.rule((w.many,) * n + ((),) * (len(op.ins) - n), (w.one,) * n, linear)
    return _with_halos(op, r, w, tuple(range(n)))


def _scatter_local(ctx: LocalContext, source: jax.Array, operand: jax.Array) -> Sequence[jax.Array]:
    """All windows that reach into this device's block, then the gradients of the block alone."""
    if not ctx.rule.internal:
        return ctx.bind(source, operand)
    source, operand = with_neighbours(ctx, [source, operand], [None, window_identity(ctx.op)])
    padding = list(ctx.op.params["padding"])
    cuts = []
    for one in ctx.rule.internal:
        assert one.over is not None and one.reads is not None
        axes = ctx.axes(one.over)
        if one.operand == 1 and ctx.mesh.size(*axes) > 1:
            padding[one.dim] = (0, 0)
            cuts.append((one.dim, one.reads, axes))
    (found,) = ctx.bind(source, operand, padding=tuple(padding))
    for dim, reads, axes in cuts:
        n = ctx.mesh.size(*axes)
        block = ctx.op.ins[1].shape[dim] // n
        starts = (block * np.arange(n) - reads.starts(n)).tolist()
        start = at_device(starts, block_index(axes, ctx.mesh))
        found = lax.dynamic_slice_in_dim(found, start, block, dim)
    return [found]


@rule("select_and_scatter_add", local=_scatter_local)
def select_and_scatter_add(op: OpView) -> Rule:
    """`(source, operand) -> like operand`: each window's gradient goes to its chosen element."""
    w = _windows(op, op.ins[1].shape, op.ins[0].shape)
    r = w.rule((w.one, w.many), (w.many,), linear_sets(op, (0,)))
    halos = []
    for d, position, place in w.overlapping:
        size, stride, (low, _), _, _ = window_of(op, d)
        windows = WindowReads(
            op.ins[0].shape[d], op.ins[1].shape[d], 1, size - 1 - low, size - 1, base=stride
        )
        reads = ReadsOfWindows(op.ins[1].shape[d], windows, stride, low, size - 1)
        repeated = (place, max(0, windows.length(2) - windows.size // 2))
        cut = JointCut("halo", (place, position), (position,), repeated=repeated)
        halos.append(Halo(cut, ((0, d, windows), (1, d, reads))))
    return with_halos(r, op.ins, halos)


@rule("select_and_gather_add", local=_reduce_local)
def select_and_gather_add(op: OpView) -> Rule:
    """`(tangents, operand) -> one per window`: the tangent of each window's chosen element."""
    w = _windows(op, op.ins[1].shape, op.outs[0].shape)
    r = w.rule((w.many, w.many), (w.one,), linear_sets(op, (0,)))
    return _with_halos(op, r, w, (0, 1))


@rule("select_and_scatter")
def select_and_scatter(op: OpView) -> Rule:
    """`(operand, source, init) -> like operand`, by a function of the user's."""
    w = _windows(op, op.ins[0].shape, op.ins[1].shape)
    return w.rule((w.many, w.one, ()), (w.many,))
