"""Third-party models planned, run and compared with their unsharded runs: `make test-models`.

`python benchmarks/models/models.py [MODEL ...]` makes `.venv-models` from `requirements/models.txt` (Flax classes of
transformers, keras, haiku, equinox, diffrax, lineax, optimistix, OTT), then runs each model of
`benchmarks/models/zoo` in a process of its own on 8 CPU devices: forward and whole training step (value_and_grad,
AdamW), planned from the batch's cut alone. It prints a table and writes it to `benchmarks/models/models.json` and
`benchmarks/models/models.md`; models named keep the others' rows. The exit code is 1 when a model fails.
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
LOCK = ROOT / "requirements" / "models.txt"
RESULTS, PAGE = HERE / "models.json", HERE / "models.md"
PYTHON = (3, 11)  # transformers' Flax classes and JAX 0.10.2 were tried together on this one
SECONDS = int(os.environ.get("MODELS_SECONDS", "900"))  # a model's time limit
TOLERANCE, EXACT = 1e-5, 1e-10  # in float32 and in float64

MODELS = (
    "Llama", "GPT2", "BERT", "ViT", "BART", "Whisper", "Gemma", "Mistral", "Bloom", "GPT-J", "GPT-Neo", "OPT",
    "CLIP", "Dinov2", "ResNet", "Wav2Vec2", "keras ResNet50", "keras MobileNetV2", "keras EfficientNetB0",
    "diffrax neural ODE", "haiku LSTM", "equinox MLP", "lineax LU", "lineax QR", "lineax SVD", "lineax GMRES",
    "lineax CG", "lineax batched", "optimistix least squares", "optimistix root finding", "OTT soft ranks",
    "OTT Sinkhorn", "diffrax implicit", "equinox training step",
)  # fmt: skip
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "PYTHONPATH": str(ROOT),
    "TRANSFORMERS_VERBOSITY": "error",
}

NOTES = """
keras MobileNetV2, train, looked into: of the 1,280 gradients of the last batch norm's offset one differs, by 8.8e-4
(the others by 1e-7 at most), which is one of that channel's 32 values on the other side of a relu6 threshold: its
gradient is there or not. The layers below inherit it. So it is rounding at a kink, not a wrong plan; it is the plain
run that falls on the other side than float64.

keras ResNet50, train: both float32 runs are 1.9 from float64, and the float64 runs agree to 6.4e-11: at these random
parameters and eight small images float32 does not determine the step, plain or sharded. Which operators lose the bits
was not looked into.

At their default sizes, from shapes alone (`python -m benchmarks.models.zoo.big`), the whole training step of 16 x 2,048
tokens on the description of 16 TPU v5p chips: Llama (6.7 billion parameters) 12,089 operators, 867 products, 0 of
them whole, 0 unknown primitives, gap 0, 8.2 s to plan with 0.9 GiB of host memory, 56.7 GiB a device planned; Gemma (8.5
billion parameters) 11,034 operators, 759 products, 0 of them whole, 0 unknown primitives, gap 0, 8.3 s to plan with 1.1
GiB of host memory, 43.3 GiB a device planned.

`.shard(...)` on the modules themselves, unchanged (`python -m benchmarks.models.zoo.modules`): transformers Llama,
outputs 3.3e-07, gradients of all 21 parameters 8.0e-07; GPT2, outputs 3.8e-07, gradients of all 28 parameters
7.2e-07. The nnx Llama of google-tunix 0.1.7 (`python -m benchmarks.models.zoo.tunix_llama`, Python 3.12, JAX 0.12):
outputs 3.6e-07, gradients of all 21 parameters 7.4e-07.
"""

INTRO = """# Models that none of us wrote

`make test-models` plans each from the batch's cut alone (every leaf of the batch cut in 8 along its first dimension,
nothing else said), runs forward and whole training step (value_and_grad, optax AdamW) on 8 CPU devices in float32,
and compares outputs, loss, gradients, new parameters, optimizer and batch statistics with the plain run.

- error: largest difference of any leaf, relative to the leaf's largest value (at least a thousandth of the largest of
  its tree: a gradient that is a sum of cancelling terms holds nothing but rounding).
- plain f64, sharded f64: the same measure of each run against the program in float64 (every operation of the traced
  program, `zoo/exact.py`): what of the error is rounding, the plain run's own as well; empty where not measured.
- f64 runs: where the error is above 1e-5, the same measure between a plain and a sharded run of the program in float64:
  rounding is 29 bits smaller there, and a wrong plan as wrong as before.
- passes: error at most 1e-5, or at most 1e-10 in float64, which says that all of the error is rounding.
- collectives: executions a call, by kind: AG all-gather, AR all-reduce, RS reduce-scatter, A2A all-to-all, CP permute.
- whole: matrix products and convolutions that every device computes entirely.
- At these sizes one collective's latency outweighs the network and the best plan computes everything everywhere, so
  the plan is made for a chip without latency, whose compute and links stand to each other as at full size.

"""


def environment(where: pathlib.Path) -> pathlib.Path:
    """The Python of the environment at `where`, made when it is missing or locked otherwise."""
    python, stamp = where / "bin" / "python", where / "lock.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == LOCK.read_text():
        return python
    if sys.version_info[:2] != PYTHON:
        version = ".".join(map(str, PYTHON))
        raise SystemExit(
            f"these models are locked for Python {version}: make PYTHON=python{version} test-models"
        )
    print(f"== setting up {where} from {LOCK.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(where)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--requirement", str(LOCK)], check=True)
    stamp.write_text(LOCK.read_text())
    return python


def measure(python: pathlib.Path, model: str) -> dict[str, Any]:
    """One model's figures from a process of its own; what was found before a crash or the limit stays."""
    command = [str(python), "-m", "benchmarks.models.zoo", model]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        out, fault = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, fault = (late.stdout or b"").decode(), f"no answer within {SECONDS} s"
    found = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    row = json.loads(found[-1]) if found else {"model": model}
    if fault:
        row["fault"] = fault.strip().splitlines()[-1]
        print(fault, file=sys.stderr)
    return row


def complaints(row: dict[str, Any]) -> list[str]:
    """What keeps a model from passing.

    >>> complaints({"model": "m", "fault": "no answer within 900 s"})
    ['no answer within 900 s']
    """
    out = [row["fault"]] if "fault" in row else []
    for part in ("forward", "train"):
        figures = row.get(part, {})
        if figures.get("error", 0.0) > TOLERANCE and not figures.get("float64", 1.0) <= EXACT:
            own = ""
            if "float64" in figures:
                own = f", in float64 {figures['float64']:.1e}"
            out.append(f"{part}: error {figures['error']:.1e} at {figures['at']}{own}")
        if figures.get("replicated"):
            out.append(f"{part}: {len(figures['replicated'])} matmuls whole on every device")
        out += [f"{part}: {text}" for text in figures.get("warnings", ())]
    return out


SHORT = {"all_gather": "AG", "all_reduce": "AR", "reduce_scatter": "RS", "all_to_all": "A2A", "permute": "CP"}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, a line for each half of each model."""
    lines = [
        "| model | | equations | unknown primitives | max error | plain f64 | sharded f64 | f64 runs | collectives "
        "| matmuls | whole | gap | plan s |",
        "|---|---|--:|---|--:|--:|--:|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        for part in ("forward", "train"):
            f = row.get(part)
            if f is None:
                lines.append(
                    f"| {row['model']} | {part} | | | | | | | {row.get('fault', 'not measured')} | | | | |"
                )
                continue
            moved = " ".join(f"{SHORT.get(k, k)} {n}" for k, n in f["collectives"].items()) or "none"
            unknown = ", ".join(f["unknown"]) or "none"
            plain, own, both = (f"{f[k]:.1e}" if k in f else "" for k in ("plain", "sharded", "float64"))
            lines.append(
                f"| {row['model']} | {part} | {f['equations']} | {unknown} | {f['error']:.1e} | {plain} | {own} | {both} "
                f"| {moved} | {f['matmuls']} | {len(f['replicated'])} | {f['gap']:.1%} | {f['plan_s']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    """Measure the models named, or all; print and write the table."""
    strange = [n for n in names if n not in MODELS]
    if strange:
        raise SystemExit(f"no model {', '.join(strange)}; known are {', '.join(MODELS)}")
    where = pathlib.Path(os.environ.get("MODELS_VENV", ROOT / ".venv-models"))
    python = environment(where)
    kept = {r["model"]: r for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    failed = 0
    for name in names or MODELS:
        row = kept[name] = measure(python, name)
        wrong = complaints(row)
        failed += bool(wrong)
        print(f"{name}: {'; '.join(wrong) or 'equal'}", flush=True)
        rows = [kept[n] for n in MODELS if n in kept]
        RESULTS.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
        PAGE.write_text(INTRO + table(rows) + NOTES)
    print(table([kept[n] for n in names or MODELS]))
    if not names:
        done = subprocess.run(
            [str(python), "-m", "benchmarks.models.zoo.modules"], env={**os.environ, **ENVIRONMENT}
        )
        failed += done.returncode != 0
        done = subprocess.run(
            [str(python), "-m", "benchmarks.models.zoo.big"], env={**os.environ, **ENVIRONMENT}
        )
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
