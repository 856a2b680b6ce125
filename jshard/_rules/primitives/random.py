"""Random numbers: each device generates its own shard, bit for bit equal to that of the unsharded operator.

With `jax_threefry_partitionable` (JAX's default) element i of a draw is the threefry cipher of the number i,
the element's position in row-major order, under the key. So a shard needs only its positions:

    position = sum over dimensions of (offset + local index) * stride

`random_bits` xors the cipher's two words (or joins them to 64 bits), `random_split` makes a key of them
(jax/_src/random/threefry2x32.py, `_threefry_random_bits_partitionable`, `_threefry_split_foldlike`).
Other key implementations and other generators are not sharded. Dimensions of batched keys are factors.

>>> from jax import ShapeDtypeStruct as S
>>> op = OpView("random_bits", {"shape": (8,), "bit_width": 32}, (jax.eval_shape(lambda: jax.random.key(0)),),
...         (S((8,), "uint32"),))
>>> print(draw(op))
 -> a
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core.jax_types import Index
from jshard._core.jaxcompat import threefry_2x32, to_common_vma
from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors, unsharded_dims
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("random")

_WORK = 100.0  # 20 rounds of add, rotate, xor on two words (Salmon et al., "Parallel random numbers", 2011)


def _is_threefry(aval: ArrayType) -> bool:
    return str(aval.dtype) == "key<fry>"


def counts(
    shape: Sequence[int], offsets: Sequence[Index], strides: Sequence[int], wide: bool
) -> tuple[jax.Array, jax.Array]:
    """High and low 32-bit words of each element's position; the high words are zero unless `wide`."""
    high = low = jnp.zeros(tuple(shape), jnp.uint32)
    for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, tuple(shape), d) + jnp.asarray(offset).astype(jnp.uint32)
        if not wide:
            low = low + index * jnp.uint32(stride)
            continue
        h, l0 = _times(index, stride)
        total = low + l0
        high = high + h + (total < low).astype(jnp.uint32)
        low = total
    return high, low


def _times(index: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """`index * stride` (32 by 64 bits) as two 32-bit words, from products of 16-bit halves."""
    s_high, s_low = jnp.uint32((stride >> 32) & 0xFFFFFFFF), stride & 0xFFFFFFFF
    a1, a0 = index >> 16, index & jnp.uint32(0xFFFF)
    b1, b0 = jnp.uint32(s_low >> 16), jnp.uint32(s_low & 0xFFFF)
    mid = a1 * b0 + ((a0 * b0) >> 16)
    mid2 = a0 * b1 + (mid & jnp.uint32(0xFFFF))
    return a1 * b1 + (mid >> 16) + (mid2 >> 16) + index * s_high, index * jnp.uint32(s_low)


def _cipher(ctx: LocalContext, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both words of the cipher for every element of this device's shard of the drawn shape."""
    whole = tuple(ctx.op.params["shape"])
    batch = keys.ndim
    local = ctx.result_shape()[batch:]
    strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    offsets = [ctx.result_offset(0, batch + d) for d in range(len(whole))]
    high, low = counts(local, offsets, strides, wide=math.prod(whole) > 2**32)
    words = jax.random.key_data(keys)
    words = words.reshape(*keys.shape, *(1,) * len(local), 2)
    shape = (*keys.shape, *local)
    k0, k1 = (words[..., i] if batch else words.reshape(2)[i] for i in (0, 1))
    if batch:
        k0, k1, high, low = (jnp.broadcast_to(v, shape) for v in (k0, k1, high, low))
    return threefry_2x32(*to_common_vma([k0, k1, high, low]))


def _is_cut(ctx: LocalContext) -> bool:
    return any(ctx.result_layout(0).dims[len(ctx.op.ins[0].shape) :])


def _bits_local(ctx: LocalContext, keys: jax.Array) -> Sequence[jax.Array]:
    if not _is_cut(ctx):
        return ctx.bind(keys)
    first, second = _cipher(ctx, keys)
    dtype = ctx.op.outs[0].dtype
    if ctx.op.params["bit_width"] == 64:
        return [(first.astype(dtype) << jnp.asarray(32, dtype)) | second.astype(dtype)]
    return [(first ^ second).astype(dtype)]


def _split_local(ctx: LocalContext, keys: jax.Array) -> Sequence[jax.Array]:
    if not _is_cut(ctx):
        return ctx.bind(keys)
    first, second = _cipher(ctx, keys)
    return [jax.random.wrap_key_data(jnp.stack([first, second], -1), impl="threefry2x32")]


def _draw(op: OpView) -> Rule:
    f = Factors()
    out = f.dims(op.outs[0].shape)
    batch = len(op.ins[0].shape)
    blocked: tuple[int, ...] = ()
    note = ""
    partitionable = getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009 (pyright does not know it)
    if not _is_threefry(op.ins[0]):
        blocked, note = tuple(range(len(f.sizes))), "only threefry keys draw block by block"
    elif not partitionable:
        blocked = tuple(range(batch, len(f.sizes)))
        note = "draws block by block need jax_threefry_partitionable"
    return Rule((out[:batch],), (out,), f.sizes, blocked=blocked, work=_WORK, note=note)


@rule("random_bits", local=_bits_local)
def draw(op: OpView) -> Rule:
    """Dimensions of the keys, then of the drawn shape."""
    return _draw(op)


@rule("random_split", local=_split_local)
def split(op: OpView) -> Rule:
    """As `random_bits`, with a key for each position."""
    return _draw(op)


@rule("random_fold_in", "random_seed", "random_clone")
def keywise(op: OpView) -> Rule:
    """One key at a time."""
    f = Factors()
    dims = f.dims(op.outs[0].shape)
    threefry = _is_threefry(op.outs[0])
    return Rule(
        tuple(dims if a.shape == op.outs[0].shape else ((),) * len(a.shape) for a in op.ins),
        (dims,),
        f.sizes,
        blocked=() if threefry else tuple(range(len(f.sizes))),
        work=_WORK,
    )


@rule("random_wrap")
def wrap(op: OpView) -> Rule:
    """Words to keys: the words' last dimensions are not sharded."""
    f = Factors()
    dims = f.dims(op.outs[0].shape)
    return Rule((dims + ((),) * (len(op.ins[0].shape) - len(dims)),), (dims,), f.sizes, work=0.0)


@rule("random_unwrap")
def unwrap(op: OpView) -> Rule:
    """Keys to words."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    return Rule((dims,), (dims + ((),) * (len(op.outs[0].shape) - len(dims)),), f.sizes, work=0.0)


@rule("random_gamma")
def gamma(op: OpView) -> Rule:
    """Each key draws for all its parameters, so only dimensions of the keys are sharded."""
    f = Factors()
    dims = f.dims(op.outs[0].shape)
    batch = len(op.ins[0].shape)
    blocked = tuple(range(batch if _is_threefry(op.ins[0]) else 0, len(f.sizes)))
    return Rule(
        (dims[:batch], dims), (dims,), f.sizes, blocked=blocked, work=10 * _WORK,
        note="one key draws for a whole block of parameters",
    )  # fmt: skip


@rule("rng_bit_generator", "rng_uniform", "philox2x32", "philox4x32", "threefry4x32", "iota_2x32_shape")
def replicated_generator(op: OpView) -> Rule:
    """Stateful or positional generators: the same numbers on every device."""
    return Rule(
        tuple(map(unsharded_dims, op.ins)), tuple(map(unsharded_dims, op.outs)), (),
        work=_WORK, note="the generator's numbers depend on the whole shape",
    )  # fmt: skip
