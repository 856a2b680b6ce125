"""All forms of a plan state the same numbers (text, Markdown, HTML, DOT, trace, JSON), and each is well-formed."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re

import pytest

from jshard._report.chrome_trace import chrome_trace
from jshard._report.format_units import format_bytes, format_seconds
from jshard._report.html import html_page
from jshard._report.module_tree import Branch, module_tree
from jshard._report.operator_graph import operator_graph
from jshard._report.text import header_lines
from jshard._report.totals import formatted_totals, objective_text, traffic
from tests.helpers.report_plans import NAMES, plan


class Reader(html.parser.HTMLParser):
    """Reads a page: data attributes, cells, and whether every element is closed where it should be."""

    VOID = {"meta", "input", "line", "rect", "path", "polygon", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.figures: dict[str, tuple[float, str]] = {}
        self.bytes: list[float] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self._figure: tuple[str, float] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.addresses += [v for k, v in attrs if k in ("src", "href")]
        if "data-figure" in given:
            self._figure = given["data-figure"], float(given["data-value"])
        if "data-bytes" in given:
            self.bytes.append(float(given["data-bytes"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open[-5:], tag)
        self.open.pop()

    def handle_data(self, data):
        if self._figure is not None:
            name, value = self._figure
            self.figures[name] = value, data
            self._figure = None
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_totals_agree_in_every_form(name, tmp_path):
    p = plan(name)
    text, markdown, read = str(p), p.to_markdown(), Reader(html_page(p))
    data = json.loads(p.to_json())
    moved = {}
    for c in data["collectives"]:
        key = c["kind"], "*".join(c["axes"])
        moved[key] = moved.get(key, 0.0) + c["bytes"] * c["count"]

    in_text = re.findall(r"^  (\w+) +over (\S+) +[\d.]+ times +([\d,]+) B", text, flags=re.MULTILINE)
    plain = markdown.replace("\\", "")
    in_markdown = re.findall(
        r"^\| (\w+) \| over (\S+) \| [\d.]+ times \| ([\d,]+) B", plain, flags=re.MULTILINE
    )
    expected = sorted((kind, axes, f"{b:,.0f}") for (kind, axes), b in moved.items())
    assert sorted(in_text) == sorted(in_markdown) == expected
    assert sorted(read.bytes) == pytest.approx(sorted(moved.values()))

    cost = data["cost"]
    shown = formatted_totals(p)
    assert read.figures["compute"] == (cost["compute"], shown["compute"])
    assert read.figures["communication"] == (cost["communication"], shown["communication"])
    assert read.figures["peak"] == (cost["peak_bytes"], shown["peak"])
    assert read.figures["step"][0] == pytest.approx(cost["compute"] + cost["communication"])
    line = (
        f"compute {shown['compute']} (redundant {shown['redundant']}), communication {shown['communication']}"
    )
    peak = f"peak memory {shown['peak']}"
    assert all(said in form for form in (text, markdown) for said in (line, peak))

    slices = [e for e in chrome_trace(p)["traceEvents"] if e["ph"] == "X"]
    by = {c: sum(e["dur"] for e in slices if e["cat"] == c) * 1e-6 for c in ("compute", "communication")}
    assert by == pytest.approx({"compute": cost["compute"], "communication": cost["communication"]})
    sent = sum(e["args"]["bytes"] for e in slices if e["cat"] == "communication")
    assert sent == pytest.approx(sum(t.bytes for t in traffic(p))) == pytest.approx(sum(moved.values()))

    whole = module_tree(p)
    assert whole.compute + whole.communication == pytest.approx(p.step_seconds)
    assert whole.operators == len(data["operators"])
    assert f"{format_seconds(whole.compute)} compute" in "".join(read.words)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_and_the_notes_are_the_same_in_every_form(name):
    """Proof, gaps, memory by class, budget, what was replicated: said once, shown everywhere."""
    p = plan(name)
    text, markdown = str(p), p.to_markdown().replace("\\", "")
    words = " ".join(" ".join(Reader(html_page(p)).words).split())
    _, *proofs = header_lines(p)
    for line in proofs:
        assert line.strip() in markdown
        for part in re.split("; | and ", line.strip()):
            assert part.removesuffix(", by propagation") in words, part
        assert line.strip() in " ".join(text.split())
    assert objective_text(p) in text and objective_text(p) in words
    for what, amount in p.memory.held:
        if len(p.memory.held) <= 6 and len(p.memory.held) > 1:
            assert (
                f"{what} {format_bytes(amount)}" in " ".join(text.split())
                and f"{what} {format_bytes(amount)}" in markdown
            )
        assert f"{what} {format_bytes(amount)}" in words
    for primitive in p.unknown:
        assert all(primitive in form for form in (text, markdown, words))
    if p.memory_budget is not None:
        assert (
            f"of {format_bytes(p.memory_budget)} allowed a device" in text
            and format_bytes(p.memory_budget) in words
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_whole_small_and_needs_nothing(name):
    text = html_page(plan(name))
    read = Reader(text)
    assert not read.open and not read.addresses
    assert "http" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert len(text.encode()) < 3_000_000
    assert len(text) < 3 * len(html_page(plan("tall8"))) or name != "tall126"
    budget = plan(name).memory_budget
    assert ("budget" in read.figures) == (budget is not None)


def test_names_cannot_break_the_page():
    p = plan("dense")
    evil = '</script><b id="x">&'
    row = dataclasses.replace(p.inputs[0], path=evil)
    text = html_page(dataclasses.replace(p, name=evil, inputs=(row, *p.inputs[1:]), unknown=(evil,)))
    assert '<b id="x">' not in text and not Reader(text).open


def test_to_files(tmp_path):
    p = plan("dense")
    p.to_html(tmp_path / "plan.html")
    p.to_trace(tmp_path / "trace.json", devices=2)
    assert (tmp_path / "plan.html").read_text() == html_page(p)
    assert len(p._repr_html_()) < len(html_page(p))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["device 0", "device 1"]


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_is_a_timeline(name):
    events = chrome_trace(plan(name))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    ends = 0.0
    for e in slices:
        assert (
            e["ts"] == pytest.approx(ends, abs=1e-9) and e["dur"] > 0 and {"pid", "tid", "args"} <= e.keys()
        )
        ends = e["ts"] + e["dur"]
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") <= plan(name).cost.peak_bytes * (
        1 + 1e-9
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_joins_what_the_plan_joins(name):
    g, p = operator_graph(plan(name)), plan(name)
    assert all(0 <= e.source < len(g.nodes) and 0 <= e.target < len(g.nodes) for e in g.edges)
    shown = {i for e in g.edges for m in e.collectives for i in m.ids}
    made = {t for r in (*p.operators, *p.boundaries) for t in r.writes} | {r.path for r in p.inputs}
    assert shown >= {c.id for c in p.collectives if c.tensor in made}
    if len(p.operators) < 60:
        assert sum(n.kind == "operator" for n in g.nodes) == len(p.operators + p.boundaries)
        reads = {(t, r.name) for r in p.operators + p.boundaries for t in r.reads if t in made}
        assert len(g.edges) <= len(reads) + len(p.outputs)
    assert len(g.nodes) < 150


def test_the_graph_of_a_small_plan():
    g = operator_graph(plan("dense"))
    names = [n.label for n in g.nodes]
    edges = {(names[e.source], names[e.target]): [m.kind for m in e.collectives] for e in g.edges}
    assert edges == {
        ("x", "dot_general.3"): [], ("w", "dot_general.3"): [], ("b", "broadcast_in_dim.4"): [],
        ("dot_general.3", "add.5"): ["all_reduce"], ("broadcast_in_dim.4", "add.5"): [], ("add.5", "max.6"): [],
        ("max.6", "result"): [],
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_dot_is_well_formed(name):
    """Statements of the language, by its grammar for what we write; names are declared before edges use them."""
    text = plan(name).to_dot()
    quoted = r'"(?:[^"\\]|\\.)*"'
    lines = text.splitlines()
    assert re.fullmatch(rf"digraph {quoted} {{", lines[0]) and lines[-1] == "}"
    declared = set()
    for line in lines[2:-1]:
        node = re.fullmatch(rf"  (n\d+) \[(\w+=({quoted}|\w+)(, )?)+\];", line)
        edge = re.fullmatch(rf"  (n\d+) -> (n\d+)( \[(\w+=({quoted}|\w+)(, )?)+\])?;", line)
        assert node or edge, line
        if node:
            declared.add(node[1])
        else:
            assert {edge[1], edge[2]} <= declared


def test_modules_differing_in_numbers_are_one_branch():
    def names(b: Branch) -> list[str]:
        return [b.name, *(n for c in b.branches for n in names(c))]

    assert names(module_tree(plan("tall126"))).count("blocks.0-125") == 1


def test_every_cell_of_a_markdown_table_has_its_column():
    for name in NAMES:
        width = None
        for line in plan(name).to_markdown().splitlines():
            if not line.startswith("|"):
                width = None
                continue
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert width in (None, cells), line
            width = cells
