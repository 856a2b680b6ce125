// Puts the parts together. The last of the files of this folder, which are one function.

// Some notebooks run scripts apart from their place: then it is the last report that no script has taken yet.
const here = document.currentScript && document.currentScript.closest(".jshard");
const root = here || Array.from(document.querySelectorAll(".jshard:not([data-ready])")).pop();
root.dataset.ready = "1";
const stored = root.querySelector("script.data");
const page = { root, data: stored.dataset.encoding ? await inflated(stored.textContent) : JSON.parse(stored.textContent) };
page.panel = panelView(page);
page.graph = graphView(page);
page.time = timeView(page);
page.search = searchView(page);
devicesView(page);

const keys = root.querySelector(".keys");
if (keys) keys.replaceChildren(...Array.from(page.graph.layouts).slice(0, 24).map(([name, i]) => el("span", { class: "key", style: "--h:" + hue(i) }, name || "scalar")));
const on = (q, event, f) => root.querySelectorAll(q).forEach(e => e.addEventListener(event, f));
on(".fit", "click", () => page.graph.fit());
on(".in", "click", () => page.graph.zoomBy(0.75));
on(".out", "click", () => page.graph.zoomBy(1.33));
on(".light", "change", e => page.graph.showLight(e.target.checked));
const lightBox = root.querySelector(".light");
if (lightBox) lightBox.checked = page.data.nodes.length <= 70;
on(".closeall", "click", () => { page.graph.open.clear(); page.graph.draw(); page.graph.fit(); });
on(".timein", "click", () => page.time && page.time.zoomBy(0.5));
on(".timeout", "click", () => page.time && page.time.zoomBy(2));
on(".timeall", "click", () => page.time && page.time.whole());
on(".timepeak", "click", () => page.time && page.time.toPeak());
on(".kinds", "change", e => {
  const kind = e.target.value;
  for (const x of root.querySelectorAll("[data-kinds]")) x.classList.toggle("off", kind !== "" && !x.dataset.kinds.split(" ").includes(kind));
  page.graph.filter(kind);
});
on(".theme", "click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : getComputedStyle(root).colorScheme.includes("dark");
  root.dataset.theme = dark ? "light" : "dark";
});

// Keys of the whole page; in a notebook, only while the report has the focus.
const whole = root.parentElement === document.body;
(whole ? document : root).addEventListener("keydown", e => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName);
  if (e.key === "Escape") {
    if (page.panel.close()) e.stopPropagation();
    else if (typing) e.target.blur();
    return;
  }
  if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
  const acts = {
    "/": () => page.search.focus(), g: () => root.querySelector("svg.graph").focus(), t: () => { const s = root.querySelector(".timesvg"); if (s) s.focus(); },
    d: () => root.querySelector(".devices .grid")?.focus(), "?": () => { const k = root.querySelector("details.help"); k.open = !k.open; k.scrollIntoView({ block: "nearest" }); },
  };
  if (!acts[e.key]) return;
  acts[e.key]();
  e.preventDefault();
  e.stopPropagation();
});
root.dataset.drawn = "1";
