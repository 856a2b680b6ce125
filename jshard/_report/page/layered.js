// Layered drawing after Sugiyama, Tagawa and Toda (1981), of one level of the graph.
//
// Rows by longest path; an edge over several rows gets a place of its own in each row between, so that no edge crosses a
// node; barycentre sweeps order the rows; positions are a least-squares fit with distances, by pooling neighbours.

const GAP_X = 20, GAP_Y = 34, DUMMY = 12;

// nodes: {w, h, order, pin: "top" | "bottom" | undefined, late: place just above the first reader}
// edges: {a, b, ax, bx}: numbers of nodes, and where the line begins and ends, from the left of the node (default: middle)
// most: the width within which rows move together as far as their nodes allow, if there is such
// Returns {x, y: of each node, w, h, routes: of each edge its points from a to b}.
function layered(nodes, edges, most) {
  const n = nodes.length;
  const forward = edges.map(e => nodes[e.a].order <= nodes[e.b].order ? [e.a, e.b] : [e.b, e.a]);
  const row = rowsOf(nodes, forward);
  const cells = nodes.map((v, i) => ({ node: i, w: v.w, h: v.h, row: row[i], links: [], x: 0, weight: 1 }));
  const chains = edges.map((e, k) => chain(cells, forward[k], e, nodes));
  const count = 1 + Math.max(-1, ...cells.map(c => c.row));
  const rows = Array.from({ length: count }, () => []);
  cells.forEach(c => rows[c.row].push(c));
  orderRows(rows);
  placeRows(rows);
  if (most) narrow(rows, cells, most);
  const top = [], bottom = [];
  let y = 0;
  rows.forEach((cs, r) => {
    const high = Math.max(0, ...cs.map(c => c.h));
    top[r] = y;
    bottom[r] = y + high;
    y += high + gapBelow(r, chains, cells);
  });
  const left = Math.min(0, ...cells.map(c => c.x - c.w / 2)), right = Math.max(0, ...cells.map(c => c.x + c.w / 2));
  cells.forEach(c => { c.x -= left; });
  return {
    x: nodes.map((_, i) => cells[i].x - cells[i].w / 2), y: nodes.map((_, i) => top[cells[i].row]),
    w: right - left, h: count ? bottom[count - 1] : 0,
    routes: edges.map((e, k) => route(chains[k], cells, forward[k][0] !== e.a, nodes, top, bottom)), row: row.slice(0, n),
  };
}

function rowsOf(nodes, forward) {
  const row = nodes.map(() => 0), out = nodes.map(() => []);
  forward.forEach(([a, b]) => { if (a !== b) out[a].push(b); });
  const byOrder = nodes.map((_, i) => i).sort((a, b) => nodes[a].order - nodes[b].order || a - b);
  for (const a of byOrder) if (!nodes[a].late) for (const b of out[a]) row[b] = Math.max(row[b], row[a] + 1);
  // What has at least as many readers as operands stands just above its first reader: fewer and shorter long lines.
  const ins = nodes.map(() => 0);
  out.forEach(bs => bs.forEach(b => { ins[b]++; }));
  for (const a of byOrder.reverse()) {
    const readers = out[a].filter(b => !nodes[b].pin);
    if (nodes[a].pin || nodes[a].late || !readers.length || readers.length < out[a].length || readers.length < ins[a]) continue;
    row[a] = Math.max(row[a], Math.min(...readers.map(b => row[b])) - 1);
  }
  // What nobody hands anything to may stand lower: an argument stands just above its first reader.
  for (const a of byOrder) if (nodes[a].late && out[a].length) row[a] = Math.min(...out[a].map(b => row[b])) - 1;
  const inner = nodes.map((v, i) => v.pin ? [] : [row[i]]).flat();
  const low = inner.length ? Math.min(...inner) : 0, high = inner.length ? Math.max(...inner) : 0;
  nodes.forEach((v, i) => { if (v.pin) row[i] = v.pin === "top" ? low - 1 : high + 1; });
  const least = Math.min(...row);
  return row.map(r => r - least);
}

// The cells that an edge passes, from its upper to its lower end.
function chain(cells, [a, b], e, nodes) {
  const flipped = a !== e.a;
  const middle = i => nodes[i].w / 2;
  const start = { cell: a, at: (flipped ? e.bx : e.ax) ?? middle(a) }, end = { cell: b, at: (flipped ? e.ax : e.bx) ?? middle(b) };
  const between = [];
  let last = a;
  for (let r = cells[a].row + 1; r < cells[b].row; r++) {
    cells.push({ node: -1, w: DUMMY, h: 0, row: r, links: [], x: 0, weight: 3 });
    between.push({ cell: cells.length - 1, at: DUMMY / 2 });
    link(cells, last, cells.length - 1, last === a ? start.at - cells[a].w / 2 : 0, 0);
    last = cells.length - 1;
  }
  link(cells, last, b, last === a ? start.at - cells[a].w / 2 : 0, end.at - cells[b].w / 2);
  return [start, ...between, end];
}

// `shift`: from the middle of each cell to the line's end there.
function link(cells, a, b, shiftA, shiftB) {
  if (cells[a].row === cells[b].row) return;
  cells[a].links.push([b, shiftB - shiftA]);
  cells[b].links.push([a, shiftA - shiftB]);
  cells[a].all = cells[b].all = cells;
}

const wantedX = c => c.links.length ? c.links.reduce((s, [b, shift]) => s + c.all[b].x + shift, 0) / c.links.length : c.x;

function orderRows(rows) {
  rows.forEach(cs => spread(cs));
  for (let sweep = 0; sweep < 14; sweep++) {
    const down = sweep % 2 === 0;
    for (let k = 0; k < rows.length; k++) {
      const r = down ? k : rows.length - 1 - k, cs = rows[r];
      const near = c => {
        const ls = c.links.filter(([b]) => down ? c.all[b].row < r : c.all[b].row > r);
        return ls.length ? ls.reduce((s, [b, shift]) => s + c.all[b].x + shift, 0) / ls.length : c.x;
      };
      const key = new Map(cs.map((c, i) => [c, [near(c), i]]));
      cs.sort((p, q) => key.get(p)[0] - key.get(q)[0] || key.get(p)[1] - key.get(q)[1]);
      spread(cs);
    }
  }
}

function spread(cs) {
  const whole = cs.reduce((s, c) => s + c.w + GAP_X, -GAP_X);
  let x = -whole / 2;
  for (const c of cs) {
    c.x = x + c.w / 2;
    x += c.w + GAP_X;
  }
}

function placeRows(rows) {
  for (let sweep = 0; sweep < 24; sweep++) {
    for (let k = 0; k < rows.length; k++) fit(rows[sweep % 2 ? rows.length - 1 - k : k]);
  }
}

// Where rows together are wider than what is seen: all positions nearer to the middle in one proportion, and inside,
// but for rows that are too wide by themselves.
function narrow(rows, cells, most) {
  const left = Math.min(...cells.map(c => c.x - c.w / 2)), right = Math.max(...cells.map(c => c.x + c.w / 2));
  if (right - left <= most) return;
  const wanted = new Map(cells.map(c => [c, (c.x - (left + right) / 2) * most / (right - left)]));
  for (const cs of rows) fit(cs, c => wanted.get(c), most / 2);
}

// The positions nearest to what is wanted, in order and apart, between -half and half: pool adjacent violators.
function fit(cs, wanted = wantedX, half = Infinity) {
  const pools = [];
  let offset = 0;
  cs.forEach((c, i) => {
    if (i) offset += (cs[i - 1].w + c.w) / 2 + (cs[i - 1].node < 0 && c.node < 0 ? 4 : GAP_X);
    c.offset = offset;
    pools.push({ sum: c.weight * (wanted(c) - offset), weight: c.weight, cells: [c] });
    while (pools.length > 1) {
      const b = pools[pools.length - 1], a = pools[pools.length - 2];
      if (a.sum / a.weight <= b.sum / b.weight) break;
      pools.splice(-2, 2, { sum: a.sum + b.sum, weight: a.weight + b.weight, cells: a.cells.concat(b.cells) });
    }
  });
  if (!cs.length) return;
  const least = cs[0].w / 2 - half, greatest = half - cs[cs.length - 1].w / 2 - offset;
  const inside = x => least > greatest ? (least + greatest) / 2 : Math.min(Math.max(x, least), greatest);
  for (const p of pools) for (const c of p.cells) c.x = inside(p.sum / p.weight) + c.offset;
}

// Rows between which many lines run aslant are further apart.
function gapBelow(r, chains, cells) {
  let aslant = 0;
  for (const c of chains) {
    for (let i = 0; i + 1 < c.length; i++) {
      if (cells[c[i].cell].row === r && Math.abs(cells[c[i].cell].x - cells[c[i + 1].cell].x) > 40) aslant++;
    }
  }
  return GAP_Y + Math.min(60, 2 * aslant);
}

// Points from the edge's source to its target: straight through rows, aslant between them.
function route(parts, cells, flipped, nodes, top, bottom) {
  const points = [];
  parts.forEach((p, i) => {
    const c = cells[p.cell], x = c.x - c.w / 2 + p.at;
    if (i === 0) points.push([x, top[c.row] + (c.node >= 0 ? nodes[c.node].h : 0)], [x, bottom[c.row]]);
    else if (i === parts.length - 1) points.push([x, top[c.row]]);
    else points.push([x, top[c.row]], [x, bottom[c.row]]);
  });
  return flipped ? points.reverse() : points;
}

// An SVG path: straight where the line is upright, an S elsewhere.
function pathOf(points) {
  let d = "M" + at(points[0]);
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i];
    if (Math.abs(x0 - x1) < 0.5) d += "L" + at(points[i]);
    else d += "C" + at([x0, (y0 + y1) / 2]) + " " + at([x1, (y0 + y1) / 2]) + " " + at(points[i]);
  }
  return d;
}

const at = p => Math.round(p[0] * 10) / 10 + " " + Math.round(p[1] * 10) / 10;
