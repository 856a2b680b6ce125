"""Rules of shardings as other libraries publish them, with the answers of those libraries, for the tests of importers.

`foreign_layouts.json` has, for each library and model: `source`, the file and commit of its repository; `rules`, its list
or the `fields` of its `ShardingConfig`; and `variables`, path -> (shape, mesh axes), which running that library's own
code on a small model of its family gave (Keras 3.15.1 on keras-hub's models, EasyLM's `match_partition_rules` on a
`TrainState`, the metadata of tunix' models). No code of theirs is here.

MaxText's answers are those of `flax.linen.logical_to_mesh_axes`, which tests call. Its logical axes are here by hand,
from `layers/{attentions,attention_mla,linears,moe,embeddings,nnx_decoders}.py` and `models/{llama2,mixtral}.py` of the
same commit, with the axis of scanned layers at 1, as `param_scan_axis` has it.

>>> len(MAXTEXT_MESH), layouts("keras_llama")["token_embedding/embeddings"]
(12, ((64, 16), ('model', 'batch')))
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from jax.sharding import PartitionSpec as P


FILE = pathlib.Path(__file__).with_name("foreign_layouts.json")


@functools.cache
def stored() -> dict[str, dict[str, Any]]:
    """The whole file."""
    return json.loads(FILE.read_text())


def _axes(spec: Any) -> tuple:
    return tuple(tuple(d) if isinstance(d, list) else d for d in spec)


def layouts(name: str) -> dict[str, tuple[tuple[int, ...], tuple | None]]:
    """Path -> shape and mesh axes; None for what the library leaves alone."""
    return {
        path: (tuple(shape), None if spec is None else _axes(spec))
        for path, (shape, spec) in stored()[name]["variables"].items()
    }


def rules(name: str) -> list[tuple[str, tuple]]:
    """Regular expressions with mesh axes."""
    return [(regex, _axes(spec)) for regex, spec in stored()[name]["rules"]]


def fields(name: str) -> dict[str, tuple]:
    """The fields of a `ShardingConfig`."""
    return {n: _axes(spec) for n, spec in stored()[name]["fields"].items()}


MAXTEXT_RULES: list[list[Any]] = stored()["maxtext"]["rules"]
MAXTEXT_MESH = dict.fromkeys(stored()["maxtext"]["mesh_axes"], 1) | {"fsdp": 4, "tensor": 2, "expert": 2}

MAXTEXT_NAMES = {
    "params.token_embedder.embedding": ("vocab", "embed_vocab"),
    "params.decoder.layers.self_attention.query.kernel": ("embed", "layers", "q_heads", "kv"),
    "params.decoder.layers.self_attention.key.kernel": ("embed", "layers", "kv_heads", "kv_head_dim"),
    "params.decoder.layers.self_attention.value.kernel": ("embed", "layers", "kv_heads", "kv_head_dim"),
    "params.decoder.layers.self_attention.out.kernel": ("heads", "layers", "kv", "embed"),
    "params.decoder.layers.self_attention.qkv_proj.kernel": ("embed", "layers", "heads", "kv"),
    "params.decoder.layers.self_attention.wq_a.kernel": ("embed", "layers", "q_lora_up_proj"),
    "params.decoder.layers.self_attention.wq_b.kernel": ("q_lora", "layers", "q_heads", "kv"),
    "params.decoder.layers.self_attention.wkv_a.kernel": ("embed", "layers", "kv_lora_up_proj"),
    "params.decoder.layers.self_attention.wkv_b.kernel": ("kv_lora", "layers", "kv_heads", "kv_head_dim"),
    "params.decoder.layers.mlp.wi_0.kernel": ("embed", "layers", "mlp"),
    "params.decoder.layers.mlp.wi_1.kernel": ("embed", "layers", "mlp"),
    "params.decoder.layers.mlp.wo.kernel": ("mlp", "layers", "embed"),
    "params.decoder.layers.moe.gate.kernel": ("embed_moe", "moe_layers", None),
    "params.decoder.layers.moe.wi_0": ("exp", "moe_layers", "embed_moe", "mlp_moe"),
    "params.decoder.layers.moe.wo": ("exp", "moe_layers", "mlp_moe", "embed_moe"),
    "params.decoder.layers.odd": ("exp", "embed", "mlp"),  # `embed` finds `expert` in use
    "params.decoder.layers.pre_self_attention_layer_norm.scale": ("norm", "layers"),
    "params.decoder.logits_dense.kernel": ("embed_vocab", "vocab"),
}

EASYLM_LLAMA = [(regex, P(*spec)) for regex, spec in rules("easylm_llama")]
EASYLM_GPTJ = [(regex, P(*spec)) for regex, spec in rules("easylm_gptj")]
KERAS_QWEN3_MOE = dict(rules("keras_qwen3_moe"))
KERAS_QWEN3_MOE_CUT = dict(rules("keras_qwen3_moe_cut"))
KERAS_LLAMA = dict(rules("keras_llama"))
TUNIX_LLAMA3, TUNIX_GEMMA = fields("tunix_llama3"), fields("tunix_gemma")


def parameters(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by path, without optimizer state."""
    return {
        path.removeprefix("params/"): shape
        for path, (shape, _) in layouts(name).items()
        if not path.startswith(("opt_state", "step"))
    }
