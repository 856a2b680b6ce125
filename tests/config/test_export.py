"""Plans as files: what is written, read again, gives the same layouts, in few lines."""

from __future__ import annotations

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks.correctness import config_round_trip
from jshard._config.config_record import ConfigRecord
from jshard._config.export_rules import regexes
from jshard._config.fewest_rules import fewest_rules
from jshard._config.path_patterns import without_numbers
from jshard._config.resolve import resolve
from jshard._config.tensors import TensorName


LAYOUTS = [
    ((), ()),
    (("fsdp",), ("tensor",)),
    (("tensor",), ("fsdp",)),
    (("fsdp", "tensor"), ()),
    ((), ("tensor",)),
]


def llama_tree(layers: int) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed.embedding": (64, 32), "lm_head.kernel": (32, 64), "model.norm.scale": (32,)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.attn.{n}.kernel": (32, 32) for n in ("q", "k", "v", "o")}
        shapes |= {f"{at}.mlp.{n}.kernel": (32, 64) for n in ("gate", "up", "down")}
        shapes |= {f"{at}.{n}.scale": (32,) for n in ("norm1", "norm2")}
    return shapes


def tensors_with_state(layers: int) -> list[TensorName]:
    out = []
    for prefix, argument in (("state.params", "state"), ("state.opt_state.0.mu", "state"), ("ema", "ema")):
        out += [TensorName(f"{prefix}.{n}", s, "float32", argument) for n, s in llama_tree(layers).items()]
    return out


def random_entries(tensors: list[TensorName], rng: random.Random) -> list:
    """Layouts by class, with some layers and some state that differ."""
    of_class: dict = {}
    out = []
    for t in tensors:
        ranked = [d[: len(t.shape)] for d in LAYOUTS]
        entry = of_class.setdefault(without_numbers(t.own[-3:]), rng.choice(ranked))
        if rng.random() < 0.02:
            entry = rng.choice(ranked)
        out.append(entry)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_rules_reproduce_any_layouts(seed: int) -> None:
    rng = random.Random(seed)
    tensors = tensors_with_state(rng.choice([1, 2, 5, 9]))
    entries = random_entries(tensors, rng)
    rules = fewest_rules(tensors, entries)
    found = resolve(ConfigRecord(parameters=rules), tensors)
    assert [r.entry for r in found.rows] == entries
    assert not [p for p in found.problems if p.refuses]
    text = jshard.Config(parameters=rules).to_yaml()
    assert jshard.Config.of(text).parameters == rules


@pytest.mark.parametrize("seed", range(6))
def test_regexes_mean_the_same(seed: int) -> None:
    rng = random.Random(seed)
    tensors = tensors_with_state(rng.choice([1, 3, 11]))
    entries = random_entries(tensors, rng)
    rules = regexes(tensors, entries)
    for t, entry in zip(tensors, entries, strict=True):
        # EasyLM's `match_partition_rules`: the first expression that is found anywhere in the path.
        path = "/".join(t.parts)
        assert next(e for regex, e in rules if re.search(regex, path)) == entry


def test_a_model_of_126_layers_has_a_short_file() -> None:
    tensors = [TensorName(f"params.{n}", s, "float32", "params") for n, s in llama_tree(126).items()]
    rng = random.Random(3)
    by_class: dict = {}
    entries = [
        by_class.setdefault(without_numbers(t.own), rng.choice([d[: len(t.shape)] for d in LAYOUTS]))
        for t in tensors
    ]
    for i in (0, 7, 125):  # three layers of a layout of their own
        entries[next(k for k, t in enumerate(tensors) if f"layers.{i}.attn.q" in t.path)] = ((), ("fsdp",))
    rules = fewest_rules(tensors, entries)
    text = jshard.Config(parameters=rules).to_yaml()
    assert len(text.splitlines()) < 60
    layouts = {(without_numbers(t.own), e) for t, e in zip(tensors, entries, strict=True)}
    assert len(rules) <= 1.5 * len(layouts)
    assert [r.entry for r in resolve(ConfigRecord(parameters=rules), tensors).rows] == entries


def training(layers: int, scanned: bool):
    """A step of a small network with Adam as a plain function, and its arguments."""

    def block(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(params, x):
        if scanned:
            x = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])[0]
        else:
            for w in params["layers"]:
                x = block(x, w)
        return (x**2).mean()

    tx = optax.adam(1e-3)

    def step(params, opt_state, x):
        grads = jax.grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    w = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    layers_of = jax.tree.map(lambda a: jnp.stack([a] * layers), w) if scanned else [w] * layers
    params = {"layers": layers_of}
    return step, (params, tx.init(params), jnp.ones((32, 16)))


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("level", [0, 2])
def test_a_plan_read_back_is_the_same(scanned: bool, level: int) -> None:
    step, args = training(3, scanned)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    plan = jshard.shard(step, in_strategy={"x": P("data", None)}, mesh=mesh, level=level).plan(*args)
    config = plan.to_config()
    again = jshard.Config.of(config.to_yaml())
    assert again == config
    back = jshard.shard(step, config=again)
    plan_back = back.plan(*args)
    assert [(r.path, r.layout) for r in plan_back.inputs] == [(r.path, r.layout) for r in plan.inputs]
    assert [(r.path, r.layout) for r in plan_back.outputs] == [(r.path, r.layout) for r in plan.outputs]
    assert plan_back.cost.objective == pytest.approx(plan.cost.objective, rel=1e-9)
    assert plan_back.to_json() == jshard.shard(step, config=config).plan(*args).to_json()
    assert not [p for p in again.check(step, *args).problems if p.error]


def test_other_forms() -> None:
    step, args = training(2, False)
    plan = jshard.shard(step, in_strategy={"x": (8, 1)}, parameter_plan={"**.up": (1, 2)}).plan(*args)
    scope: dict = {}
    exec(plan.to_rules("specs"), scope)
    for row in plan.inputs:
        node = scope["SPECS"]
        for part in row.path.split("."):
            node = node[part]
        assert node == row.layout.spec
    exec(plan.to_rules("regexes"), scope)
    for row in plan.inputs:
        if row.shape:
            spec = next(
                s for regex, s in scope["PARTITION_RULES"] if re.search(regex, row.path.replace(".", "/"))
            )
            assert spec == row.layout.spec
    with pytest.raises(jshard.ShardError, match="need the logical axes"):
        plan.to_rules("logical")
    with pytest.raises(jshard.ShardError, match="form='regex' is not known"):
        plan.to_rules("regex")


def test_logical_rules_of_a_plan_give_its_layouts_in_linen() -> None:
    from flax import linen as nn

    step, args = training(2, False)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), devices=jax.devices()[:8])
    plan = jshard.shard(
        step,
        mesh=mesh,
        parameter_plan={"params.**.up": P("fsdp", "tensor"), "params.**.down": P("tensor", "fsdp")},
    ).plan(*args)
    names = {
        r.path: ("embed", "mlp") if r.path.endswith("up") else ("mlp", "embed")
        for r in plan.inputs
        if len(r.shape) == 2
    }
    scope: dict = {}
    text = plan.to_rules("logical", names)
    exec(text, scope)
    missing = [line.split()[3] for line in text.splitlines() if line.startswith("# not")]
    for row in plan.inputs:
        if row.path in names and row.path not in missing and row.layout.spec != P():
            ours = nn.logical_to_mesh_axes(names[row.path], scope["LOGICAL_AXIS_RULES"])
            assert tuple(ours) == tuple(d[0] if len(d) == 1 else d or None for d in row.layout.dims)
    assert "params.layers.0.up" not in missing


def test_tensors_that_no_logical_rules_give_are_named() -> None:
    from jshard._config.logical_rules import rules_of_entries

    # One logical axis cut by two different mesh axes, with nothing to tell the tensors apart.
    entries = {"a": (("x",), ()), "b": (("y",), ())}
    names = {"a": ("embed", "mlp"), "b": ("embed", "mlp")}
    pairs, missing = rules_of_entries(entries, names, {"a": 8, "b": 4})
    assert missing == ["b"] and pairs[0] == ("embed", ("x",))


NAMES = [name for name, _ in config_round_trip.cases() if "level" in name or "linen" in name]


@pytest.mark.parametrize("name", random.Random(18).sample(NAMES, 2))
def test_a_plan_goes_through_its_file_and_back(name: str) -> None:
    """A sample of `benchmarks/correctness/config_round_trip.py`, which asserts that the plans are the same."""
    figures = config_round_trip.round_trip(dict(config_round_trip.cases())[name]())
    assert 0 < figures["rules"] <= 1.5 * figures["layouts"]


def _read_back(step, args, **strategies) -> tuple[str, list, list]:
    """The file of a plan, and the layouts of results of the plan and of the plan under its file."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    plan = jshard.shard(step, mesh=mesh, **strategies).plan(*args)
    config = plan.to_config()
    again = jshard.shard(step, mesh=mesh, config=config).plan(*args)
    return config.to_yaml(), [r.layout for r in plan.outputs], [r.layout for r in again.outputs]


def test_a_rule_for_lists_leaves_a_scalar_argument_alone() -> None:
    """`"*"` for two lists of one array each matches the counter beside them too, which has no dimensions."""
    S = jax.ShapeDtypeStruct
    square = S((8, 8), "float32")
    text, before, after = _read_back(
        lambda p, m, q, n: ([p[0] @ p[1], m[0] + p[0]], q, n + 1),
        ([square, square], [square, square], square, S((), "int32")),
        in_strategy=((2, 4), (2, 4), (2, 4), None),
    )
    assert '"*": [x, y]\n  "n": []' in text
    assert before == after


def test_a_rule_for_results_leaves_a_scalar_result_alone() -> None:
    S = jax.ShapeDtypeStruct

    def step(w, x):
        h = x @ w
        return w * 2, (h.sum(), h.sum(0), h.sum(0) * 2, h.sum(0) + 1)

    args = S((8, 8), "float32"), S((16, 8), "float32")
    text, before, after = _read_back(step, args, out_strategy=(None, (None, (1,), (1,), (1,))))
    assert '"1.1"' in text and '"1.*"' not in text
    assert before == after


@pytest.mark.parametrize("last", [24, 3])
def test_a_rule_for_results_leaves_new_values_of_arguments_alone(last: int) -> None:
    """`w.*` for three results that lie unlike their arguments matches the fourth, which lies like its own."""
    S = jax.ShapeDtypeStruct
    P = jax.sharding.PartitionSpec
    state = {"w": [*[S((12, 24), "float32")] * 3, S((12, last), "float32")]}
    text, before, after = _read_back(
        lambda state, n: {"w": [v + n for v in state["w"]]},
        (state, S((), "float32")),
        in_strategy={"state": P()},
        out_strategy={"w": [P(None, ("x", "y"))] * 3 + [P()]},
    )
    assert before == after and "w.3" in text


def test_a_result_named_like_part_of_an_argument_has_a_rule() -> None:
    """`ws.0` of a larger result is not the new value of the argument `ws`: nothing gives it that layout."""
    S = jax.ShapeDtypeStruct
    P = jax.sharding.PartitionSpec
    text, before, after = _read_back(
        lambda ws, x: {"ws": [w + x for w in ws], "loss": x * 2},
        ([S((16, 8), "float32")] * 2, S((), "float32")),
        in_strategy=(P(), None),
        out_strategy={"ws": [P(), P()], "loss": None},
    )
    assert before == after and "outputs:\n  ws.*: [null, null]" in text


def test_regular_expressions_of_a_plan_give_its_layouts_back() -> None:
    """That of an array which is an argument, too: it had been searched for below arguments only."""
    S = jax.ShapeDtypeStruct
    args = {"w": S((8, 16), "float32"), "v": S((16, 8), "float32")}, S((16, 8), "float32"), S((), "float32")
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))

    def step(params, x, scale):
        return jax.numpy.tanh(x @ params["w"]) @ params["v"] * scale

    cut = {"x": (2, 1), "params": {"w": jax.sharding.PartitionSpec(None, "y"), "v": None}}
    plan = jshard.shard(step, mesh=mesh, in_strategy=cut).plan(*args)
    written: dict = {}
    exec(plan.to_rules("regexes"), written)
    config = jshard.Config.from_regexes(written["PARTITION_RULES"], mesh={"x": 2, "y": 4})
    again = jshard.shard(step, mesh=mesh, config=config).plan(*args)
    assert [r.layout for r in again.inputs] == [r.layout for r in plan.inputs]
    every = jshard.Config.from_regexes(
        [("w", jax.sharding.PartitionSpec()), (".*", jax.sharding.PartitionSpec())]
    )
    assert jshard.shard(step, mesh=mesh, config=every).plan(*args).inputs[2].layout.dims != (
        (),
        (),
    )  # x is no parameter
