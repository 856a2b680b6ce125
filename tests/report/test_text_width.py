"""On a terminal of eighty columns no row of a report wraps; a stored notebook with a sweep and a what_if stays small."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._api.doctor import inspect_installation
from jshard._core.text_width import text_width
from tests.helpers.report_plans import NAMES, plan, sharded


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(value: object) -> list[str]:
    """The lines of something printed on a terminal of eighty columns."""
    with mock.patch.object(sys, "stdout", Terminal()), mock.patch.dict(os.environ, COLUMNS="80"):
        return str(value).splitlines()


def test_a_file_has_a_hundred_columns_whatever_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert text_width() == 100
    assert max(map(len, str(plan("gpt")).splitlines())) > 80


@pytest.mark.parametrize("columns, width", [("20", 60), ("72", 72), ("80", 80), ("100", 100), ("300", 100)])
def test_a_terminal_narrows_text_to_sixty_columns_at_least(columns, width, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", columns)
    assert text_width() == width


@pytest.mark.parametrize("name", NAMES)
def test_no_row_of_a_plan_wraps(name):
    lines = on_terminal(plan(name))
    assert max(map(len, lines)) <= 80
    assert len(lines) < 130 and lines[0].startswith("plan of ")


def test_no_row_of_a_sweep_a_difference_or_an_answer_wraps():
    f, args = sharded("ffn")
    p = f.plan(*args)
    answer = p.what_if(w1=(4, 1))
    forms = (jshard.sweep(f, *args, level=[0, 1, 2]), p.why("w1"), p.diff(plan("propagation")), answer)
    for form in forms:
        assert max(map(len, on_terminal(form))) <= 80, type(form)


CELLS = (
    "import jax\nfrom tests.helpers.report_plans import mesh, sharded\nimport jshard\nf, args = sharded('gpt')\n"
    "jshard.sweep(f, *args, level=[0, 2], mesh=[mesh(2, 4), mesh(8)])",
    "plan = f.plan(*args)\nplan.what_if(**{'params.embed': (8, 1)})",
    "plan",
)


def test_a_stored_notebook_with_a_sweep_a_what_if_and_a_plan_is_small(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "notebook_run", pathlib.Path(__file__).parents[2] / "notebooks" / "run.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "small.ipynb"
    cells = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": [text]}
        for text in CELLS
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    module.run(str(path), write=True)
    stored = json.loads(path.read_text())["cells"]
    assert all(c["outputs"] for c in stored)
    assert len(path.read_bytes()) < 200_000


def test_no_row_of_what_else_is_printed_wraps():
    """A function and mesh axes with long names, on a terminal of eighty columns."""

    def feed_forward_network_of_a_transformer_block_with_residual(parameters, activations_of_the_batch):
        hidden = jax.nn.relu(activations_of_the_batch @ parameters["up_projection_kernel"])
        return (activations_of_the_batch + hidden @ parameters["down_projection_kernel"]).mean()

    f = feed_forward_network_of_a_transformer_block_with_residual
    kernels = {
        "up_projection_kernel": jnp.ones((64, 512)) / 64,
        "down_projection_kernel": jnp.ones((512, 64)) / 64,
    }
    args = kernels, jnp.ones((32, 64))
    axes = ("data_parallel_outer", "fully_sharded_inner", "tensor_model_parallel")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    sharded = jshard.shard(f, mesh=mesh, level=2)
    p = sharded.plan(*args, verify=True)
    config = p.to_config()
    forms = (
        p, p.verification, p.figures(), p.batch, p.diff(p), p.measure(sharded, *args), jshard.recipes(sharded, *args),
        config.check(sharded, *args), jshard.audit(sharded, config, *args), inspect_installation(),
    )  # fmt: skip
    for form in forms:
        lines = on_terminal(form)
        assert lines and max(map(len, lines)) <= 80, type(form)
