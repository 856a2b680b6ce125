"""Rules of shardings as other libraries publish them, and the tensors that they are about, for the tests of importers.

The tables state facts of these files, in our own form: MaxText `configs/base.yml` (the rules of weights),
EasyLM `models/{llama,gptj}` (`get_partition_rules`), keras-hub `{llama,qwen3_moe}_backbone.py` (`get_layout_map`), tunix
`models/{llama3,gemma}/model.py` (`ShardingConfig`).

>>> len(MAXTEXT_MESH), len(easylm_llama(2))
(12, 21)
"""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec as P


MAXTEXT_MESH = {
    "data": 1, "stage": 1, "fsdp": 4, "fsdp_transpose": 1, "sequence": 1, "context": 1, "context_autoregressive": 1,
    "tensor": 2, "tensor_transpose": 1, "tensor_sequence": 1, "expert": 2, "autoregressive": 1,
}  # fmt: skip

_EMBED = [
    "fsdp fsdp_transpose sequence tensor_transpose context",
    "fsdp sequence tensor_transpose context",
    "fsdp fsdp_transpose sequence context",
    "fsdp sequence context",
]
MAXTEXT_RULES: list[list[Any]] = [
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["mlp_no_fsdp", ["tensor", "tensor_sequence", "autoregressive"]],
    *[
        [n, "tensor tensor_transpose tensor_sequence autoregressive".split()]
        for n in ("vocab", "heads", "q_heads", "kv_heads")
    ],
    *[["embed", [*e.split(), "expert"]] for e in _EMBED],
    *[["embed_no_exp", e.split()] for e in _EMBED],
    ["embed_tensor_transpose", ["tensor_transpose"]],
    *[["q_lora", [*e.split(), "expert"]] for e in _EMBED],
    ["q_lora_up_proj", []],
    *[["kv_lora", [*e.split(), "expert"]] for e in _EMBED],
    ["kv_lora_up_proj", []],
    ["norm", ["tensor", "tensor_transpose"]],
    ["layers", "stage"],
    *[[n, []] for n in ("qkv", "kv", "kv_head_dim")],
    ["exp", "expert"],
    ["exp_with_fsdp", "fsdp"],
    *[[n, []] for n in ("dense_layers", "moe_layers")],
]  # fmt: skip

MAXTEXT_NAMES = {
    "params.token_embedder.embedding": ("vocab", "embed"),
    "params.decoder.layers.self_attention.query.kernel": ("embed", "layers", "q_heads", "kv"),
    "params.decoder.layers.self_attention.key.kernel": ("embed", "layers", "kv_heads", "kv_head_dim"),
    "params.decoder.layers.self_attention.value.kernel": ("embed", "layers", "kv_heads", "kv_head_dim"),
    "params.decoder.layers.self_attention.out.kernel": ("heads", "layers", "kv", "embed"),
    "params.decoder.layers.self_attention.wq_a.kernel": ("embed", "layers", "q_lora_up_proj"),
    "params.decoder.layers.self_attention.wq_b.kernel": ("q_lora", "layers", "q_heads", "kv"),
    "params.decoder.layers.mlp.wi_0.kernel": ("embed", "layers", "mlp"),
    "params.decoder.layers.mlp.wi_1.kernel": ("embed", "layers", "mlp"),
    "params.decoder.layers.mlp.wo.kernel": ("mlp", "layers", "embed"),
    "params.decoder.layers.moe.gate.kernel": ("embed_no_exp", "moe_layers", None),
    "params.decoder.layers.moe.wi_0": ("exp", "moe_layers", "embed_no_exp", "mlp"),
    "params.decoder.layers.moe.odd": ("exp", "embed", "mlp"),
    "params.decoder.layers.pre_norm.scale": ("norm", "layers"),
    "params.decoder.logits_dense.kernel": ("embed", "vocab"),
}

EASYLM_LLAMA = (
    ("transformer/wte/embedding", P("mp", "fsdp")), ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")), ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")), ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)), ("ffn_norm/kernel", P(None)), ("transformer/ln_f/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "mp")), (".*", P(None)),
)  # fmt: skip

EASYLM_GPTJ = (
    ("transformer/wte/embedding", P("mp", "fsdp")), ("attn/(k_proj|q_proj|v_proj)/kernel", P("fsdp", "mp")),
    ("attn/out_proj/kernel", P("mp", "fsdp")), ("mlp/fc_in/kernel", P("fsdp", "mp")), ("mlp/fc_in/bias", P("mp")),
    ("mlp/fc_out/kernel", P("mp", "fsdp")), ("mlp/fc_out/bias", P()), ("ln_[0-9]+/bias", P()),
    ("[0-9]+/ln_[0-9]+/scale", P()), ("ln_f/bias", P()), ("ln_f/scale", P()),
    ("lm_head/kernel", P("fsdp", "mp")), ("lm_head/bias", P("mp")), (".*", P()),
)  # fmt: skip


def easylm_llama(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of EasyLM's Llama by path."""
    out = {
        "transformer/wte/embedding": (64, 16),
        "transformer/ln_f/kernel": (16,),
        "lm_head/kernel": (16, 64),
    }
    for i in range(layers):
        at = f"transformer/h/{i}"
        out |= {f"{at}/attention/{n}/kernel": (16, 16) for n in ("wq", "wk", "wv", "wo")}
        out |= {
            f"{at}/feed_forward/{n}/kernel": s
            for n, s in (("w1", (16, 32)), ("w2", (32, 16)), ("w3", (16, 32)))
        }
        out |= {f"{at}/{n}/kernel": (16,) for n in ("attention_norm", "ffn_norm")}
    return out


def easylm_gptj(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of EasyLM's GPT-J by path."""
    out = {"transformer/wte/embedding": (64, 16), "lm_head/kernel": (16, 64), "lm_head/bias": (64,)}
    out |= {f"transformer/ln_f/{n}": (16,) for n in ("scale", "bias")}
    for i in range(layers):
        at = f"transformer/h/{i}"
        out |= {f"{at}/attn/{n}/kernel": (16, 16) for n in ("q_proj", "k_proj", "v_proj", "out_proj")}
        out |= {
            f"{at}/mlp/fc_in/kernel": (16, 64),
            f"{at}/mlp/fc_in/bias": (64,),
            f"{at}/mlp/fc_out/kernel": (64, 16),
        }
        out |= {f"{at}/mlp/fc_out/bias": (16,)} | {f"{at}/ln_1/{n}": (16,) for n in ("scale", "bias")}
    return out


_DECODER = "transformer_layer.*"
KERAS_LLAMA = {
    "token_embedding/embeddings": ("model", "batch"), "token_embedding/reverse_embeddings": ("batch", "model"),
    _DECODER + "self_attention.*(query|key|value).kernel": ("model", "batch", None),
    _DECODER + "self_attention.*attention_output.kernel": ("model", None, "batch"),
    _DECODER + "feedforward_intermediate_dense.kernel": ("batch", "model"),
    _DECODER + "feedforward_gate_dense.kernel": ("batch", "model"),
    _DECODER + "feedforward_output_dense.kernel": ("model", "batch"),
}  # fmt: skip

KERAS_QWEN3_MOE = {
    "token_embedding/embeddings": ("model", "batch"), "token_embedding/reverse_embeddings": ("batch", "model"),
    _DECODER + "self_attention.*(query|key|value).kernel": ("model", "batch", None),
    _DECODER + "self_attention.*attention_output.kernel": ("model", None, "batch"),
    _DECODER + "feedforward_gate_dense.kernel": ("batch", "model"),
    _DECODER + "feedforward_output_dense.kernel": ("model", "batch"),
}  # fmt: skip


def keras_decoder(layers: int, experts: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of keras-hub's Llama or Qwen3-MoE by path; weights of experts have no `/kernel`."""
    out = {"token_embedding/embeddings": (64, 16), "token_embedding/reverse_embeddings": (16, 64)}
    for i in range(layers):
        at = f"transformer_layer_{i}"
        out |= {f"{at}/self_attention/{n}/kernel": (16, 4, 8) for n in ("query", "key", "value")}
        out |= {
            f"{at}/self_attention/attention_output/kernel": (4, 8, 16),
            f"{at}/self_attention_layernorm/scale": (16,),
        }
        if experts:
            bank = f"{at}/experts/expert_feedforward"
            out |= {f"{bank}_gate_dense": (experts, 16, 64), f"{bank}_output_dense": (experts, 32, 16)}
            out |= {f"{at}/sparse_feedforward_gate_dense/kernel": (16, experts)}
        else:
            out |= {f"{at}/feedforward_{n}_dense/kernel": (16, 32) for n in ("intermediate", "gate")}
            out |= {f"{at}/feedforward_output_dense/kernel": (32, 16)}
    return out


TUNIX_LLAMA3 = {
    "emb_vd": ("tp", "fsdp"), "emb_dv": ("fsdp", "tp"), "q_weight_ndh": ("tp", "fsdp", None),
    "kv_weight_ndh": ("tp", "fsdp", None), "o_weight_nhd": ("tp", None, "fsdp"), "ffw_weight_df": ("fsdp", "tp"),
    "ffw_weight_fd": ("tp", "fsdp"), "rms_norm_weight": ("tp",), "act_btd": ("fsdp", None, "tp"),
    "act_btf": ("fsdp", None, "tp"), "act_btnh": ("fsdp", None, "tp", None),
}  # fmt: skip

TUNIX_GEMMA = {
    "emb_vd": ("tp", "fsdp"), "q_weight_ndh": ("tp", "fsdp", None), "kv_weight_cndh": (None, "tp", "fsdp", None),
    "qkv_weight_cndh": (None, "tp", "fsdp", None), "o_weight_nhd": ("tp", None, "fsdp"), "ffw_weight_df": ("fsdp", "tp"),
    "ffw_weight_fd": ("tp", "fsdp"), "rms_norm_weight": ("tp",), "act_btd": ("fsdp", None, "tp"),
    "act_btf": ("fsdp", None, "tp"), "act_btnh": ("fsdp", None, "tp", None),
}  # fmt: skip


def tunix_llama3(layers: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of `ShardingConfig` and shape of each parameter of tunix' Llama 3, by path."""
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "embedder.input_embedding": ("emb_vd", (64, 16)), "lm_head.w": ("emb_dv", (16, 64)),
        "final_norm.w": ("rms_norm_weight", (16,)),
    }  # fmt: skip
    for i in range(layers):
        at = f"layers.{i}"
        out[f"{at}.attn.q_proj.w"] = ("q_weight_ndh", (16, 4, 8))
        out |= {f"{at}.attn.{n}_proj.w": ("kv_weight_ndh", (16, 4, 8)) for n in "kv"}
        out[f"{at}.attn.o_proj.w"] = ("o_weight_nhd", (4, 8, 16))
        out |= {f"{at}.mlp.{n}_proj.kernel": ("ffw_weight_df", (16, 32)) for n in ("gate", "up")}
        out[f"{at}.mlp.down_proj.kernel"] = ("ffw_weight_fd", (32, 16))
        out |= {
            f"{at}.{n}.w": ("rms_norm_weight", (16,)) for n in ("input_layernorm", "post_attention_layernorm")
        }
    return out


def tunix_gemma(layers: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same of tunix' Gemma."""
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "embedder.input_embedding": ("emb_vd", (64, 16)), "final_norm.scale": ("rms_norm_weight", (16,))
    }  # fmt: skip
    for i in range(layers):
        at = f"layers.{i}"
        out[f"{at}.attn.q_einsum.w"] = ("q_weight_ndh", (4, 16, 8))
        out[f"{at}.attn.kv_einsum.w"] = ("kv_weight_cndh", (2, 4, 16, 8))
        out[f"{at}.attn.attn_vec_einsum.w"] = ("o_weight_nhd", (4, 8, 16))
        out |= {f"{at}.mlp.{n}_proj.kernel": ("ffw_weight_df", (16, 32)) for n in ("gate", "up")}
        out[f"{at}.mlp.down_proj.kernel"] = ("ffw_weight_fd", (32, 16))
        out |= {f"{at}.{n}.scale": ("rms_norm_weight", (16,)) for n in ("pre_attention_norm", "pre_ffw_norm")}
    return out
