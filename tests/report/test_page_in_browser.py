"""The HTML page as it is used: modules open, search finds, time and memory follow the cursor, keys work; and its layout.

Skipped without Chromium (the page) and without Node.js (the layout alone).
"""

from __future__ import annotations

import json

import pytest

from jshard._report.format_units import format_bytes
from jshard._report.html import html_fragment, html_page
from jshard._report.page_data import page_data
from jshard._report.totals import formatted_totals, traffic
from tests.helpers.browser import CHROMIUM, NODE, run_node, tour
from tests.helpers.report_plans import NAMES, plan


needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
needs_node = pytest.mark.skipif(not NODE, reason="no Node.js here")

CHECK = """
const data = JSON.parse(DATA);
const model = graphModel(data), out = {overlaps: [], crossed: [], outside: [], boxes: [], widths: []};
for (const open of [new Set(), new Set(model.modules.map((_, i) => i))]) {
  for (const [hide, most] of [[true, undefined], [false, undefined], [true, 600], [false, 600]]) {
    const found = layoutAll(model, open, hide, most);
    out.boxes.push(found.boxes.length);
    out.widths.push(found.w);
    const plain = found.boxes.filter(b => !b.open);
    for (const a of found.boxes) {
      if (a.x < -1 || a.y < -1 || a.x + a.w > found.w + 1 || a.y + a.h > found.h + 1) out.outside.push(a.label);
    }
    for (let i = 0; i < plain.length; i++) for (let j = 0; j < i; j++) {
      const a = plain[i], b = plain[j];
      const beside = a.x >= b.x + b.w - 1 || b.x >= a.x + a.w - 1 || a.y >= b.y + b.h - 1 || b.y >= a.y + a.h - 1;
      if (!beside) out.overlaps.push([a.label, b.label]);
    }
    // No line passes through a box: every upright piece, and the ends of every slanting one.
    for (const line of found.lines) for (let k = 1; k < line.points.length; k++) {
      const [[x0, y0], [x1, y1]] = [line.points[k - 1], line.points[k]];
      const [left, right, low, high] = [Math.min(x0, x1), Math.max(x0, x1), Math.min(y0, y1), Math.max(y0, y1)];
      for (const b of plain) {
        const through = right > b.x + 1 && left < b.x + b.w - 1 && low < b.y + b.h - 1 && high > b.y + 1;
        if (through) out.crossed.push([b.label, line.points]);
      }
    }
  }
}
console.log(JSON.stringify(out));
"""


@needs_node
@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_and_no_line_passes_through_a_box(name, tmp_path):
    script = CHECK.replace("DATA", json.dumps(json.dumps(page_data(plan(name)))))
    found = run_node(script, "units.js", "layered.js", "nested.js")
    assert not found["overlaps"] and not found["crossed"] and not found["outside"]
    assert max(found["boxes"]) > 3
    free, narrow = found["widths"][:2], found["widths"][2:4]  # with all modules closed
    assert all(n <= max(600, f) for f, n in zip(free, narrow, strict=True))
    if name == "budget":  # no row is wider by itself
        assert min(free) > 700 and max(narrow) <= 600


@needs_node
def test_units_are_those_of_the_report():
    from jshard._core.messages import format_seconds

    times = [0, 3e-10, 1.5e-6, 0.00123, 0.0999, 12.34, 2e-11]
    sizes = [0, 12, 1023, 1024, 229376, 1023.6 * 1024, 5 * 2**40]
    said = run_node(f"console.log(JSON.stringify([{times}.map(seconds), {sizes}.map(bytes)]));", "units.js")
    assert said == [[format_seconds(t) for t in times], [format_bytes(b) for b in sizes]]


OPENING = """
  const before = all("g.box").length;
  const m = all("g.box.module.operator").find(g => g.textContent.includes("+ "));
  said.name = m.querySelector("title").textContent.split("\\n")[0];
  const key = m.dataset.key;
  click(m);
  said.opened = all("g.box").length > before && find(`[data-key="${key}"]`).classList.contains("open");
  const r = find(`[data-key="${key}"] rect`).getBoundingClientRect(), s = find(".stage").getBoundingClientRect();
  said.visible = r.top >= s.top - 1 && r.left >= s.left - 1;
  click(find(`[data-key="${key}"]`));
  said.closed = all("g.box").length === before;
  find(".kinds").value = find(".kinds").options[1].value;
  find(".kinds").dispatchEvent(new Event("change"));
  said.kind = find(".kinds").value;
  said.rows = all("tr.coll:not(.off) td.r[data-bytes]").map(e => e.textContent);
  said.cards = Object.fromEntries(all(".card b").map(e => [e.dataset.figure, e.textContent]));
  said.wide = document.documentElement.scrollWidth <= innerWidth;
"""


@needs_browser
@pytest.mark.parametrize("width", [800, 2560])
def test_modules_open_where_they_stand_and_nothing_is_wider_than_the_window(width, tmp_path):
    p = plan("gpt")
    said = tour(tmp_path, html_page(p), OPENING, width)
    assert said["opened"] and said["visible"] and said["closed"] and said["wide"]
    assert said["rows"] == [f"{t.bytes:,.0f} B" for t in traffic(p) if t.kind == said["kind"]]
    values = {**formatted_totals(p), "moved": format_bytes(sum(c.total for c in p.collectives))}
    assert {k: v for k, v in said["cards"].items() if k in values} == {
        k: v for k, v in values.items() if k != "budget"
    }


@needs_browser
def test_the_cell_of_a_notebook_reads_its_compressed_data(tmp_path):
    p = plan("gpt")
    cell = f"<html><head></head><body><main>{html_fragment(p)}</main></body></html>"
    said = tour(tmp_path, cell, OPENING)
    assert said["opened"] and said["visible"] and said["closed"]


USING = """
  const search = find(".search");
  press("/", document.body);
  said.focus = document.activeElement === search;
  search.value = "attention dot_general";
  search.dispatchEvent(new Event("input"));
  said.hits = all(".found li code").map(e => e.textContent);
  press("ArrowDown", search); press("Enter", search);
  said.chosen = find("g.box.chosen title").textContent;
  said.panel = find(".panel").hidden ? "" : find(".panel").textContent;
  press("Escape", document.body);
  said.closed = find(".panel").hidden;
  search.value = NAMED; search.dispatchEvent(new Event("input"));
  said.named = all(".found li").length;
  click(find('[data-figure="communication"]'));
  said.behind = find(".panel .sum").textContent;
  press("Escape", document.body);
  const time = find(".timesvg");
  press("t", document.body);
  said.timeFocus = document.activeElement === time;
  press("Home", time);
  said.first = find(".readout").textContent;
  press("p", time);
  said.peak = find(".readout").textContent;
  said.tensors = all(".readout tr").length;
  said.names = all(".timesvg text").map(e => e.textContent).join(" ");
  const slices = all(".timesvg .slice").length;
  press("+", time); press("+", time); press("+", time);
  said.zoomed = all(".timesvg .slice").length !== slices;
  said.lanes = all(".timesvg text.lane").map(e => e.textContent);
  said.units = all(".timesvg text.tick").map(e => e.textContent);
  const graph = find("svg.graph");
  press("g", document.body);
  said.graphFocus = document.activeElement === graph;
  find(".closeall").click();
  press("ArrowDown", graph);
  const first = find("g.box.chosen").dataset.key;
  for (let i = 0; i < 30 && !find("g.box.chosen.module.operator"); i++) press(i % 3 ? "ArrowDown" : "ArrowRight", graph);
  said.moved = find("g.box.chosen").dataset.key !== first;
  press("Enter", graph);
  said.entered = all("g.box.open").length;
  press("?", document.body);
  said.help = find("details.help").open;
"""


@needs_browser
def test_search_time_memory_and_keys(tmp_path):
    p = plan("gpt")
    some = next(r.name for r in p.operators if r.primitive == "dot_general")
    said = tour(tmp_path, html_page(p), USING.replace("NAMED", json.dumps(some)))
    assert said["focus"] and said["hits"] and all(h.startswith("dot_general") for h in said["hits"])
    assert said["chosen"].startswith("dot_general") and "in_strategy" in said["panel"] and said["closed"]
    assert said["named"] == 1
    assert formatted_totals(p)["communication"] in said["behind"]
    assert said["timeFocus"] and said["first"].startswith("at ") and "in memory" in said["first"]
    highest = max(p.memory.curve)
    assert f"{format_bytes(highest)} in memory, the most" in said["peak"] and said["tensors"] > 3
    assert format_bytes(p.cost.peak_bytes) in said["names"]
    assert said["zoomed"] and "compute" in said["lanes"] and any("KiB" in lane for lane in said["lanes"])
    assert any(unit in t for t in said["units"] for unit in ("us", "ms"))
    assert said["graphFocus"] and said["moved"] and said["entered"] == 1 and said["help"]


@needs_browser
def test_four_thousand_devices(tmp_path):
    import dataclasses

    from jshard._core.layout import MeshAxes

    p = plan("dense")
    large = dataclasses.replace(p, mesh=MeshAxes(p.mesh.names, (64, 64)))
    script = """
      said.cells = all(".devices .grid i").length;
      said.blocks = new Set(all(".devices .grid i").map(e => e.dataset.block)).size;
      const grid = find(".devices .grid");
      press("ArrowDown", grid); press("ArrowRight", grid);
      said.device = find(".device").textContent;
      said.wide = document.documentElement.scrollWidth <= innerWidth;
    """
    said = tour(tmp_path, html_page(large), script, 800)
    cut = next(r for r in large.inputs if any(r.layout.dims))
    assert said["cells"] == 4096 and said["blocks"] == cut.layout.pieces(large.mesh) and said["wide"]
    names = large.mesh.names
    assert said["device"].startswith(f"device 65 ({names[0]}=1, {names[1]}=1) holds [")
