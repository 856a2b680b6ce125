"""Fused operators: `op(fn, rule=...)` is one operator of the search, runs on blocks, and keeps its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard import ShardError


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def attention(fn):
    def f(q, k, v):
        return jnp.sin(fn(q, k, v))

    return f


SHAPES = [(8, 16, 4, 8)] * 3


def arrays(shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def close(a, b, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_attention_is_cut_over_batch_and_heads_without_communication():
    fused = jshard.op(jax.nn.dot_product_attention, rule="b q h d, b k h d, b k h d -> b q h d")
    sharded = jshard.shard(attention(fused), in_strategy=((4, 1, 2, 1), None, None), mesh=mesh())
    args = arrays(SHAPES)
    plan = sharded.plan(*args)
    (row,) = [r for r in plan.operators if r.primitive == "jshard_fused"]
    assert row.strategy == ((4, 1, 2, 1),) * 3
    assert plan.collectives == ()
    close(sharded(*args), jax.jit(attention(jax.nn.dot_product_attention))(*args))


def test_a_factor_that_is_not_free_is_found_and_kept_whole():
    fused = jshard.op(jax.nn.dot_product_attention, rule="b q h d, b k h d, b k h d -> b q h d")
    sharded = jshard.shard(attention(fused), in_strategy=((1, 1, 1, 8), None, None))
    args = arrays(SHAPES)
    plan = sharded.plan(*args)
    (row,) = [r for r in plan.operators if r.primitive == "jshard_fused"]
    assert row.note.endswith("cutting d changes the numbers, so kept whole")
    close(sharded(*args), attention(jax.nn.dot_product_attention)(*args))


def centred(x):
    y = x.reshape(-1, 8, 4)  # 8 heads of 4, whatever the batch is
    return (y - y.mean(0)).reshape(x.shape)


def normed_heads(x):
    y = x.reshape(len(x), 8, 4)
    return (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize(
    "fn, rule, pin, note",
    [
        (centred, "b _ -> b _", (8, 1), "cutting b changes the numbers, so kept whole"),
        (normed_heads, "b f -> b f", (1, 8), "it does not run on blocks of f, so kept whole"),
    ],
)
def test_the_rule_of_a_function_with_sizes_of_its_own_is_checked_on_them(fn, rule, pin, note):
    """Arrays of 4 do not suit it: the first was off by 1.8, the second a TypeError at the call."""
    x = jax.random.normal(jax.random.key(0), (16, 32))
    sharded = jshard.shard(lambda x: jshard.op(fn, rule=rule)(x), in_strategy=(pin,))
    assert sharded.plan(x).operators[0].note.endswith(note)
    close(sharded(x), fn(x))


@pytest.mark.parametrize("pins", [((4, 1, 2, 1), None, None), (None, None, None)])
def test_gradients_inside_and_outside_equal_plain(pins):
    fused = jshard.op(jax.nn.dot_product_attention, rule="b q h d, b k h d, b k h d -> b q h d")
    args = arrays(SHAPES)

    def loss(fn):
        return lambda *a: (attention(fn)(*a) ** 2).sum()

    want = jax.jit(jax.grad(loss(jax.nn.dot_product_attention), argnums=(0, 1, 2)))(*args)
    inside = jshard.shard(jax.grad(loss(fused), argnums=(0, 1, 2)), in_strategy=pins)
    close(inside(*args), want, 1e-4)
    outside = jshard.shard(loss(fused), in_strategy=pins)
    close(jax.grad(outside, argnums=(0, 1, 2))(*args), want, 1e-4)


def test_a_reduction_factor_gets_its_sum():
    product = jshard.op(
        lambda a, b: a @ b, rule="m k, k n -> m n", reduction=("k",), in_strategy=((1, 8), None)
    )
    a, b = arrays([(16, 32), (32, 8)])
    sharded = jshard.shard(lambda a, b: jnp.sin(product(a, b)))
    assert [c.kind for c in sharded.plan(a, b).collectives] == ["all_reduce"]
    close(sharded(a, b), jnp.sin(a @ b))


def test_a_pallas_kernel_runs_on_blocks():
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] * y_ref[...] + 1.0

    def scaled(x, y):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)

    fused = jshard.op(scaled, rule="m n, m n -> m n")
    x, y = arrays([(16, 32), (16, 32)])
    sharded = jshard.shard(lambda x, y: fused(x, y) * 2, in_strategy=((4, 2), None), mesh=mesh())
    (row,) = [r for r in sharded.plan(x, y).operators if r.primitive == "jshard_fused"]
    assert row.strategy == ((4, 2), (4, 2)) and sharded.plan(x, y).collectives == ()
    close(sharded(x, y), (x * y + 1) * 2)


@pytest.mark.parametrize(
    "rule, text",
    [
        ("m k, k n -> m", "result 0 has shape (16, 8), the rule gives it 1 dimensions"),
        ("m k, k n, z -> m n", "the rule has 3 operands, the function 2"),
        ("m k, k n -> m q", "unknown factor 'q': no operand has it"),
    ],
)
def test_a_malformed_rule_points_at_the_token(rule, text):
    a, b = arrays([(16, 32), (32, 8)])
    with pytest.raises(ShardError, match="where") as raised:
        jshard.shard(jshard.op(lambda a, b: a @ b, rule=rule))(a, b)
    assert raised.value.what == text and "^" in raised.value.where
