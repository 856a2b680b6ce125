"""Slices that are updated and written back are updated in their array: values, and which programs are left alone."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jshard
from jshard._core import hardware, jaxcompat as compat
from jshard._program.written_back import with_updates_in_place


pytestmark = pytest.mark.one_pair


S = jax.ShapeDtypeStruct
MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def rewritten(f, *args):
    """A function after the rewriting, and whether anything was rewritten."""
    closed = jax.make_jaxpr(f)(*args)
    before, consts = compat.open_jaxpr(closed)
    after = with_updates_in_place(before)
    return lambda *a: compat.run_jaxpr(
        after, [*consts, *a] if before.constvars else list(a)
    ), after is not before


def drawn(seed):
    """A part of an array of random rank, taken at random and maybe negative or too large starts, updated and read."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    sizes = [rng.randint(1, n) if rng.random() < 0.6 else n for n in shape]
    squeezed = [n for n in sizes if n != 1 or rng.random() < 0.3]
    dtype = rng.choice(["int32", "int8", "uint32"])
    updates = []
    for _ in range(rng.randint(1, 2)):
        updates.append([rng.randint(1, n) for n in squeezed])
    ends = [max(1, n // 2) for n in squeezed]

    def f(c, starts, *rows):
        starts = [starts[d] for d in range(len(shape))]
        part = lax.dynamic_slice(c, starts, sizes).reshape(squeezed)
        seen = []
        for k, (update, row) in enumerate(zip(updates, rows, strict=True)):
            inner = [s + k for s in starts[: len(squeezed)]]
            part = lax.dynamic_update_slice(part, row.reshape(update), inner)
            seen += [part.sum(), lax.slice(part, [0] * len(ends), ends)]
            seen.append(lax.dynamic_slice(part, inner, ends))
        return lax.dynamic_update_slice(c, part.reshape(sizes), starts), seen

    draws = np.random.default_rng(seed)
    starts = np.asarray([rng.randint(0 if dtype == "uint32" else -3, 7) for _ in shape], dtype)
    rows = [draws.standard_normal(int(np.prod(u))).astype("float32") for u in updates]
    return f, (draws.standard_normal(shape).astype("float32"), starts, *rows)


def test_values_of_random_parts():
    count = 0
    for seed in range(0, 60, 6):
        f, args = drawn(seed)
        g, changed = rewritten(f, *args)
        for a, b in zip(jax.tree.leaves(f(*args)), g(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        count += changed
    assert count >= 6  # in the others the part is the array


def layers(cache, x, loop):
    """The cache of all layers as a carry; every layer writes a row into its part."""

    def layer(i, state):
        x, cache = state
        part = lax.dynamic_index_in_dim(cache, i, keepdims=False)
        part = lax.dynamic_update_slice(part, jnp.stack([x, 2 * x])[:, :, None], (0, 0, 3, 0))
        p = jax.nn.softmax(jnp.einsum("bd,bld->bl", x, part[0]))
        x = jnp.tanh(x + jnp.einsum("bl,bld->bd", p, part[1]))
        return x, lax.dynamic_update_index_in_dim(cache, part, i, 0)

    if loop == "fori":
        return lax.fori_loop(0, 4, layer, (x, cache))
    if loop == "scan":
        return lax.scan(lambda s, i: (layer(i, s), None), (x, cache), jnp.arange(4))[0]
    if loop == "while":
        return lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, *layer(s[0], s[1:])), (0, x, cache))[
            1:
        ]
    for i in range(4):
        x, cache = layer(i, (x, cache))
    return x, cache


@pytest.mark.parametrize("loop", ["fori", "scan", "while", "unrolled"])
def test_a_cache_as_a_carry_is_one_buffer(loop):
    """Parts that are written back are no copies: planned and compiled, the cache alone and no layer's beside it."""
    cut = P(None, None, ("x", "y"))
    f = jshard.shard(
        lambda c, x: layers(c, x, loop), (cut, P(("x", "y"))), mesh=MESH, donate_argnums=0, hardware="tpu-v5e"
    )
    cache, x = S((4, 2, 8, 512, 128), "float32"), S((8, 128), "float32")
    plan, local = f.plan(cache, x), 4 * 2 * 512 * 128 * 4
    assert local <= plan.cost.peak_bytes <= 1.02 * local
    writes = [r for r in plan.operators if r.primitive == "dynamic_update_slice"]
    launch = hardware.get("tpu-v5e").units.launch  # of each kernel, however little it writes
    assert sum(r.seconds - launch * r.repeat for r in writes) < 0.05 * plan.cost.compute
    given = np.random.default_rng(1).standard_normal(cache.shape).astype("float32") / 8
    rows = np.random.default_rng(2).standard_normal(x.shape).astype("float32")
    run = jshard.shard(lambda c, x: layers(c, x, loop), (cut, P(("x", "y"))), mesh=MESH)
    for a, b in zip(layers(given, rows, loop), run(given, rows), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_what_is_taken_and_written_elsewhere_is_left_alone():
    def other_place(c, i):
        part = lax.dynamic_update_slice(c[i], jnp.ones(1), (2,))
        return lax.dynamic_update_index_in_dim(c, part, i + 1, 0)

    def read_beside(c, i):
        part = lax.dynamic_update_slice(lax.dynamic_index_in_dim(c, i, keepdims=False), jnp.ones(1), (2,))
        return lax.dynamic_update_index_in_dim(c, part, i, 0), c.sum()

    def not_an_update(c, i):
        part = 2 * lax.dynamic_index_in_dim(c, i, keepdims=False)
        return lax.dynamic_update_index_in_dim(c, part, i, 0)

    for f in (other_place, read_beside, not_an_update):
        assert not rewritten(f, jnp.ones((4, 8)), 1)[1]


def test_gradients_through_parts_that_are_written_back():
    cut = P(None, None, "x")
    cache, x = jnp.ones((4, 2, 8, 16, 8)) / 8, jnp.linspace(-1, 1, 64).reshape(8, 8)

    def loss(c, x):
        return sum(jnp.sum(jnp.sin(y)) for y in layers(c, x, "fori"))

    want = jax.grad(loss, (0, 1))(cache, x)
    for got in (
        jshard.shard(jax.grad(loss, (0, 1)), (cut, P("x")), mesh=MESH)(cache, x),
        jax.grad(jshard.shard(loss, (cut, P("x")), mesh=MESH), (0, 1))(cache, x),
    ):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
