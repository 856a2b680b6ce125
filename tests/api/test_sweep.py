"""A sweep has a row for every combination: the plan that `shard` gives, or the reason that there is none."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._api.pareto import Frontier, _pareto_front
from jshard._core.saved_chip import chip_to_json
from jshard._plan.request import PlanRequest
from jshard._report.progress import progress, progress_line
from tests.helpers.models import ffn
from tests.helpers.report_plans import FFN, f32, mesh


pytestmark = pytest.mark.one_pair


def machines():
    return [
        jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False),
        jshard.topology("v5p:2x2x2", {"x": 2, "y": 4}, compiles=False),
        jshard.topology("h100:1x4", {"x": 4}, compiles=False),
    ]


def big(x, w1, w2):
    """Two products: x (n, d), w1 (d, f), w2 (f, d)."""
    return jax.nn.relu(x @ w1) @ w2


BIG = (f32(4096, 8192), f32(8192, 32768), f32(32768, 8192))


def whole(batch: jax.Array, w: jax.Array) -> jax.Array:
    """A function that refuses odd batches."""
    if batch.shape[0] % 2:
        raise TypeError("odd batches are not for me")
    return batch.reshape(batch.shape[0] // 2, -1) @ w


def test_every_combination_is_a_row_with_the_plan_of_shard():
    found = jshard.sweep(big, *BIG, mesh=machines(), level=[0, 1, 2], batch={"x": [64, 128]})
    assert len(found) == 18 and len(found.plans) == 18
    assert [p.setting("batch") for p in found][:2] == [64, 128]
    for point in found:
        where = next(m for m in machines() if f"{m.name} " in point.setting("mesh"))
        own = jshard.shard(big, mesh=where, level=point.setting("level"))
        plan = own.plan(f32(point.setting("batch"), 8192), *BIG[1:])
        assert plan == point.plan and plan.chip == point.setting("chip")
        assert point.row["step_s"] == plan.step_seconds and point.row["peak_bytes"] == plan.cost.peak_bytes


def test_what_cannot_be_is_a_row_with_the_reason():
    found = jshard.sweep(
        jshard.shard(big, {"x": jax.P("y")}), *BIG, mesh=machines(), memory_budget=["60GiB", "1MiB"]
    )
    assert len(found) == 6 and len(found.plans) == 2
    reasons = [p.error for p in found]
    assert (
        "no plan fits 1,048,576 bytes a device" in reasons[1]
        and "names mesh axis 'y', which the mesh lacks" in reasons[4]
    )
    assert all(bool(p.error) == (p.plan is None) for p in found)
    assert found[4].setting("mesh") == "h100:1x4 x=4" and found[4].setting("devices") == 4
    assert found[4].setting("chip") == "gpu-h100"
    text = str(found)
    assert text.count("no plan: ") == 4 and max(map(len, text.splitlines())) <= 100


def test_an_error_of_the_function_is_a_row_too():
    found = jshard.sweep(whole, f32(8, 4), f32(8, 4), batch=[8, 9], mesh=mesh(2))
    assert [p.error for p in found] == ["", "TypeError: odd batches are not for me"]


def test_a_batch_is_resized_in_every_leaf_and_by_every_name():
    def step(params, batch, labels):
        return jnp.mean((batch["tokens"] @ params["w"] - labels) ** 2)

    args = ({"w": f32(8, 4)}, {"tokens": f32(16, 8)}, f32(16, 4))
    found = jshard.sweep(step, *args, batch={("batch", "labels"): [32, 64]}, mesh=mesh(4))
    for point in found:
        shapes = {r.path: r.shape for r in point.plan.inputs}
        n = point.setting("batch")
        assert shapes == {"params.w": (8, 4), "batch.tokens": (n, 8), "labels": (n, 4)}


def test_pins_and_options_of_a_sharded_function_hold():
    own = jshard.shard(ffn, {"x": (2, 1)}, level=2, mesh=mesh(2, 4))
    found = jshard.sweep(own, *FFN, search=["optimal", "propagation"])
    assert [p.plan.level for p in found] == [2, 2] and all(p.plan.inputs[0].pinned for p in found)
    assert found[0].plan == own.plan(*FFN) and found[1].row["gap"] is None


def test_chips_are_swept_on_one_mesh():
    found = jshard.sweep(
        big, *BIG, mesh=machines()[0], hardware=["v5e", "tpu-v5p", jshard.hardware.get("v6e")]
    )
    assert [p.setting("chip") for p in found] == ["tpu-v5e", "tpu-v5p", "tpu-v6e"]
    assert len({p.row["step_s"] for p in found}) == 3


def test_a_swept_chip_may_be_a_file(tmp_path):
    saved = dataclasses.replace(jshard.hardware.get("v5e"), name="swept-v5e", bf16_flops=1e14)
    (tmp_path / "chip.json").write_text(chip_to_json(saved, {"date": "2026-11-23"}))
    found = jshard.sweep(big, *BIG, mesh=machines()[0], hardware=["v5e", str(tmp_path / "chip.json")])
    assert [p.setting("chip") for p in found] == ["tpu-v5e", "swept-v5e"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"level": [0, 3]}, "level=3 is not a level"),
        ({"level": []}, "an empty list leaves nothing to plan"),
        ({"batch": [8]}, "big has no argument 'batch' whose dimension 0 is the batch"),
        ({"batch": {"x": [0]}}, "a batch of 0"),
        ({"batch": {"x": [8], "w1": [8]}}, "batch names 2 groups of arguments"),
        ({"search": "best"}, "search='best' is not known"),
        ({"hardware": "v99"}, "unknown chip 'v99'"),
        ({"memory_budget": "much"}, "memory_budget='much' is not an amount of memory"),
        ({"device": "Ascend"}, "MindSpore's"),
    ],
)
def test_a_wrong_setting_is_an_error_before_anything_is_planned(settings, message):
    with pytest.raises(jshard.ShardError, match=re.escape(message)):
        jshard.sweep(big, *BIG, **settings)


def test_what_is_the_same_stands_in_the_title_and_what_varies_in_columns():
    found = jshard.sweep(big, *BIG, mesh=machines()[0], level=[1, 2])
    title, names, *rows = str(found).splitlines()
    assert title == "2 plans of big (v5e:2x4 x=2 x y=4, tpu-v5e, devices 8)"
    assert names.split() == ["level", "step", "compute", "comm.", "moved", "peak", "gap"] and len(rows) == 2
    page = found._repr_html_()
    assert page.count("<tr>") == 3 and "v5e:2x4" in page
    assert all(f"<b>{name}</b>" in page for name in names.split()[1:])  # each column of figures is explained


@pytest.mark.parametrize(
    "make", [jax.sharding.AbstractMesh, lambda sizes, names: jax.make_mesh(sizes, names)]
)
def test_a_mesh_on_which_nothing_fits_is_a_row_with_its_devices(make):
    found = jshard.sweep(big, *BIG, mesh={"m": make((2, 4), ("x", "y"))}, memory_budget=["1 KiB"], level=1)
    assert found[0].plan is None and found[0].setting("devices") == 8 and "no plan fits" in found[0].error


def test_a_sweep_is_a_page_of_its_own(tmp_path):
    found = jshard.sweep(big, *BIG, mesh=machines()[0], level=[1, 2])
    found.to_html(tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert (
        page.startswith("<!doctype html>") and found._repr_html_() in page and "<title>2 plans of big" in page
    )
    with pytest.raises(
        jshard.ShardError, match=r"(?s)nowhere/a.html cannot be written.*a file in a folder that exists"
    ):
        found.to_html("nowhere/a.html")


def test_chips_and_devices_that_the_mesh_tells_have_no_column():
    found = jshard.sweep(big, *BIG, mesh=machines(), level=2)
    names = str(found).splitlines()[1].split()
    assert names[:2] == ["mesh", "step"] and found[0].setting("chip") == "tpu-v5e"
    chips = jshard.sweep(big, *BIG, mesh=machines()[0], hardware=["v5e", "v5p"], level=2)
    assert str(chips).splitlines()[1].split()[0] == "chip"


def test_names_cannot_break_the_table():
    found = jshard.sweep(big, *BIG, mesh={"<b id=x>": machines()[0], "two": machines()[1]})
    assert "<b id=x>" not in found._repr_html_()


def test_chip_time_compares_machines_of_different_size():
    found = jshard.sweep(big, *BIG, mesh=machines(), batch={"x": [64, 4096]}, level=2)
    assert found.fastest.setting("batch") == 4096
    lines = str(found).splitlines()
    assert lines[1].endswith("chip time") and "chip time for one entry of the batch" in lines[0]


@pytest.mark.skipif(not importlib.util.find_spec("pandas"), reason="no pandas here")
def test_a_frame_has_every_point():
    found = jshard.sweep(big, *BIG, mesh=machines(), memory_budget=["60GiB", "1MiB"])
    frame = found.to_pandas()
    assert len(frame) == len(found) and list(frame["error"]) == [p.error for p in found]
    first = frame.iloc[0]
    assert first["step_s"] == found[0].plan.step_seconds and first["mesh"] == "v5e:2x4 x=2 x y=4"


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="no matplotlib here")
def test_pictures_show_every_point():
    found = jshard.sweep(big, *BIG, mesh=machines(), memory_budget=["60GiB", "1MiB"])
    figure = found.plot()
    assert len(figure.axes) == 3
    widths = [bar.get_width() for bar in figure.axes[2].patches]
    peaks = [p.row["peak_bytes"] or 0 for p in found]
    assert [w / max(widths) for w in widths] == pytest.approx([b / max(peaks) for b in peaks])
    assert sum(t.get_text() == "no plan" for t in figure.axes[0].texts) == len(found) - len(found.plans)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")

    curve = jshard.pareto(jshard.shard(big, mesh=machines()[0]), *BIG, points=3)
    drawn = curve.plot(jshard.pareto(jshard.shard(big, mesh=machines()[2]), *BIG, points=3)).axes[0].lines
    assert len(drawn) == 2 and len(drawn[0].get_xdata()) == len(curve)


def test_a_frontier_falls_and_fills_its_widest_gap(monkeypatch):
    # A search under a budget takes its whole time when its proof does not close; the curve's form needs none.
    monkeypatch.setattr("jshard._api.prepare.PlanRequest", functools.partial(PlanRequest, memory_seconds=0.5))
    own = jshard.shard(big, mesh=machines()[0])
    few, many = (jshard.pareto(own, *BIG, points=n) for n in (3, 7))
    for curve in (few, many):
        times, peaks = zip(*curve.points, strict=True)
        assert list(times) == sorted(times) and list(peaks) == sorted(peaks, reverse=True)
        assert len(set(peaks)) == len(peaks)
    assert len(many) > len(few) and many.tried <= 7
    assert many.points[0][0] <= few.points[0][0] and many.points[-1][1] <= few.points[-1][1]
    for plan in many:
        assert plan.memory_budget is None or plan.cost.peak_bytes <= plan.memory_budget
    assert len(str(many).splitlines()) == len(many) + 2 and "<table>" in many._repr_html_()
    # Nothing on the frontier is beaten by a plan of any level.
    for level in (0, 1, 2):
        p = jshard.shard(big, mesh=machines()[0], level=level).plan(*BIG)
        assert any(t <= p.step_seconds and b <= p.cost.peak_bytes for t, b in many.points)


def test_the_best_plans_beat_each_other_in_nothing():
    plans = [p for p in jshard.sweep(big, *BIG, mesh=machines(), level=[0, 1, 2]).plans]
    kept = Frontier("big", _pareto_front(plans)).points
    for t, b in kept:
        assert not any((s <= t and c < b) or (s < t and c <= b) for s, c in kept)


@pytest.mark.parametrize("total", [None, 4])
def test_progress_is_erased_and_silent_where_nobody_looks(total):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    said, file = Terminal(), io.StringIO()
    for stream in (said, file):
        with progress("planning f", total, stream=stream) as show:
            show(2, "bound 3 ms")
    assert "planning f" in said.getvalue() and "bound 3 ms" in said.getvalue() and not file.getvalue()
    assert said.getvalue().rstrip(" \r").endswith("ms")  # what is left on the line is blank
    late = Terminal()
    with progress("quick", total, after=60.0, stream=late) as show:
        show(1)
    assert "quick" not in late.getvalue()


def test_progress_in_a_notebook_is_one_display_that_ends_empty(monkeypatch):
    shown = []

    class Handle:
        def update(self, page):
            shown.append(page)

    def display(page, display_id):
        assert display_id
        shown.append(page)
        return Handle()

    kernel = types.SimpleNamespace(kernel=object())
    fake = types.SimpleNamespace(
        get_ipython=lambda: kernel, display=types.SimpleNamespace(display=display, HTML=str)
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)
    with progress("sweep of <f>", 2) as show:
        show(1, "v5e:2x4")
    assert shown[0].startswith("<pre>sweep of &lt;f&gt; [##########----------] 1/2") and shown[-1] == ""


def test_progress_ends_with_the_work_and_lets_errors_through():
    said = io.StringIO()
    with pytest.raises(KeyError):
        with progress("f", 2, stream=said, shown=True):
            raise KeyError
    assert said.getvalue().endswith("\r")
    assert len(progress_line("x" * 200, 1, 2, "y" * 200, 5)) <= 100
