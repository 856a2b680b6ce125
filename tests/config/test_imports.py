"""Rules of other libraries: what each means, tensor by tensor, is what the library itself computes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from flax.core import spmd as core_spmd
from jax.sharding import PartitionSpec as P

import jshard
from jshard._config.config_record import WHOLE, Entry
from jshard._config.foreign_rules import logical_names
from jshard._config.resolve import resolve
from jshard._config.tensors import TensorName
from tests.helpers import foreign_rules as rules


def entries(config: Any, shapes: dict[str, tuple[int, ...]], under: str = "params") -> dict[str, Any]:
    """The spec of each tensor of an argument under a configuration, by its path; padded to the rank."""
    tensors = [TensorName(f"{under}.{p}".replace("/", "."), s, "float32", under) for p, s in shapes.items()]
    found = resolve(config, tensors)
    assert not [p for p in found.problems if p.refuses]
    out = {}
    for path, row in zip(shapes, found.rows, strict=True):
        spec = spec_of(row.entry) if row.entry is not None else None
        out[path] = None if spec is None else padded(spec, len(row.tensor.shape))
    return out


def spec_of(entry: Entry) -> P | None:
    """The `PartitionSpec` of an entry by axes; None for words."""
    if isinstance(entry, str):
        return P() if entry == WHOLE else None
    return P(*(P.UNCONSTRAINED if d is None else d or None for d in entry))


def padded(spec: Any, rank: int) -> tuple:
    dims = tuple(spec or ())
    dims = (*dims, *(None,) * (rank - len(dims)))
    return tuple(d[0] if isinstance(d, tuple) and len(d) == 1 else d or None for d in dims)


# -- logical axis rules: MaxText, linen, nnx ----------------------------------------------------------------


def test_maxtext_base_means_what_linen_computes() -> None:
    config = jshard.Config.from_logical_rules(rules.MAXTEXT_RULES, rules.MAXTEXT_NAMES, rules.MAXTEXT_MESH)
    ours = entries(config, {p: (8,) * len(n) for p, n in rules.MAXTEXT_NAMES.items()}, "state")
    for path, names in rules.MAXTEXT_NAMES.items():
        theirs = nn.logical_to_mesh_axes(
            names, [(n, tuple(a) if isinstance(a, list) else a) for n, a in rules.MAXTEXT_RULES]
        )
        assert ours[path] == padded(theirs, len(names)), path
    notes = "\n".join(config.notes)
    assert "nnx would read the rules otherwise" in notes and "rules without effect" in notes


def test_the_text_of_a_maxtext_file() -> None:
    text = "mesh_axes: [data, stage, fsdp, tensor]\nici_fsdp_parallelism: 4\ndcn_data_parallelism: 2\n"
    text += "ici_pipeline_parallelism: 2\n"
    text += 'logical_axis_rules: [["embed", ["fsdp", "tensor"]], ["mlp", "tensor"], ["layers", "stage"]]\n'
    config = jshard.Config.from_logical_rules(text, {"w": ("layers", "mlp", "embed")})
    assert config.mesh.text == "{data: 2, stage: 2, fsdp: 4, tensor: 1}"
    # `embed` comes first and takes `tensor`, which `mlp` then finds in use: nothing is left for it.
    assert config.parameters[0].text == "[stage, null, [fsdp, tensor]]"
    with pytest.raises(jshard.ShardError, match="there is no logical_axis_rules"):
        jshard.Config.from_logical_rules("mesh_axes: []", {})


@pytest.mark.parametrize("seed", range(20))
def test_both_readings_on_random_rules(seed: int) -> None:
    rng = random.Random(seed)
    axes, names = ("a", "b", "c", "d"), ("embed", "mlp", "heads", "kv", "typo")
    pairs = []
    for _ in range(rng.randrange(1, 9)):
        some = tuple(rng.sample(axes, rng.randrange(0, 3)))
        pairs.append((rng.choice(names[:4]), rng.choice([some, some[0] if some else None, None])))
    for own in itertools.permutations(names, 3):
        linen = jshard.Config.from_logical_rules(pairs, {"w": own})
        assert entries(linen, {"w": (8, 8, 8)})["w"] == padded(nn.logical_to_mesh_axes(own, pairs), 3)
        theirs = padded(core_spmd.apply_rules(P(*own), pairs), 3)
        used = [a for d in theirs for a in (d if isinstance(d, tuple) else (d,)) if a]
        if len(set(used)) == len(used):  # otherwise no `PartitionSpec` of a mesh
            nnx_config = jshard.Config.from_logical_rules(pairs, {"w": own}, reading="nnx")
            assert entries(nnx_config, {"w": (8, 8, 8)})["w"] == theirs


def test_names_from_linen_boxes_and_nnx_variables() -> None:
    init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", "mlp"))
    variables = jax.eval_shape(nn.Dense(4, kernel_init=init).init, jax.random.key(0), jnp.ones((2, 8)))
    assert logical_names(variables) == {"params.kernel": ("embed", "mlp")}
    kernel_init = nnx.with_partitioning(nnx.initializers.zeros_init(), ("fsdp", "tp"))
    with jax.set_mesh(jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4])):
        model = nnx.Linear(8, 4, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    assert logical_names(nnx.state(model)) == {"kernel": ("fsdp", "tp")}
    config = jshard.Config.from_metadata(nnx.state(model), {"fsdp": 2, "tp": 2})
    assert [(r.name, r.text) for r in config.parameters] == [("kernel", "[fsdp, tp]")]
    with pytest.raises(jshard.ShardError, match="carries no partitioning metadata"):
        jshard.Config.from_metadata({"w": jnp.ones(3)})


# -- regular expressions: EasyLM, Keras ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["easylm_llama", "easylm_gptj"])
def test_easylm(name: str) -> None:
    theirs = rules.layouts(name)  # of parameters, and of the moments that AdamW keeps of them
    ours = entries(
        jshard.Config.from_regexes(rules.rules(name)), {p: s for p, (s, _) in theirs.items()}, "state"
    )
    assert sum(p.startswith("opt_state/1/0/mu/") for p in theirs) > 10
    for path, (shape, spec) in theirs.items():
        if shape:
            assert ours[path] == padded(spec, len(shape)), path


def test_a_block_of_another_name_that_easylm_leaves_whole_is_named() -> None:
    shapes = {n.replace("/mlp/", "/feed_forward/"): s for n, s in rules.parameters("easylm_gptj").items()}
    config = jshard.Config.from_regexes(rules.EASYLM_GPTJ, {"fsdp": 2, "mp": 2})
    tensors = [TensorName(f"p.{n}".replace("/", "."), s, "float32", "p") for n, s in shapes.items()]
    found = resolve(config, tensors, sizes={"fsdp": 2, "mp": 2})
    caught = {p.name for p in found.problems if p.kind == "catch-all"}
    assert "p.transformer.h.0.feed_forward.fc_in.kernel" in caught
    assert {p.name for p in found.problems if p.kind == "unmatched"} >= {
        "mlp/fc_in/kernel",
        "mlp/fc_out/kernel",
    }


@pytest.mark.parametrize("name", ["keras_llama", "keras_qwen3_moe", "keras_qwen3_moe_cut"])
def test_keras_layout_maps(name: str) -> None:
    theirs = rules.layouts(name)
    shapes = {p: s for p, (s, _) in theirs.items()}
    config = jshard.Config.from_layout_map(dict(rules.rules(name)), {"batch": 2, "model": 4})
    ours = entries(config, shapes, "variables")
    for path, (shape, spec) in theirs.items():
        assert ours[path] == padded(spec, len(shape)), path
    again = jshard.Config.of(config.to_yaml())
    assert again == config and entries(again, shapes, "variables") == ours


def test_the_experts_that_one_map_of_keras_leaves_whole_and_its_successor_cuts() -> None:
    def whole(name: str) -> set[str]:
        shapes = {p: s for p, (s, _) in rules.layouts(name).items()}
        config = jshard.Config.from_layout_map(dict(rules.rules(name)), {"batch": 2, "model": 4})
        tensors = [TensorName(f"v.{p}".replace("/", "."), s, "float32", "v") for p, s in shapes.items()]
        found = resolve(config, tensors, sizes={"batch": 2, "model": 4})
        return {p.name.rpartition(".")[2] for p in found.problems if p.kind == "without rule"}

    experts = {"expert_feedforward_gate_dense", "expert_feedforward_output_dense"}
    assert experts <= whole("keras_qwen3_moe") and not experts & whole("keras_qwen3_moe_cut")


def test_the_whole_path_or_a_part_of_it() -> None:
    """Keras 3.14 went over from `re.search` to `re.fullmatch`: the same map means less."""
    pairs, shapes = {"dense.kernel": (None, "model")}, {"dense/kernel": (4, 4), "layer/dense/kernel": (4, 4)}
    full = entries(jshard.Config.from_layout_map(pairs), shapes)
    part = entries(jshard.Config.from_layout_map(pairs, full=False), shapes)
    assert full == {"dense/kernel": (None, "model"), "layer/dense/kernel": (None, None)}
    assert part == dict.fromkeys(shapes, (None, "model"))


def test_two_expressions_of_keras_on_one_path_are_refused() -> None:
    pairs = {"dense.kernel": (None, "model"), ".*kernel": ("model", None)}
    for full in (True, False):
        config = jshard.Config.from_layout_map(pairs, full=full)
        found = resolve(config, [TensorName("p.dense.kernel", (4, 4), "float32", "p")])
        assert [p.kind for p in found.problems if p.refuses] == ["tie"]


# -- tunix, levanter ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class TunixModelConfig:
    """The two fields of tunix' `ModelConfig` that decide how weights are cut."""

    shd_config: Any
    num_kv_heads: int


@pytest.mark.parametrize(
    "name, kv_heads", [("tunix_llama3", 4), ("tunix_gemma", 4), ("tunix_gemma_one_kv_head", 1)]
)
def test_tunix(name: str, kv_heads: int) -> None:
    theirs = rules.layouts(name)
    shapes = {p: s for p, (s, _) in theirs.items()}
    configs = [jshard.Config.from_tunix(TunixModelConfig(rules.fields(name), kv_heads))]
    if kv_heads > 1:
        configs.append(jshard.Config.from_tunix(rules.fields(name)))
    for config in configs:
        ours = entries(config, shapes, "model")
        for path, (shape, spec) in theirs.items():
            assert ours[path] == padded(spec, len(shape)), path
    with pytest.raises(jshard.ShardError, match="'q_wieght' is no field"):
        jshard.Config.from_tunix({"q_wieght": ("tp",)})


def test_levanter_axis_mapping() -> None:
    mapping = {"embed": "data", "vocab": ("model", "replica"), "heads": "model"}
    names = {"transformer.attn.q": ("heads", "head_size", "embed"), "embeddings.weight": ("vocab", "embed")}
    config = jshard.Config.from_axis_mapping(mapping, names)
    ours = entries(config, {p: (8,) * len(n) for p, n in names.items()}, "m")
    assert ours == {
        # haliax: the mesh axis of each logical axis, None for one without.
        p: padded([mapping.get(n) for n in own], len(own))
        for p, own in names.items()
    }
    with pytest.raises(jshard.ShardError, match="is cut twice over 'model'"):
        jshard.Config.from_axis_mapping(mapping, {"w": ("heads", "vocab")})


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "model": 4},
        jax.sharding.AbstractMesh((2, 4), ("data", "model")),
        jshard.topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False),
    ],
)
def test_rules_of_others_take_a_mesh_as_shard_does(mesh) -> None:
    spec = jax.sharding.PartitionSpec(None, "model")
    for config in (
        jshard.Config.from_regexes([("up", spec)], mesh=mesh),
        jshard.Config.from_layout_map({"up": spec}, mesh=mesh),
        jshard.Config.from_axis_mapping({"mlp": "model"}, {"up": ("embed", "mlp")}, mesh=mesh),
    ):
        assert config.to_yaml().startswith("mesh: {data: 2, model: 4}\n")


def test_what_is_no_mesh_and_what_are_no_rules() -> None:
    with pytest.raises(jshard.ShardError, match="mesh is an int, 8") as error:
        jshard.Config.from_regexes([("up", jax.sharding.PartitionSpec())], mesh=8)
    assert error.value.fix == 'a mesh, or the sizes of its axes: {"data": 2, "model": 4}'
    for pairs in ({"up": None}, [("up",)], ["up"]):
        with pytest.raises(jshard.ShardError, match="not pairs of a regular expression and a spec"):
            jshard.Config.from_regexes(pairs)


def test_a_file_that_cannot_be_written_is_named(tmp_path) -> None:
    config = jshard.Config.of({"mesh": {"x": 2}})
    with pytest.raises(jshard.ShardError, match="nowhere"):
        config.save(tmp_path / "nowhere" / "config.yaml")


def test_logical_axes_of_another_rank() -> None:
    w, mesh = jax.ShapeDtypeStruct((8, 16), "float32"), jax.sharding.AbstractMesh((8,), ("x",))
    plan = jshard.shard(lambda p: p["w"] * 2, mesh=mesh, in_strategy=({"w": (1, 8)},)).plan({"w": w})
    with pytest.raises(jshard.ShardError, match="p.w has 2 dimensions, and the logical axes") as error:
        plan.to_rules("logical", names={"p.w": ("embed",)})
    assert error.value.fix == "a name or None for each dimension"
