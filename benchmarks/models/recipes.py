"""Recipes and the search on models that none of us wrote: loss and gradients against the plain run, on 8 CPU devices.

`python benchmarks/models/recipes.py [MODEL ...]` runs `benchmarks/models/zoo/recipes.py` for each model in a process of its
own, in the environment of `benchmarks/models/models.py`, writes `benchmarks/models/recipes.json` and
`benchmarks/models/recipes.md`, and exits with 1 where a cell fails. Models named keep the others' rows.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import models  # noqa: E402


RESULTS, PAGE = HERE / "recipes.json", HERE / "recipes.md"
FAMILIES = (
    "Llama", "GPT2", "BERT", "ViT", "Whisper", "Mistral", "Gemma", "Bloom", "OPT", "GPT-J", "GPT-Neo", "CLIP", "BART",
    "ResNet", "Swin-like", "SAM-like",
)  # fmt: skip
COLUMNS = (
    "fsdp",
    "megatron",
    "fsdp+megatron",
    "megatron+sequence",
    "ulysses",
    "vocab",
    "lazy",
    "fused",
    "search",
)
TOLERANCE = 1e-5

INTRO = """# Recipes on models that none of us wrote

`python benchmarks/models/recipes.py` runs loss and gradients (training, dropout included) of each model, at two layers and a
width of 64 in float32, on 8 CPU devices as data 2 x model 4, by each recipe and by the search from the batch's cut, and
compares them with the plain run. A cell: the largest difference of any leaf, relative to the leaf's largest value; then
what the plan costs at level 0 over the search's (which pins the batch only); `not as planned` where the compiled
collectives are not the planned ones. `lazy`: parameters created in the shardings of `fsdp+megatron` from shapes alone,
against the plain initialisation (at the same random numbers), and the share of them that a device holds. `fused`: by
`fsdp+megatron` with attention as one operator and fused norms, against the plain model as it is written.
The last two models are our own, since no installed library has windows of images; they run in any environment with
`MODELS_PYTHON`.
At these sizes the plans are made for a chip without latency, as in `benchmarks/models/models.md`.

"""


def cell(column: str, row: dict[str, Any], notes: list[str]) -> str:
    """One cell of the table; reasons and failures go to the notes.

    >>> notes = []
    >>> cell("fsdp", {"fsdp": {"reason": "no batch"}}, notes), notes
    ('[1]', ['no batch'])
    """
    found = row.get(column)
    if found is None:
        return "failed" if "fault" in row else ""
    if "reason" in found:
        if found["reason"] not in notes:
            notes.append(found["reason"])
        return f"[{notes.index(found['reason']) + 1}]"
    text = f"{found['error']:.1e}"
    if column == "lazy":
        return f"{text}, {found['share']:.0%}"
    base = row.get("search", {}).get("objective")
    text += f", {found['objective'] / base:.2f}x" if base else ""
    return text if found["verified"] else f"{text}, not as planned"


def failures(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row."""
    out = [row["fault"]] if "fault" in row else []
    for column in COLUMNS:
        found = row.get(column, {})
        if found.get("error", 0.0) > TOLERANCE:
            out.append(f"{column}: error {found['error']:.1e} at {found['at']}")
        if not found.get("verified", True):
            out.append(f"{column}: the compiled collectives are not the planned ones")
    return out


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    notes: list[str] = []
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    lines += [f"| {row['model']} | {' | '.join(cell(c, row, notes) for c in COLUMNS)} |" for row in rows]
    said = [f"[{i}] {note}" for i, note in enumerate(notes, 1)]
    wrong = [f"{row['model']}: {'; '.join(failures(row))}" for row in rows if failures(row)]
    return INTRO + "\n".join([*lines, "", *(f"{s}\n" for s in (*said, *wrong))])


def measure(python: pathlib.Path, model: str) -> dict[str, Any]:
    """One model's row from a process of its own; what was found before a fault stays."""
    done = subprocess.run(
        [str(python), "-m", "benchmarks.models.zoo.recipes", model],
        cwd=ROOT,
        env={**os.environ, **models.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    row = json.loads(found[-1]) if found else {"model": model}
    if done.returncode:
        row["fault"] = next(
            (x for x in reversed(done.stderr.strip().splitlines()) if x.strip()), "no message"
        )
        print(done.stderr, file=sys.stderr)
    return row


def main(names: list[str]) -> int:
    """Measure the models named, or all."""
    if strange := [n for n in names if n not in FAMILIES]:
        raise SystemExit(f"no model {', '.join(strange)}; known are {', '.join(FAMILIES)}")
    python = os.environ.get("MODELS_PYTHON")
    where = pathlib.Path(os.environ.get("MODELS_VENV", ROOT / ".venv-models"))
    program = pathlib.Path(python) if python else models.environment(where)
    kept = {r["model"]: r for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    failed = 0
    for name in names or FAMILIES:
        row = kept[name] = measure(program, name)
        failed += bool(failures(row))
        print(f"{name}: {'; '.join(failures(row)) or 'equal'}", flush=True)
        rows = [kept[n] for n in FAMILIES if n in kept]
        RESULTS.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
        PAGE.write_text(page(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
