"""Fused functions equal the equations they stand for, in float64, and keep for their gradient no more than they say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


def layer_norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias


def rms_norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def gated(x, other, w):
    return (jax.nn.silu(x) * other) @ w


CASES = {
    "layer norm": (
        functools.partial(jshard.ops.layer_norm, epsilon=1e-3), layer_norm, ((3, 5, 7), (7,), (7,)), 3 * 5 * 9
    ),
    "rms norm": (functools.partial(jshard.ops.rms_norm, epsilon=1e-3), rms_norm, ((3, 5, 7), (7,)), 3 * 5 * 8),
    "gated product": (
        lambda x, other, w: jshard.ops.activated_product(x, w, activation=jax.nn.silu, times=other), gated,
        ((3, 5, 7), (3, 5, 7), (7, 4)), 2 * 3 * 5 * 7,
    ),
    "product": (
        functools.partial(jshard.ops.activated_product, activation=jnp.tanh), lambda x, w: jnp.tanh(x) @ w,
        ((6, 7), (7, 4)), 6 * 7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_equations(case):
    fn, plain, shapes, kept = CASES[case]
    with jax.enable_x64(True):
        rng = np.random.default_rng(4)
        args = [jnp.asarray(rng.normal(size=s)) for s in shapes]
        a, pull = jax.vjp(fn, *args)
        b, plain_pull = jax.vjp(plain, *args)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
        g = jnp.asarray(rng.normal(size=a.shape))
        for x, y in zip(pull(g), plain_pull(g), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
    parameters = sum(
        x.size for x, s in zip(args, shapes, strict=True) if len(s) < len(shapes[0]) or s == (7, 4)
    )
    held = sum(x.size for x in jax.tree.leaves(pull))
    assert held <= kept + parameters


def test_norms_without_parameters_and_in_half_precision():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    for y in (jshard.ops.layer_norm(x), jshard.ops.rms_norm(x)):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose((y.astype("float32") ** 2).mean(-1), 1, atol=0.02)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: jshard.ops.layer_norm(jnp.ones((2, 3)), jnp.ones(2)), r"x of shape \(2, 3\) with a scale of shape \(2,\)"),
        (lambda: jshard.ops.rms_norm(1.0), r"x of shape \(\) with no scale"),
        (lambda: jshard.ops.activated_product(jnp.ones((2, 3)), jnp.ones((2, 3))), "operands of shapes x"),
        (lambda: jshard.op(jnp.dot, work=-1), "work is -1"),
    ],
)  # fmt: skip
def test_wrong_operands(call, text):
    with pytest.raises(jshard.ShardError, match=text) as error:
        call()
    assert error.value.fix


def test_a_kernel_states_its_flops():
    x, w = jax.ShapeDtypeStruct((64, 512), "float32"), jax.ShapeDtypeStruct((512, 256), "float32")
    mesh = jshard.topology("v5e:2x2", {"x": 4}, compiles=False)

    def planned(**work):
        product = jshard.op(lambda x, w: x @ w, rule="a b, b c -> a c", reduction=("b",), **work)
        step = jax.value_and_grad(lambda x, w: product(x, w).sum())
        plan = jshard.shard(step, in_strategy=((4, 1), None), mesh=mesh).plan(x, w)
        return plan.cost.compute, plan.model_flops.flops

    points = 64 * 512 * 256
    seconds, flops = planned(work=2e6)
    assert flops == 3 * 2e6 * points  # once forward, twice backward
    np.testing.assert_allclose(planned(work=4e6)[0], 2 * seconds, rtol=1e-2)
    assert planned()[0] == planned(work=2.0)[0] < seconds
