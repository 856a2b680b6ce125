"""`python -m jshard`: its commands do what the library does, and its errors have the library's form."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import jax
import pytest

import jshard
from jshard._api.command_line import example_arguments, main, parse_mesh, parse_shape
from jshard._api.doctor import jax_requirement


pytestmark = pytest.mark.one_pair


MODULE = """
import jax
import jax.numpy as jnp
import jshard

def dense(x, w):
    return jnp.tanh(x @ w)

sharded = jshard.shard(dense, in_strategy=((8, 1), None), mesh=jshard.topology("v5e:2x4", {"x": 8}, compiles=False))

def arguments():
    return jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("cli_model", None)


def expected(level=0):
    import cli_model

    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    f = jshard.shard(cli_model.dense, in_strategy=((2, 4), None), mesh=mesh, level=level)
    return f.plan(*cli_model.arguments())


PLAN = [
    "plan",
    "cli_model:dense",
    "--mesh",
    "v5e:2x4",
    "--axes",
    "x=2,y=4",
    "--in-strategy",
    "((2, 4), None)",
]


def test_plan_prints_and_saves_what_the_library_plans(folder, capsys):
    shapes = ["--args", "f32[64,32]", "float32[32,16]"]
    assert main([*PLAN, *shapes, "--level", "2", "--save", "plan.json", "--html", "plan.html"]) == 0
    assert capsys.readouterr().out.strip() == str(expected(level=2)).strip()
    assert jshard.Plan.load("plan.json") == expected(level=2)
    assert "<html" in (folder / "plan.html").read_text()
    assert main([*PLAN, "--args", "cli_model:arguments", "--json"]) == 0
    assert jshard.Plan.from_json(capsys.readouterr().out) == expected()


def test_a_function_may_be_named_by_its_file(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    named = f"{folder.name}/cli_model.py"
    shapes = ["--args", f"{named}:arguments", "--json"]
    assert main(["plan", f"{named}:dense", *PLAN[2:], *shapes]) == 0
    assert jshard.Plan.from_json(capsys.readouterr().out) == expected()


def test_shardings_are_read_from_a_file_and_written_to_one(folder, capsys):
    shapes = ["--args", "cli_model:arguments", "--json"]
    assert main([*PLAN, *shapes, "--save-config", "dense.yaml"]) == 0
    first = jshard.Plan.from_json(capsys.readouterr().out)
    machine = ["--mesh", "v5e:2x4", "--axes", "x=2,y=4"]
    assert main(["plan", "cli_model:dense", *machine, *shapes, "--config", "dense.yaml"]) == 0
    second = jshard.Plan.from_json(capsys.readouterr().out)
    assert [row.layout for row in second.inputs] == [row.layout for row in first.inputs]
    assert all(row.pinned for row in second.inputs)


def test_a_sharded_function_keeps_its_options(folder, capsys):
    import cli_model

    assert main(["plan", "cli_model:sharded", "--args", "cli_model:arguments", "--json"]) == 0
    assert jshard.Plan.from_json(capsys.readouterr().out) == cli_model.sharded.plan(*cli_model.arguments())
    assert main(["plan", "cli_model:sharded", "--level", "2", "--args", "cli_model:arguments"]) == 1
    assert capsys.readouterr().err == (
        "error: cli_model:sharded is sharded already, and --level would change how\n"
        "  where: python -m jshard plan\n  write instead: the plain function, or no options\n"
    )


def test_report_and_diff_of_saved_plans(folder, capsys):
    expected().save("a.json")
    expected(level=2).save("b.json")
    assert main(["report", "a.json"]) == 0
    assert capsys.readouterr().out.strip() == str(expected()).strip()
    assert main(["report", "a.json", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == expected().to_markdown().strip()
    assert main(["diff", "a.json", "b.json"]) == 0
    assert capsys.readouterr().out.strip() == str(expected().diff(expected(level=2)))
    assert main(["diff", "a.json", "b.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["different"] and "level: 0 -> 2" in found["headings"]


def test_doctor_tells_versions_and_devices(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == {"cpu": jax.device_count()}
    assert main(["doctor"]) == 0
    assert f"jax {jax.__version__}" in capsys.readouterr().out


def test_doctor_knows_the_versions_of_jax_that_the_package_requires():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert jax_requirement() in project["dependencies"]


def test_doctor_of_a_machine_with_one_device():
    code = "import jax; jax.config.update('jax_platforms', 'cpu')\n"
    code += "from jshard._api.command_line import main; main(['doctor'])"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert (
        "problem: one CPU device" in done.stdout
        and 'jax.config.update("jax_num_cpu_devices", 8)' in done.stdout
    )


def test_the_package_is_a_program(folder):
    done = subprocess.run(
        [sys.executable, "-m", "jshard", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in ("plan", "report", "diff", "doctor"))


def test_shapes_and_meshes():
    assert parse_shape("bf16[8, 128]").dtype == "bfloat16"
    assert parse_shape("pred[]").shape == () and parse_shape("u8[3]").dtype == "uint8"
    assert parse_shape("float8_e4m3fn[2]").dtype == "float8_e4m3fn"
    assert example_arguments(["f32[2]", "s32[]"])[1].dtype == "int32"
    assert parse_mesh("x=4,y=2", None).shape == {"x": 4, "y": 2}
    assert parse_mesh("v5e:2x4", None) == "auto:v5e:2x4" and parse_mesh("auto", None) == "auto"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["plan", "cli_model"], "error: 'cli_model' names no function\n  where: python -m jshard plan\n"
         "  write instead: MODULE:NAME, such as train:step\n"),
        (["plan", "no_such_module:f"], "error: there is no module 'no_such_module'\n  where: python -m jshard plan\n"
         "  write instead: a module of the current folder or an installed one\n"),
        (["plan", "nowhere/model.py:f"], "error: there is no file 'nowhere/model.py'\n"
         "  where: python -m jshard plan\n  write instead: the path of a file from the current folder\n"),
        (["plan", "cli_model:dens"], "error: cli_model has no 'dens'\n  where: python -m jshard plan\n"
         "  write instead: one of its names: "),
        (["plan", "cli_model:dense", "--args", "f33[2]"], "error: 'f33[2]' is no shape\n"
         "  where: python -m jshard plan --args\n  write instead: type and sizes: \"f32[8,128]\", \"int32[]\"; "
         "or MODULE:NAME of a value or of a function that makes the arguments\n"),
        (["plan", "cli_model:dense", "--mesh", "x=four"], "error: 'x=four' names no axes\n  where: python -m jshard plan\n"
         "  write instead: data=4,model=8\n"),
        (["plan", "cli_model:dense", "--mesh", "x=4,x=2"], "error: 'x=4,x=2' names the axis x twice\n"
         "  where: python -m jshard plan\n  write instead: another name for each axis: data=4,model=8\n"),
        (["report", "nowhere.json"], "error: nowhere.json cannot be read: No such file or directory\n"
         "  where: Plan.load\n  write instead: the path of a file that plan.save(path) wrote\n"),
        (["report", "cli_model.py"], "error: this is no plan\n  where: Plan.load\n"
         "  write instead: a file that plan.save(path) wrote, or plan.to_json()\n"),
    ],
)  # fmt: skip
def test_errors_say_what_to_write(folder, capsys, arguments, text):
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(text)


def test_a_wrong_command_line_is_status_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "a:b", "--in-strategy", "open('x')"])
    assert stopped.value.code == 2
    assert "is no tuple, dict or name" in capsys.readouterr().err
