// The step of one device over time: a lane of compute, a lane for each set of mesh axes, and memory below, with one cursor.

const LEFT = 92, RIGHT = 14, LANE = 24, MEMORY = 170, TOP = 26;

function timeView(page) {
  const { root, data } = page, place = root.querySelector(".time");
  if (!place || !data.step) return null;
  const svg = svgEl("svg", { class: "timesvg", tabindex: "0", role: "application", "aria-label": "time line: arrow keys move the cursor, plus and minus zoom" });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  place.append(svg, readout);
  const slices = [];
  let now = 0;
  for (const [s, who, n] of data.events) {
    slices.push({ from: now, to: now + s, who, n: n || 1 });
    now += s;
  }
  const whole = now || data.step;
  const lanes = ["compute", ...Array.from(new Set(slices.filter(s => s.who < 0).map(laneOf))).sort()];
  const laneY = new Map(lanes.map((name, i) => [name, TOP + i * (LANE + 4)]));
  const memoryTop = TOP + lanes.length * (LANE + 4) + 18, high = memoryTop + MEMORY + 26;
  let from = 0, to = whole, cursor = peakTime();

  function laneOf(s) { return s.who >= 0 ? "compute" : data.collectives[-1 - s.who][1]; }

  function peakTime() {
    const best = data.curve.reduce((a, p) => !a || p[2] > a[2] ? p : a, null);
    return best ? best[1] : 0;
  }

  const wide = () => Math.max(320, place.getBoundingClientRect().width || 800);
  const xOf = t => LEFT + (t - from) / (to - from) * (wide() - LEFT - RIGHT);
  const tOf = x => from + (x - LEFT) / (wide() - LEFT - RIGHT) * (to - from);

  function draw() {
    const w = wide();
    fill(svg, { viewBox: `0 0 ${w} ${high}`, width: w, height: high }, []);
    svg.replaceChildren();
    const every = tick(to - from, Math.max(3, Math.floor((w - LEFT) / 120)), 10);
    for (let t = Math.ceil(from / every) * every; t <= to + every * 1e-6; t += every) {
      const x = xOf(t);
      svg.append(svgEl("line", { class: "rule", x1: x, x2: x, y1: TOP - 6, y2: memoryTop + MEMORY }),
        svgEl("text", { x: Math.min(x, w - 30), y: 14, class: "tick" }, seconds(t)));
    }
    for (const name of lanes) svg.append(svgEl("text", { x: LEFT - 8, y: laneY.get(name) + LANE / 2 + 4, class: "lane" }, shortened(name === "compute" ? name : "over " + name, 13)));
    drawSlices(w);
    drawMemory(w);
    svg.append(svgEl("line", { class: "cursor", y1: TOP - 6, y2: memoryTop + MEMORY }));
    showCursor();
  }

  // Slices narrower than a pixel are drawn together with their neighbours on the lane.
  function drawSlices() {
    const pending = new Map();
    const flush = name => {
      const p = pending.get(name);
      if (!p) return;
      pending.delete(name);
      const r = svgEl("rect", { class: "slice " + (name === "compute" ? "compute" : "communication") + (p.many ? " many" : ""), x: p.x, y: laneY.get(name), width: Math.max(p.x2 - p.x, 0.6), height: LANE });
      if (!p.many) r.style.setProperty("--h", hueOf(p.slice));
      svg.append(r);
      if (!p.many && p.x2 - p.x > 60) svg.append(svgEl("text", { class: "slicename", x: (p.x + p.x2) / 2, y: laneY.get(name) + LANE / 2 + 4 }, shortened(nameOf(p.slice), Math.floor((p.x2 - p.x) / 7))));
    };
    for (const s of slices) {
      if (s.to < from || s.from > to) continue;
      const name = laneOf(s), x = Math.max(xOf(s.from), LEFT), x2 = Math.min(xOf(s.to), wide() - RIGHT), p = pending.get(name);
      if (p && x - p.x2 < 0.7 && (p.many || p.x2 - p.x < 2) && x2 - x < 2) {
        p.x2 = x2;
        p.many = true;
      } else {
        flush(name);
        pending.set(name, { x, x2, slice: s, many: s.n > 1 });
      }
    }
    lanes.forEach(flush);
  }

  function hueOf(s) {
    const module = s.who >= 0 ? data.nodes[s.who][MODULE] : data.collectives[-1 - s.who][0].length;
    return hue(s.who >= 0 ? module + 1 : module);
  }

  function nameOf(s) {
    if (s.n > 1) return s.n + " short ones";
    if (s.who >= 0) return data.nodes[s.who][LABEL];
    const c = data.collectives[-1 - s.who];
    return c[0] + " " + bytes(c[4] / c[10]);
  }

  function drawMemory(w) {
    if (!data.curve.length) return void svg.append(svgEl("text", { x: LEFT, y: memoryTop + 20, class: "tick start" }, "this plan has no memory curve"));
    const budget = data.budget !== null && data.budget < 3 * data.peak ? data.budget : 0;
    const top = Math.max(data.peak, budget) * 1.08 || 1, yOf = b => memoryTop + MEMORY * (1 - b / top);
    const every = tick(top, 4, 2);
    for (let b = 0; b <= top; b += every) {
      svg.append(svgEl("line", { class: "rule", x1: LEFT, x2: w - RIGHT, y1: yOf(b), y2: yOf(b) }), svgEl("text", { x: LEFT - 8, y: yOf(b) + 4, class: "lane" }, bytes(b)));
    }
    const points = [];
    let held = 0;
    data.curve.forEach(([, t, b], i) => {
      const next = i + 1 < data.curve.length ? data.curve[i + 1][1] : whole;
      if (next < from || t > to) { held = b; return; }
      const x = Math.max(xOf(t), LEFT), x2 = Math.min(Math.max(xOf(next), x), w - RIGHT);
      points.push([x, yOf(b)], [x2, yOf(b)]);
    });
    if (!points.length) points.push([LEFT, yOf(held)], [w - RIGHT, yOf(held)]);
    const path = points.map(p => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L");
    svg.append(svgEl("path", { class: "memory", d: `M${points[0][0].toFixed(1)} ${yOf(0)}L${path}L${points[points.length - 1][0].toFixed(1)} ${yOf(0)}Z` }));
    if (budget) svg.append(svgEl("line", { class: "budget", x1: LEFT, x2: w - RIGHT, y1: yOf(budget), y2: yOf(budget) }), svgEl("text", { class: "budgetname", x: w - RIGHT - 4, y: yOf(budget) - 4 }, "budget " + bytes(budget)));
    svg.append(svgEl("line", { class: "peak", x1: LEFT, x2: w - RIGHT, y1: yOf(data.peak), y2: yOf(data.peak) }));
    svg.append(svgEl("text", { class: "tick start", x: LEFT, y: memoryTop - 6 }, "memory of a device; peak " + bytes(data.peak)));
  }

  const sliceAt = t => slices.find(s => t >= s.from && t < s.to) || slices[slices.length - 1];

  // The point of the curve at a time: the highest of those that begin there.
  function pointAt(t) {
    let best = data.curve[0];
    for (const p of data.curve) {
      if (p[1] > t + whole * 1e-9) break;
      best = p[1] === best[1] && p[2] < best[2] ? best : p;
    }
    return best;
  }

  function showCursor() {
    const line = svg.querySelector(".cursor"), x = xOf(cursor);
    fill(line, { x1: x, x2: x, visibility: x < LEFT - 1 || x > wide() - RIGHT + 1 ? "hidden" : "visible" }, []);
    const s = sliceAt(cursor), p = data.curve.length ? pointAt(cursor) : null;
    const parts = [];
    if (s) {
      const c = s.who < 0 ? data.collectives[-1 - s.who] : null;
      const node = s.who >= 0 ? s.who : c[6], about = s.n > 1 ? "" : c ? ", of " + c[7] + " for " + c[8] : page.panel.where(s.who) ? ", in " + page.panel.where(s.who) : "";
      parts.push(el("p", {}, el("b", {}, "at " + seconds(cursor) + ": "),
        node >= 0 && s.n === 1 ? el("button", { type: "button", class: "go", onclick: () => page.graph.reveal("n" + node) }, nameOf(s)) : nameOf(s), " (" + seconds(s.to - s.from) + (c ? ", over " + c[1] : "") + ")" + about));
    }
    if (p) parts.push(...heldAt(p));
    readout.replaceChildren(...parts);
  }

  const highest = data.curve.reduce((a, p) => Math.max(a, p[2]), 0);
  const most = b => b < highest * (1 - 1e-9) ? "" : b >= data.peak * (1 - 1e-9) ? ", the most of the step"
    : ", the most while an operator runs (the peak of " + bytes(data.peak) + " is while a collective runs)";

  // What is in memory while an operator runs, alike tensors together.
  function heldAt([op, , b]) {
    const rows = new Map();
    for (const [node, kind, size, first, last, n] of data.live) {
      if (op < first || op > last) continue;
      const key = node + " " + kind, r = rows.get(key) || [0, 0, node, kind];
      rows.set(key, [r[0] + size * n, r[1] + n, node, kind]);
    }
    const sorted = Array.from(rows.values()).sort((x, y) => y[0] - x[0]), listed = sorted.reduce((s, r) => s + r[0], 0);
    const head = el("p", {}, el("b", {}, bytes(b)), " in memory" + most(b) + ":");
    if (!data.live.length) return [head, el("p", {}, el("small", {}, "a plan read from a file does not say which tensors: shard(f, plan=plan).plan(*args) does"))];
    const body = sorted.slice(0, 12).map(([size, n, node, kind]) => el("tr", {},
      el("td", {}, node >= 0 ? el("button", { type: "button", class: "go", onclick: () => page.graph.reveal("n" + node) }, data.nodes[node][LABEL] + (n > 1 ? " x" + n : "")) : "others",
        el("small", {}, " " + data.kinds[kind] + (node >= 0 && page.panel.where(node) ? ", in " + page.panel.where(node) : ""))),
      el("td", { class: "r" }, bytes(size)), el("td", { class: "wide" }, bar(size / (b || 1)))));
    const rest = sorted.slice(12).reduce((s, r) => s + r[0], 0), beside = b - listed, notes = [];
    if (rest) notes.push("and " + (sorted.length - 12) + " smaller kinds, " + bytes(rest));
    if (beside > 0.001 * b) notes.push((data.unlisted ? "tensors too small to be listed, " : "") + "buffers that the operator holds while it runs: " + bytes(beside));
    if (beside < -0.001 * b) notes.push("of these, " + bytes(-beside) + " are results written over operands that end here");
    return [head, el("table", {}, el("tbody", {}, ...body)), ...notes.map(t => el("p", {}, el("small", {}, t)))];
  }

  const bar = share => el("span", { class: "bar" }, el("i", { class: "compute", style: `width:${Math.min(100, 100 * share).toFixed(1)}%` }));

  function setCursor(t) {
    cursor = Math.min(Math.max(t, 0), whole * (1 - 1e-9));
    if (cursor < from || cursor > to) pan(cursor - (from + to) / 2);
    else showCursor();
  }

  function pan(by) {
    const span = to - from;
    from = Math.min(Math.max(0, from + by), whole - span);
    to = from + span;
    draw();
  }

  function zoom(by, about) {
    const span = Math.min(whole, Math.max(whole * 1e-5, (to - from) * by)), share = (about - from) / (to - from);
    from = Math.min(Math.max(0, about - span * share), whole - span);
    to = from + span;
    draw();
  }

  // To the next slice or the one before.
  function stepBy(n) {
    const i = slices.indexOf(sliceAt(cursor)), s = slices[Math.min(Math.max(i + n, 0), slices.length - 1)];
    setCursor((s.from + s.to) / 2);
  }

  const pointer = e => tOf((e.clientX - svg.getBoundingClientRect().left));
  svg.addEventListener("pointermove", e => { if (!e.buttons) setCursor(pointer(e)); });
  svg.addEventListener("wheel", e => {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    zoom(e.deltaY > 0 ? 1.25 : 0.8, pointer(e));
  }, { passive: false });
  dragging(svg, (dx, _, start) => {
    from = start[0];
    to = start[1];
    pan(-dx / (wide() - LEFT - RIGHT) * (to - from));
  }, () => [from, to]);
  svg.addEventListener("click", e => {
    const s = sliceAt(pointer(e));
    setCursor(pointer(e));
    if (e.clientY - svg.getBoundingClientRect().top < memoryTop - 18 && s && s.n === 1) {
      const node = s.who >= 0 ? s.who : data.collectives[-1 - s.who][6];
      if (node >= 0) page.panel.ofNode(node);
    }
  });
  svg.addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const acts = {
      ArrowRight: () => stepBy(e.shiftKey ? 10 : 1), ArrowLeft: () => stepBy(e.shiftKey ? -10 : -1), Home: () => setCursor(0), End: () => setCursor(whole),
      "+": () => zoom(0.6, cursor), "=": () => zoom(0.6, cursor), "-": () => zoom(1.7, cursor), f: () => { from = 0; to = whole; draw(); },
      p: () => setCursor(peakTime()),
    };
    if (!acts[e.key]) return;
    acts[e.key]();
    e.preventDefault();
    e.stopPropagation();
  });
  draw();
  let seen = wide();
  if (window.ResizeObserver) new ResizeObserver(() => { if (wide() !== seen) { seen = wide(); draw(); } }).observe(place);
  return {
    draw, get cursor() { return cursor; },
    zoomBy: by => zoom(by, cursor), whole: () => { from = 0; to = whole; draw(); },
    toPeak() { setCursor(peakTime()); place.scrollIntoView({ block: "nearest" }); },
  };
}
