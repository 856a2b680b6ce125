"""Examples with indices and random numbers: gather and scatter in all modes, keys of all shapes.

Many indices are out of range on purpose, on either side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode as Mode

from jshard._program.searchsorted_primitive import searchsorted_p
from tests.helpers.rules_table import example, floats, ints


def _gathers(x: Any, i: Any) -> Any:
    wild = i * 2  # half of them out of range on either side
    a = [x.at[wild].get(mode=m, fill_value=f) for m, f in (("fill", None), ("clip", None), ("fill", 7))]
    b = [x.at[:, wild].get(mode="fill"), x.at[wild, i + 1].get(mode="clip"), x.at[wild, 1].get(mode="fill")]
    c = [jnp.take(x, i % 8, axis=0), jnp.take_along_axis(x, i % 4, 1), x[i % 8, (i + 1) % 4], x[i % 8, ::2]]
    n = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    starts = jnp.stack([wild[:, 0], i[:, 1] % 4], -1)
    d = [
        lax.gather(x, starts, n, s, mode=m)
        for s in ((1, 1), (1, 4), (2, 1), (8, 1))
        for m in (Mode.CLIP, "fill")
    ]
    return a, b, c, d, x.at[wild].get(mode="promise_in_bounds"), x.at[i.astype(jnp.uint8)].get(mode="clip")


@example
def gathers() -> tuple[Any, ...]:
    return _gathers, floats(8, 4), ints(8, 2, low=-8, high=8)


@example
def gathers_int() -> tuple[Any, ...]:
    def fn(x: Any, i: Any) -> Any:
        b = x > 0
        a = [
            x.at[i].get(mode="fill"),
            b[i % 8],
            x.astype(jnp.int8).at[i].get(mode="fill"),
            b.at[i].get(mode="fill"),
        ]
        keys = jax.random.split(jax.random.key(0), 8)
        return a, jax.random.key_data(keys[i[0] % 8]), x.astype(jnp.uint32).at[i].get(mode="fill")

    return fn, ints(8, 4), ints(8, 2, low=-12, high=12)


@example
def gathers_batched() -> tuple[Any, ...]:
    def fn(x: Any, i: Any) -> Any:
        a = jax.vmap(lambda a, j: a[j])(x, i % 8)
        b = jnp.take_along_axis(x, (i % 8)[..., None], 1)
        c = jnp.take_along_axis(x, (i % 8)[:, :, None] + jnp.zeros((1, 1, 4), jnp.int32), 1, mode="clip")
        return a, b, c, jax.vmap(lambda a, j: a.at[j].get(mode="fill"))(x, i)

    return fn, floats(4, 8, 4), ints(4, 2, low=-9, high=12)


def _scatters(x: Any, i: Any, u: Any, single: Any) -> Any:
    out = []
    for mode in ("drop", "clip", "promise_in_bounds"):
        at = x.at[i if mode != "promise_in_bounds" else i % 8]
        out += [at.add(u, mode=mode), at.max(u, mode=mode), at.min(u, mode=mode), at.mul(u, mode=mode)]
        out += [x.at[single].set(u[:, 0], mode=mode, unique_indices=mode == "drop"), at.add(1, mode=mode)]
    return (
        out,
        x.at[:, single].add(1, mode="drop"),
        x.at[single, single].set(3, mode="drop"),
        x.at[2:6].add(1),
    )


@example
def scatters() -> tuple[Any, ...]:
    return _scatters, floats(8, 4), ints(4, 2, low=-9, high=12), floats(4, 2, 4), jnp.array([3, 11, -2, 0])


@example
def scatters_int() -> tuple[Any, ...]:
    return _scatters, ints(8, 4), ints(4, 2, low=-9, high=12), ints(4, 2, 4), jnp.array([3, 11, -2, 0])


@example
def scatters_more() -> tuple[Any, ...]:
    def fn(x: Any, i: Any, u: Any) -> Any:
        a = jax.vmap(lambda a, j, v: a.at[j].add(v))(x, i % 8, u)
        b = jax.grad(lambda x: (jnp.take_along_axis(x, (i % 8)[..., None], 1) ** 2).sum())(x)
        c = jax.grad(lambda x: (x[0][i] ** 2).sum())(x)
        d = [
            jnp.zeros((8, 4)).at[i].add(u),
            jax.ops.segment_sum(u[0], i[0] % 8, 8),
            jnp.bincount(i[0] % 8, length=8),
        ]
        e = [x.at[0].subtract(1), x.at[:, i[0]].add(1, mode="clip"), x.at[:, i[0], 1].multiply(2)]
        return (
            a,
            b,
            c,
            d,
            e,
            jax.grad(lambda x: x[:, 1:3, :].sum())(x),
            x.at[jnp.arange(4), :, i[0, :1] % 4].set(u.reshape(4, 8), mode="drop"),
        )

    return fn, floats(4, 8, 4), ints(4, 2, low=-9, high=12), floats(4, 2, 4)


@example
def randoms() -> tuple[Any, ...]:
    def fn(seed: Any, raw: Any, a: Any) -> Any:
        key = jax.random.key(seed)
        keys = jax.random.split(key, (4, 8))
        b = [jax.random.bits(key, (8, 4), t) for t in (jnp.uint8, jnp.uint16, jnp.uint32)]
        c = [
            jax.random.normal(key, (4, 8)),
            jax.random.uniform(raw, (16,)),
            jax.random.bernoulli(key, 0.3, (8, 2)),
        ]
        d = [
            jax.vmap(lambda k: jax.random.bits(k, (8,)))(keys[0]),
            jax.random.bits(key),
            jax.random.fold_in(key, 3),
        ]
        e = [
            jax.vmap(jax.random.fold_in)(keys[0], jnp.arange(8)),
            jax.random.key_data(keys),
            jax.random.clone(key),
        ]
        f = [
            jax.random.gamma(key, a),
            jax.random.permutation(key, 8),
            jax.random.categorical(key, jnp.ones((8, 4))),
        ]
        g = [
            jax.vmap(lambda k: jax.random.gamma(k, a[0]))(keys[0]),
            lax.rng_bit_generator(jnp.arange(4, dtype="uint32"), (8,)),
        ]
        return b, c, d, e, f, g, jax.random.randint(key, (8,), 0, 5), jax.vmap(jax.random.key)(jnp.arange(8))

    return fn, jnp.int32(7), jax.random.PRNGKey(3), jnp.abs(floats(8, 4)) + 0.5


@example
def randoms_rbg() -> tuple[Any, ...]:
    def fn(seed: Any) -> Any:
        key = jax.random.key(seed, impl="rbg")
        keys = jax.random.split(key, 4)
        return jax.random.bits(key, (8, 4)), keys, jax.vmap(lambda k: jax.random.bits(k, (4,)))(keys)

    return fn, jnp.int32(7)


@example
def one_update() -> tuple[Any, ...]:
    """XLA turns a scatter of one update into slices of slices, which jaxlib 0.10 merges wrongly."""

    def fn(x: Any, u: Any) -> Any:
        return [(x.at[jnp.array([i])].set(u), x.at[jnp.array([i])].add(u)) for i in (0, 3, 5)]

    return fn, floats(6, 4), floats(1, 4)


@example
def tails() -> tuple[Any, ...]:
    from jshard._program.tail_primitives import mask_tail, pad_tail

    def fn(x: Any, i: Any) -> Any:
        return (
            pad_tail(x, 0, 8),
            pad_tail(x, 1, 16),
            mask_tail(pad_tail(x, 0, 8), 0, 7, -1.5),
            mask_tail(i, 0, 3, 0),
        )

    return fn, floats(7, 4), ints(8)


@example
def stages() -> tuple[Any, ...]:
    from jshard._program.stage_shift import add_to_round, rounded_sum, stage_shift, zero_unless

    def fn(x: Any, i: Any, kept: Any, sums: Any, addend: Any) -> Any:
        shifted = stage_shift(x, 1), stage_shift(x, -1, wrap=True), stage_shift(i, 1, wrap=True)
        rounds = jnp.arange(8, dtype=jnp.int32) % 3  # the last is out of range
        added = add_to_round(sums, addend, rounds)
        dropped = zero_unless(x, kept), zero_unless(i, kept[:, None] == (i > 3))
        return (*shifted, *dropped, added, rounded_sum(sums.astype(jnp.bfloat16), jnp.float32))

    return fn, floats(8, 4), ints(8, 4), jnp.arange(8) % 3 == 0, floats(2, 4, 8), floats(4, 8)


@example
def searches() -> tuple[Any, ...]:
    def fn(a: Any, q: Any) -> Any:
        kinds = [("left", "scan"), ("right", "scan"), ("left", "sort"), ("right", "sort")]
        found = [searchsorted_p.bind(a, q, side=s, method=m, dtype="int32")[0] for s, m in kinds]
        return found, lax.sort((q, -q, a[q % 8]), dimension=0, num_keys=1), jnp.argsort(q, 1, stable=False)

    return fn, jnp.sort(ints(16, low=0, high=9)), ints(8, 4, low=-2, high=12)
