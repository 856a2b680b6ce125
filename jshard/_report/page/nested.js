// Which part of the graph is seen, as modules open and close, and where it stands: every open module is drawn on its own,
// and lines that enter or leave it have ports at its border.

const KIND = 0, LABEL = 1, MODULE = 2, TIMES = 3, SECONDS = 4, REDUNDANT = 5, LAYOUT = 6, DETAIL = 7, COLLECTIVES = 8, LIGHT = 9, NUMBERS = 10;
const CHAR = 6.7, HEAD = 26, PAD = 14, NODE_H = 40;

// The whole graph: arguments and results beside the modules, by the first part of their path.
function graphModel(data) {
  const modules = data.modules.map(m => ({ name: m[0], parent: m[1], count: m[2], kind: "operator" }));
  const place = data.nodes.map(v => v[MODULE]);
  for (const kind of ["input", "output"]) {
    const roots = new Map();
    data.nodes.forEach((v, i) => {
      if (v[KIND] !== kind) return;
      const root = v[LABEL].split(".")[0];
      if (!roots.has(root)) roots.set(root, []);
      roots.get(root).push(i);
    });
    for (const [root, members] of roots) {
      if (members.length < 2) continue;
      modules.push({ name: kind === "output" && /^\d/.test(root) ? "result " + root : root, parent: -1, count: 1, kind });
      for (const i of members) place[i] = modules.length - 1;
    }
  }
  const seconds = modules.map(() => 0), inside = modules.map(() => []), order = modules.map(() => Infinity);
  data.nodes.forEach((v, i) => {
    for (let m = place[i]; m >= 0; m = modules[m].parent) {
      seconds[m] += v[SECONDS] + v[COLLECTIVES].reduce((s, c) => s + data.collectives[c][5], 0);
      inside[m].push(i);
      order[m] = Math.min(order[m], i);
    }
  });
  return { data, modules, place, seconds, inside, order };
}

// Edges between shown nodes; a path through hidden operators is one edge with all their collectives.
function shownEdges(data, hidden) {
  const after = data.nodes.map(() => []), out = new Map();
  data.edges.forEach(e => after[e[0]].push(e));
  data.nodes.forEach((_, a) => {
    if (hidden[a]) return;
    const seen = new Set(), todo = after[a].map(e => [e[1], e[2] || []]);
    while (todo.length) {
      const [b, moved] = todo.pop();
      if (!hidden[b]) {
        const key = a + " " + b;
        if (!out.has(key)) out.set(key, [a, b, new Set()]);
        moved.forEach(c => out.get(key)[2].add(c));
      } else if (!seen.has(b)) {
        seen.add(b);
        after[b].forEach(e => todo.push([e[1], moved.concat(e[2] || [])]));
      }
    }
  });
  return Array.from(out.values());
}

// What is seen of a node: the open modules around it, then the closed one or the node itself; "m3", "n17".
function seenChain(model, open, i) {
  const up = [];
  for (let m = model.place[i]; m >= 0; m = model.modules[m].parent) up.unshift(m);
  const chain = [];
  for (const m of up) {
    chain.push("m" + m);
    if (!open.has(m)) return chain;
  }
  chain.push("n" + i);
  return chain;
}

// The levels: container ("" or "m3") -> {elements: key -> element, edges: [{from, to, fromPort, toPort, nodes}]}.
function levels(model, open, hideLight) {
  const { data } = model, level = new Map();
  const of = container => {
    if (!level.has(container)) level.set(container, { elements: new Map(), edges: new Map(), next: [] });
    return level.get(container);
  };
  const seen = data.nodes.map((_, i) => seenChain(model, open, i));
  // A light operator that is in no closed module is hidden.
  const hidden = data.nodes.map((v, i) => hideLight && Boolean(v[LIGHT]) && seen[i][seen[i].length - 1][0] === "n");
  const chains = seen.map((chain, i) => hidden[i] ? null : chain), edges = shownEdges(data, hidden);
  const inContainer = (chain, k) => k ? chain[k - 1] : "";
  const orderOf = key => key[0] === "m" ? model.order[+key.slice(1)] : +key.slice(1);
  const put = (container, key, more) => {
    const es = of(container).elements;
    if (!es.has(key)) es.set(key, { key, order: orderOf(key), ...more });
  };
  chains.forEach(chain => chain && chain.forEach((key, k) => put(inContainer(chain, k), key)));
  const join = (container, from, to, fromPort, toPort, who) => {
    const key = [from, to, fromPort || "", toPort || ""].join("|"), es = of(container).edges;
    if (!es.has(key)) es.set(key, { from, to, fromPort, toPort, who: new Set() });
    who.forEach(w => es.get(key).who.add(w));
  };
  of("");
  const pills = new Map();
  for (const [a, b, moved] of edges) {
    const A = chains[a], B = chains[b], who = [a, b];
    let d = 0;
    while (d < A.length && d < B.length && A[d] === B[d]) d++;
    if (d === A.length || d === B.length) continue;  // inside one closed module
    const C = inContainer(A, d), seenA = A[A.length - 1];
    if (a >= b) {  // the next of folded layers: named at both ends, no line
      of(C).next.push([seenA, B[B.length - 1]]);
      continue;
    }
    const out = A.length - 1 > d ? "o:" + seenA : null;
    const ids = Array.from(moved).sort((p, q) => p - q);
    const into = B.length - 1 > d ? "i:" + (ids.length ? "c" + ids.join(",") : seenA) : null;
    for (let k = d + 1; k < A.length; k++) {
      put(A[k - 1], out, { pin: "bottom", order: Infinity });
      join(A[k - 1], A[k], out, k < A.length - 1 ? out : null, null, who);
    }
    for (let k = d + 1; k < B.length; k++) {
      put(B[k - 1], into, { pin: "top", order: -1 });
      join(B[k - 1], into, B[k], null, k < B.length - 1 ? into : null, who);
    }
    if (!ids.length) {
      join(C, A[d], B[d], out, into, who);
      continue;
    }
    const pill = "c" + ids.join(",") + ":" + seenA;
    if (!pills.has(pill)) pills.set(pill, { C, ids, from: A[d], out, to: [] });
    pills.get(pill).to.push([B[d], into, who]);
  }
  // Collectives of one kind over the same axes, from one box to the same boxes, are one pill.
  const merged = new Map();
  pills.forEach((p, key) => {
    const kinds = Array.from(new Set(p.ids.map(c => data.collectives[c][0] + data.collectives[c][1]))).sort();
    const ends = Array.from(new Set(p.to.map(([to, into]) => to + " " + into))).sort();
    const group = [p.C, p.from, p.out, kinds, ends].join("|");
    if (!merged.has(group)) merged.set(group, { key, ...p, ids: [], to: [] });
    const m = merged.get(group);
    m.ids = Array.from(new Set(m.ids.concat(p.ids))).sort((x, y) => x - y);
    m.to.push(...p.to);
  });
  merged.forEach(p => {
    put(p.C, p.key, { order: orderOf(p.from) + 0.5, collectives: p.ids });
    for (const [to, into, who] of p.to) {
      join(p.C, p.from, p.key, p.out, null, who);
      join(p.C, p.key, to, null, into, who);
    }
  });
  return level;
}

// Sizes and positions of one level and all inside: {w, h, boxes: [...], lines: [...]} in its own coordinates.
function layoutLevel(model, open, level, container, most) {
  const here = level.get(container) || { elements: new Map(), edges: new Map(), next: [] };
  const elements = Array.from(here.elements.values()), number = new Map(elements.map((e, i) => [e.key, i]));
  const sized = elements.map(e => measured(model, open, level, e));
  const portAt = (i, port) => port && sized[i].ports ? sized[i].ports.get(port) : undefined;
  const joined = Array.from(here.edges.values()).filter(e => number.has(e.from) && number.has(e.to) && e.from !== e.to);
  const edges = joined.map(e => {
    const a = number.get(e.from), b = number.get(e.to);
    return { a, b, ax: portAt(a, e.fromPort), bx: portAt(b, e.toPort) };
  });
  const found = layered(sized, edges, most);
  const boxes = [], lines = [], ports = new Map();
  elements.forEach((e, i) => {
    const x = found.x[i], y = found.y[i];
    if (e.pin) ports.set(e.key, x + sized[i].w / 2);
    else boxes.push({ ...sized[i], key: e.key, x, y });
  });
  joined.forEach((e, k) => {
    const last = elements[edges[k].b];
    const up = sized[edges[k].a].order > sized[edges[k].b].order;
    lines.push({ points: found.routes[k], who: e.who, arrow: !last.pin, up,
      moved: Boolean(elements[edges[k].a].collectives || last.collectives) });
  });
  return { w: found.w, h: found.h, boxes, lines, ports, next: here.next };
}

function measured(model, open, level, e) {
  const { data } = model;
  if (e.pin) return { w: 8, h: 0, order: e.pin === "top" ? -1 : 1e9, pin: e.pin };
  const wide = (...texts) => Math.max(96, ...texts.map(t => t.length * CHAR + 22));
  if (e.collectives) {
    const cs = e.collectives.map(c => data.collectives[c]);
    const name = Array.from(new Set(cs.map(c => c[0] + "[" + c[1] + "]"))).slice(0, 2).join(", ");
    const number = cs.reduce((n, c) => n + c[10], 0);
    const amount = bytes(cs.reduce((s, c) => s + c[4], 0)) + ", " + seconds(cs.reduce((s, c) => s + c[5], 0));
    const label = shortened(name, 44) + (number > 1 ? " x" + number : "") + "  " + amount;
    return { kind: "collective", label, sub: "", w: wide(label), h: 22, order: e.order, collectives: e.collectives };
  }
  const i = +e.key.slice(1);
  if (e.key[0] === "n") {
    const v = data.nodes[i], times = v[TIMES] > 1 ? " x" + v[TIMES] : "";
    const name = v[KIND] === "output" && /^\d/.test(v[LABEL]) ? "result " + v[LABEL] : v[LABEL];
    const label = shortened(name, 42) + times, sub = shortened(v[LAYOUT] || "scalar", 44);
    return { kind: v[KIND], label, sub, w: wide(label, sub), h: NODE_H, order: e.order, late: v[KIND] === "input", node: i };
  }
  const m = model.modules[i], times = m.count > 1 ? " x" + m.count : "";
  const what = m.kind === "operator" ? "operators" : "tensors";
  const sum = model.inside[i].reduce((s, n) => s + data.nodes[n][TIMES], 0);
  const label = shortened(m.name, 46) + times, sub = sum + " " + what + (model.seconds[i] ? ", " + seconds(model.seconds[i]) : "");
  const base = { kind: "module " + m.kind, label, sub, order: e.order, module: i, late: m.kind === "input" };
  if (!open.has(i)) return { ...base, w: wide(label + "  +", sub), h: NODE_H };
  const inner = layoutLevel(model, open, level, e.key);
  const w = Math.max(inner.w + 2 * PAD, wide(label + sub + "   -")), shift = (w - inner.w) / 2;
  const ports = new Map(Array.from(inner.ports, ([k, x]) => [k, x + shift]));
  return { ...base, open: true, w, h: inner.h + HEAD + 2 * PAD, ports, inner, shift };
}

// All boxes and lines in one coordinate system, outer ones first.
function layoutAll(model, open, hideLight, most) {
  const top = layoutLevel(model, open, levels(model, open, hideLight), "", most - 2 * PAD);
  const boxes = [], lines = [], next = [];
  const flatten = (part, dx, dy, depth, box) => {
    for (const b of part.boxes) boxes.push({ ...b, x: b.x + dx, y: b.y + dy, depth });
    for (const line of part.lines) lines.push({ ...line, points: ends(line.points, box).map(([x, y]) => [x + dx, y + dy]) });
    next.push(...part.next);
    for (const b of part.boxes) if (b.inner) flatten(b.inner, dx + b.x + b.shift, dy + b.y + HEAD + PAD, depth + 1, b);
  };
  flatten(top, PAD, PAD, 0, null);
  return { w: top.w + 2 * PAD, h: top.h + 2 * PAD, boxes, lines, next };
}

// A line that starts or ends at a port is drawn up to the border of its module.
function ends(points, box) {
  if (!box) return points;
  const all = points.slice();
  const [first, last] = [all[0], all[all.length - 1]];
  if (first[1] <= 0.5) all.unshift([first[0], -HEAD - PAD]);
  if (last[1] >= box.inner.h - 0.5) all.push([last[0], box.inner.h + PAD]);
  return all;
}
