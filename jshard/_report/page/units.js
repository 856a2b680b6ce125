// Numbers as the report writes them (format_units.py), and small helpers for elements.

function number3(x) {
  const text = x.toPrecision(3);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : String(Number(text));
}

function seconds(s) {
  if (!s) return "0";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) if (s >= scale) return number3(s / scale) + " " + unit;
  return s >= 1e-10 ? number3(s * 1e9) + " ns" : "<0.1 ns";
}

function bytes(b) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (b >= scale) return (b / scale < 999.5 ? number3(b / scale) : Math.round(b / scale)) + " " + unit;
  }
  return Math.round(b) + " B";
}

function percent(x) {
  return x >= 0.1 || x === 0 ? Math.round(100 * x) + "%" : (100 * x).toFixed(1) + "%";
}

// A step for about `count` ticks up to `most`, a round number in base 10, or a power of two for bytes.
function tick(most, count, base) {
  const raw = most / count || 1;
  if (base === 2) return 2 ** Math.ceil(Math.log2(raw));
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find(m => m * power >= raw * 0.999);
}

// An HTML element: el("p", {class: "x", onclick: f}, "text", child).
function el(tag, given, ...children) {
  return fill(document.createElement(tag), given, children);
}

// An SVG element.
function svgEl(tag, given, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), given, children);
}

function fill(e, given, children) {
  for (const [k, v] of Object.entries(given || {})) {
    if (typeof v === "function") e.addEventListener(k.slice(2), v);
    else if (v !== undefined && v !== null) e.setAttribute(k, v);
  }
  e.append(...children.filter(c => c !== "" && c !== null && c !== undefined));
  return e;
}

// A text of at most `most` characters, its middle left out.
function shortened(text, most) {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) * 0.6);
  return text.slice(0, head) + "\u2026" + text.slice(text.length - (most - 1 - head));
}

const HUES = [210, 35, 130, 275, 0, 175, 55, 320, 95, 240];
const hue = n => n < HUES.length ? HUES[n] : (n * 47) % 360;

// JSON of data in base64 that zlib compressed.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
