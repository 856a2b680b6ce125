"""Rules of other libraries: what each means, tensor by tensor, is what the library itself computes."""

from __future__ import annotations

import itertools
import random
import re
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


def match_partition_rules(pairs: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What EasyLM's function of this name documents: scalars whole, then the first expression found in the path."""
    out = {}
    for path, shape in shapes.items():
        one = not shape or all(s == 1 for s in shape)
        out[path] = P() if one else next(spec for regex, spec in pairs if re.search(regex, path))
    return out


@pytest.mark.parametrize(
    "pairs, shapes",
    [(rules.EASYLM_LLAMA, rules.easylm_llama(2)), (rules.EASYLM_GPTJ, rules.easylm_gptj(2))],
)
def test_easylm(pairs: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    state = {f"params/{p}": s for p, s in shapes.items()}
    state |= {f"opt_state/0/{m}/params/{p}": s for p, s in shapes.items() for m in ("mu", "nu")} | {
        "step": ()
    }
    ours = entries(jshard.Config.from_regexes(pairs), state, "train_state")
    theirs = match_partition_rules(pairs, state)
    for path, shape in state.items():
        if shape:
            assert ours[path] == padded(theirs[path], len(shape)), path


def test_a_block_of_another_name_that_easylm_leaves_whole_is_named() -> None:
    shapes = {n.replace("/mlp/", "/feed_forward/"): s for n, s in rules.easylm_gptj(2).items()}
    config = jshard.Config.from_regexes(rules.EASYLM_GPTJ, {"fsdp": 2, "mp": 2})
    tensors = [TensorName(f"p.{n}".replace("/", "."), s, "float32", "p") for n, s in shapes.items()]
    found = resolve(config, tensors, sizes={"fsdp": 2, "mp": 2})
    caught = {p.name for p in found.problems if p.kind == "catch-all"}
    assert "p.transformer.h.0.feed_forward.fc_in.kernel" in caught
    assert {p.name for p in found.problems if p.kind == "unmatched"} >= {
        "mlp/fc_in/kernel",
        "mlp/fc_out/kernel",
    }


def layout_map_get(pairs: dict[str, Any], path: str) -> Any:
    """What Keras' `LayoutMap.__getitem__` documents: the exact key, else the one expression found, else nothing."""
    if path in pairs:
        return pairs[path]
    hits = [k for k in pairs if re.search(k, path)]
    assert len(hits) < 2
    return pairs[hits[0]] if hits else None


@pytest.mark.parametrize("pairs, experts", [(rules.KERAS_LLAMA, 0), (rules.KERAS_QWEN3_MOE, 8)])
def test_keras_layout_maps(pairs: dict[str, Any], experts: int) -> None:
    shapes = rules.keras_decoder(2, experts)
    config = jshard.Config.from_layout_map(pairs, {"batch": 2, "model": 4})
    ours = entries(config, shapes, "variables")
    for path, shape in shapes.items():
        assert ours[path] == padded(layout_map_get(pairs, path), len(shape)), path
    again = jshard.Config.of(config.to_yaml())
    assert again == config and entries(again, shapes, "variables") == ours


def test_two_expressions_of_keras_on_one_path_are_refused() -> None:
    config = jshard.Config.from_layout_map({"dense.kernel": (None, "model"), "kernel": ("model", None)})
    found = resolve(config, [TensorName("p.dense.kernel", (4, 4), "float32", "p")])
    assert [p.kind for p in found.problems if p.refuses] == ["tie"]


# -- tunix, levanter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, model",
    [(rules.TUNIX_LLAMA3, rules.tunix_llama3(2)), (rules.TUNIX_GEMMA, rules.tunix_gemma(2))],
)
def test_tunix(fields: dict[str, Any], model: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    ours = entries(jshard.Config.from_tunix(fields), {p: s for p, (_, s) in model.items()}, "model")
    for path, (field, shape) in model.items():
        assert ours[path] == padded(fields[field], len(shape)), path
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
