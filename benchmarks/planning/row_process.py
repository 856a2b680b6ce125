"""Rows of a table, each measured in a process of its own, so that its memory and caches are its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


Columns = Sequence[tuple[str, int]]  # name and width


def ask(
    script: str,
    row: Sequence[object],
    more: Sequence[str] = (),
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """What `script --row A,B,... MORE` prints last, as JSON, and its other lines printed; None where it failed."""
    key = ",".join("" if x is None else str(x) for x in row)
    command = [python, script, "--row", key, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        told = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{key}: failed ({done.returncode}): {told}", flush=True)
        return None
    for text in lines[:-1]:
        print(text)
    return json.loads(lines[-1])


def line(columns: Columns, shown: Callable[[str, Any], str], values: Mapping[str, Any] | None = None) -> str:
    """A row of the table, its columns flush right; the head where there are no values."""
    return "  ".join((shown(n, values.get(n, "")) if values else n).rjust(w) for n, w in columns)
