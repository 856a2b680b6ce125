"""Fused functions inside of functions and of linen modules: equal to the original; what is not attention stays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax.linen.attention import dot_product_attention_weights

import jshard.flax
from jshard._api.policy import qualified_name
from jshard._core.errors import ShardError
from tests.flax.test_optimize import MESH


pytestmark = pytest.mark.one_pair


def arrays(dtype="float64"):
    """Queries, keys, values, bias, mask; a query may attend to no key."""
    rng = np.random.default_rng(11)
    q, k, v, b = (
        jnp.asarray(rng.normal(size=s), dtype)
        for s in ((3, 8, 4, 6), (3, 5, 4, 6), (3, 5, 4, 7), (3, 4, 8, 5))
    )
    return q, k, v, b, jnp.asarray(rng.random((3, 1, 8, 5)) > 0.3).at[0, 0, 2].set(False)


def of_flax(q, k, v, b, m):
    p = dot_product_attention_weights(q, k, mask=m, bias=b[:1], deterministic=True)
    return jnp.einsum("...hqk,...khd->...qhd", p, v)


def by_hand(q, k, v, b, m):
    s = jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k) / 4 * 0.5, -1e9) - b
    p = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("bhts,bshe->ebht", p / p.sum(-1, keepdims=True), v)


def low_bias(q, k, v, b, m):
    s = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.where(m.at[0, 0, 2, 0].set(True), b, jnp.finfo(b.dtype).min)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(s), v)


def grouped(q, k, v, b, m):
    q = q.reshape(3, 8, 2, 2, 6)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :, :2]) + b.reshape(3, 2, 2, 8, 5)
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(s), v[:, :, :2])


def heads_masked(q, k, v, b, m):
    p = dot_product_attention_weights(q, k, mask=m, deterministic=True)
    p = jnp.einsum("...hqk,h->...hqk", p, b[0, :, 0, 0])
    p = jnp.einsum("bhqk,qb->bhqk", p, b[:, 0, :, 0].T)
    return jnp.einsum("...hqk,...khd->...qhd", p, v)


def no_heads(q, k, v, b, m):
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T + b[0, 0]) @ v[0, :, 0]


def in_a_loop(q, k, v, b, m):
    def layer(x, _):
        return jax.checkpoint(lambda x: x + of_flax(x, k, v, b, m)[..., :6])(x), None

    return jax.lax.scan(layer, q, None, length=2)[0]


@pytest.mark.parametrize("fn", [of_flax, by_hand, low_bias, grouped, heads_masked, no_heads, in_a_loop])
def test_attention_written_out_is_one_operator_with_the_same_values_and_gradients(fn):
    with jax.enable_x64(True):
        *x, m = arrays()
        fused = jshard.flax.fuse_function(fn, ("attention",))
        assert "jshard_attention" in str(jax.make_jaxpr(fused)(*x, m))
        a, b = (
            jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x, m) ** 2).sum(), (0, 1, 2, 3)))(*x)
            for f in (fn, fused)
        )
        for wanted, got in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


def test_half_precision_keeps_its_type():
    *x, m = arrays("bfloat16")
    wanted, got = of_flax(*x, m), jshard.flax.fuse_function(of_flax, ("attention",))(*x, m)
    assert got.dtype == wanted.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype("float32"), wanted.astype("float32"), atol=0.05)


def returned(q, k, v, b, m):
    p = dot_product_attention_weights(q, k, deterministic=True)
    return jnp.einsum("...hqk,...khd->...qhd", p, v), p


def dropped(q, k, v, b, m):
    p = dot_product_attention_weights(q, k, dropout_rng=jax.random.key(0), dropout_rate=0.5)
    return jnp.einsum("...hqk,...khd->...qhd", p, v)


def over_queries(q, k, v, b, m):
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-2)
    return jnp.einsum("bhts,bshe->bthe", p, v)


def negated(q, k, v, b, m):
    p = jax.nn.softmax(-1 * jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshe->bthe", p, v)


def masked_weakly(q, k, v, b, m):
    p = jax.nn.softmax(jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k), -2.0))
    return jnp.einsum("bhts,bshe->bthe", p, v)


@pytest.mark.parametrize("fn", [returned, dropped, over_queries, negated, masked_weakly])
def test_what_is_not_attention_is_refused(fn):
    with pytest.raises(
        ShardError, match=f"fused 'attention' replaces nothing in {fn.__name__}: there is none of a s"
    ):
        jshard.flax.fuse_function(fn, ("attention",))(*arrays("float32"))


def test_other_arguments_pass_and_the_rest_of_the_function_stays():
    def fn(x, kind, *, more):
        y = of_flax(*x)
        return {"out": y, "kind": kind, "noise": jax.random.normal(more["key"], (2,))}

    x, key = arrays("float32"), jax.random.key(3)
    wanted = fn(x, "plain", more={"key": key})
    got = jshard.flax.fuse_function(fn, ("attention",))(x, "plain", more={"key": key})
    assert got["kind"] == "plain" and set(got) == set(wanted)
    np.testing.assert_array_equal(got["noise"], wanted["noise"])
    np.testing.assert_allclose(got["out"], wanted["out"], atol=2e-6)


# -- linen ----------------------------------------------------------------------------------------------------


class Squared(linen.Module):
    """A norm of the author's own."""

    @linen.compact
    def __call__(self, x):
        return (
            x
            / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            * self.param("weight", linen.initializers.ones, (32,))
        )


class Block(linen.Module):
    """Of linen's own modules."""

    norm: type = linen.LayerNorm
    dropout: float = 0.0

    @linen.compact
    def __call__(self, x):
        y = self.norm(name="norm")(x)
        attention = linen.MultiHeadDotProductAttention(
            4, name="attention", dropout_rate=self.dropout, deterministic=not self.dropout
        )
        x = x + attention(y, mask=linen.make_causal_mask(x[..., 0]))
        return x + linen.Dense(32, name="down")(
            linen.gelu(linen.Dense(64, name="up")(Squared(name="own")(x)))
        )


def own_norm(original, x):
    return jshard.ops.rms_norm(x, original.__self__.get_variable("params", "weight"), epsilon=1e-6)


class OfBlocks(jshard.Policy):
    models = (qualified_name(Block),)
    fused = {"norm": {f"{qualified_name(Squared)}.__call__": own_norm}}


X = jnp.asarray(np.random.default_rng(5).normal(size=(4, 8, 32)), "float32")
KEY = jax.random.key(0)
NAMES = ("attention", "norm")


def test_optimize_replaces_in_linen_modules_by_name():
    model = Block(linen.RMSNorm)
    done = jshard.flax.optimize(
        model, X, policy=OfBlocks, mesh=MESH, config="megatron", rngs=KEY, fused=NAMES
    )
    assert "jshard_attention" in {o.primitive for o in done.plan.operators}
    plain = jax.jit(model.init)(KEY, X)
    assert jax.tree.structure(plain) == jax.tree.structure(done.variables)

    def loss(module, variables):
        return (module.apply(variables, X) ** 2).mean()

    a, b = (jax.jit(jax.value_and_grad(functools.partial(loss, m)))(plain) for m in (model, done.model))
    for wanted, got in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-6)
    second = jshard.flax.optimize(
        model, X, policy=OfBlocks, mesh=MESH, config="megatron", rngs=KEY, fused=NAMES
    )
    assert second.plan.cost.objective == done.plan.cost.objective


def test_norms_are_those_of_the_call_alone():
    model = Block()
    variables = model.init(KEY, X)
    before = str(jax.make_jaxpr(model.apply)(variables, X))
    fused = jshard.flax.fuse_function(model.apply, ("norm",), OfBlocks.fused)
    assert str(jax.make_jaxpr(fused)(variables, X)).count("custom_vjp_call") > before.count("custom_vjp_call")
    assert str(jax.make_jaxpr(model.apply)(variables, X)) == before
    np.testing.assert_allclose(fused(variables, X), model.apply(variables, X), atol=2e-5)


@pytest.mark.parametrize(
    "model, options, text",
    [
        (Block(), {"fused": ("atention",)}, "there is no fused 'atention'"),
        (Block(), {"fused": "attention"}, "fused is a str, 'attention'"),
        (
            linen.Dense(3),
            {"fused": ("norm",)},
            "fused 'norm' replaces nothing in Dense: there is none of linen.LayerNorm",
        ),
        (
            linen.LayerNorm(reduction_axes=-2, feature_axes=-2),
            {"fused": ("norm",)},
            "replaces nothing in LayerNorm",
        ),
    ],
)
def test_wrong_names(model, options, text):
    with pytest.raises(ShardError, match=text) as error:
        jshard.flax.optimize(model, X, mesh=MESH, rngs=KEY, **options)
    assert error.value.fix


def test_a_replacement_of_another_signature_is_refused():
    own = {"norm": {f"{qualified_name(Squared)}.__call__": lambda original, y: y}}
    model = Block()
    variables = model.init(KEY, X)
    with pytest.raises(
        ShardError, match=r"the replacement of Squared.__call__ takes \(y\), the method \(x\)"
    ):
        jshard.flax.fuse_function(model.apply, ("norm",), own)(variables, X)


class Weighing(linen.Module):
    """Attention that also gives its probabilities, which nobody asks for."""

    @linen.compact
    def __call__(self, x):
        q, k, v = (linen.DenseGeneral((4, 8), name=n)(x) for n in "qkv")
        p = dot_product_attention_weights(q, k, deterministic=True)
        return jnp.einsum("...hqk,...khd->...qhd", p, v), p


class Residual(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + Weighing()(x)[0].reshape(x.shape)


def test_probabilities_that_a_module_gives_and_nobody_asks_for_are_no_hindrance():
    """The planner marks the results of modules, also those that are not used."""
    model, x = Residual(), jnp.ones((8, 6, 32))
    variables = model.init(jax.random.key(0), x)
    fused = jshard.flax.fuse_function(model.apply, ("attention",))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jshard.shard(fused, mesh=mesh, config="data", hardware="v5e")
    assert "jshard_attention" in {o.primitive for o in sharded.plan(variables, x).operators}
    np.testing.assert_allclose(sharded(variables, x), model.apply(variables, x), atol=1e-5)
