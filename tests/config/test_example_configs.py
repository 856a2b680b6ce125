"""The files of `examples/configs` on small models: they match, they are followed, and training is the plain training."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard._spec.tree_paths import path_name
from tests.helpers.decoder_models import SIZES, Decoder, LinenDecoder, Sizes, loss_of, nnx_step, tokens_of
from tests.helpers.import_graph import ROOT


FOLDER = ROOT / "examples" / "configs"
FAMILIES = {
    "llama-fsdp": ("llama", "mesh.fsdp=4"),
    "llama-fsdp-tp": ("llama", "mesh.fsdp=2"),
    "llama-fsdp-tp-cp": ("llama", "mesh.fsdp=2"),
    "mixtral-fsdp": ("mixtral", "mesh.fsdp=4"),
    "mixtral-fsdp-tp-ep": ("mixtral", "mesh.fsdp=2"),
    "llama4-fsdp-tp": ("llama4", "mesh.fsdp=2"),
    "deepseek-fsdp-tp": ("deepseek", "mesh.fsdp=2"),
    "qwen-fsdp-tp": ("qwen", "mesh.fsdp=2"),
}
TRAINED = ["llama-fsdp-tp-cp", "mixtral-fsdp-tp-ep"]  # all: benchmarks/correctness/config_training.py


def sizes(name: str, **changes: Any) -> Sizes:
    return dataclasses.replace(SIZES[FAMILIES[name][0]], **changes)


def made(small: Sizes) -> Decoder:
    """A model whose weights are quickly drawn."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(small, nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def drawn(s: jax.ShapeDtypeStruct) -> jax.Array:
        inner = s.shape[-2] if len(s.shape) > 1 else 1
        return jnp.asarray(rng.normal(size=s.shape) / inner**0.5, s.dtype)

    return nnx.merge(graph, jax.tree.map(drawn, state))


def config_of(name: str) -> jshard.Config:
    return jshard.Config.load(FOLDER / f"{name}.yaml").override(FAMILIES[name][1])


def test_every_file_has_a_family_and_is_in_the_index() -> None:
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(FAMILIES)
    index = (FOLDER / "README.md").read_text()
    assert not [name for name in FAMILIES if f"`{name}.yaml`" not in index]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_matches_its_family_both_ways(name: str, scanned: bool) -> None:
    model = nnx.eval_shape(lambda: Decoder(sizes(name, scanned=scanned), nnx.Rngs(0)))
    report = config_of(name).check(model, jax.ShapeDtypeStruct((8, 8), "int32"))
    assert report.ok, str(report)
    assert not [p for p in report.problems if p.kind != "unused axis"], str(report)
    parameters = [t for t in report.tensors if t.path.startswith("model.") and t.kind == "argument"]
    assert all(t.status == "rule" for t in parameters)


def test_a_file_cuts_what_it_says() -> None:
    report = config_of("mixtral-fsdp-tp-ep").check(
        nnx.eval_shape(lambda: Decoder(sizes("mixtral-fsdp-tp-ep", scanned=True), nnx.Rngs(0))),
        jax.ShapeDtypeStruct((8, 8), "int32"),
    )
    by_path = {t.path: t.entry for t in report.tensors}
    assert by_path["model.model.layers.block_sparse_moe.experts.w2"] == "[null, expert, tensor, fsdp]"
    assert by_path["model.layers[0]"] == "[[data, fsdp, expert], null, null]"


def sgd(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


@pytest.mark.parametrize("name", TRAINED)
def test_training_by_a_file_is_plain_training(name: str) -> None:
    small = sizes(name, layers=1, width=16, hidden=32, vocab=32)
    plain, cut = made(small), made(small)
    state, cut_state = sgd(plain), sgd(cut)
    config = config_of(name)
    step, reference = jshard.shard(nnx_step, config=config), nnx.jit(nnx_step)
    expected, losses = [], []
    for i in range(20):
        tokens = tokens_of(vocab=32, seed=i)
        expected.append(float(reference(plain, state, tokens)))
        losses.append(float(step(cut, cut_state, tokens)))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    report = config.check(nnx_step, cut, cut_state, tokens)
    wanted = {t.path: t for t in report.tensors if t.kind == "argument" and t.entry}
    assert len(wanted) > 20
    for root, tree in (("model", cut), ("optimizer", cut_state)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(tree))[0]:
            entry = wanted.get(f"{root}.{path_name(path)}")
            if entry is not None:
                assert leaf.sharding.is_equivalent_to(
                    jax.sharding.NamedSharding(leaf.sharding.mesh, spec(entry.entry)), leaf.ndim
                ), (path, entry.entry, leaf.sharding)
    assert step.plan(cut, cut_state, tokens).cost.gap < 0.05


GRADIENTS = [("deepseek-fsdp-tp", True)]  # all: benchmarks/correctness/config_training.py


def value_and_gradients(model: nnx.Module, tokens: jax.Array) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: loss_of(m(tokens), tokens))(model)
    return loss, nnx.state(grads)


@pytest.mark.parametrize("name, scanned", GRADIENTS)
def test_values_and_gradients_by_a_file_are_the_plain_ones(name: str, scanned: bool) -> None:
    small = sizes(name, layers=1 + scanned, width=16, hidden=32, vocab=32, scanned=scanned)
    model, tokens = made(small), tokens_of(vocab=32)
    sharded = jshard.shard(value_and_gradients, config=config_of(name), level=0)
    loss, grads = sharded(model, tokens)
    expected, plain = nnx.jit(value_and_gradients)(model, tokens)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    ours, theirs = jax.tree.leaves(grads), jax.tree.leaves(plain)
    assert len(ours) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()) + 1e-9)
    assert sharded.plan(model, tokens, verify=True).verification.ok


def spec(entry: str) -> P:
    import yaml

    return P(*(tuple(d) if isinstance(d, list) else d for d in yaml.safe_load(entry)))


@pytest.mark.parametrize("scanned", [False])  # both: benchmarks/correctness/config_training.py
def test_a_linen_model_by_a_file(scanned: bool, steps: int = 20) -> None:
    small = Sizes(layers=1 + scanned, width=16, hidden=32, vocab=32, scanned=scanned)
    model, tokens = LinenDecoder(small), tokens_of(vocab=32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    config = jshard.Config.of(
        {
            "mesh": {"fsdp": 4, "tensor": 2},
            "inputs": {"tokens": ["fsdp", None]},
            "parameters": {
                "embed_tokens.embedding": ["fsdp", "tensor"],
                "layers.*.{q,k,v,gate,up}_proj.kernel": ["fsdp", "tensor"],
                "layers.*.{o,down}_proj.kernel": ["tensor", "fsdp"],
                "lm_head.kernel": ["fsdp", "tensor"],
                "**.scale": None,
            },
            "activations": {"layers.*": ["fsdp", None, None], "": ["fsdp", None, "tensor"]},
        }
    )
    assert config.check(model, variables, tokens).ok, str(config.check(model, variables, tokens))
    tx = optax.sgd(0.1, momentum=0.9)

    def train(variables, state, tokens):
        loss, grads = jax.value_and_grad(lambda v: loss_of(model.apply(v, tokens), tokens))(variables)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(variables, updates), state, loss, grads

    ours = theirs = (variables, tx.init(variables))
    sharded, reference = jshard.shard(train, config=config), jax.jit(train)
    step = sharded.lower(*ours, tokens).compile()
    for i in range(steps):
        tokens = tokens_of(vocab=32, seed=i)
        *ours, loss, grads = step(*ours, tokens)
        *theirs, expected, plain = reference(*theirs, tokens)
        np.testing.assert_allclose(loss, expected, rtol=2e-5)
        if i == 0:
            for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()) + 1e-9)
    kernel = ours[0]["params"]["layers" if scanned else "layers_0"]["o_proj"]["kernel"]
    assert kernel.sharding.spec == (P(None, "tensor", "fsdp") if scanned else P("tensor", "fsdp"))
    assert sharded.plan(*ours, tokens).verify(step).ok
    assert jnp.isfinite(loss)
