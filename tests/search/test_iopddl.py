"""Two small instances of the ASPLOS / EuroSys 2025 contest, proved without and with the memory limit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jshard._search import iopddl, peak, solve


DATA = Path(os.environ.get("JSHARD_IOPDDL", Path(__file__).parents[3] / "shared/data/iopddl"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="contest files are not here")


@needs_data
@pytest.mark.parametrize(("name", "free", "limited"), [("B", 134_699, 532_843), ("G", 111_306, 217_039)])
def test_proved(name, free, limited):
    network = iopddl.read(DATA / f"{name}.json.gz", memory=False)
    found = solve(network, seconds=30)
    assert found.cost == free and found.optimal
    network = iopddl.read(DATA / f"{name}.json.gz")
    assert network.memory is not None and network.memory.limit is not None
    found = solve(network, seconds=60)
    assert found.cost == limited and found.optimal
    assert peak(network, found.assignment) <= network.memory.limit


def test_reads_the_format(tmp_path):
    text = """{"problem": {"name": "x", "nodes": {"intervals": [[0, 2], [1, 3]],
      "costs": [[1, 2], [3, 1000000000000000000, 0]], "usages": [[5, 1], [4, 4, 4]]},
      "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 2, 3, 4, 5]]}, "usage_limit": 7}}"""
    (tmp_path / "x.json").write_text(text)
    network = iopddl.read(tmp_path / "x.json")
    assert network.pairwise[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert network.unary[1].tolist() == [3, np.inf, 0]
    found = solve(network)
    assert found.assignment.tolist() == [1, 2] and found.cost == 7 and found.optimal
    assert solve(iopddl.read(tmp_path / "x.json", memory=False)).cost == 3
