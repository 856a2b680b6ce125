"""Exports conform to their formats: JSON as documented, DOT for a parser, traces by Chrome's rules."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess

import pytest

import jshard
from jshard._core.layout import MeshAxes
from jshard._plan import rows
from jshard._plan.record import JSON_VERSION
from jshard._report.chrome_trace import chrome_trace
from jshard._report.operator_graph import operator_graph
from tests.helpers.report_plans import NAMES, plan


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "plan_json.md").read_text()
OBJECTS = {
    "Mesh": MeshAxes, "Tensor": rows.TensorRow, "Operator": rows.OperatorRow, "Collective": rows.CollectiveRow,
    "Cost": rows.Cost, "Memory": rows.Memory, "Model FLOPs": rows.ModelFlops, "Physics": rows.StepLowerBound,
    "Need": rows.ProductBound, "Decision": rows.Decision, "Line": rows.LocalRow,
}  # fmt: skip


def documented(section: str) -> list[str]:
    """Keys in the table of a section of the page."""
    body = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE)


def test_the_page_names_every_key_of_a_plan_and_no_other():
    for name in ("dense", "scan"):
        assert sorted(documented("Plan")) == sorted(json.loads(plan(name).to_json()))
    assert f"now **{JSON_VERSION}**" in PAGE


@pytest.mark.parametrize("section", OBJECTS)
def test_the_page_names_every_key_of_an_object(section):
    assert documented(section) == [f.name for f in dataclasses.fields(OBJECTS[section])]


def test_every_object_in_a_file_is_one_of_the_page():
    known = {frozenset(documented(s)) for s in (*OBJECTS, "Layout")}

    def look(x):
        if isinstance(x, dict):
            assert frozenset(x) in known, x
        for v in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
            look(v)

    for name in ("dense", "scan", "unknown"):
        look(list(json.loads(plan(name).to_json()).values()))
    assert set(documented("Layout")) == set(json.loads(plan("dense").to_json())["inputs"][0]["layout"])


# The Trace Event Format, "JSON Object Format": https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
# Which keys an event of each phase must have, and of which type.
NUMBER = (int, float)
PHASES = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


def complaints(text: str) -> list[str]:
    """What a reader of Chrome traces would stumble over."""
    found = []
    data = json.loads(text, parse_constant=lambda c: found.append(f"{c} is not JSON"))
    if data.get("displayTimeUnit") not in ("ms", "ns") or not isinstance(data.get("traceEvents"), list):
        found.append("not a JSON object of trace events")
    last: dict[tuple[int, int], float] = {}
    for e in data["traceEvents"]:
        wanted = PHASES.get(e.get("ph"))
        if wanted is None:
            found.append(f"phase {e.get('ph')!r}")
            continue
        bad = [k for k, t in wanted.items() if not isinstance(e.get(k), t)]
        if bad:
            found.append(f"{e['ph']} without a right {bad[0]}: {e}")
            continue
        if e["ph"] == "M" and (e["name"] not in METADATA or "name" not in e["args"]):
            found.append(f"metadata {e}")
        if e["ph"] == "C" and not all(isinstance(v, NUMBER) for v in e["args"].values()):
            found.append(f"a counter of something else than numbers: {e}")
        if e["ph"] == "X":
            # Slices of one thread nest or follow each other; ours follow.
            track = e["pid"], e["tid"]
            if e["ts"] < last.get(track, 0.0) - 1e-9 or e["dur"] < 0:
                found.append(f"overlaps: {e}")
            last[track] = e["ts"] + e["dur"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_keeps_the_rules_of_its_format(name, tmp_path):
    plan(name).to_trace(tmp_path / "trace.json", devices=2)
    text = (tmp_path / "trace.json").read_text()
    assert not complaints(text)
    assert len(json.loads(text)["traceEvents"]) > len(plan(name).collectives)


def test_a_wrong_trace_is_found():
    right = chrome_trace(plan("dense"))
    slices = [e for e in right["traceEvents"] if e["ph"] == "X"]
    for wrong in (
        {**slices[0], "ph": "Z"}, {**slices[0], "dur": "long"}, {**slices[0], "ts": -1.0},
        {"name": "memory", "ph": "C", "ts": 0, "pid": 0, "args": {"bytes": "many"}},
        {"name": "x", "ph": "M", "pid": 0, "args": {}},
    ):  # fmt: skip
        assert complaints(json.dumps({**right, "traceEvents": [*right["traceEvents"], wrong]})), wrong
    assert complaints(json.dumps({**right, "displayTimeUnit": "s"}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot calls pyparsing by its old names
@pytest.mark.parametrize("name", ["dense", "scan", "gpt"])
def test_dot_goes_through_a_parser_that_knows_the_language(name):
    pydot = pytest.importorskip("pydot")
    (parsed,) = pydot.graph_from_dot_data(plan(name).to_dot())
    g = operator_graph(plan(name))
    nodes = [n for n in parsed.get_nodes() if n.get_name() not in ("node", "edge", '"\\n"')]
    assert len(nodes) == len(g.nodes) and len(parsed.get_edges()) == len(g.edges)
    shown = {(e.get_source(), e.get_destination()) for e in parsed.get_edges()}
    assert shown == {(f"n{e.source}", f"n{e.target}") for e in g.edges}


@pytest.mark.skipif(not shutil.which("dot"), reason="no Graphviz here")
@pytest.mark.parametrize("name", ["dense", "gpt"])
def test_graphviz_draws_it(name):
    done = subprocess.run(
        ["dot", "-Tsvg"], input=plan(name).to_dot(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('class="node"') == len(operator_graph(plan(name)).nodes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evil_names_do_not_break_dot():
    pydot = pytest.importorskip("pydot")
    p = plan("dense")
    row = dataclasses.replace(p.inputs[0], path='a"; b [label="\\')
    evil = dataclasses.replace(p, name='f" {', inputs=(row, *p.inputs[1:]))
    (parsed,) = pydot.graph_from_dot_data(evil.to_dot())
    assert len(parsed.get_edges()) == len(operator_graph(evil).edges)


def test_a_version_that_does_not_exist_is_refused():
    text = plan("dense").to_json()
    assert json.loads(text)["jshard"] == JSON_VERSION
    with pytest.raises(jshard.ShardError, match="reads version"):
        jshard.Plan.from_json(text.replace(f'"jshard": {JSON_VERSION}', '"jshard": 0'))
