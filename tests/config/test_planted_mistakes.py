"""Ten mistakes in configurations: each is found before anything runs, and named with file, line and advice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
import jshard.flax  # noqa: F401  modules get `.shard`
from tests.helpers.decoder_models import SIZES, Decoder, tokens_of


MESH = "mesh: {data: 2, fsdp: 2, tensor: 4}\n"
RULES = {
    "model.embed_tokens.embedding": "[tensor, fsdp]",
    "model.layers.*.self_attn.{q,k,v}_proj.kernel": "[fsdp, tensor]",
    "model.layers.*.self_attn.o_proj.kernel": "[tensor, fsdp]",
    "model.layers.*.mlp.{gate,up}_proj.kernel": "[fsdp, tensor]",
    "model.layers.*.mlp.down_proj.kernel": "[tensor, fsdp]",
    "lm_head.kernel": "[fsdp, tensor]",
    "**.scale": "null",
}


def text(**changes: str) -> str:
    rules = RULES | {k: v for k, v in changes.items() if v}
    lines = [f'  "{k}": {v}' for k, v in rules.items() if changes.get(k, "-") != ""]
    inputs = "inputs: {tokens: [data, null]}\n"
    return MESH + inputs + "parameters:\n" + "\n".join(lines) + "\n"


def model() -> Decoder:
    return nnx.eval_shape(lambda: Decoder(SIZES["llama"], nnx.Rngs(0)))


def problems(config: str, tree: object = None) -> dict[str, jshard.Config]:
    report = jshard.Config.of(config).check(tree or model(), *(() if tree else (tokens_of(),)))
    found = {}
    for p in report.problems:
        found.setdefault(p.kind, p)
    return found


def test_a_right_file_has_no_problem() -> None:
    report = jshard.Config.of(text()).check(model(), tokens_of())
    assert report.ok and not report.problems
    # By hand: 8192 bytes of embedding and head each, cut 8 ways; and so on for two layers.
    layer = 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) // 8 + 4 * 32 * 2
    assert report.bytes_per_device == 2 * 8192 // 8 + 2 * layer + 4 * 32 + 8 * 8 * 4 // 2


def test_a_typo() -> None:
    config = text(**{"lm_head.kernel": "", "lm_haed.kernel": "[fsdp, tensor]"})
    p = problems(config)["unmatched"]
    assert p.name == "lm_haed.kernel" and p.where == "config:10" and "lm_head.kernel" in p.fix and p.error
    with pytest.raises(jshard.ShardError, match="lm_haed.kernel' of parameters matches nothing"):
        jshard.shard(lambda m, tokens: m(tokens), config=config).plan(model(), tokens_of())


def test_a_missing_layer() -> None:
    config = text().replace("layers.*.mlp.down_proj", "layers.1.mlp.down_proj")
    p = problems(config)["missing layer"]
    assert p.name == "model.model.layers.0.mlp.down_proj.kernel" and p.error and "8,192 bytes" in p.what


def test_a_shadowed_rule() -> None:
    config = text(**{"**.down_proj.kernel": "[fsdp, null]"})
    p = problems(config)["shadowed"]
    assert p.name == "**.down_proj.kernel" and "model.layers.*.mlp.down_proj.kernel" in p.what and p.error


def test_the_entry_of_one_layer_for_a_stack() -> None:
    """The dimension of the layers is put where the loop runs over it, and not at the end, which cut the inputs."""

    def model(p, x):
        return jax.lax.scan(lambda h, layer: (h + jnp.tanh(h @ layer["up"]) @ layer["down"], None), x, p)[0]

    args = {"up": jnp.ones((12, 8, 32)), "down": jnp.ones((12, 32, 8))}, jnp.ones((16, 8))
    config = {"mesh": {"data": 2, "model": 4}, "parameters": {"up": [None, "model"]}}
    with pytest.raises(jshard.ShardError, match="has 2 dimensions, p.up has 3") as error:
        jshard.shard(model, config=config).plan(*args)
    assert error.value.fix.startswith("up: [null, null, model], one item for each dimension")


def test_a_wrong_rank() -> None:
    p = problems(text(**{"lm_head.kernel": "[fsdp, tensor, null]"}))["rank"]
    assert p.name == "lm_head.kernel" and p.refuses and "[fsdp, tensor]" in p.fix


def test_a_cut_that_does_not_divide() -> None:
    sizes = dataclasses.replace(SIZES["llama"], vocab=66)
    tree = nnx.eval_shape(lambda: Decoder(sizes, nnx.Rngs(0)))
    report = jshard.Config.of(text()).check(tree, tokens_of())
    wrong = [p for p in report.problems if p.kind == "divides"]
    assert {p.name for p in wrong} == {"model.embed_tokens.embedding", "lm_head.kernel"}
    assert (
        "of size 66 in dimension 0, is not divided by 4, the size of tensor" in wrong[-1].what
        or wrong[0].what
    )


def test_an_axis_that_no_rule_uses() -> None:
    p = problems(
        text().replace("fsdp: 2", "fsdp: 2, expert: 1, idle: 1").replace("data: 2", "data: 1, spare: 2")
    )
    assert p["unused axis"].name == "spare" and not p["unused axis"].error


def test_the_orientation_of_torch() -> None:
    turned = {
        "model.layers.*.self_attn.{q,k,v}_proj.kernel": "[tensor, fsdp]",
        "model.layers.*.self_attn.o_proj.kernel": "[fsdp, tensor]",
        "model.layers.*.mlp.{gate,up}_proj.kernel": "[tensor, fsdp]",
        "model.layers.*.mlp.down_proj.kernel": "[fsdp, tensor]",
    }
    config = text(**turned).replace("tokens: [data, null]", "tokens: [[data, fsdp], null]")
    p = problems(config)["orientation"]
    assert "tensor" in p.what and "[out, in]" in p.what and "torch:" in p.fix
    assert "orientation" not in problems(
        text().replace("tokens: [data, null]", "tokens: [[data, fsdp], null]")
    )


def test_the_experts_that_keras_leaves_whole() -> None:
    sizes = dataclasses.replace(SIZES["mixtral"], layers=1)
    tree = nnx.eval_shape(lambda: Decoder(sizes, nnx.Rngs(0)))
    rules = "\n".join(f'  - ["{k}", {v}]' for k, v in (
        ("embed_tokens.*embedding", "[tensor, null]"), ("self_attn.*(q|k|v)_proj.*kernel", "[null, tensor]"),
        ("self_attn.*o_proj.*kernel", "[tensor, null]"), ("block_sparse_moe.*gate.*kernel", "[null, tensor]"),
        ("block_sparse_moe.*experts.*kernel", "[tensor, null, null]"), ("lm_head.*kernel", "[null, tensor]"),
    ))  # fmt: skip
    config = jshard.Config.of(MESH + "unlisted: replicated\nregex_match: only\nregexes:\n" + rules)
    report = config.check(tree, tokens_of())
    assert "block_sparse_moe.*experts.*kernel" in [p.name for p in report.errors if p.kind == "unmatched"]
    holes = [p for p in report.problems if p.kind == "without rule"]
    whole = 4 * 32 * 64 * 4
    assert any("experts.w1" in p.name and f"replicated: {whole:,} bytes" in p.what for p in holes)


def test_the_catch_all_of_easylm() -> None:
    tree = {
        "params": {
            f"h.{i}": {"wq": {"kernel": jnp.zeros((8, 8))}, "new": jnp.zeros((8, 8))} for i in range(2)
        }
    }
    config = MESH + 'regexes:\n  - ["wq/kernel", [fsdp, tensor]]\n  - [".*", null]\n'
    p = problems(config, tree)["catch-all"]
    assert "new" in p.name and "a rule that matches everything: 512 bytes" in p.what and p.where == "config:4"


def test_an_axis_named_twice() -> None:
    with pytest.raises(jshard.ShardError) as error:
        jshard.Config.of(text(**{"lm_head.kernel": "[tensor, [data, tensor]]"}))
    assert str(error.value) == (
        "an entry names the axis 'tensor' 2 times\n  where: config:9\n"
        "  write instead: each mesh axis at most once in an entry"
    )


def test_warnings_in_place_of_errors() -> None:
    config = jshard.Config.of(
        {"mesh": {"x": 2}, "strict": False, "parameters": {"w": ["x", None], "v": [None]}}
    )
    f32 = jax.ShapeDtypeStruct((4, 4), "float32")
    with pytest.warns(UserWarning, match="'v' of parameters matches nothing"):
        plan = jshard.shard(lambda p: p["w"] * 2, config=config).plan({"w": f32})
    assert str(plan.inputs[0].layout) == "(x, -)"
    with pytest.raises(jshard.ShardError, match="matches nothing"):
        jshard.shard(lambda p: p["w"] * 2, config=config, strict=True).plan({"w": f32})


def test_a_report_prints_problems_and_tensors() -> None:
    wrong = jshard.Config.of(text(**{"lm_head.kernel": "", "lm_haed.kernel": "[fsdp, tensor]"}))
    report = wrong.check(model(), tokens_of())
    head, *lines = str(report).splitlines()
    assert head.startswith("config on data=2 x fsdp=2 x tensor=4: 1 error,")
    assert lines[0] == "errors" and lines[1].startswith("  unmatched: ")
    assert lines[2].startswith("    where: config:10; write instead: ")
    assert lines[4].startswith("  without rule: model.lm_head.kernel has no rule")
    [head] = [line for line in lines if line.startswith("  model.lm_head.kernel ")]
    assert head.split()[1:] == ["float32[32,64]", "?", "8,192", "derived"]
    assert [p for p in report.problems if not p.error] == list(report.warnings)


@pytest.mark.parametrize(
    "section, name, fix",
    [
        ("regexes", "result", "'result' is a name for outputs"),
        ("gradients", "w", "'w' is a name for products"),
        ("gradients", "q", "the function has no names for gradients"),
        ("parameters", "result", "'result' is a name for outputs"),
        ("outputs", "w", "none is near; there are result"),
        ("activations", "tanh", "the function has no names for activations"),
        ("products", "v", "none is near; there are w"),
    ],
)
def test_names_of_the_section_are_proposed_and_none_of_others(section, name, fix):
    """Written there, a name that another section has was refused in turn."""
    rules = [[name, ["x", None]]] if section == "regexes" else {name: ["x", None]}
    args = {"w": jnp.ones((8, 16))}, jnp.ones((16, 8))
    with pytest.raises(jshard.ShardError, match=f"{name!r} of {section} matches nothing") as error:
        jshard.shard(lambda p, x: jnp.tanh(x @ p["w"]), config={"mesh": {"x": 8}, section: rules}).plan(*args)
    assert error.value.fix.startswith(fix)


def test_unlisted_needs_a_rule_that_says_which_arguments_hold_parameters():
    """Without one it did nothing: every weight was laid out by the search."""
    args = {"w": jnp.ones((8, 16)), "v": jnp.ones((16, 8))}, jnp.ones((16, 8))
    config = {"mesh": {"x": 8}, "unlisted": "replicated"}

    def model(p, x):
        return jnp.tanh(x @ p["w"] @ p["v"])

    with pytest.raises(jshard.ShardError, match="'unlisted: replicated' replicates nothing") as error:
        jshard.shard(model, config=config).plan(*args)
    assert error.value.fix.startswith("a rule for a tensor of each, as parameters: {'p.v': '?'}")
    said = {**config, "parameters": {"p.v": "?"}, "inputs": {"x": ["x", None]}}
    plan = jshard.shard(model, config=said).plan(*args)
    assert plan.inputs[1].layout.dims == ((), ())  # p.w
