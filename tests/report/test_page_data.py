"""What the HTML page holds: every operator once, sums that agree with the plan, a small file, figures with sentences."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest

from jshard._report.html import SCRIPTS, STYLES, assets, html_fragment, html_page
from jshard._report.page_data import NOTEBOOK, PAGE, Limits, page_data
from jshard._report.page_help import KEYS, figure_sentences
from tests.helpers.report_plans import NAMES, plan


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_and_every_second_is_in_the_data(name):
    p = plan(name)
    data = json.loads(json.dumps(page_data(p)))
    operators = [v for v in data["nodes"] if v[0] == "operator"]
    assert sum(v[3] for v in operators) == len(p.operators) + len(p.boundaries)
    assert sum(v[4] for v in operators) == pytest.approx(p.cost.compute, rel=1e-5)
    assert sum(v[5] for v in operators) == pytest.approx(p.cost.redundant, rel=1e-5, abs=1e-15)
    assert sum(c[4] for c in data["collectives"]) == pytest.approx(sum(c.total for c in p.collectives))
    assert sum(c[5] for c in data["collectives"]) == pytest.approx(p.cost.communication, rel=1e-5)
    assert sum(e[0] for e in data["events"]) == pytest.approx(p.step_seconds, rel=1e-4)
    assert max((b for _, _, b in data["curve"]), default=0) <= p.cost.peak_bytes * (1 + 1e-9)
    last = len(data["nodes"])
    assert all(0 <= e[0] < last and 0 <= e[1] < last for e in data["edges"])
    shown = {c for e in data["edges"] for c in (e[2] if len(e) > 2 else [])}
    made = {t for r in (*p.operators, *p.boundaries) for t in r.writes} | {r.tensor for r in p.inputs}
    assert len(shown) == len(data["collectives"]) or any(c.tensor not in made for c in p.collectives)


def test_alike_layers_are_one_module_with_their_number():
    data = page_data(plan("tall126"))
    names = {m[0]: m[2] for m in data["modules"]}
    assert names["blocks.0-125/mlp"] == names["blocks.0-125/mlp (backward)"] == 126
    assert len(data["nodes"]) < 80


def test_without_scopes_modules_are_the_functions_that_call_each_other():
    modules = page_data(plan("gpt"))["modules"]
    paths = []
    for name, parent, _ in modules:
        paths.append(f"{paths[parent]}/{name}" if parent >= 0 else name)
    assert "loss/logits/block/attention" in paths and "loss (backward)/logits/block/attention" in paths


@pytest.mark.parametrize("limits", [PAGE, NOTEBOOK, Limits(30, 20, 10, 5)])
def test_limits_keep_sums(limits):
    p = plan("tall126")
    data = page_data(p, limits)
    assert sum(e[0] for e in data["events"]) == pytest.approx(p.step_seconds, rel=1e-4)
    assert len(data["curve"]) <= limits.points and len(data["live"]) <= limits.live
    assert max(b for _, _, b in data["curve"]) == max(p.memory.curve)


def test_a_large_network_is_a_small_page_without_addresses():
    text = html_page(plan("tall126"))
    assert len(text.encode()) < 400_000 < 3_000_000
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


@pytest.mark.parametrize("name", ["dense", "tall126", "gpt"])
def test_a_cell_of_a_notebook_is_small(name):
    assert len(html_fragment(plan(name)).encode()) < 120_000


def test_headline_figures_agree_and_each_has_a_sentence():
    for name in NAMES:
        p = plan(name)
        found = {f.key: f for f in figure_sentences(p)}
        assert all(f.sentence for f in found.values())
        assert found["step"].value == found["compute"].value + found["communication"].value
        if p.level == 0:
            parts = found["communication"].value + found["redundant"].value + p.cost.price
            assert found["cost"].value == pytest.approx(parts)
        if "bound" in found:
            assert found["bound"].value <= found["cost"].value * (1 + 1e-12)
            assert ("equal to the cost" in found["bound"].sentence) == p.cost.optimal
    assert any("bound" not in {f.key for f in figure_sentences(plan(n))} for n in NAMES)


def test_the_page_documents_every_key_that_its_scripts_know():
    text = assets(SCRIPTS)
    known = set(re.findall(r'^(?:"([/?+=-])"|([a-z])|(Home|End)): \(', text, flags=re.MULTILINE))
    known = {next(filter(None, k)) for k in known} | {"Enter", "Escape"}
    told = " ".join(" ".join((*keys, what)) for keys, what in KEYS)
    for key in known - {"="}:
        assert ("Esc" if key == "Escape" else key) in told, key
    assert "Keys and reading" in html_page(plan("dense"))


def test_assets_are_whole():
    script, style = assets(SCRIPTS), assets(STYLES)
    assert script.count("{") == script.count("}") and style.count("{") == style.count("}")
    assert "</script" not in script and "</style" not in style


def test_live_tensors_are_the_curve_but_for_what_an_operator_holds_itself():
    p = plan("scan")
    at = max(range(len(p.memory.curve)), key=lambda k: p.memory.curve[k])
    assert sum(r.bytes for r in p.live if r.first <= at <= r.last) == p.memory.curve[at]
    kinds = {k for k, _ in p.memory.held}
    assert kinds <= {r.kind for r in p.live} | {"intermediate values"}


def test_a_plan_from_a_file_has_a_page_too():
    p = plan("gpt")
    read = type(p).from_json(p.to_json())
    assert read == p and not read.live
    assert [r.calls for r in read.operators] == [r.calls for r in p.operators]
    data = page_data(read)
    assert data["live"] == [] and data["curve"] == page_data(p)["curve"]
    assert len(html_page(read)) > 50_000


def test_evil_names_stay_text():
    p = plan("dense")
    evil = "</script><img src=x onerror=alert(1)>"
    row = dataclasses.replace(p.operators[0], module=evil)
    text = html_page(dataclasses.replace(p, name=evil, operators=(row, *p.operators[1:])))
    assert "<img" not in text


def test_events_of_short_operators_are_merged_only_with_their_neighbours():
    p = plan("tall126")
    data = page_data(p, Limits(200, 100, 100, 10))
    merged = [e for e in data["events"] if len(e) > 2]
    assert merged and all(e[2] > 1 for e in merged)
    lanes = [e[1] >= 0 for e in data["events"] if len(e) > 2]
    both = [(a, b) for a, b in itertools.pairwise(data["events"]) if len(a) > 2 and len(b) > 2]
    assert lanes and all((a[1] >= 0) != (b[1] >= 0) for a, b in both)
