"""Runs of benchmarks with the compilers: a process a run, its row of JSON kept in a file.

A process a run, since the TPU and GPU compilers may abort it and take memory that they do not give back. They are found in
the environment that `benchmarks/compilers/compilers.py` makes, or in `COMPILERS_VENV`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.compilers.compilers import ENVIRONMENT, ROOT, environment


def in_process(python: str, script: str, given: list[str], seconds: float) -> dict[str, Any]:
    """The line of JSON that a script prints in a process with a time limit; what it died of when it did."""
    flags = ENVIRONMENT["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    env = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [python, script, *given]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    said = [s for s in done.stderr.splitlines() if "Error" in s and not s.startswith(" ")]
    return {"failed": said[-1][:300] if said else f"exit status {done.returncode}"}


def compilers_python() -> str:
    """The Python of the environment with the compilers; made by `benchmarks/compilers/compilers.py` if it is missing."""
    version = ".".join(map(str, sys.version_info[:2]))
    where = pathlib.Path(os.environ.get("COMPILERS_VENV", ROOT / f".venv-compilers-{version}"))
    ready = where / "bin" / "python"
    return str(ready if ready.exists() else environment(where))


def kept_rows(file: pathlib.Path, *keys: str) -> dict[Any, dict[str, Any]]:
    """The last row of each run in a file, by the fields that name a run."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return {r[keys[0]] if len(keys) == 1 else tuple(r[k] for k in keys): r for r in rows}


def keep_rows(file: pathlib.Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of rows anew."""
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))


def arguments(
    about: str | None, names: Iterable[str], machines: Iterable[str], **one: Any
) -> argparse.ArgumentParser:
    """What benches of runs in processes of their own are asked; `one` says what names a run."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--one", help="one run, in this process", **one)
    parser.add_argument("--only", nargs="*", default=list(names))
    parser.add_argument("--on", nargs="*", default=list(machines))
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one run")
    parser.add_argument("--again", action="store_true", help="repeat runs that are there already")
    parser.add_argument(
        "--changed", action="store_true", help="repeat those whose plan is not the stored one"
    )
    parser.add_argument("--known", nargs=2, type=float, default=(), metavar=("BYTES", "PEAK"))
    return parser
