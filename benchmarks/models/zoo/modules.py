"""`python -m benchmarks.models.zoo.modules`: `.shard(...)` on Flax modules of `transformers`, values and gradients
against plain.

The modules are taken as the library makes them and no line of them is changed: the batch is cut in 8, the rest is
derived. Printed: model, error of the outputs and of every parameter's gradient, collectives of the forward plan.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import jax
import jax.numpy as jnp
import transformers as hf

import jshard.flax
from benchmarks.models.zoo.__main__ import CHIP, error
from benchmarks.models.zoo.texts import LENGTH, WORDS, _tokens
from jshard import hardware


def llama() -> tuple[object, dict]:
    """Llama with two layers."""
    model = hf.FlaxLlamaForCausalLM(hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64), seed=0, input_shape=(1, LENGTH))  # fmt: skip
    return model.module, model.params


def gpt2() -> tuple[object, dict]:
    """GPT2 with two layers."""
    model = hf.FlaxGPT2LMHeadModel(
        hf.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=4),
        seed=0,
        input_shape=(1, LENGTH),
    )
    return model.module, model.params


def compare(name: str, module, params) -> str:
    """One line: the sharded module beside the plain one."""
    tokens = _tokens()
    rest = (jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(LENGTH, dtype=tokens.dtype), tokens.shape))
    cut = module.shard(in_strategy=((8, 1), (8, 1), (8, 1)), hardware=CHIP.name)
    labels = jax.nn.one_hot(_tokens(1), WORDS)

    def loss(which, p):
        return -(jax.nn.log_softmax(which.apply({"params": p}, tokens, *rest).logits) * labels).mean()

    plain = jax.jit(lambda p: module.apply({"params": p}, tokens, *rest).logits)(params)
    got = jax.jit(lambda p: cut.apply({"params": p}, tokens, *rest).logits)(params)
    forward, _ = error(got, plain)
    gradient, at = error(
        jax.jit(jax.grad(lambda p: loss(cut, p)))(params),
        jax.jit(jax.grad(lambda p: loss(module, p)))(params),
    )
    cut.apply({"params": params}, tokens, *rest)
    plan = jshard.flax.plan_of(cut, {"params": params}, tokens, *rest)
    kinds = sorted({c.kind for c in plan.collectives})
    if not max(forward, gradient) <= 1e-5:
        raise SystemExit(f"{name}: outputs {forward:.1e} or gradients {gradient:.1e} at {at} differ")
    leaves = len(jax.tree.leaves(params))
    return f"{name}: outputs {forward:.1e}, gradients of {leaves} parameters {gradient:.1e} at {at}, {kinds}"


def main() -> None:
    """Every module of this file."""
    hardware.register(CHIP)
    for make in (llama, gpt2):
        print(compare(make.__name__, *make()), flush=True)


if __name__ == "__main__":
    main()
