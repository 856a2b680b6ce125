"""Reader for the format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl).

A problem is JSON, gzipped or not: nodes with live intervals, costs and memory usages per strategy, edges with
row-major pairwise costs, one usage limit. Entries of 1e17 and more mean "forbidden". Used by benchmarks and tests.

Example: `solve(read("B.json.gz", memory=False))` proves 134 699.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from jshard._core.arrays import Floats
from jshard._search.cost_network import CostNetwork, build


FORBIDDEN = 1e17


def _costs(values: list) -> Floats:
    table = np.array(values, dtype=np.float64)
    table[table >= FORBIDDEN] = np.inf
    return table


def read(path: str | Path, *, memory: bool = True) -> CostNetwork:
    """The network of a contest file; `memory=False` leaves the usage limit out."""
    raw = Path(path).read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    problem = json.loads(raw)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    # One array object per distinct row: build() then converts each once.
    known: dict[tuple, Floats] = {}

    def table(row: list, columns: int = 0) -> Floats:
        key = (columns, *row)
        array = known.get(key)
        if array is None:
            array = _costs(row)
            known[key] = array = array.reshape(-1, columns) if columns else array
        return array

    unaries = [table(row) for row in nodes["costs"]]
    pairs = [
        (i, j, table(row, len(unaries[j])))
        for (i, j), row in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    if not memory:
        return build(unaries, pairs)
    usages = [table(row) for row in nodes["usages"]]
    limit = problem.get("usage_limit")
    return build(
        unaries,
        pairs,
        intervals=nodes["intervals"],
        usages=usages,
        limit=None if limit is None else float(limit),
    )
