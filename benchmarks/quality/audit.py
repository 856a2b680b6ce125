"""`python -m benchmarks.quality.audit`: shardings that others publish, priced on full-size models beside the search's plan.

Each row is a rule list of `tests/helpers/foreign_layouts.json` (MaxText, EasyLM, Keras, tunix) on a decoder of the family
it was written for, of full width and depth and in that library's names, or a file of `examples/configs` on the models of
`tests/helpers/decoder_models.py`; on two machines of 64 devices. Printed and written to `audit.md`: predicted step, peak
memory and the bytes that every device holds whole, of the file and of the search. A row that is there already is not run
again; `--only NAME` runs one, `--layers N` makes the models less deep (for a try; the page has full depth only).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jshard
from jshard._report.format_units import format_bytes, format_seconds
from tests.helpers import foreign_rules as rules
from tests.helpers.import_graph import ROOT


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
MACHINES = ("v5p:4x4x4", "h100:8x8")
BATCH, LENGTH = 64, 4096


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder in the names of a library.

    - `names`: role -> path, with `{i}` for the layer. Without "gate" the hidden layer has no gate; "qkv" in place of "q",
        "k", "v" is one tensor of all three; "experts_in", "experts_out", "router" in place of "up", "down" are a mixture.
    - `heads_as`: "df" for matrices, "dhw" for (width, heads, head width), "hdw" for (heads, width, head width).
    - `experts`, `top`: of a mixture, how many, and how many an average token is sent to.
    - `scanned`: layers stacked in dimension 1, as MaxText stores them.
    """

    names: Mapping[str, str]
    vocab: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    heads_as: str = "df"
    experts: int = 0
    top: int = 0
    scanned: bool = False

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of a tensor in one layer."""
        d, f, w = self.width, self.hidden, self.head_width
        h = self.kv_heads if role in ("k", "v") else self.heads
        into = {"df": (d, h * w), "dhw": (d, h, w), "hdw": (h, d, w)}[self.heads_as]
        return {
            "embed": (self.vocab, d), "head": (d, self.vocab), "q": into, "k": into, "v": into, "qkv": (3, *into),
            "o": (h * w, d) if self.heads_as == "df" else (h, w, d), "gate": (d, f), "up": (d, f), "down": (f, d),
            "up_bias": (f,), "down_bias": (d,), "norm": (d,), "norm2": (d,), "last": (d,), "router": (d, self.experts),
            "experts_in": (self.experts, d, 2 * f), "experts_out": (self.experts, f, d),
        }[role]  # fmt: skip

    def parameters(self) -> Any:
        """The nested parameters, in bfloat16."""
        tree: dict[str, Any] = {}
        for role, path in self.names.items():
            shape = self.shape(role)
            if "{i}" not in path or self.scanned:
                if self.scanned and "layers" in path:
                    shape = (shape[0], self.layers, *shape[1:])
                _put(tree, path, shape)
            else:
                for i in range(self.layers):
                    _put(tree, path.format(i=i), shape)
        return tree

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """A loss of the logits; every layer is computed again in the backward pass."""
        roles = [r for r, path in self.names.items() if "{i}" in path or self.scanned and "layers" in path]
        layer = jax.checkpoint(self.layer)
        x = _get(params, self.names["embed"])[tokens]
        if self.scanned:
            stacked = {r: jnp.moveaxis(_get(params, self.names[r]), 1, 0) for r in roles}
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0]
        else:
            for i in range(self.layers):
                x = layer(x, {r: _get(params, self.names[r].format(i=i)) for r in roles})
        x = _norm(x, _get(params, self.names["last"]))
        head = self.names.get("head")
        logits = x @ (_get(params, head) if head else _get(params, self.names["embed"]).T)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    def layer(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        """One block."""
        x = x + self.attention(_norm(x, w["norm"]), w)
        y = _norm(x, w.get("norm2", w["norm"]))
        if self.experts:
            return x + self.mixture(y, w)
        hidden = y @ w["up"] + w.get("up_bias", 0)
        hidden = jax.nn.silu(y @ w["gate"]) * hidden if "gate" in w else jax.nn.gelu(hidden)
        return x + hidden @ w["down"] + w.get("down_bias", 0)

    def attention(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        """Attention of grouped queries."""
        b, s, _ = x.shape
        if "qkv" in w:
            q, k, v = jnp.einsum("bsd,chdw->cbshw", x, w["qkv"])
        else:
            q, k, v = (
                jnp.einsum(f"bsd,{self.heads_as}->bs{self.heads_as.replace('d', '', 1)}", x, w[r])
                for r in "qkv"
            )
            q, k, v = (a.reshape(b, s, -1, self.head_width) for a in (q, k, v))
        q = q.reshape(b, s, k.shape[2], -1, self.head_width)
        scores = jax.nn.softmax(jnp.einsum("bqkgw,bskw->bkgqs", q, k), axis=-1)
        y = jnp.einsum("bkgqs,bskw->bqkgw", scores, v)
        if self.heads_as == "df":
            return y.reshape(b, s, -1) @ w["o"]
        return jnp.einsum("bshw,hwd->bsd", y.reshape(b, s, -1, self.head_width), w["o"])

    def mixture(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        """Experts that choose their tokens in each example, as many as `top` for an average token."""
        share = jax.nn.softmax(x @ w["router"])
        weight, chosen = jax.lax.top_k(share.swapaxes(1, 2), x.shape[1] * self.top // self.experts)
        slots = jax.vmap(lambda x, i: x[i])(x, chosen)  # (batch, experts, slots, width)
        gate, up = jnp.split(jnp.einsum("becd,edf->becf", slots, w["experts_in"]), 2, axis=-1)
        out = jnp.einsum("becf,efd->becd", jax.nn.silu(gate) * up, w["experts_out"]) * weight[..., None]
        return jax.vmap(lambda y, i, o: y.at[i].add(o))(jnp.zeros_like(x), chosen, out)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _put(tree: dict[str, Any], path: str, shape: tuple[int, ...]) -> None:
    *above, last = path.split("/")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _get(tree: Any, path: str) -> jax.Array:
    for part in path.split("/"):
        tree = tree[part]
    return tree


def _under(at: str, **names: str) -> dict[str, str]:
    return {role: f"{at}/{name}" for role, name in names.items()}


LLAMA_8B: dict[str, Any] = dict(
    vocab=128256, width=4096, hidden=14336, layers=32, heads=32, kv_heads=8, head_width=128
)
EASYLM_LLAMA = Model(
    {"embed": "transformer/wte/embedding", "last": "transformer/ln_f/kernel", "head": "lm_head/kernel"}
    | _under("transformer/h/{i}/attention", q="wq/kernel", k="wk/kernel", v="wv/kernel", o="wo/kernel")
    | _under("transformer/h/{i}/feed_forward", gate="w1/kernel", down="w2/kernel", up="w3/kernel")
    | _under("transformer/h/{i}", norm="attention_norm/kernel", norm2="ffn_norm/kernel"),
    **LLAMA_8B,
)  # fmt: skip
GPTJ_6B = Model(
    {"embed": "transformer/wte/embedding", "last": "transformer/ln_f/scale", "head": "lm_head/kernel"}
    | _under("transformer/h/{i}/attn", q="q_proj/kernel", k="k_proj/kernel", v="v_proj/kernel", o="out_proj/kernel")
    | _under("transformer/h/{i}/mlp", up="fc_in/kernel", up_bias="fc_in/bias", down="fc_out/kernel", down_bias="fc_out/bias")
    | _under("transformer/h/{i}", norm="ln_1/scale"),
    vocab=50400, width=4096, hidden=16384, layers=28, heads=16, kv_heads=16, head_width=256,
)  # fmt: skip
_KERAS = {
    "embed": "token_embedding/embeddings", "head": "token_embedding/reverse_embeddings",
    "last": "sequence_output_layernorm/scale", "norm": "transformer_layer_{i}/self_attention_layernorm/scale",
    "norm2": "transformer_layer_{i}/feedforward_layernorm/scale",
} | _under(
    "transformer_layer_{i}/self_attention", q="query/kernel", k="key/kernel", v="value/kernel", o="attention_output/kernel"
)  # fmt: skip
KERAS_LLAMA = Model(
    _KERAS | _under("transformer_layer_{i}", up="feedforward_intermediate_dense/kernel",
                    gate="feedforward_gate_dense/kernel", down="feedforward_output_dense/kernel"),
    heads_as="dhw", **LLAMA_8B,
)  # fmt: skip
KERAS_QWEN3_MOE = Model(  # Qwen3-30B-A3B
    _KERAS | _under("transformer_layer_{i}/qwen3_sparse_moe_block", router="sparse_feedforward_gate_dense/kernel",
                    experts_in="experts/expert_feedforward_gate_dense",
                    experts_out="experts/expert_feedforward_output_dense"),
    vocab=151936, width=2048, hidden=768, layers=48, heads=32, kv_heads=4, head_width=128, heads_as="dhw", experts=128,
    top=8,
)  # fmt: skip
_TUNIX = {"embed": "embedder/input_embedding"} | _under(
    "layers/{i}/mlp", gate="gate_proj/kernel", up="up_proj/kernel", down="down_proj/kernel"
)
TUNIX_LLAMA3 = Model(
    _TUNIX | {"head": "lm_head/w", "last": "final_norm/w"}
    | _under("layers/{i}", norm="input_layernorm/w", norm2="post_attention_layernorm/w")
    | _under("layers/{i}/attn", q="q_proj/w", k="k_proj/w", v="v_proj/w", o="o_proj/w"),
    heads_as="dhw", **LLAMA_8B,
)  # fmt: skip
TUNIX_GEMMA = Model(  # Gemma 7B; its head is its embedding
    _TUNIX | {"last": "final_norm/scale"}
    | _under("layers/{i}", norm="pre_attention_norm/scale", norm2="pre_ffw_norm/scale")
    | _under("layers/{i}/attn", qkv="qkv_einsum/w", o="attn_vec_einsum/w"),
    vocab=256128, width=3072, hidden=24576, layers=28, heads=16, kv_heads=16, head_width=256, heads_as="hdw",
)  # fmt: skip
MAXTEXT_LLAMA = Model(
    _under("params/decoder/layers/self_attention", q="query/kernel", k="key/kernel", v="value/kernel", o="out/kernel")
    | _under("params/decoder/layers/mlp", gate="wi_0/kernel", up="wi_1/kernel", down="wo/kernel")
    | {
        "embed": "params/token_embedder/embedding", "head": "params/decoder/logits_dense/kernel",
        "last": "params/decoder/decoder_norm/scale", "norm": "params/decoder/layers/pre_self_attention_layer_norm/scale",
        "norm2": "params/decoder/layers/post_self_attention_layer_norm/scale",
    },
    heads_as="dhw", scanned=True, **LLAMA_8B,
)  # fmt: skip
_MAXTEXT_NAMES = rules.MAXTEXT_NAMES | {
    "params.decoder.decoder_norm.scale": ("norm",),
    "params.decoder.layers.post_self_attention_layer_norm.scale": ("norm", "layers"),
}

Case = tuple[Model, jshard.Config, dict[str, int]]


def cases() -> dict[str, Case]:
    """Name -> (model, configuration, sizes of its mesh axes on 64 devices)."""
    easylm = {"dp": 1, "fsdp": 16, "mp": 4}
    # keras-hub cuts the heads of keys and values, 8 and 4 of them, over `batch`: a larger axis is an error there.
    keras, keras_moe = {"batch": 8, "model": 8}, {"batch": 4, "model": 16}
    tunix = {"fsdp": 16, "tp": 4}
    maxtext = rules.MAXTEXT_MESH | {"fsdp": 16, "tensor": 4, "expert": 1}
    used = [n.replace("/", ".") for n in MAXTEXT_LLAMA.names.values()]
    named = {n: _MAXTEXT_NAMES[n] for n in used}
    fsdp = maxtext | {"fsdp": 64, "tensor": 1}
    config = jshard.Config
    return {
        "MaxText base, fsdp 16 x tensor 4, Llama 3 8B": (
            MAXTEXT_LLAMA, config.from_logical_rules(rules.MAXTEXT_RULES, named, maxtext), maxtext),
        "MaxText base, fsdp 64, Llama 3 8B": (
            MAXTEXT_LLAMA, config.from_logical_rules(rules.MAXTEXT_RULES, named, fsdp), fsdp),
        "EasyLM Llama, Llama 3 8B": (EASYLM_LLAMA, config.from_regexes(rules.EASYLM_LLAMA), easylm),
        "EasyLM GPT-J, 6B": (GPTJ_6B, config.from_regexes(rules.EASYLM_GPTJ), easylm),
        "Keras Llama, Llama 3 8B": (KERAS_LLAMA, config.from_layout_map(rules.KERAS_LLAMA), keras),
        "Keras Qwen3-MoE, 30B-A3B": (KERAS_QWEN3_MOE, config.from_layout_map(rules.KERAS_QWEN3_MOE), keras_moe),
        "Keras Qwen3-MoE that cuts experts, 30B-A3B": (
            KERAS_QWEN3_MOE, config.from_layout_map(rules.KERAS_QWEN3_MOE_CUT), keras_moe),
        "tunix Llama 3, 8B": (TUNIX_LLAMA3, config.from_tunix(rules.TUNIX_LLAMA3), tunix),
        "tunix Gemma, 7B": (TUNIX_GEMMA, config.from_tunix(rules.TUNIX_GEMMA), tunix),
        **example_files(),
    }  # fmt: skip


def example_files() -> dict[str, Case]:
    """The dense files of `examples/configs` on Llama 3 8B in the names of Hugging Face."""
    names = {
        "embed": "model/embed_tokens/embedding", "last": "model/norm/scale", "head": "lm_head/kernel",
        "norm": "model/layers/{i}/input_layernorm/scale", "norm2": "model/layers/{i}/post_attention_layernorm/scale",
    } | _under(
        "model/layers/{i}/self_attn", q="q_proj/kernel", k="k_proj/kernel", v="v_proj/kernel", o="o_proj/kernel"
    ) | _under("model/layers/{i}/mlp", gate="gate_proj/kernel", up="up_proj/kernel", down="down_proj/kernel")  # fmt: skip
    model = Model(names, **LLAMA_8B)
    out = {}
    for file, mesh in (
        ("llama-fsdp", {"data": 1, "fsdp": 64}), ("llama-fsdp-tp", {"data": 1, "fsdp": 16, "tensor": 4}),
    ):  # fmt: skip
        config = jshard.Config.load(ROOT / "examples" / "configs" / f"{file}.yaml")
        out[f"{file}.yaml, Llama 3 8B"] = model, dataclasses.replace(config, activations=()), mesh
    return out


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of SGD."""

    def step(params: Any, tokens: jax.Array) -> Any:
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, grads)

    return step


def run(name: str, machine: str, layers: int) -> dict[str, Any]:
    """One row: the file and the search on a machine; `layers`: 0 for all."""
    model, config, mesh = cases()[name]
    if layers:
        model = dataclasses.replace(model, layers=layers)
    batch = [a for a in mesh if a in ("dp", "data", "fsdp", "batch") and mesh[a] > 1]
    sizes = ", ".join(f"{a}: {n}" for a, n in mesh.items() if n > 1 or a in config.axes_in_rules())
    config = config.override(
        f"mesh={{machine: '{machine}', axes: {{{sizes}}}}}", f"inputs.tokens=[[{', '.join(batch)}], null]",
        "memory_budget=10TiB", "level=2",
    )  # fmt: skip
    begin = time.process_time()
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    report = jshard.audit(step_of(model.loss), config, model.parameters(), tokens)
    return {
        "name": name, "machine": machine, "layers": model.layers, "cpu": round(time.process_time() - begin, 1),
        "file": [report.file.step, report.file.peak_bytes], "search": [report.search.step, report.search.peak_bytes],
        "whole": report.whole_bytes, "largest": report.whole[0].path if report.whole else "",
        "problems": sorted({p.kind for p in report.problems}), "proof": report.proof,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The page of all rows of full depth."""
    full = {name: case[0].layers for name, case in cases().items()}
    lines = [
        "# Shardings that others publish, beside the search",
        "",
        f"Written by `python -m benchmarks.quality.audit`: SGD steps in bfloat16 on {BATCH} x {LENGTH} tokens, all layers,"
        " each computed again in the backward pass, no memory limit. Predictions of the model, not measurements. What is"
        " whole counts parameters that every device holds all of, under the file. Llama 3 8B has 15 GiB of parameters,"
        " Qwen3-30B-A3B 57 GiB.",
        "",
        "| rules, model | machine | step: file, search | peak: file, search | whole on every device | in the check |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        if full.get(r["name"]) != r["layers"]:
            continue
        (a, m), (b, n) = r["file"], r["search"]
        whole = f"{format_bytes(r['whole'])}{', ' + r['largest'] if r['largest'] else ''}"
        lines.append(
            f"| {r['name']} | {r['machine']} | {format_seconds(a)}, {format_seconds(b)} ({a / b:.2f} x)"
            f" | {format_bytes(m)}, {format_bytes(n)} | {whole} | {', '.join(r['problems']) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rows that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(r["name"], r["machine"], r["layers"]) for r in rows}
    for name, (model, *_) in cases().items():
        for machine in MACHINES:
            if (name, machine, options.layers or model.layers) in done or options.only not in name:
                continue
            row = run(name, machine, options.layers)
            print(json.dumps(row), flush=True)
            if not options.layers:
                rows.append(row)
                ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
