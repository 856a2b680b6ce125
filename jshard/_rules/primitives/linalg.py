"""Batched linear algebra and Fourier transforms: batch dimensions may be sharded, those of the matrix not.

The right-hand sides of a triangular solve may be sharded too, since each column is solved by itself.

>>> from jax import ShapeDtypeStruct as S
>>> a, v = S((8, 4, 4), "float32"), S((8, 4), "float32")
>>> r = batched(OpView("eigh", {}, (a,), (a, v)))
>>> print(r, "blocked:", r.blocked)
a b c -> a d e, a f blocked: (1, 2, 3, 4, 5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshard._core import jaxcompat as compat
from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, block_index, family, in_row_major
from jshard._rules.rule import Dims, Rule, Workspace


rule = family("linalg")

# Core dimensions of each operand and result; every tensor has the same batch dimensions before them.
_CORE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "cholesky": ((2,), (2,)),
    "cholesky_update": ((2, 1), (2,)),
    "eig": ((2,), (1, 2, 2)),
    "eigh": ((2,), (2, 1)),
    "geqp3": ((2, 1), (2, 1, 1)),
    "geqrf": ((2,), (2, 1)),
    "hessenberg": ((2,), (2, 1)),
    "householder_product": ((2, 1), (2,)),
    "lu": ((2,), (2, 1, 1)),
    "lu_pivots_to_permutation": ((1,), (1,)),
    "ormqr": ((2, 1, 2), (2,)),
    "qr": ((2,), (2, 2, 1)),
    "schur": ((2,), (2, 2)),
    "svd": ((2,), (1, 2, 2)),
    "tridiagonal": ((2,), (2, 1, 1, 1)),
}
_NOTE = "the matrix is needed whole"


@rule(*_CORE)
def batched(op: OpView) -> Rule:
    """Batch dimensions in front of core dimensions, which are blocked."""
    ins, outs = _CORE[op.primitive]
    f = Factors()
    batch = f.dims(op.ins[0].shape[: len(op.ins[0].shape) - ins[0]])
    blocked: list[int] = []

    def dims(aval: ArrayType, core: int) -> Dims:
        core_dims = f.dims(aval.shape[len(aval.shape) - core :])
        blocked.extend(k for d in core_dims for k in d)
        return (*batch, *core_dims)

    operands = tuple(dims(a, c) for a, c in zip(op.ins, ins, strict=True))
    # The last results are optional (eigenvectors, pivots).
    results = tuple(dims(a, c) for a, c in zip(op.outs, outs, strict=False))
    return Rule(operands, results, f.sizes, blocked=tuple(blocked), work=_work(op, blocked, f), note=_NOTE)


def _work(op: OpView, blocked: list[int], f: Factors) -> float:
    """Operations per point of the iteration space, so that their sum is about 2 n**3 per matrix."""
    core = [f.sizes[k] for k in blocked]
    points = math.prod(core)
    side = max(core, default=1)
    return 2.0 * side**3 / points if points else 0.0


def _symmetric_local(ctx: LocalContext, a: jax.Array, c: jax.Array) -> Sequence[jax.Array]:
    across = tuple(n for f in ctx.rule.reduction for n in ctx.axes(f))
    if across:
        c = jnp.where(block_index(across, ctx.mesh) == 0, c, jnp.zeros_like(c))
    return ctx.bind(a, c)


@rule("symmetric_product", local=_symmetric_local)
def symmetric_product(op: OpView) -> Rule:
    """`alpha a a^T + beta c`: columns of `a` are a reduction; one device adds `c`."""
    f = Factors()
    *batch, rows, columns = f.dims(op.ins[0].shape)
    both = f.new(op.outs[0].shape[-1])
    square = (*batch, rows, (both,))
    return Rule(
        ((*batch, rows, columns), square), (square,), f.sizes,
        reduction=columns, blocked=(*rows, both), work=2.0, note=_NOTE,
    )  # fmt: skip


@rule("triangular_solve")
def triangular_solve(op: OpView) -> Rule:
    """Columns of the right-hand side (rows, if the matrix is on the right) may be sharded."""
    f = Factors()
    batch = f.dims(op.ins[0].shape[:-2])
    side = f.new(op.ins[0].shape[-1])
    left = op.params["left_side"]
    free = f.new(op.ins[1].shape[-1 if left else -2])
    b = (*batch, (side,), (free,)) if left else (*batch, (free,), (side,))
    other = f.new(op.ins[0].shape[-2])
    return Rule(
        ((*batch, (other,), (side,)), b),
        (b,),
        f.sizes,
        blocked=(side, other),
        linear=linear_sets(op, (1,)),
        note=_NOTE,
    )


@rule("tridiagonal_solve")
def tridiagonal_solve(op: OpView) -> Rule:
    """Columns of the right-hand side may be sharded."""
    f = Factors()
    *batch, m, n = f.dims(op.ins[3].shape)
    diagonal = (*batch, m)
    b = (*batch, m, n)
    return Rule(
        (diagonal,) * 3 + (b,), (b,), f.sizes, blocked=m, linear=linear_sets(op, (3,)), work=8.0, note=_NOTE
    )


def _fft_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    # Row-major, since XLA on CPU otherwise propagates the memory layout of a later reduce-scatter to the transform, which
    # then fails. The transform of a derivative taken from outside has operand and result exchanged.
    x = in_row_major(x, ctx.chip) if compat.check_vma_enabled() else x
    return [in_row_major(y, ctx.chip) for y in ctx.bind(x)]


@rule("fft", local=_fft_local)
def fft(op: OpView) -> Rule:
    """Transformed dimensions are not sharded; a complex array of full length is in memory meanwhile."""
    f = Factors()
    lengths = op.params["fft_lengths"]
    n = len(lengths)
    shape = op.outs[0].shape
    batch = f.dims(shape[: len(shape) - n])
    core = f.dims(shape[len(shape) - n :])
    more = [length - size for length, size in zip(lengths, shape[len(shape) - n :], strict=True)]
    whole = [(k, 0) for d in batch for k in d] + [(k, m) for d, m in zip(core, more, strict=True) for k in d]
    itemsize = max(a.dtype.itemsize for a in (op.ins[0], op.outs[0]))
    return Rule(
        ((*batch, *((),) * n),), ((*batch, *core),), f.sizes, blocked=tuple(k for d in core for k in d),
        linear=linear_sets(op, (0,)), work=5.0 * sum(max(1, s).bit_length() for s in shape[len(shape) - n :]),
        note="every frequency depends on every sample",
        workspace=(Workspace(tuple(k for k, _ in whole), itemsize, more=tuple(m for _, m in whole)),),
    )  # fmt: skip
