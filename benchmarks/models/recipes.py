"""Recipes and the search on models: loss and gradients against the plain run, on 8 CPU devices.

`python benchmarks/models/recipes.py [MODEL ...]` runs `benchmarks/models/zoo/recipes.py` for each model in a process of its
own, in the environment of `benchmarks/models/models.py`, writes `benchmarks/models/recipes.json` and
`docs/recipes_on_models.md`, and exits with 1 where a cell fails. Models named keep the others' rows.
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


RESULTS, PAGE = HERE / "recipes.json", ROOT / "docs" / "recipes_on_models.md"
FAMILIES = (
    "BERT", "RoBERTa", "ALBERT", "T5", "BART", "Llama", "Mistral", "Mixtral", "Gemma", "Qwen2", "Qwen3", "Qwen3-MoE", "GPT2",
    "GPT-Neo", "GPT-J", "OPT", "Bloom", "ViT", "BEiT", "CLIP", "Whisper", "ResNet", "Swin-like", "SAM-like",
)  # fmt: skip
COLUMNS = (
    "megatron", "megatron+sequence", "lazy", "fused attention", "fused norm", "search", "fsdp", "fsdp+megatron",
    "ulysses", "vocab",
)  # fmt: skip
TOLERANCE = 1e-5
# The time of a cell is that of compiling; LLVM's optimizations change no collective.
FLAGS = models.ENVIRONMENT["XLA_FLAGS"] + " --xla_backend_optimization_level=0"

INTRO = """# Recipes on models

`python benchmarks/models/recipes.py [MODEL ...] [--columns COLUMN ...]` runs loss and gradients (training, dropout included)
of each model, at two layers and a width of 64 in float32, on 8 CPU devices as data 2 x model 4 (images: data 4 x model 2),
by each recipe and by the search from the batch's cut, and compares them with the plain run.

- A cell: the largest difference of any leaf, relative to the leaf's largest value; then what the plan costs at level 0
  over the search's, which pins the batch only. The compiled collectives are the planned ones, or the cell says
  `not as planned`. Empty: not measured.
- `megatron` is tensor parallel, `megatron+sequence` with sequence parallel.
- `lazy`: parameters created in the shardings of `fsdp+megatron` from shapes alone, against the plain initialisation (at the
  same random numbers), and the share of them that a device holds.
- `fused attention`, `fused norm`: by `fsdp+megatron` with these functions replaced (`jshard.flax.fuse_function`), without
  dropout of attention's probabilities, against the model as its library has it. Norms that are a library's own are named as
  a policy names them.
- Qwen2, Qwen3, Mixtral, Qwen3-MoE, Swin-like and SAM-like are our own, since no installed library has them for JAX; the
  others are those of transformers. At these sizes the plans are made for a chip without latency.
- ResNet's batch statistics lose digits in float32: in float64 the same columns differ by 2.4e-14 (search), 2.6e-14 (`fsdp`)
  and 1.1e-13 (`megatron`, `fsdp+megatron`), by a run apart from this table.
- The rows are of several runs.

"""


def cell(column: str, row: dict[str, Any], notes: list[str]) -> str:
    """One cell of the table; reasons and failures go to the notes.

    >>> notes = []
    >>> cell("fsdp", {"fsdp": {"reason": "no batch"}}, notes), notes
    ('[1]', ['no batch'])
    """
    found = row.get(column)
    if found is None:
        return ""
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


def measure(python: pathlib.Path, model: str, columns: list[str]) -> dict[str, Any]:
    """One model's row from a process of its own; what was found before a fault stays."""
    done = subprocess.run(
        [str(python), "-m", "benchmarks.models.zoo.recipes", model, *columns],
        cwd=ROOT,
        env={**os.environ, **models.ENVIRONMENT, "XLA_FLAGS": FLAGS},
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


def write(kept: dict[str, dict[str, Any]]) -> None:
    """Store the rows, and the page of the documentation made of them."""
    rows = [kept[n] for n in FAMILIES if n in kept]
    RESULTS.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
    PAGE.write_text(page(rows))


def main(words: list[str]) -> int:
    """Measure the models named, or all; of columns that are named, the others' figures stay."""
    at = words.index("--columns") if "--columns" in words else len(words)
    names, columns = words[:at], words[at + 1 :]
    strange = [n for n in names if n not in FAMILIES] + [c for c in columns if c not in COLUMNS]
    if strange:
        known = ", ".join((*FAMILIES, *COLUMNS))
        raise SystemExit(f"no model or column {', '.join(strange)}; known are {known}")
    python = os.environ.get("MODELS_PYTHON")
    where = pathlib.Path(os.environ.get("MODELS_VENV", ROOT / ".venv-models"))
    program = pathlib.Path(python) if python else models.environment(where)
    kept = {r["model"]: r for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    failed = 0
    for name in names or FAMILIES:
        row = measure(program, name, columns or list(COLUMNS))
        before = {k: v for k, v in kept.get(name, {}).items() if columns and k != "fault"}
        kept[name] = {**before, **row}
        failed += bool(failures(row))
        print(f"{name}: {'; '.join(failures(row)) or 'equal'}", flush=True)
        write(kept)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
