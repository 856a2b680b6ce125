"""Modules replaced by fused ones, by name: equal to the original; what cannot be replaced stays or is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard.flax
from jshard._api.policy import qualified_name
from jshard._core.errors import ShardError
from jshard.flax._fused import dot_product_attention
from tests.flax.test_optimize import MESH, TOKENS, Tiny


pytestmark = pytest.mark.one_pair


class Layer(nnx.Module):
    """Of Flax's own modules; the gated MLP is the author's."""

    def __init__(self, norm, kv_heads, dropout, rngs):
        self.norm, self.out_norm = norm(32, rngs=rngs), norm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            8, 32, num_kv_heads=kv_heads, decode=False, dropout_rate=dropout, deterministic=False, rngs=rngs
        )
        self.gate, self.up, self.down = (
            nnx.Linear(a, b, rngs=rngs) for a, b in ((32, 48), (32, 48), (48, 32))
        )

    def mlp(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm(x), is_causal=mask is None, mask=mask)
        return x + self.mlp(self.out_norm(x))


def fused_mlp(original, x):
    m = original.__self__
    return (
        jshard.ops.activated_product(m.gate(x), m.down.kernel[...], activation=nnx.silu, times=m.up(x))
        + (m.down.bias[...])
    )


class Fused(jshard.Policy):
    fused = {"activation": {f"{qualified_name(Layer)}.mlp": fused_mlp}}


def made(norm=nnx.LayerNorm, kv_heads=None, dropout=0.0):
    return Layer(norm, kv_heads, dropout, nnx.Rngs(3))


X = jnp.asarray(np.random.default_rng(5).normal(size=(4, 16, 32)), "float32")
MASK = jnp.asarray(np.random.default_rng(6).random((4, 1, 16, 16)) > 0.2).at[..., 0].set(True)
NAMES = ("attention", "norm", "activation")


def loss(model, *args):
    return (model(*args) ** 2).mean()


@pytest.mark.parametrize("norm, kv_heads, mask", [(nnx.LayerNorm, None, MASK), (nnx.RMSNorm, 2, None)])
def test_values_and_gradients_are_those_of_the_original(norm, kv_heads, mask):
    plain, fused = made(norm, kv_heads), made(norm, kv_heads)
    done = jshard.flax.fuse(fused, NAMES, Fused.fused)
    assert done == {"attention": ("attention",), "norm": ("norm", "out_norm"), "activation": ("",)}
    args = (X,) if mask is None else (X, mask)
    (a, da), (b, db) = (nnx.jit(nnx.value_and_grad(loss))(m, *args) for m in (plain, fused))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert jax.tree.structure(da) == jax.tree.structure(db)
    for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(db), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * float(jnp.abs(x).max()) + 1e-8)


@pytest.mark.parametrize("causal, shape", [(False, (2, 1, 1, 6)), (True, (2, 4, 6, 6))])
def test_queries_without_keys_get_equal_weights(causal, shape):
    rng = np.random.default_rng(4)
    x = [jnp.asarray(rng.normal(size=(2, 6, 4, 3)), jnp.float32) for _ in range(3)]
    mask = jnp.asarray(rng.random(shape) > 0.4).at[..., 0].set(False).at[:1].set(False)

    def of(attend):
        return jax.value_and_grad(lambda x: (attend(*x, mask=mask, is_causal=causal) ** 2).sum())(x)

    wanted, got = of(nnx.dot_product_attention), of(dot_product_attention)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6 * float(abs(a).max()))


def test_half_precision_keeps_its_types():
    plain, fused = (nnx.LayerNorm(32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)) for _ in range(2))
    jshard.flax.fuse(fused, ("norm",))
    a, b = plain(X), fused(X)
    assert a.dtype == b.dtype == jnp.bfloat16
    np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), atol=0.03)


def test_optimize_switches_by_name():
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    done = jshard.flax.optimize(made(), x, policy=Fused, mesh=MESH, config="ring", fused=NAMES)
    assert "jshard_attention" in {o.primitive for o in done.plan.operators}
    np.testing.assert_allclose(done.model(X), made()(X), atol=2e-5)
    assert jax.tree.structure(done.state()) == jax.tree.structure(nnx.state(made()))
    plain = jshard.flax.optimize(made(), x, policy=Fused, mesh=MESH)
    assert "jshard_attention" not in {o.primitive for o in plain.plan.operators}


def test_a_model_created_in_its_shardings_is_fused():
    done = jshard.flax.optimize(made, X, mesh=MESH, config="megatron", fused=("attention", "norm"))
    assert "jshard_attention" in {o.primitive for o in done.plan.operators}
    np.testing.assert_allclose(done.model(X), made()(X), atol=2e-5)


def test_dropout_of_probabilities_stays_as_it_was():
    plain, fused = made(dropout=0.5), made(dropout=0.5)
    jshard.flax.fuse(fused, ("attention",))
    np.testing.assert_array_equal(plain(X), fused(X))
    for m in (plain, fused):
        m.attention.deterministic = True
    np.testing.assert_allclose(plain(X), fused(X), atol=2e-6)


def test_a_norm_over_other_dimensions_stays_as_it_was():
    model = nnx.Sequential(nnx.LayerNorm(16, reduction_axes=-2, feature_axes=-2, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ShardError, match="fused 'norm' replaces nothing in Sequential: no module is one of nnx"
    ):
        jshard.flax.fuse(model, ("norm",))


@pytest.mark.parametrize(
    "names, text",
    [
        (("atention",), "there is no fused 'atention'"),
        ("attention", "fused is a str, 'attention'"),
        (
            ("attention",),
            "fused 'attention' replaces nothing in Tiny: no module is one of nnx.MultiHeadAttention",
        ),
    ],
)
def test_wrong_names(names, text):
    with pytest.raises(ShardError, match=text) as error:
        jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, mesh=MESH, fused=names)
    assert error.value.fix


def test_a_replacement_of_another_signature_is_refused():
    own = {"activation": {f"{qualified_name(Layer)}.mlp": lambda original, x, y: x}}
    with pytest.raises(ShardError, match=r"the replacement of Layer.mlp takes \(x, y\), the method \(x\)"):
        jshard.flax.fuse(made(), ("activation",), own)
