// The search box: operators (by name, primitive, module or source line), modules, tensors, collectives.

function searchView(page) {
  const { root, data } = page, box = root.querySelector(".search"), list = root.querySelector(".found");
  let hits = [], at = -1;

  const entries = () => {
    const model = page.graph.model, out = [];
    model.modules.forEach((m, i) => out.push({ kind: "module", key: "m" + i, name: m.name, more: "", text: m.name }));
    data.nodes.forEach((v, i) => {
      const more = v[KIND] === "operator" ? [page.panel.where(i), v[DETAIL][0]].filter(Boolean).join("  ") : v[DETAIL][0];
      out.push({ kind: v[KIND] === "input" ? "argument" : v[KIND] === "output" ? "result" : "operator", key: "n" + i, name: page.panel.nodeName(i), more, text: v[LABEL] + " " + more, node: i });
    });
    data.collectives.forEach((c, i) => {
      if (c[6] >= 0) out.push({ kind: "collective", key: "n" + c[6], name: c[0] + "[" + c[1] + "] " + c[2], more: "of " + c[7], text: c[0] + "[" + c[1] + "] " + c[7] });
    });
    return out;
  };
  let all = null;

  // "dot_general.123": the group that has this operator.
  const numbered = (e, text) => {
    const m = text.match(/^([a-z_0-9]+)\.(\d+)$/i);
    if (!m || e.node === undefined) return false;
    const v = data.nodes[e.node], n = +m[2];
    return v[LABEL] === m[1] && v[NUMBERS].split(" ").some(piece => {
      const [range, step] = piece.split("/"), [a, b] = range.split("-").map(Number);
      return b === undefined ? a === n : n >= a && n <= b && (n - a) % +step === 0;
    });
  };

  function find() {
    const text = box.value.trim().toLowerCase();
    all = all || entries();
    const words = text.split(/\s+/);
    hits = text ? all.filter(e => numbered(e, text) || words.every(w => e.text.toLowerCase().includes(w))) : [];
    hits.sort((a, b) => rank(a, text) - rank(b, text));
    at = hits.length ? 0 : -1;
    draw(text);
  }

  const rank = (e, text) => numbered(e, text) ? -1 : e.name.toLowerCase().startsWith(text) ? 0 : e.name.toLowerCase().includes(text) ? 1 : 2;

  function draw(text) {
    list.hidden = !text;
    list.replaceChildren(...hits.slice(0, 40).map((e, i) => el("li", {
      role: "option", "aria-selected": String(i === at), class: i === at ? "at" : "",
      onpointerdown: x => { x.preventDefault(); pick(i); },
    }, el("small", {}, e.kind + " "), el("code", {}, e.name), el("small", {}, " " + e.more))),
    ...(hits.length > 40 ? [el("li", {}, el("small", {}, "and " + (hits.length - 40) + " more"))] : []),
    ...(text && !hits.length ? [el("li", {}, el("small", {}, "nothing has this in its name, module or source line"))] : []));
    const seen = list.querySelector(".at");
    if (seen) seen.scrollIntoView({ block: "nearest" });
  }

  function pick(i) {
    const e = hits[i];
    if (!e) return;
    list.hidden = true;
    page.graph.reveal(e.key);
    root.querySelector(".stage").scrollIntoView({ block: "nearest" });
    if (e.key[0] === "m") page.panel.ofModule(+e.key.slice(1));
    else page.panel.ofNode(+e.key.slice(1));
  }

  box.addEventListener("input", find);
  box.addEventListener("focus", () => { if (box.value) find(); });
  box.addEventListener("blur", () => { list.hidden = true; });
  box.addEventListener("keydown", e => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      const n = Math.min(hits.length, 40);
      if (n) at = (at + (e.key === "ArrowDown" ? 1 : n - 1)) % n;
      draw(box.value.trim());
    } else if (e.key === "Enter") pick(at);
    else if (e.key === "Escape" && !list.hidden) list.hidden = true;
    else return;
    e.preventDefault();
    e.stopPropagation();
  });
  return { focus: () => { box.focus(); box.select(); } };
}
