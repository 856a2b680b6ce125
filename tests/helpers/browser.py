"""Runs a page in a headless browser, where there is one, and says what a script found in it."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE = shutil.which("node")


def tour(
    folder: pathlib.Path, page: str, script: str, width: int = 1280, height: int = 1000
) -> dict[str, Any]:
    """What `script` puts into `said`, after the page was loaded; errors of the page fail.

    `root` is the report, `find(css)` and `all(css)` look in it, `press(key, element)` presses a key there.
    """
    prelude = """<script>
      const errors = []; addEventListener("error", e => errors.push(e.message + " " + e.lineno));
      addEventListener("unhandledrejection", e => errors.push(String(e.reason && e.reason.stack)));
    </script>"""
    after = f"""<script>addEventListener("load", async () => {{
      const said = {{}}, root = document.querySelector(".jshard");
      const find = q => root.querySelector(q), all = q => Array.from(root.querySelectorAll(q));
      const press = (key, e, more) => e.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true, ...more}}));
      const click = e => e.dispatchEvent(new MouseEvent("click", {{bubbles: true}}));
      while (!root.dataset.drawn && !errors.length) await new Promise(later => setTimeout(later, 5));
      try {{ {script} }} catch (e) {{ errors.push(String(e) + e.stack); }}
      said.errors = errors;
      document.title = JSON.stringify(said);
    }});</script>"""
    file = folder / "page.html"
    file.write_text(page.replace("<head>", "<head>" + prelude).replace("</body>", after + "</body>"))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}",
        "--virtual-time-budget=3000", f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout, flags=re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(html.unescape(found[1]))
    assert not said["errors"], said["errors"]
    return said


def run_node(script: str, *files: str) -> Any:
    """What the expression or statements of `script` log as JSON, in Node.js, after some files of `_report/page/`."""
    folder = pathlib.Path(__file__).parents[2] / "jshard" / "_report" / "page"
    text = "\n".join((folder / f).read_text() for f in files)
    done = subprocess.run(
        [str(NODE), "-"], input=text + "\n" + script, capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout)
