"""Models of `transformers`: Flax modules with random parameters, two layers each."""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers as hf

import jshard.flax
from benchmarks.models.zoo.kinds import Model, cross_entropy


BATCH, LENGTH, WORDS = 8, 16, 256


def _tokens(seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, WORDS, (BATCH, length), dtype=np.int32)


def _pixels(size: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((BATCH, 3, size, size), dtype=np.float32)


def _classes(n: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, n, (BATCH,), dtype=np.int32)


def _apply(module: Any, *names: str, output: str = "logits", train_word: str = "train"):
    """Apply with dropout under training; `names` are the inputs' names in the batch, given as keywords."""

    def apply(params, state, batch, train):
        inputs = {n: batch[n] for n in names}
        if train_word == "deterministic":
            inputs["deterministic"] = not train
        else:
            inputs["train"] = train
        if train:
            inputs["dropout_rng"] = jax.random.key(7)
        return getattr(module(**inputs, params=params), output), state

    return apply


def _of_root_mean_square(original: Any, x: Any, *, more: float = 0.0) -> Any:
    """The RMS norms of these models, which divide by the root; Gemma's weight is `more` larger."""
    m = original.__self__
    epsilon = m.eps if hasattr(m, "eps") else m.epsilon
    return jshard.ops.rms_norm(x, m.get_variable("params", "weight") + more, epsilon=epsilon)


def _llama_norm(original: Any, hidden_states: Any) -> Any:
    return _of_root_mean_square(original, hidden_states)


def _gemma_norm(original: Any, hidden_states: Any) -> Any:
    return _of_root_mean_square(original, hidden_states, more=1.0)


_OF = "transformers.models"
NORMS = {"norm": {
    f"{_OF}.llama.modeling_flax_llama.FlaxLlamaRMSNorm.__call__": _llama_norm,
    f"{_OF}.mistral.modeling_flax_mistral.FlaxMistralRMSNorm.__call__": _llama_norm,
    f"{_OF}.gemma.modeling_flax_gemma.FlaxGemmaRMSNorm.__call__": _gemma_norm,
    f"{_OF}.t5.modeling_flax_t5.FlaxT5LayerNorm.__call__": _llama_norm,
}}  # fmt: skip
"""Norms of these models' own, as a policy names them."""


def with_fused(make: Callable[..., Model], names: tuple[str, ...], **config: Any) -> Model:
    """A model with fused functions; `config`: what keeps the probabilities of attention from being dropped."""
    model = make(**config)
    if not names:
        return model

    def training(params: Any, state: Any, batch: Any) -> Any:
        return model.apply(params, state, batch, True)

    fused = jshard.flax.fuse_function(training, names, NORMS)
    return dataclasses.replace(model, apply=lambda p, s, b, train: fused(p, s, b))


def _created(module: Any, *shapes: Any) -> Callable[[], Any]:
    """Initialisation that can be traced."""
    return lambda: module.init_weights(jax.random.key(0), *shapes)


def _causal(kind: str, config: Any, train_word: str = "train") -> Model:
    module = getattr(hf, kind)(config, seed=0, input_shape=(1, LENGTH))
    batch = {"input_ids": _tokens(), "labels": _tokens(1)}
    apply = _apply(module, "input_ids", train_word=train_word)

    return Model(module.params, batch, apply, cross_entropy, create=_created(module, (1, LENGTH)))


def llama() -> Model:
    """Rotary positions, RMS norm, gated MLP."""
    return _causal("FlaxLlamaForCausalLM", hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64))  # fmt: skip


def mistral() -> Model:
    """Grouped-query attention in a sliding window."""
    return _causal("FlaxMistralForCausalLM", hf.MistralConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=8))  # fmt: skip


def gemma() -> Model:
    """One key-value head for all, tied and scaled embedding."""
    return _causal("FlaxGemmaForCausalLM", hf.GemmaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64))  # fmt: skip


def gpt2(**config: Any) -> Model:
    """Learned positions, dropout, tied embedding."""
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64, **config)
    return _causal("FlaxGPT2LMHeadModel", config)


def gpt_j() -> Model:
    """Attention and MLP side by side."""
    return _causal("FlaxGPTJForCausalLM", hf.GPTJConfig(
        vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8))  # fmt: skip


def gpt_neo() -> Model:
    """A layer of global and a layer of local attention."""
    return _causal("FlaxGPTNeoForCausalLM", hf.GPTNeoConfig(
        vocab_size=WORDS, hidden_size=64, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 1]], intermediate_size=128))  # fmt: skip


def bloom() -> Model:
    """ALiBi: positions as a bias made of the mask."""
    return _causal(
        "FlaxBloomForCausalLM", hf.BloomConfig(vocab_size=WORDS, hidden_size=64, n_layer=2, n_head=4)
    )


def opt() -> Model:
    """Positions counted from the mask."""
    return _causal("FlaxOPTForCausalLM", hf.OPTConfig(
        vocab_size=WORDS, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64), "deterministic")  # fmt: skip


def bert(**config: Any) -> Model:
    """Masked language model."""
    return _causal("FlaxBertForMaskedLM", hf.BertConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **config))  # fmt: skip


def roberta(**config: Any) -> Model:
    """Positions counted from the padding."""
    return _causal("FlaxRobertaForMaskedLM", hf.RobertaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **config))  # fmt: skip


def albert(**config: Any) -> Model:
    """One layer's parameters for all layers, a small embedding."""
    return _causal("FlaxAlbertForMaskedLM", hf.AlbertConfig(
        vocab_size=WORDS, embedding_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, **config))  # fmt: skip


def t5(**config: Any) -> Model:
    """Encoder and decoder with relative positions as a bias, no scale of the scores.

    Its code gives `jnp.clip` an argument that JAX no longer has; it sees a `jnp` whose `clip` takes it.
    """
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = types.SimpleNamespace(
        **{**vars(jnp), "clip": lambda x, a_max: jnp.minimum(x, a_max)}
    )
    module = hf.FlaxT5ForConditionalGeneration(hf.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
        **config), seed=0, input_shape=(1, LENGTH))  # fmt: skip
    batch = {"input_ids": _tokens(), "decoder_input_ids": _tokens(3), "labels": _tokens(1)}
    return Model(module.params, batch, _apply(module, "input_ids", "decoder_input_ids"), cross_entropy,
        create=_created(module, (1, LENGTH)))  # fmt: skip


def beit() -> Model:
    """Patches with relative positions as a bias, layer scale."""
    module = hf.FlaxBeitForImageClassification(hf.BeitConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=24,
        patch_size=8, num_labels=10, use_relative_position_bias=True), seed=0)  # fmt: skip
    batch = {"pixel_values": _pixels(24), "labels": _classes(10)}
    return Model(module.params, batch, _apply(module, "pixel_values"), cross_entropy,
        create=_created(module, (1, 24, 24, 3)))  # fmt: skip


def bart() -> Model:
    """Encoder and decoder with cross attention."""
    module = hf.FlaxBartForConditionalGeneration(hf.BartConfig(
        vocab_size=WORDS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64), seed=0,
        input_shape=(1, LENGTH))  # fmt: skip
    batch = {"input_ids": _tokens(), "decoder_input_ids": _tokens(3), "labels": _tokens(1)}
    return Model(module.params, batch, _apply(module, "input_ids", "decoder_input_ids"), cross_entropy,
        create=_created(module, (1, LENGTH)))  # fmt: skip


def whisper() -> Model:
    """Sound to text: two convolutions over time, then encoder and decoder."""
    module = hf.FlaxWhisperForConditionalGeneration(hf.WhisperConfig(
        vocab_size=WORDS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16,
        max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None), seed=0,
        input_shape=(1, 16, 32))  # fmt: skip
    sound = np.random.default_rng(5).standard_normal((BATCH, 16, 32), dtype=np.float32)
    batch = {"input_features": sound, "decoder_input_ids": _tokens(3), "labels": _tokens(1)}
    return Model(module.params, batch, _apply(module, "input_features", "decoder_input_ids"), cross_entropy,
        create=_created(module, (1, 16, 32)))  # fmt: skip


def vit(size: int = 32) -> Model:
    """Patches of images of `size` pixels."""
    module = hf.FlaxViTForImageClassification(hf.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=size,
        patch_size=8, num_labels=10), seed=0)  # fmt: skip
    batch = {"pixel_values": _pixels(size), "labels": _classes(10)}
    return Model(module.params, batch, _apply(module, "pixel_values"), cross_entropy,
        create=_created(module, (1, size, size, 3)))  # fmt: skip


def dinov2() -> Model:
    """Patches, layer scale, stochastic depth."""
    module = hf.FlaxDinov2ForImageClassification(hf.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7, num_labels=10,
        drop_path_rate=0.1), seed=0)  # fmt: skip
    batch = {"pixel_values": _pixels(28), "labels": _classes(10)}
    return Model(module.params, batch, _apply(module, "pixel_values"), cross_entropy)


def clip(size: int = 32) -> Model:
    """Images against texts: a matrix of the batch with itself."""
    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = hf.CLIPConfig(
        text_config=dict(small, vocab_size=WORDS, max_position_embeddings=64, eos_token_id=2),
        vision_config=dict(small, image_size=size, patch_size=8), projection_dim=32)  # fmt: skip
    module = hf.FlaxCLIPModel(config, seed=0, input_shape=((1, LENGTH), (1, size, size, 3)))
    batch = {
        "input_ids": _tokens(),
        "pixel_values": _pixels(size),
        "attention_mask": np.ones((BATCH, LENGTH), np.int32),
    }

    def apply(params, state, batch, train):
        rng = jax.random.key(7) if train else None
        out = module(**batch, params=params, dropout_rng=rng, train=train)
        return (out.logits_per_image, out.text_embeds, out.image_embeds), state

    def loss(out, batch):
        return cross_entropy(out[0], {"labels": jnp.arange(BATCH)})

    shapes = ((1, LENGTH), (1, size, size, 3))
    return Model(module.params, batch, apply, loss, create=_created(module, shapes))


def resnet() -> Model:
    """Convolutions and batch statistics."""
    module = hf.FlaxResNetForImageClassification(hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck", num_labels=10),
        seed=0, input_shape=(1, 64, 64, 3))  # fmt: skip

    def apply(params, state, batch, train):
        variables = {"params": params, "batch_stats": state}
        out = module(batch["pixel_values"], params=variables, train=train)
        return (out[0].logits, out[1]["batch_stats"]) if train else (out.logits, state)

    batch = {"pixel_values": _pixels(64), "labels": _classes(10)}
    return Model(module.params["params"], batch, apply, cross_entropy, module.params["batch_stats"],
        create=lambda: module.init_weights(jax.random.key(0), (1, 64, 64, 3))["params"])  # fmt: skip


def wav2vec2() -> Model:
    """Sound: strided and grouped convolutions, weight norm."""
    module = hf.FlaxWav2Vec2ForCTC(hf.Wav2Vec2Config(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, feat_extract_norm="layer", do_stable_layer_norm=True,
        mask_time_prob=0.0), seed=0, input_shape=(1, 640))  # fmt: skip
    sound = np.random.default_rng(5).standard_normal((BATCH, 640), dtype=np.float32)
    length = jax.eval_shape(lambda x: module(x).logits, sound).shape[1]
    labels = np.random.default_rng(1).integers(0, 32, (BATCH, length), dtype=np.int32)
    return Model(
        module.params,
        {"input_values": sound, "labels": labels},
        _apply(module, "input_values"),
        cross_entropy,
    )


MODELS = {
    "Llama": llama, "GPT2": gpt2, "BERT": bert, "ViT": vit, "BART": bart, "Whisper": whisper, "Gemma": gemma,
    "Mistral": mistral, "Bloom": bloom, "GPT-J": gpt_j, "GPT-Neo": gpt_neo, "OPT": opt, "CLIP": clip,
    "Dinov2": dinov2, "ResNet": resnet, "Wav2Vec2": wav2vec2, "RoBERTa": roberta, "ALBERT": albert, "T5": t5,
    "BEiT": beit,
}  # fmt: skip
_UNDROPPED: dict[str, dict[str, Any]] = {
    "GPT2": {"attn_pdrop": 0.0}, "T5": {"dropout_rate": 0.0},
    **{name: {"attention_probs_dropout_prob": 0.0} for name in ("BERT", "RoBERTa", "ALBERT")},
}  # fmt: skip


def model_of(name: str) -> Model:
    """A model for the table of recipes: images of 3 x 3 patches, so that the class token makes an even number."""
    make = functools.partial(MODELS[name], 24) if name in ("ViT", "CLIP") else MODELS[name]
    fused = functools.partial(with_fused, make, **_UNDROPPED.get(name, {}))
    return dataclasses.replace(make(), fused=None if name == "ResNet" else fused)
