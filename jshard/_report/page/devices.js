// Which device holds which block of a tensor: one square a device, as the mesh has them, up to some thousand.

function devicesView(page) {
  const { root, data } = page, place = root.querySelector(".devices");
  const [names, sizes] = data.axes, total = sizes.reduce((a, b) => a * b, 1);
  if (!data.tensors.length) return;
  const pick = el("select", { "aria-label": "tensor" }), said = el("p"), grid = el("div", { class: "grid", tabindex: "0", role: "img" }), note = el("p", { class: "device", "aria-live": "polite" });
  data.tensors.forEach((t, i) => pick.add(new Option(shortened(t[0], 70) + "  " + t[1] + "[" + t[2].join(",") + "]", i)));
  place.append(el("label", {}, "tensor ", pick), said, grid, note);
  // Rows by the major axes, columns by the minor ones, as near to a square as the axes allow.
  let columns = 1, k = names.length;
  const most = total > 256 ? 64 : 24;
  while (k > 0 && (columns === 1 || columns * columns < total && columns * sizes[k - 1] <= most)) columns *= sizes[--k];
  if (columns > most) columns = total > 256 ? 64 : 16;
  const coordinate = (device, axis) => {
    let rest = device;
    for (let j = names.length - 1; j > axis; j--) rest = Math.floor(rest / sizes[j]);
    return rest % sizes[axis];
  };
  const places = names.map((n, i) => n + " in " + (i < k ? "rows" : "columns")).join(", ");
  let at = 0, blockOf = () => [];

  function draw() {
    const [name, , shape, dims, partial] = data.tensors[+pick.value];
    const cuts = dims.map(d => d.reduce((n, a) => n * sizes[names.indexOf(a)], 1));
    blockOf = device => dims.map(d => d.reduce((n, a) => n * sizes[names.indexOf(a)] + coordinate(device, names.indexOf(a)), 0));
    const cut = cuts.map((c, i) => [c, i]).filter(c => c[0] > 1).map(c => c[1]);
    const each = shape.map((s, i) => Math.ceil(s / cuts[i])).join(" x ") || "one number";
    const many = cuts.reduce((a, b) => a * b, 1);
    said.textContent = "each of " + total + " devices holds " + each + (cut.length ? ", cut along " + cut.map(i => "dimension " + i + " by " + dims[i].join("*")).join(" and ") + ": " + many + " blocks, each on " + total / many + (total / many > 1 ? " devices" : " device") : ": all of it")
      + (partial.length ? "; an addend of the sum over " + partial.join("*") : "") + ". A square is a device (" + places + "), a colour and a number are a block.";
    const small = total > 256;
    grid.className = "grid" + (small ? " small" : "");
    grid.style.gridTemplateColumns = `repeat(${Math.min(columns, total)}, ${small ? "minmax(6px, 14px)" : "minmax(26px, 46px)"})`;
    grid.setAttribute("aria-label", "devices and the blocks of " + name);
    const cells = document.createDocumentFragment();
    for (let device = 0; device < total; device++) {
      const number = blockOf(device).reduce((n, b, i) => n * cuts[i] + b, 0);
      const cell = document.createElement("i");
      if (!small) cell.textContent = number;
      cell.dataset.block = number;
      cell.style.setProperty("--h", Math.round((number * 137.5) % 360));
      cells.append(cell);
    }
    grid.replaceChildren(cells);
    tell(Math.min(at, total - 1), shape, cuts);
  }

  function tell(device, shape, cuts) {
    at = device;
    grid.querySelectorAll(".at").forEach(c => c.classList.remove("at"));
    if (grid.children[device]) grid.children[device].classList.add("at");
    const block = blockOf(device);
    const ranges = shape.map((s, i) => {
      const size = Math.ceil(s / cuts[i]);
      return block[i] * size + ":" + Math.min(s, (block[i] + 1) * size);
    });
    note.textContent = "device " + device + " (" + names.map((n, i) => n + "=" + coordinate(device, i)).join(", ") + ") holds [" + ranges.join(", ") + "]";
  }

  const about = device => {
    const [, , shape, dims] = data.tensors[+pick.value];
    tell(device, shape, dims.map(d => d.reduce((n, a) => n * sizes[names.indexOf(a)], 1)));
  };
  grid.addEventListener("pointerover", e => { if (e.target !== grid) about(Array.from(grid.children).indexOf(e.target)); });
  grid.addEventListener("keydown", e => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[e.key];
    if (!by) return;
    if (at + by >= 0 && at + by < total) about(at + by);
    e.preventDefault();
    e.stopPropagation();
  });
  pick.addEventListener("change", draw);
  pick.value = Math.max(0, data.tensors.findIndex(t => t[3].some(d => d.length)));
  draw();
}
