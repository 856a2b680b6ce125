// The graph: boxes that open and close, lines, zoom and move, the keyboard, and a small map of the whole.

const LEAST_SCALE = 0.75;  // below it the names cannot be read

function graphView(page) {
  const { root, data } = page, model = graphModel(data), stage = root.querySelector(".stage");
  const svg = svgEl("svg", { class: "graph", tabindex: "0", role: "application", "aria-label": "operator graph: arrow keys move, Enter opens" });
  const map = svgEl("svg", { class: "map", "aria-hidden": "true" });
  stage.replaceChildren(svg, map);
  const open = startOpen(model), layouts = layoutHues(data);
  let hideLight = data.nodes.length > 70, found, view = [0, 0, 1, 1], chosen = null, kind = "";
  const view_ = {
    model, open, reveal, fit: fitAll, draw, zoomBy: by => zoom(by, 0.5, 0.5), toggle, layouts,
    get boxes() { return found.boxes; }, get lines() { return found.lines; }, get view() { return view; }, get chosen() { return chosen; },
    showLight(on) { hideLight = !on; draw(); fitAll(); },
    filter(k) { kind = k; draw(); },
  };

  function draw() {
    found = layoutAll(model, open, hideLight, size()[0] / LEAST_SCALE);
    svg.replaceChildren(svgEl("defs", {}, arrow("jshard-arrow"), arrow("jshard-moved")));
    const behind = svgEl("g"), lines = svgEl("g"), front = svgEl("g");
    for (const b of found.boxes) {
      (b.open ? behind : front).append(boxElement(b));
      if (b.open) front.append(headElement(b));
    }
    for (const line of found.lines) lines.append(lineElement(line));
    svg.append(behind, lines, front);
    drawMap();
    // As high as the graph, but not higher than most of the window.
    stage.style.height = Math.round(Math.min(Math.max(380, found.h * 1.15), Math.max(380, 0.72 * window.innerHeight))) + "px";
    view[3] = view[2] * size()[1] / size()[0];
    show();
  }

  function arrow(id) {
    return svgEl("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" },
      svgEl("path", { d: "M0 0L8 4L0 8z", class: id }));
  }

  function boxElement(b) {
    const g = svgEl("g", {
      class: "box " + b.kind + (b.open ? " open" : "") + (chosen === b.key ? " chosen" : ""), "data-key": b.key,
      transform: `translate(${Math.round(b.x)} ${Math.round(b.y)})`,
    });
    if (b.node !== undefined) g.style.setProperty("--h", hue(layouts.get(data.nodes[b.node][LAYOUT]) || 0));
    if (kind && b.collectives && !b.collectives.some(c => data.collectives[c][0] === kind)) g.classList.add("off");
    g.append(svgEl("title", {}, b.sub ? b.label + "\n" + b.sub : b.label));
    g.append(svgEl("rect", { width: b.w, height: b.h, rx: b.kind === "operator" ? 5 : b.module !== undefined ? 8 : b.h / 2 }));
    if (!b.open) {
      const sign = b.module !== undefined ? "+ " : "";
      g.append(svgEl("text", { x: b.w / 2, y: b.sub ? 17 : 15 }, sign + b.label));
      if (b.sub) g.append(svgEl("text", { x: b.w / 2, y: 32, class: "sub" }, b.sub));
      const spent = b.module !== undefined ? model.seconds[b.module] : b.node !== undefined ? data.nodes[b.node][SECONDS] : 0;
      if (spent && data.step) g.append(svgEl("rect", { class: "spent", x: 6, y: b.h - 4, height: 3, width: Math.max(1, (b.w - 12) * spent / data.step) }));
    }
    if (b.node !== undefined && found.next.some(([a]) => a === b.key)) g.append(svgEl("text", { x: b.w - 4, y: b.h + 11, class: "next end" }, "\u21b4 next layer"));
    if (b.node !== undefined && found.next.some(([, c]) => c === b.key)) g.append(svgEl("text", { x: b.w - 4, y: -4, class: "next end" }, "from the layer before"));
    g.addEventListener("click", () => {
      choose(b.key);
      if (b.module !== undefined) toggle(b.module);
      else page.panel.ofBox(b);
    });
    g.addEventListener("pointerenter", () => light(b));
    g.addEventListener("pointerleave", () => light(null));
    return g;
  }

  // The name of an open module lies above the lines that enter it.
  function headElement(b) {
    return svgEl("g", { class: "box name", transform: `translate(${Math.round(b.x)} ${Math.round(b.y)})` },
      svgEl("text", { x: 12, y: 17, class: "head" }, "\u2212 " + b.label), svgEl("text", { x: b.w - 12, y: 17, class: "sub end" }, b.sub));
  }

  function lineElement(line) {
    const classes = "line" + (line.moved ? " moved" : "") + (line.up ? " up" : "");
    const path = svgEl("path", { d: pathOf(line.points), class: classes });
    if (line.arrow) path.setAttribute("marker-end", `url(#${line.moved ? "jshard-moved" : "jshard-arrow"})`);
    line.element = path;
    return path;
  }

  // The lines of a box stand out while the pointer is on it.
  function light(b) {
    const inside = b && (b.node !== undefined ? new Set([b.node]) : b.module !== undefined && !b.open ? new Set(model.inside[b.module]) : null);
    for (const line of found.lines) line.element.classList.toggle("on", Boolean(inside) && Array.from(line.who).some(w => inside.has(w)));
  }

  function choose(key) {
    chosen = key;
    for (const g of svg.querySelectorAll(".box")) g.classList.toggle("chosen", g.dataset.key === key);
  }

  // Opens or closes a module; the choice stays on it.
  function toggle(m) {
    if (open.has(m)) open.delete(m);
    else open.add(m);
    chosen = "m" + m;
    draw();
    const b = found.boxes.find(x => x.key === "m" + m);
    if (b) into(b);
  }

  // Opens what is around a node or module and shows it.
  function reveal(key) {
    let m = key[0] === "m" ? model.modules[+key.slice(1)].parent : model.place[+key.slice(1)];
    for (; m >= 0; m = model.modules[m].parent) open.add(m);
    if (key[0] === "n" && data.nodes[+key.slice(1)][LIGHT] && hideLight) {
      hideLight = false;
      const box = root.querySelector(".light");
      if (box) box.checked = true;
    }
    chosen = key;
    draw();
    const b = found.boxes.find(x => x.key === key);
    if (b) into(b, true);
  }

  const size = () => { const r = svg.getBoundingClientRect(); return [r.width || 800, r.height || 400]; };
  const show = () => {
    svg.setAttribute("viewBox", view.map(v => Math.round(v * 10) / 10).join(" "));
    const frame = map.querySelector(".frame");
    if (frame) fill(frame, { x: view[0], y: view[1], width: view[2], height: view[3] }, []);
    map.classList.toggle("needed", Boolean(found) && (view[2] < found.w - 1 || view[3] < found.h - 1));
  };

  // The whole graph where its names can be read so, else its beginning at the least scale.
  function fitAll() {
    const [w, h] = size(), scale = Math.min(1.15, Math.max(LEAST_SCALE, Math.min(w / found.w, h / found.h)));
    const first = found.boxes.filter(b => b.y < h / scale).map(b => b.x + b.w / 2);
    const middle = found.w * scale <= w ? found.w / 2 : first.reduce((a, b) => a + b, 0) / (first.length || 1);
    view = [middle - w / scale / 2, found.h * scale <= h ? (found.h - h / scale) / 2 : 0, w / scale, h / scale];
    show();
  }

  // Moves so that a box is seen whole, or its beginning; zooms out as far as names can be read.
  function into(b, centre) {
    const [w, h] = size();
    let scale = w / view[2];
    if (b.w > view[2] || b.h > view[3]) scale = Math.max(LEAST_SCALE, Math.min(scale, w / (b.w + 40), h / (b.h + 40)));
    let [x, y] = view, vw = w / scale, vh = h / scale;
    if (centre || vw !== view[2]) [x, y] = [b.x + b.w / 2 - vw / 2, b.y + Math.min(b.h, vh - 20) / 2 - vh / 2];
    if (b.x < x || b.x + b.w > x + vw) x = b.w > vw ? b.x + b.w / 2 - vw / 2 : b.x < x ? b.x - 20 : b.x + b.w + 20 - vw;
    if (b.y < y || b.y + b.h > y + vh) y = b.h > vh - 40 ? b.y - 10 : b.y < y ? b.y - 20 : b.y + b.h + 20 - vh;
    view = [x, y, vw, vh];
    show();
  }

  function zoom(by, fx, fy) {
    view = [view[0] + view[2] * fx * (1 - by), view[1] + view[3] * fy * (1 - by), view[2] * by, view[3] * by];
    show();
  }

  function drawMap() {
    const scale = Math.min(170 / found.w, 130 / found.h);
    fill(map, { viewBox: `0 0 ${found.w} ${found.h}`, width: found.w * scale, height: found.h * scale }, []);
    map.replaceChildren(...found.boxes.map(b => svgEl("rect", { x: b.x, y: b.y, width: b.w, height: b.h, class: b.open ? "open" : "closed" })),
      svgEl("rect", { class: "frame" }));
  }

  map.addEventListener("click", e => {
    const r = map.getBoundingClientRect();
    view[0] = (e.clientX - r.left) / r.width * found.w - view[2] / 2;
    view[1] = (e.clientY - r.top) / r.height * found.h - view[3] / 2;
    show();
  });
  svg.addEventListener("wheel", e => {
    if (!e.ctrlKey && !e.metaKey) return;  // plain wheels scroll the page
    e.preventDefault();
    const r = svg.getBoundingClientRect();
    zoom(e.deltaY > 0 ? 1.15 : 0.87, (e.clientX - r.left) / r.width, (e.clientY - r.top) / r.height);
  }, { passive: false });
  dragging(svg, (dx, dy, start) => {
    const scale = start[2] / size()[0];
    view = [start[0] - dx * scale, start[1] - dy * scale, view[2], view[3]];
    show();
  }, () => view.slice());
  svg.addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const b = found.boxes.find(x => x.key === chosen);
    const way = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[e.key];
    if (way) step(b, way);
    else if ((e.key === "Enter" || e.key === " ") && b) {
      if (b.module !== undefined) toggle(b.module);
      else page.panel.ofBox(b);
    } else if (e.key === "i" && b) page.panel.ofBox(b);
    else if (e.key === "f") fitAll();
    else if (e.key === "+" || e.key === "=") zoom(0.8, 0.5, 0.5);
    else if (e.key === "-") zoom(1.25, 0.5, 0.5);
    else return;
    e.preventDefault();
    e.stopPropagation();
  });

  // The nearest box in a direction becomes the chosen one.
  function step(b, [dx, dy]) {
    if (!b) return void (found.boxes.length && (choose(found.boxes[0].key), into(found.boxes[0])));
    const centre = c => [c.x + c.w / 2, c.open ? c.y + HEAD / 2 : c.y + c.h / 2];
    const [x, y] = centre(b);
    let best = null, least = Infinity;
    for (const c of found.boxes) {
      const [u, v] = centre(c), along = (u - x) * dx + (v - y) * dy, aside = Math.abs((u - x) * dy) + Math.abs((v - y) * dx);
      if (c.key === b.key || along < 4) continue;
      const far = along + 2 * aside;
      if (far < least) [best, least] = [c, far];
    }
    if (best) {
      choose(best.key);
      into(best.open ? { ...best, h: HEAD } : best);
    }
  }

  draw();
  fitAll();
  let seen = size()[0];
  if (window.ResizeObserver) new ResizeObserver(() => { if (size()[0] !== seen) { seen = size()[0]; draw(); fitAll(); } }).observe(svg);
  return view_;
}

// Opened at first: the largest modules, while there is room to see what is in them.
function startOpen(model) {
  const open = new Set();
  const inside = m => model.modules.filter(x => x.parent === m).length + model.inside[m].filter(i => model.place[i] === m && !model.data.nodes[i][LIGHT]).length;
  let room = 14 - model.modules.filter(m => m.parent < 0).length - model.place.filter((m, i) => m < 0 && !model.data.nodes[i][LIGHT]).length;
  for (;;) {
    const can = model.modules.map((m, i) => i).filter(i => !open.has(i) && model.modules[i].kind === "operator"
      && (model.modules[i].parent < 0 || open.has(model.modules[i].parent)) && inside(i) <= room);
    if (!can.length) return open;
    const best = can.reduce((a, b) => model.seconds[b] > model.seconds[a] ? b : a);
    open.add(best);
    room -= inside(best);
  }
}

// A colour for every layout, the commonest first.
function layoutHues(data) {
  const times = new Map();
  for (const v of data.nodes) times.set(v[LAYOUT], (times.get(v[LAYOUT]) || 0) + v[TIMES]);
  return new Map(Array.from(times).sort((a, b) => b[1] - a[1]).map(([name], i) => [name, i]));
}

// Moves with the pointer held down; a click without a move stays a click.
function dragging(target, moved, begin) {
  let from = null;
  target.addEventListener("pointerdown", e => { if (e.button === 0) from = [e.clientX, e.clientY, begin(e), false]; });
  target.addEventListener("pointermove", e => {
    if (!from) return;
    const dx = e.clientX - from[0], dy = e.clientY - from[1];
    if (!from[3] && Math.abs(dx) + Math.abs(dy) < 4) return;
    if (!from[3]) target.setPointerCapture(e.pointerId);
    from[3] = true;
    moved(dx, dy, from[2], e);
  });
  const end = e => {
    if (from && from[3]) target.addEventListener("click", x => x.stopPropagation(), { capture: true, once: true });
    from = null;
  };
  target.addEventListener("pointerup", end);
  target.addEventListener("pointercancel", () => { from = null; });
}
