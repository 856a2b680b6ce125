"""Decoder-only language models in the names of Hugging Face and torchprime, for configurations of shardings.

One block covers the families: grouped-query attention (Llama), norms of queries and keys (Qwen), a mixture of experts
(Mixtral), experts beside a shared one (Llama 4), latent attention (DeepSeek). Layers are a list, or stacked under a scan.

>>> model = Decoder(SIZES["llama"], nnx.Rngs(0))
>>> model(jnp.zeros((2, 4), jnp.int32)).shape
(2, 4, 64)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; `latent`: width of the compressed queries and keys, 0 without; `shared`: a shared expert."""

    vocab: int = 64
    width: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    experts: int = 0
    top: int = 2
    shared: bool = False
    latent: int = 0
    norms: bool = False
    scanned: bool = False
    head_width: int = 8


SIZES = {
    "llama": Sizes(),
    "mixtral": Sizes(experts=4),
    "llama4": Sizes(experts=4, top=1, shared=True),
    "deepseek": Sizes(experts=4, shared=True, latent=16),
    "qwen": Sizes(norms=True, heads=8, kv_heads=4, head_width=4),
}


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; arrays are (batch, sequence, heads, width), keys and values may have fewer heads."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1), v)


def linear(into: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(into, out, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.sizes = s
        own, kv = s.heads * s.head_width, s.kv_heads * s.head_width
        if s.latent:
            self.q_a_proj, self.q_b_proj = linear(s.width, s.latent, rngs), linear(s.latent, own, rngs)
            self.kv_a_proj_with_mqa = linear(s.width, s.latent, rngs)
            self.kv_b_proj = linear(s.latent, 2 * own, rngs)
        else:
            self.q_proj = linear(s.width, own, rngs)
            self.k_proj, self.v_proj = linear(s.width, kv, rngs), linear(s.width, kv, rngs)
        if s.norms:
            self.q_norm, self.k_norm = (nnx.RMSNorm(s.head_width, rngs=rngs) for _ in range(2))
        self.o_proj = linear(own, s.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        s, batch = self.sizes, x.shape[:2]
        if s.latent:
            q = self.q_b_proj(self.q_a_proj(x))
            k, v = jnp.split(self.kv_b_proj(self.kv_a_proj_with_mqa(x)), 2, axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (a.reshape(*batch, -1, s.head_width) for a in (q, k, v))
        if s.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(q, k, v).reshape(*batch, -1))


class MLP(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.gate_proj, self.up_proj = linear(s.width, s.hidden, rngs), linear(s.width, s.hidden, rngs)
        self.down_proj = linear(s.hidden, s.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """All experts as three tensors, (experts, in, out)."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) / shape[1] ** 0.5)

        self.w1, self.w3 = weight(s.experts, s.width, s.hidden), weight(s.experts, s.width, s.hidden)
        self.w2 = weight(s.experts, s.hidden, s.width)

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        hidden = nnx.silu(jnp.einsum("bsd,edf->bsef", x, self.w1[...]))
        hidden = hidden * jnp.einsum("bsd,edf->bsef", x, self.w3[...])
        return jnp.einsum("bsef,efd,bse->bsd", hidden, self.w2[...], weights)


class MoE(nnx.Module):
    """A router over experts, and possibly a shared expert; its output is (values, logits of the router)."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.top = s.top
        self.gate, self.experts = linear(s.width, s.experts, rngs), Experts(s, rngs)
        self.shared_expert = MLP(s, rngs) if s.shared else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = self.gate(x)
        least = jnp.sort(logits, axis=-1)[..., -self.top, None]
        weights = jax.nn.softmax(jnp.where(logits >= least, logits, -1e9), axis=-1)
        y = self.experts(x, weights)
        return (y if self.shared_expert is None else y + self.shared_expert(x)), logits


class Layer(nnx.Module):
    """One block; its output is a pair where it has experts, as in torchprime's Mixtral."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(s.width, rngs=rngs)
        self.self_attn = Attention(s, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(s.width, rngs=rngs)
        if s.experts:
            self.block_sparse_moe = MoE(s, rngs)
        else:
            self.mlp = MLP(s, rngs)

    def __call__(self, x: jax.Array) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        if hasattr(self, "mlp"):
            return x + self.mlp(y)
        y, logits = self.block_sparse_moe(y)
        return x + y, logits


class Backbone(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.scanned = s.scanned
        self.embed_tokens = nnx.Embed(s.vocab, s.width, rngs=rngs)
        if s.scanned:
            self.layers = nnx.vmap(lambda r: Layer(s, r), in_axes=0, out_axes=0)(rngs.split(s.layers))
        else:
            self.layers = nnx.List([Layer(s, rngs) for _ in range(s.layers)])
        self.norm = nnx.RMSNorm(s.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        if self.scanned:

            def body(x: jax.Array, layer: Layer) -> jax.Array:
                y = layer(x)
                return y[0] if isinstance(y, tuple) else y

            x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                y = layer(x)
                x = y[0] if isinstance(y, tuple) else y
        return self.norm(x)


class Decoder(nnx.Module):
    """A language model: logits of the next token."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.model = Backbone(s, rngs)
        self.lm_head = linear(s.width, s.vocab, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(self.model(tokens))


class LinenLayer(nn.Module):
    """A Llama block in linen, with linen's own names of numbered layers."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.sizes

        def dense(out: int, name: str) -> nn.Module:
            return nn.Dense(out, use_bias=False, name=name)

        y, batch = nn.RMSNorm(name="input_layernorm")(x), x.shape[:2]
        q = dense(s.heads * s.head_width, "q_proj")(y)
        k, v = (dense(s.kv_heads * s.head_width, n)(y) for n in ("k_proj", "v_proj"))
        q, k, v = (a.reshape(*batch, -1, s.head_width) for a in (q, k, v))
        x = x + dense(s.width, "o_proj")(attend(q, k, v).reshape(*batch, -1))
        y = nn.RMSNorm(name="post_attention_layernorm")(x)
        y = nn.silu(dense(s.hidden, "gate_proj")(y)) * dense(s.hidden, "up_proj")(y)
        return x + dense(s.width, "down_proj")(y)


class LinenDecoder(nn.Module):
    """A Llama in linen: `layers_0`, `layers_1`, or one stacked `layers` under `nn.scan`."""

    sizes: Sizes = SIZES["llama"]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.sizes
        x = nn.Embed(s.vocab, s.width, name="embed_tokens")(tokens)
        if s.scanned:
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=s.layers,
            )
            x, _ = scan(LinenLayer(s, name="layers"), x, None)
        else:
            for i in range(s.layers):
                x = LinenLayer(s, name=f"layers_{i}")(x)
        return nn.Dense(s.vocab, use_bias=False, name="lm_head")(nn.RMSNorm(name="norm")(x))


def loss_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def nnx_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One training step, in place; the loss."""
    loss, grads = nnx.value_and_grad(lambda m: loss_of(m(tokens), tokens))(model)
    optimizer.update(model, grads)
    return loss


def adam(model: nnx.Module) -> nnx.Optimizer:
    """Adam for a model."""
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def tokens_of(batch: int = 8, length: int = 8, vocab: int = 64, seed: int = 0) -> jax.Array:
    """Random tokens."""
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab)
