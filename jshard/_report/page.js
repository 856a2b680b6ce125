(function () {
  // Some notebooks run scripts apart from their place: then it is the last report that no script has taken yet.
  const here = document.currentScript && document.currentScript.closest(".jshard");
  const root = here || Array.from(document.querySelectorAll(".jshard:not([data-ready])")).pop();
  root.dataset.ready = "1";
  const data = JSON.parse(root.querySelector("script.data").textContent);
  const all = (q, el) => Array.from((el || root).querySelectorAll(q));

  // Zoom and move: the viewBox is the only state.
  const svg = root.querySelector("svg.graph"), note = root.querySelector(".hover");
  const wide = +svg.dataset.wide, high = +svg.dataset.high;
  let box;
  const show = () => svg.setAttribute("viewBox", box.join(" "));
  const fit = () => {
    const r = svg.getBoundingClientRect(), ratio = r.height && r.width ? r.height / r.width : 0.5;
    const w = Math.max(Math.min(wide, 1400), 500);
    // Begin where the program begins: at the middle of the nodes that the first screen can hold.
    const at = all(".node", svg).map(g => g.getAttribute("transform").match(/[\d.]+/g).map(Number));
    const first = at.filter(p => p[1] < w * ratio).map(p => p[0]);
    const middle = first.reduce((a, b) => a + b, 0) / (first.length || 1) + 89;
    box = [Math.min(Math.max(middle - w / 2, 0), Math.max(wide - w, (wide - w) / 2)), 0, w, w * ratio];
    show();
  };
  const zoom = (by, fx, fy) => {
    box = [box[0] + box[2] * fx * (1 - by), box[1] + box[3] * fy * (1 - by), box[2] * by, box[3] * by];
    show();
  };
  fit();
  root.querySelector(".fit").onclick = () => { box = [0, 0, wide, high]; show(); };
  root.querySelector(".in").onclick = () => zoom(0.75, 0.5, 0.5);
  root.querySelector(".out").onclick = () => zoom(1.33, 0.5, 0.5);
  svg.addEventListener("wheel", e => {
    if (!e.ctrlKey && !e.metaKey) return;  // plain wheels scroll the page
    e.preventDefault();
    const r = svg.getBoundingClientRect();
    zoom(e.deltaY > 0 ? 1.15 : 0.87, (e.clientX - r.left) / r.width, (e.clientY - r.top) / r.height);
  }, { passive: false });
  let from = null;
  svg.addEventListener("pointerdown", e => { from = [e.clientX, e.clientY, box[0], box[1]]; svg.setPointerCapture(e.pointerId); });
  svg.addEventListener("pointermove", e => {
    if (!from) return;
    const scale = box[2] / svg.getBoundingClientRect().width;
    box = [from[2] - (e.clientX - from[0]) * scale, from[3] - (e.clientY - from[1]) * scale, box[2], box[3]];
    show();
  });
  svg.addEventListener("pointerup", () => { from = null; });

  // Hover: what the title says, where it can be read and copied; neighbours stand out.
  for (const g of all(".node, .edge", svg)) {
    g.addEventListener("pointerenter", () => {
      note.textContent = g.querySelector("title").textContent;
      const n = g.dataset.n;
      for (const e of all(".edge", svg)) e.classList.toggle("on", n !== undefined && (e.dataset.a === n || e.dataset.b === n));
      for (const m of all(".node", svg)) m.classList.toggle("on", n === undefined && (m.dataset.n === g.dataset.a || m.dataset.n === g.dataset.b));
    });
  }

  // Filter by kind of collective: edges, lines of the tree and rows of the traffic.
  root.querySelector(".kinds").onchange = e => {
    const kind = e.target.value;
    for (const g of all("[data-kinds]")) g.classList.toggle("off", kind !== "" && !g.dataset.kinds.split(" ").includes(kind));
  };

  // Which device holds which block of a tensor.
  const place = root.querySelector(".devices"), names = data.names, sizes = data.sizes;
  const total = sizes.reduce((a, b) => a * b, 1);
  const pick = document.createElement("select"), out = document.createElement("div");
  data.tensors.forEach((t, i) => pick.add(new Option(t[0] + "  " + t[1] + "[" + t[2].join(",") + "]", i)));
  place.append(pick, out);
  const coordinate = (device, axis) => {
    let rest = device;
    for (let k = names.length - 1; k > axis; k--) rest = Math.floor(rest / sizes[k]);
    return rest % sizes[axis];
  };
  const ranges = ds => {
    const parts = [];
    for (let i = 0; i < ds.length; i++) {
      let j = i;
      while (j + 1 < ds.length && ds[j + 1] === ds[j] + 1) j++;
      parts.push(j > i + 1 ? ds[i] + "-" + ds[j] : ds.slice(i, j + 1).join(","));
      i = j;
    }
    return parts.length > 6 ? parts.slice(0, 5).join(",") + ",.." : parts.join(",");
  };
  const draw = () => {
    const [name, dtype, shape, dims, partial] = data.tensors[+pick.value];
    const cuts = dims.map(d => d.reduce((n, a) => n * sizes[names.indexOf(a)], 1));
    const blocks = new Map();
    for (let device = 0; device < total; device++) {
      const index = dims.map(d => d.reduce((n, a) => n * sizes[names.indexOf(a)] + coordinate(device, names.indexOf(a)), 0));
      const key = index.join(",");
      if (!blocks.has(key)) blocks.set(key, []);
      blocks.get(key).push(device);
    }
    const cut = cuts.map((c, i) => [c, i]).filter(c => c[0] > 1).map(c => c[1]);
    const last = cut.length ? cut[cut.length - 1] : -1, rows = cut.length > 1 ? cut[cut.length - 2] : -1;
    const many = rows < 0 && last >= 0 && cuts[last] > 16, wrap = root.clientWidth < 900 ? 8 : 16;  // one long row or column is broken like text
    const columns = many ? wrap : rows < 0 && last === 0 ? 1 : last < 0 ? 1 : cuts[last];
    out.replaceChildren();
    const said = document.createElement("p");
    const each = shape.map((s, i) => s / cuts[i]).join(" x ") || "one number";
    said.textContent = "each device holds " + each + (cut.length ? ", cut along " + cut.map(i => "dimension " + i + " by " + dims[i].join("*")).join(" and ") : ": all of it")
      + (partial.length ? "; an addend of the sum over " + partial.join("*") : "") + ". Devices in each block:";
    out.append(said);
    let grid = null, number = 0;
    const per = many ? cuts[last] : columns * (rows < 0 ? (last === 0 ? cuts[0] : 1) : cuts[rows]);
    for (const [key, ds] of blocks_in_order(blocks)) {
      if (number % per === 0) {
        grid = document.createElement("div");
        grid.className = "grid";
        grid.style.gridTemplateColumns = "repeat(" + columns + ", auto)";
        out.append(grid);
      }
      const cell = document.createElement("div");
      cell.textContent = ranges(ds);
      cell.title = "block " + key + " of " + name;
      cell.style.setProperty("--h", (number * 137) % 360);
      grid.append(cell);
      if (++number >= 512) break;
    }
  };
  const blocks_in_order = blocks => Array.from(blocks).sort((a, b) => {
    const x = a[0].split(",").map(Number), y = b[0].split(",").map(Number);
    for (let i = 0; i < x.length; i++) if (x[i] !== y[i]) return x[i] - y[i];
    return 0;
  });
  pick.onchange = draw;
  pick.value = Math.max(0, data.tensors.findIndex(t => t[3].some(d => d.length)));
  if (data.tensors.length) draw();
})();
