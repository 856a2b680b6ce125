"""Configurations of an encoder-decoder, a vision transformer and a mixture with shared experts, with optimizers in parts.

No false alarm on a right file; a planted mistake is named with its line. The models are plain functions, in the style of
T5 (unrolled, cross attention), ViT (scanned, convolution in front) and DeepSeek-MoE (shared experts beside routed ones).
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jshard


D, F, H, V, L, E = 16, 64, 4, 96, 3, 8
MESH = "mesh: {data: 2, fsdp: 2, tensor: 4}\n"


def attend(x: jax.Array, y: jax.Array, w: Any) -> jax.Array:
    q, k, v = x @ w["q"], y @ w["k"], y @ w["v"]
    q, k, v = (a.reshape(*a.shape[:2], H, -1) for a in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*x.shape[:2], -1) @ w["o"]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def gated(x: jax.Array, w: Any) -> jax.Array:
    return (jax.nn.gelu(x @ w["wi_0"]) * (x @ w["wi_1"])) @ w["wo"]


def t5(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["shared"]["embedding"][tokens]
    for b in p["encoder"]["block"]:
        x = x + attend(norm(x, b["ln"]["weight"]), norm(x, b["ln"]["weight"]), b["attention"])
        x = x + gated(x, b["mlp"])
    y = p["shared"]["embedding"][tokens[:, ::-1]]
    for b in p["decoder"]["block"]:
        y = y + attend(norm(y, b["ln"]["weight"]), norm(y, b["ln"]["weight"]), b["attention"])
        y = y + attend(y, x, b["cross"])
        y = y + gated(y, b["mlp"])
    return jax.nn.logsumexp(y @ p["head"], -1).mean()


def vit(p: Any, images: jax.Array) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        images, p["patch"]["kernel"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = x.reshape(x.shape[0], -1, D) + p["position"]

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = x + attend(norm(x, w["norm1"]), norm(x, w["norm1"]), w["attention"])
        h = jax.nn.gelu(norm(x, w["norm2"]) @ w["fc1"]["kernel"] + w["fc1"]["bias"])
        return x + h @ w["fc2"]["kernel"] + w["fc2"]["bias"], None

    x, _ = jax.lax.scan(block, x, p["blocks"])
    return jax.nn.logsumexp(x.mean(1) @ p["head"]["kernel"] + p["head"]["bias"], -1).mean()


def moe(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens]
    for w in p["layers"]:
        x = x + attend(x, x, w["attention"])
        share = jax.nn.softmax(x @ w["moe"]["router"])
        e = w["moe"]["experts"]
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->ebsf", x, e["gate"])) * jnp.einsum(
            "bsd,edf->ebsf", x, e["up"]
        )
        x = x + jnp.einsum("ebsf,efd,bse->bsd", hidden, e["down"], share)
        s = w["moe"]["shared"]
        x = x + (jax.nn.silu(x @ s["gate"]) * (x @ s["up"])) @ s["down"]
    return jax.nn.logsumexp(x @ p["head"], -1).mean()


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


ATTENTION = {n: f32(D, D) for n in "qkvo"}
MLP = {"wi_0": f32(D, F), "wi_1": f32(D, F), "wo": f32(F, D)}
GLU = {"gate": f32(D, F), "up": f32(D, F), "down": f32(F, D)}


def t5_parameters(vocab: int = V) -> Any:
    block = {"attention": ATTENTION, "mlp": MLP, "ln": {"weight": f32(D)}}
    return {
        "shared": {"embedding": f32(vocab, D)}, "head": f32(D, vocab), "encoder": {"block": [block] * L},
        "decoder": {"block": [block | {"cross": ATTENTION}] * L},
    }  # fmt: skip


def vit_parameters(vocab: int = V) -> Any:
    block = {
        "attention": ATTENTION, "norm1": f32(D), "norm2": f32(D), "fc1": {"kernel": f32(D, F), "bias": f32(F)},
        "fc2": {"kernel": f32(F, D), "bias": f32(D)},
    }  # fmt: skip
    stacked = jax.tree.map(lambda s: f32(L, *s.shape), block)
    head = {"kernel": f32(D, vocab), "bias": f32(vocab)}
    return {"patch": {"kernel": f32(4, 4, 3, D)}, "position": f32(1, 16, D), "blocks": stacked, "head": head}


def moe_parameters(vocab: int = V) -> Any:
    experts = {"gate": f32(E, D, F), "up": f32(E, D, F), "down": f32(E, F, D)}
    layer = {"attention": ATTENTION, "moe": {"router": f32(D, E), "experts": experts, "shared": GLU}}
    return {"embed": f32(vocab, D), "head": f32(D, vocab), "layers": [layer] * L}


def decays(params: Any) -> Any:
    return jax.tree.map(lambda a: a.ndim > 1, params)


def groups(params: Any) -> Any:
    return jax.tree.map(lambda a: "matrices" if a.ndim > 2 else "others", params)


TOKENS, IMAGES = jax.ShapeDtypeStruct((8, 12), "int32"), f32(8, 16, 16, 3)
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, optax.GradientTransformation]] = {
    "t5": (t5, t5_parameters, TOKENS, optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.masked(optax.trace(0.9), decays), optax.scale(-0.1))),
    "vit": (vit, vit_parameters, IMAGES, optax.multi_transform(
        {"matrices": optax.adamw(1e-3), "others": optax.sgd(1e-2, momentum=0.9)}, groups)),
    "moe": (moe, moe_parameters, TOKENS, optax.chain(
        optax.scale_by_factored_rms(), optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation())),
}  # fmt: skip
RULES = {
    "t5": {
        "shared.embedding": "[tensor, fsdp]", "head": "[fsdp, tensor]", "**.{q,k,v}": "[fsdp, tensor]",
        "**.{attention,cross}.o": "[tensor, fsdp]", "*.block.*.mlp.{wi_0,wi_1}": "[fsdp, tensor]",
        "*.block.*.mlp.wo": "[tensor, fsdp]", "**.ln.weight": "null",
    },
    "vit": {
        "patch.kernel": "[null, null, null, fsdp]", "position": "null", "blocks.*.attention.{q,k,v}": "[fsdp, tensor]",
        "blocks.*.attention.o": "[tensor, fsdp]", "blocks.*.{norm1,norm2}": "null", "blocks.*.fc1.kernel": "[fsdp, tensor]",
        "blocks.*.fc1.bias": "[tensor]", "blocks.*.fc2.kernel": "[tensor, fsdp]", "blocks.*.fc2.bias": "null",
        "head.kernel": "[fsdp, tensor]", "head.bias": "[tensor]",
    },
    "moe": {
        "embed": "[tensor, fsdp]", "head": "[fsdp, tensor]", "layers.*.attention.{q,k,v}": "[fsdp, tensor]",
        "layers.*.attention.o": "[tensor, fsdp]", "layers.*.moe.router": "[fsdp, null]",
        "layers.*.moe.experts.{gate,up}": "[tensor, fsdp, null]", "layers.*.moe.experts.down": "[tensor, null, fsdp]",
        "layers.*.moe.shared.{gate,up}": "[fsdp, tensor]", "layers.*.moe.shared.down": "[tensor, fsdp]",
    },
}  # fmt: skip


def call_of(family: str, vocab: int = V) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    loss, parameters, batch, tx = FAMILIES[family]

    def train(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = parameters(vocab)
    return train, (params, jax.eval_shape(tx.init, params), batch)


def report(tmp_path: pathlib.Path, family: str, changes: dict[str, str], vocab: int = V) -> Any:
    """The report of the family's file with some rules changed, added, or left out ("")."""
    rules = {k: v for k, v in (RULES[family] | changes).items() if v}
    rank = "[[data, fsdp], null]" if family != "vit" else "[[data, fsdp], null, null, null]"
    path = tmp_path / f"{family}.yaml"
    lines = [f'  "{k}": {v}' for k, v in rules.items()]
    path.write_text(f"{MESH}inputs: {{batch: {rank}}}\nparameters:\n" + "\n".join(lines) + "\n")
    train, args = call_of(family, vocab)
    return jshard.Config.load(path).check(train, *args)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_false_alarm_on_a_right_file(family: str, tmp_path: pathlib.Path) -> None:
    found = report(tmp_path, family, {})
    assert not found.problems, str(found)
    by_path = {t.path: t for t in found.tensors if t.kind == "argument"}
    params, state = call_of(family)[1][:2]
    shapes = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    same = [
        t
        for t in by_path.values()
        if t.path.startswith("opt_state") and t.shape in shapes.values() and t.shape
    ]
    mirrored = [t for t in same if t.status == "mirrors"]
    assert len(mirrored) == len(same) >= len(shapes) // 2
    assert all(by_path[t.of].entry == t.entry for t in mirrored)


MISTAKES = [
    ("t5", "typo", {"*.block.*.mlp.wo": "", "*.block.*.mpl.wo": "[tensor, fsdp]"}, "unmatched", "mpl.wo", True),
    ("t5", "a layer left out", {"*.block.*.mlp.wo": "", "{encoder,decoder}.block.{0,2}.mlp.wo": "[tensor, fsdp]"},
     "missing layer", "params.decoder.block.1.mlp.wo", True),
    ("t5", "cross attention left out", {"**.{q,k,v}": "", "**.{attention}.{q,k,v}": "[fsdp, tensor]"}, "without rule",
     "params.decoder.block.0.cross.k", False),
    ("t5", "a rule behind another", {"**.wo": "[null, fsdp]"}, "shadowed", "**.wo", True),
    ("vit", "rank of a convolution", {"patch.kernel": "[null, fsdp]"}, "rank", "patch.kernel", True),
    ("vit", "the layers' dimension twice", {"blocks.*.fc1.kernel": "[null, fsdp, tensor, null]"},
     "unmatched", "blocks.*.fc1.kernel", True),
    ("vit", "an axis of another mesh", {"head.bias": "[model]"}, "axis", "head.bias", True),
    ("vit", "keys the other way round", {
        "blocks.*.attention.{q,k,v}": "", "blocks.*.attention.{q,v}": "[fsdp, tensor]",
     "blocks.*.attention.k": "[tensor, fsdp]"}, "cut otherwise", "params.blocks.attention.k", False),
    ("moe", "experts' weights without rule", {"layers.*.moe.experts.{gate,up}": "", "layers.*.moe.experts.down": ""},
     "without rule", "params.layers.0.moe.experts.gate", False),
    ("moe", "torch's orientation", {
        "layers.*.attention.{q,k,v}": "[tensor, fsdp]", "layers.*.attention.o": "[fsdp, tensor]",
        "layers.*.moe.shared.{gate,up}": "[tensor, fsdp]", "layers.*.moe.shared.down": "[fsdp, tensor]",
     }, "orientation", "tensor", False),
    ("moe", "a router of eight cut over sixteen", {"layers.*.moe.router": "[null, [data, fsdp, tensor]]"}, "divides",
     "layers.*.moe.router", True),
]  # fmt: skip


@pytest.mark.parametrize("family, what, changes, kind, name, error", MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_planted_mistake_is_named(
    family: str, what: str, changes: dict[str, str], kind: str, name: str, error: bool, tmp_path: pathlib.Path
) -> None:
    found = report(tmp_path, family, changes)
    kinds = {p.kind: p for p in found.problems}
    assert kind in kinds, str(found)
    [problem, *_] = [p for p in found.problems if p.kind == kind and name in p.name] or [kinds[kind]]
    assert name in problem.name and problem.error == error, problem
    assert f"{family}.yaml" in problem.where and problem.fix
    if kind not in ("without rule", "missing layer"):
        line = int(problem.where.rpartition(":")[2])
        written = (tmp_path / f"{family}.yaml").read_text().splitlines()[line - 1]
        assert any(key in written for key in changes), written
    assert set(kinds) <= {kind, "without rule", "cut otherwise"}, list(kinds)  # what follows from it


def test_a_vocabulary_that_does_not_divide(tmp_path: pathlib.Path) -> None:
    found = report(tmp_path, "t5", {}, vocab=98)
    assert {p.name for p in found.errors} == {"shared.embedding", "head"} and found.errors[
        0
    ].kind == "divides"
