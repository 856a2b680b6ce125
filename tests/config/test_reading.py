"""Configurations read from files, text and dicts: sections, composition, overrides; and what wrong ones get."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from jshard._config.sections import OPTIONS
from jshard._spec.options import CONFIG_ONLY_ADVICE
from tests.helpers.import_graph import ROOT


F32 = jax.ShapeDtypeStruct


def f(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def args() -> tuple:
    w = {"w1": F32((16, 32), "float32"), "w2": F32((32, 16), "float32")}
    return w, F32((8, 16), "float32")


BASE = """
mesh: {data: 2, tensor: 4}
inputs: {x: [data, null]}
parameters:
  w1: [null, tensor]
  w2: [tensor, null]
level: 2
"""


def layouts(plan: Any) -> dict[str, str]:
    return {r.path: str(r.layout) for r in plan.inputs}


def test_text_dict_file_and_object_are_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ffn.yaml"
    path.write_text(BASE)
    as_dict = {
        "mesh": {"data": 2, "tensor": 4}, "inputs": {"x": P("data", None)}, "level": 2,
        "parameters": {"w1": P(None, "tensor"), "w2": ["tensor", None]},
    }  # fmt: skip
    configs = [jshard.Config.of(v) for v in (BASE, as_dict, path, str(path))]
    configs += [
        jshard.Config.load(path),
        jshard.Config.of(configs[0]),
        jshard.Config.of(configs[0].to_yaml()),
    ]
    assert all(c == configs[0] and hash(c) == hash(configs[0]) for c in configs)
    configs[0].save(tmp_path / "again.yaml")
    plans = [jshard.shard(f, config=c).plan(*args()) for c in (BASE, as_dict, path, tmp_path / "again.yaml")]
    assert all(p.to_json() == plans[0].to_json() for p in plans)
    assert layouts(plans[0]) == {"params.w1": "(-, tensor)", "params.w2": "(tensor, -)", "x": "(data, -)"}
    assert plans[0].level == 2


def test_arguments_win_over_the_file() -> None:
    plan = jshard.shard(
        f, in_strategy={"x": (1, 4)}, parameter_plan={"w1": (4, 2)}, level=0, config=BASE
    ).plan(*args())
    assert (
        plan.level == 0
        and layouts(plan)["params.w1"] == "(tensor, data)"
        and layouts(plan)["x"] == "(-, tensor)"
    )
    mesh = jax.make_mesh((2, 4, 2), ("data", "tensor", "more"))
    assert jshard.shard(f, config=BASE, mesh=mesh).plan(*args()).mesh.names == ("data", "tensor", "more")
    decorated = jshard.shard(config=BASE)(f)
    w = {"w1": jnp.ones((16, 32)), "w2": jnp.ones((32, 16))}
    np.testing.assert_allclose(decorated(w, jnp.ones((8, 16))), f(w, jnp.ones((8, 16))), rtol=1e-6)


def test_the_options_of_a_file_are_those_of_shard() -> None:
    import inspect

    own = {"fn", "in_strategy", "out_strategy", "parameter_plan", "mesh", "plan", "strict", "config"}
    parameters = set(inspect.signature(jshard.shard).parameters)
    assert set(OPTIONS) == parameters - own | set(CONFIG_ONLY_ADVICE)
    assert len(parameters) < 20 and not parameters & set(CONFIG_ONLY_ADVICE)
    text = BASE + "memory_budget: 1GiB\nhardware: tpu-v5e\nsearch: propagation\ndonate_argnames: [params]\n"
    plan = jshard.shard(f, config=text).plan(*args())
    assert plan.memory_budget == 2**30 and plan.chip == "tpu-v5e" and plan.search == "propagation"


def test_files_extend_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sub" / "own.yaml").write_text(
        "extends: ../base.yaml\nparameters: {w2: [null, tensor], w3: [null]}\noptional: [w3]\nlevel: 1\n"
    )
    config = jshard.Config.load(tmp_path / "sub" / "own.yaml")
    assert [(r.name, r.text) for r in config.parameters] == [
        ("w1", "[null, tensor]"), ("w2", "[null, tensor]"), ("w3", "[null]")
    ]  # fmt: skip
    assert config.option("level") == 1 and config.mesh.text == "{data: 2, tensor: 4}"
    assert config.parameters[0].where.endswith("base.yaml:5") and config.check(f, *args()).ok


def test_overrides() -> None:
    config = jshard.Config.of(BASE)
    got = config.override(
        "parameters.w1=[[data, tensor], null]", "level=0", "mesh.tensor=2", "+mesh.more=2", "~inputs.x", "strict=false",
        "inputs.x=['?', 2]", "memory_budget=1GiB", "optional=[w9]", "unlisted=replicated",
    )  # fmt: skip
    assert got.parameters[0].text == "[[data, tensor], null]" and got.option("level") == 0
    assert (
        got.mesh.text == "{data: 2, tensor: 2, more: 2}" and not got.strict and got.unlisted == "replicated"
    )
    assert (
        got.inputs[0].text == "['?', 2]" and got.option("memory_budget") == "1GiB" and got.optional == ("w9",)
    )
    assert got.override("strict=true", "unlisted=derived").strict and config == jshard.Config.of(BASE)
    assert layouts(jshard.shard(f, config=got).plan(*args()))["params.w1"] == "(data*tensor, -)"


def test_forms_of_meshes() -> None:
    def axes(mesh: Any) -> dict[str, int]:
        plan = jshard.shard(f, config={"mesh": mesh, "parameters": {"w1": [None, "t"]}}).plan(*args())
        return dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))

    assert axes({"d": 2, "t": -1}) == {"d": 2, "t": 8}
    assert axes({"ici": {"d": 2, "t": 2}, "dcn": {"d": 4}}) == {"d": 8, "t": 2}
    assert axes({"machine": "v5p:4x4x4", "axes": {"d": -1, "t": 4}}) == {"d": 16, "t": 4}
    hybrid = jshard.Config.of({"mesh": {"ici": {"d": 2, "t": 2}, "dcn": {"d": 4}}})
    from jshard._config.mesh_section import build_mesh

    grid = [[d.id for d in row] for row in build_mesh(hybrid.mesh).devices]
    assert grid[:3] == [[0, 1], [2, 3], [4, 5]]  # a slice holds consecutive devices
    plan = jshard.shard(f, config={"mesh": "auto:4", "level": 2}).plan(*args())
    assert plan.mesh.total == 4


def test_pieces_and_derived_dimensions() -> None:
    config = {
        "mesh": {"a": 2, "b": 2},
        "parameters": {"w1": [4, 1], "w2": ["?", "a"]},
        "outputs": {"result": "full_batch"},
    }
    plan = jshard.shard(f, config=config).plan(*args())
    assert layouts(plan)["params.w1"] == "(a*b, -)" and layouts(plan)["params.w2"].endswith(", a)")
    assert str(plan.outputs[0].layout) == "(-, -)" and plan.outputs[0].pinned


WRONG = [
    (
        "[1, 2]",
        "a configuration is a map from sections to rules, not a list",
        "config:1",
        "parameters: {lm_head",
    ),
    ("level: 7", "level=7 is not a level", "config:1", "0 (compute"),
    ("mesh: {a: 2}\nparamters: {w: [a]}", "'paramters' is no section", "config:2", "'parameters'"),
    ("parameters: {w: 3}", "an entry is an int, 3", "config:1", "[[data, fsdp], null]"),
    ("parameters: {w: data}", "an entry is a str, 'data'", "config:1", "here [data]"),
    ("parameters:\n  w: [2.5]", "a dimension is a float, 2.5", "config:2", "a list with one axis"),
    (
        "parameters:\n  w: [a, 2]",
        "mixes numbers of pieces with mesh axes",
        "config:2",
        "[4, 1] or [data, null]",
    ),
    (
        "parameters:\n  w: [a]\n  w: [b]",
        "the name 'w' is there twice",
        "config:3 and config:2",
        "one of the two",
    ),
    ("parameters:\n  **.w: [a]", "this is not YAML", "config:2", "stands in quotes"),
    ("a: !!python/object/apply:os.system ['true']", "is not plain YAML", "config:1", "numbers, strings"),
    ("a: &x [*x]", "a value contains itself", "config:1", "written out"),
    ("mesh: {a: 0}", "the size of mesh axis 'a' is an int, 0", "config:1", "a positive number, or -1"),
    ("mesh: {a: -1, b: -1}", "two mesh axes have the size -1", "config:1", "-1 for one axis only"),
    ("mesh: {machine: v5p:4x4x4, axis: {a: 64}}", "mesh has no key 'axis'", "config:1", "'axes'"),
    ("regexes: {w: [a]}", "regexes is a dict", "config:1", "in the order in which they are tried"),
    ("regexes: [['(', [a]]]", "is no regular expression", "config:1", "Python's re"),
    ("optional: 3", "optional is an int", "config:1", "a list of names"),
    ("unlisted: whole", "unlisted is a str, 'whole'", "config:1", "derived or replicated"),
    ("strict: 1", "strict is an int, 1", "config:1", "true or false"),
    ("extends: 3", "extends is an int, 3", "config:1", "the path of a file"),
    ("extends: none-there.yaml", "none-there.yaml cannot be read", "config:1", "the path of a YAML file"),
    ("memory_budget: lots", "memory_budget='lots' is not an amount of memory", "config:1", "14GiB"),
]


@pytest.mark.parametrize("text, what, where, fix", WRONG, ids=[w[0][:24].replace("\n", " ") for w in WRONG])
def test_a_wrong_text(text: str, what: str, where: str, fix: str) -> None:
    with pytest.raises(jshard.ShardError) as error:
        jshard.Config.of(text)
    assert what in error.value.what and error.value.where == where and fix in error.value.fix


def test_a_file_that_extends_itself(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text("level: 1\nextends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(jshard.ShardError) as error:
        jshard.Config.load(tmp_path / "a.yaml")
    assert "a.yaml -> b.yaml -> a.yaml" in error.value.what and error.value.where.endswith("b.yaml:1")


def test_two_equally_specific_rules(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tie.yaml"
    path.write_text('mesh: {a: 2}\nparameters:\n  "*arams.w1": [a, null]\n  "params.*1": [null, a]\n')
    with pytest.raises(jshard.ShardError) as error:
        jshard.shard(f, config=path, strict=False).plan(*args())
    assert "equally specific" in str(error.value) and "tie.yaml:3" in str(error.value)
    fixed = jshard.Config.load(path).override("~parameters.params.*1")
    assert fixed.check(f, *args()).ok


def test_an_axis_that_the_mesh_lacks() -> None:
    with pytest.raises(jshard.ShardError) as error:
        jshard.shard(f, config=BASE.replace("[tensor, null]", "[tenser, null]")).plan(*args())
    assert error.value.what == "the mesh has no axis 'tenser'" and error.value.where == "config:6 (for f)"
    assert error.value.fix.startswith("'tensor'")


@pytest.mark.parametrize("text, what", [
    ("", "an override is a str"), ("level", "an override has no '='"), ("lvel=2", "'lvel' is no section"),
    ("~parameters.w9", "there is no rule 'w9' in parameters"), ("mesh.tensor=two", "the size of mesh axis 'tensor'"),
    ("level=9", "level=9 is not a level"), ("parameters.w1=[[", "this is not YAML"),
])  # fmt: skip
def test_a_wrong_override(text: str, what: str) -> None:
    with pytest.raises(jshard.ShardError, match=what.replace("[", r"\[")) as error:
        jshard.Config.of(BASE).override(text)
    assert "override" in error.value.where


def test_other_wrong_values() -> None:
    with pytest.raises(jshard.ShardError, match="config is an int"):
        jshard.shard(f, config=3)
    for name in ("missing.yaml", "missing.json"):
        with pytest.raises(jshard.ShardError, match=f"{name} cannot be read"):
            jshard.shard(f, config=name)
    with pytest.raises(jshard.ShardError, match="the mesh {a: 64} has 64 devices, there are"):
        jshard.shard(f, config={"mesh": {"a": 64}})
    with pytest.raises(jshard.ShardError, match="are no multiple of 3"):
        jshard.shard(f, config={"mesh": {"a": 3, "b": -1}})
    with pytest.raises(jshard.ShardError, match="check takes a function, a module or a pytree"):
        jshard.Config().check(3, 4)


def test_without_pyyaml_and_without_flax() -> None:
    """Dicts need neither; `import jshard` imports neither, nor the modules of configurations."""
    code = """
import sys
sys.modules["yaml"] = None
sys.modules["flax"] = None
import jshard
own = [m for m in sys.modules if m.startswith("jshard._config.")]
assert own == ["jshard._config.config_record"], own
config = jshard.Config.of({"mesh": {"x": 1}, "parameters": {"w": ["x", None]}})
assert "w: [x, null]" in config.to_yaml()
del sys.modules["flax"]
print(jshard.shard(lambda p: p["w"] * 2, config=config).plan({"w": __import__("numpy").ones((4, 4))}).inputs[0].pinned)
try:
    jshard.Config.of("level: 2")
except jshard.ShardError as error:
    print(error.fix)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split("\n")[:2] == [
        "True",
        "pip install 'jshard[config]', or give the configuration as a dict",
    ], run.stderr


def test_the_constructor_names_the_reader():
    with pytest.raises(jshard.ShardError) as caught:
        jshard.Config({"parameters": {"w": ["x", None]}})
    assert (caught.value.what, caught.value.where) == ("Config is called with a dict", "Config")
    assert caught.value.fix == 'Config.of(...) of a dict or YAML text, or Config.load("rules.yaml")'
