"""torchprime's flat files on Flax models: every kind of line, as YAML and as an override, in the compiled program."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jshard
from tests.helpers.decoder_models import SIZES, Decoder, tokens_of


MESH = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}

# A line of each kind of torchprime's guide; the tensor that it is about, and its layout on a Flax model.
LINES = {
    "llama": [
        ("lm_head.weight", "[tensor, fsdp]", "model.lm_head.kernel", "(fsdp, tensor)"),
        ("model.embed_tokens.weight", "[fsdp, null]", "model.model.embed_tokens.embedding", "(fsdp, -)"),
        (
            "model.layers.*.self_attn.q_proj.weight", "[[tensor, data], fsdp]",
            "model.model.layers.0.self_attn.q_proj.kernel", "(fsdp, tensor*data)",
        ),
        (
            "model.layers.*.input_layernorm.weight", "[fsdp]",
            "model.model.layers.0.input_layernorm.scale", "(fsdp)",
        ),
        ("lm_head", "[[data, fsdp], null, tensor]", "Decoder/lm_head", "(data*fsdp, -, tensor)"),
        ("model.layers.*", "[[data, fsdp], null, null]", "Decoder/model/layers.0", "(data*fsdp, -, -)"),
        ("''", "[[data, fsdp], null, null]", "Decoder", "(data*fsdp, -, -)"),
    ],
    "mixtral": [
        (
            "model.layers.*.block_sparse_moe.experts.w1", "[null, null, fsdp]",
            "model.model.layers.0.block_sparse_moe.experts.w1", "(-, -, fsdp)",
        ),
        (
            "model.layers.*.block_sparse_moe.gate.weight", "[null, fsdp]",
            "model.model.layers.0.block_sparse_moe.gate.kernel", "(fsdp, -)",
        ),
        ("model.layers.*[0]", "[[data, fsdp], null, null]", "Decoder/model/layers.0", "(data*fsdp, -, -)"),
        (
            "model.layers.*.block_sparse_moe[0]", "[data, null, tensor]",
            "Decoder/model/layers.0/block_sparse_moe", "(data, -, tensor)",
        ),
        (
            "model.layers.*.self_attn", "[data, tensor, null]",
            "Decoder/model/layers.0/self_attn", "(data, tensor, -)",
        ),
    ],
}  # fmt: skip


def small(family: str, **changes: Any) -> Decoder:
    sizes = dataclasses.replace(SIZES[family], layers=1, width=16, hidden=32, vocab=32, **changes)
    return Decoder(sizes, nnx.Rngs(0))


def call(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model(tokens)


@pytest.mark.parametrize("as_override", [False, True])
@pytest.mark.parametrize("family", LINES)
def test_every_line_in_the_compiled_program(family: str, as_override: bool) -> None:
    lines = LINES[family]
    if as_override:
        config = jshard.Config.of(MESH)
        for name, entry, *_ in lines:
            config = config.override(f"{'' if name == chr(39) * 2 else name}={entry}".replace("''", ""))
    else:
        text = "\n".join(f"{name}: {entry}" for name, entry, *_ in lines)
        config = jshard.Config.of(text).override("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    assert [r.text for r in config.torch] == [entry for _, entry, *_ in lines]
    model, tokens = small(family), tokens_of(vocab=32)
    assert config.check(model, tokens).ok
    step = jshard.shard(call, config=config)
    plan = step.plan(model, tokens, verify=not as_override)
    assert as_override or plan.verification.ok
    layouts = {r.path: str(r.layout) for r in plan.inputs}
    outputs = {o.module: str(o.results[0]) for o in plan.operators if o.primitive == "jshard_module_output"}
    for name, _, tensor, layout in lines:
        assert (layouts | outputs).get(tensor) == layout, name
    np.testing.assert_allclose(step(model, tokens), call(model, tokens), rtol=2e-5, atol=1e-6)


INSTRUCTION = re.compile(r'= \w+\[([\d,]*)\]\S* [\w-]+\(.*op_name="([^"]*)"')


@pytest.mark.parametrize("family", LINES)
def test_the_compiled_shardings_of_every_line(family: str) -> None:
    """Parameters: the input shardings of the compiled program. Outputs of modules: the blocks that it computes.

    A module's output is there with the shape of one device's block: as an instruction of the module or of the one around
    it, into which it may be fused, or as the collective that brings it to the layout of the line.
    """
    config = jshard.Config.of("\n".join(f"{name}: {entry}" for name, entry, *_ in LINES[family]))
    config = config.override("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    model, tokens = small(family), tokens_of(vocab=32)
    step = jshard.shard(call, config=config)
    plan, compiled = step.plan(model, tokens), step.lower(model, tokens).compile()
    inputs = dict(zip((r.path for r in plan.inputs), jax.tree.leaves(compiled.input_shardings), strict=True))
    blocks = [(m[1], m[2]) for m in INSTRUCTION.finditer(compiled.as_text())]
    width = {"lm_head": 32, "": 32}
    for name, entry, tensor, _ in LINES[family]:
        dims = tuple(tuple(d) if isinstance(d, list) else d for d in yaml.safe_load(entry))
        if tensor in inputs:
            wanted = P(*(dims[::-1] if name.endswith(".weight") and "embed" not in name else dims))
            rank = len(inputs[tensor].shard_shape((16,) * len(dims)))
            assert inputs[tensor].is_equivalent_to(NamedSharding(inputs[tensor].mesh, wanted), rank), name
            continue
        shape = (8, 8, width.get(name.strip("'"), 16))
        pieces = [2 ** len((d,) if isinstance(d, str) else d or ()) for d in dims]
        b, n, w = (size // k for size, k in zip(shape, pieces, strict=True))
        forms = {f"{b},{n},{w}", f"{b * n},{w}"}  # a product of matrices has batch and sequence as one
        module = tensor.rpartition("/")[0] or tensor
        assert any(
            found in forms and (f"{module}/" in at or re.search(r"/jshard\.\d+/", at)) for found, at in blocks
        ), (name, forms)


def test_a_name_and_its_elements_do_not_mix() -> None:
    config = jshard.Config.of(
        MESH | {"model.layers.*": ["data", None, None], "model.layers.*[1]": ["data", None, None]}
    )
    report = config.check(small("mixtral"), tokens_of(vocab=32))
    assert [(p.kind, p.name) for p in report.errors] == [("unmatched", "model.layers.*")]
    config = jshard.Config.of(MESH | {"model.layers.*": ["data", None, None]})
    [problem] = config.check(small("mixtral"), tokens_of(vocab=32)).errors[:1]
    assert problem.kind == "element" and "model.layers.*[0]" in problem.fix
    config = jshard.Config.of(MESH | {"model.layers.*[2]": ["data", None, None]})
    [problem] = config.check(small("mixtral"), tokens_of(vocab=32)).errors
    assert problem.kind == "unmatched" and problem.fix == "[0] to [1]"


def test_a_star_is_a_number_and_nothing_else() -> None:
    config = jshard.Config.of(MESH | {"model.layers.*.self_attn.*_proj.weight": ["fsdp", None]})
    assert [p.kind for p in config.check(small("llama"), tokens_of(vocab=32)).errors] == ["unmatched"]


def test_meshes_of_torchprime() -> None:
    text = "lm_head.weight: [fsdp, null]\nici_mesh: {data: 1, fsdp: 4, tensor: 1}\ndcn_mesh: {data: 2, fsdp: 1}\n"
    config = jshard.Config.of(text)
    assert config.mesh.sizes == {"data": 2, "fsdp": 4, "tensor": 1}
    assert config.override("ici_mesh.fsdp=2", "ici_mesh.tensor=2").mesh.sizes == {
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
    }


def test_heads_that_flax_keeps_as_dimensions() -> None:
    """torch's [out, in] of a projection to heads, on a kernel (in, heads, width), and of the projection back."""
    import jax.numpy as jnp
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            q = nn.DenseGeneral((4, 8), use_bias=False, name="q_proj")(x)
            return nn.DenseGeneral(16, axis=(-2, -1), use_bias=False, name="o_proj")(q)

    config = jshard.Config.of(
        MESH | {"q_proj.weight": ["tensor", "fsdp"], "o_proj.weight": ["fsdp", "tensor"]}
    )
    x = jnp.ones((8, 16))
    variables = Block().init(jax.random.key(0), x)
    report = config.check(Block(), variables, x)
    assert {t.path.split(".")[2]: t.entry for t in report.tensors if t.entry} == {
        "q_proj": "[fsdp, tensor, null]", "o_proj": "[tensor, null, fsdp]"
    }  # fmt: skip
