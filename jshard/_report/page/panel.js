// The panel: what a box holds, and the operators behind a number, with their shares of it.

function panelView(page) {
  const { root, data } = page, panel = root.querySelector(".panel");
  let returnTo = null;
  const close = () => {
    if (panel.hidden) return false;
    panel.hidden = true;
    if (returnTo && returnTo.focus) returnTo.focus();
    return true;
  };

  function show(title, ...children) {
    if (panel.hidden) returnTo = document.activeElement;
    panel.hidden = false;
    panel.replaceChildren(el("header", {}, el("b", {}, title),
      el("button", { type: "button", class: "close", "aria-label": "close", onclick: close }, "\u00d7")), ...children);
    panel.scrollTop = 0;
  }

  const nodeName = i => data.nodes[i][LABEL] + (data.nodes[i][TIMES] > 1 ? " x" + data.nodes[i][TIMES] : "");
  const where = i => {
    const model = page.graph.model, up = [];
    for (let m = model.place[i]; m >= 0; m = model.modules[m].parent) up.unshift(model.modules[m].name);
    return up.join("/");
  };
  const collectiveSeconds = i => data.nodes[i][COLLECTIVES].reduce((s, c) => s + data.collectives[c][5], 0);
  const goTo = key => () => page.graph.reveal(key);

  // rows: [value, key or null, name, place]; the sum is what the number says.
  function table(rows, form, note) {
    const sum = rows.reduce((s, r) => s + r[0], 0);
    const shown = rows.filter(r => r[0] > 0).sort((a, b) => b[0] - a[0]);
    const body = el("tbody");
    for (const [value, key, name, place] of shown.slice(0, 300)) {
      const label = key ? el("button", { type: "button", class: "go", onclick: goTo(key) }, name) : name;
      body.append(el("tr", {}, el("td", {}, label, el("small", {}, " " + place)), el("td", { class: "r" }, form(value)),
        el("td", { class: "r" }, percent(sum ? value / sum : 0))));
    }
    const parts = [el("p", { class: "sum" }, shown.length + " kinds, together " + form(sum))];
    if (note) parts.push(el("p", {}, note));
    parts.push(el("table", {}, body));
    if (shown.length > 300) parts.push(el("p", {}, "and " + (shown.length - 300) + " smaller ones"));
    return parts;
  }

  const computeRows = (only, column) => data.nodes.map((v, i) => [v[column || SECONDS], "n" + i, nodeName(i), where(i)]).filter((_, i) => !only || only.has(i));
  const collectiveRows = (ids, column) => ids.map(c => {
    const m = data.collectives[c];
    return [m[column], m[6] >= 0 ? "n" + m[6] : null, m[0] + "[" + m[1] + "] " + m[2], "of " + m[7] + (m[10] > 1 ? " and " + (m[10] - 1) + " more" : "") + ", for " + m[8]];
  });
  const everyCollective = data.collectives.map((_, i) => i);
  const behind = {
    step: () => table(computeRows().concat(collectiveRows(everyCollective, 5)), seconds, "Compute and collectives, one after the other."),
    compute: () => table(computeRows(), seconds),
    redundant: () => table(computeRows(null, REDUNDANT), seconds, "The part of each operator beyond an even share over all devices."),
    communication: () => table(collectiveRows(everyCollective, 5), seconds),
    moved: () => table(collectiveRows(everyCollective, 4), bytes, "Bytes that one device receives."),
    peak: () => [el("p", {}, "By class, at the peak:"), ...table(data.held.map(([k, b]) => [b, null, k, ""]), bytes),
      ...(page.time ? [el("button", { type: "button", onclick: () => page.time.toPeak() }, "show the peak on the time line")] : [])],
  };
  behind.budget = behind.peak;
  behind.cost = behind.bound = data.level === 1 ? behind.peak : data.level === 2 ? behind.step
    : () => table(computeRows(null, REDUNDANT).concat(collectiveRows(everyCollective, 5)), seconds, "Collectives and the redundant part of each operator: what level 0 makes least.");

  function behindElement(e) {
    const title = e.dataset.title || e.textContent;
    if (e.dataset.figure) return show(title, ...behind[e.dataset.figure]());
    const list = text => (text || "").split(" ").filter(Boolean).map(Number);
    if (e.dataset.traffic) {
      const [kind, axes] = e.dataset.traffic.split("|");
      const ids = everyCollective.filter(c => data.collectives[c][0] + (data.collectives[c][9] ? " (own)" : "") === kind && data.collectives[c][1] === axes);
      const column = e.dataset.unit === "bytes" ? 4 : e.dataset.unit === "times" ? 3 : 5;
      return show(kind + " over " + axes, ...table(collectiveRows(ids, column), column === 4 ? bytes : column === 3 ? x => String(Math.round(x)) : seconds));
    }
    const nodes = new Set(list(e.dataset.nodes)), ids = list(e.dataset.collectives);
    show(title, ...table(computeRows(nodes).concat(collectiveRows(ids, 5)), seconds));
  }

  function ofNode(i) {
    const v = data.nodes[i], lines = [];
    if (v[SECONDS]) lines.push(seconds(v[SECONDS]) + " of compute, " + percent(v[SECONDS] / data.step) + " of the step" + (v[REDUNDANT] ? ", of it redundant " + seconds(v[REDUNDANT]) : ""));
    const places = where(i);
    if (places) lines.push("in " + places);
    lines.push(...v[DETAIL]);
    if (v[NUMBERS] && v[TIMES] > 1) lines.push("operators " + v[LABEL] + "." + v[NUMBERS].split(" ").join(", ." ));
    else if (v[NUMBERS]) lines.push("operator " + v[LABEL] + "." + v[NUMBERS]);
    const cs = v[COLLECTIVES].length ? table(collectiveRows(v[COLLECTIVES], 5), seconds) : [];
    const reads = data.edges.filter(e => e[1] === i).map(e => e[0]), feeds = data.edges.filter(e => e[0] === i).map(e => e[1]);
    const links = (word, list) => list.length ? [el("p", {}, word + " ", ...list.slice(0, 30).flatMap(k => [el("button", { type: "button", class: "go", onclick: goTo("n" + k) }, nodeName(k)), " "]), list.length > 30 ? "and " + (list.length - 30) + " more" : "")] : [];
    show(nodeName(i) + "  " + v[LAYOUT], el("pre", {}, lines.join("\n")), ...links("reads", reads), ...links("is read by", feeds), ...cs);
  }

  function ofModule(m) {
    const model = page.graph.model, inside = new Set(model.inside[m]);
    const ids = Array.from(new Set(model.inside[m].flatMap(i => data.nodes[i][COLLECTIVES])));
    const module = model.modules[m];
    if (module.kind !== "operator") {
      return show(module.name, el("p", {}, model.inside[m].length + " kinds of tensors"),
        el("table", {}, el("tbody", {}, ...model.inside[m].map(i => el("tr", {}, el("td", {}, el("button", { type: "button", class: "go", onclick: goTo("n" + i) }, nodeName(i))),
          el("td", {}, data.nodes[i][DETAIL][0]), el("td", {}, data.nodes[i][LAYOUT]))))));
    }
    show(module.name + (module.count > 1 ? " x" + module.count : ""), ...table(computeRows(inside).concat(collectiveRows(ids, 5)), seconds));
  }

  function ofBox(b) {
    if (b.collectives) show("collectives", ...table(collectiveRows(b.collectives, 5), seconds, "Time of all executions in a call."), ...table(collectiveRows(b.collectives, 4), bytes, "Bytes that a device receives."));
    else if (b.module !== undefined) ofModule(b.module);
    else ofNode(b.node);
  }

  // Every number that has operators behind it can be clicked, and reached by Tab.
  for (const e of root.querySelectorAll("[data-figure], [data-traffic], [data-nodes]")) {
    fill(e, { tabindex: "0", role: "button", class: e.className + " behind", title: "the operators behind this number" }, []);
    e.addEventListener("click", x => { x.preventDefault(); x.stopPropagation(); behindElement(e); });
    e.addEventListener("keydown", x => {
      if (x.key !== "Enter" && x.key !== " ") return;
      x.preventDefault();
      x.stopPropagation();
      behindElement(e);
    });
  }
  return { show, close, ofBox, ofNode, ofModule, nodeName, where };
}
