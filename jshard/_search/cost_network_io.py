"""Cost networks as `.npz` files: the pools of tables end to end, their shapes, and the index arrays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jshard._core.arrays import Floats
from jshard._core.errors import ShardError
from jshard._search.cost_network import CostNetwork, Memory, concat_tables


VERSION = 2  # of the file's format


def save(network: CostNetwork, path: str | Path) -> None:
    """Write a network to a file."""
    data = {
        "version": np.array(VERSION),
        "unary": concat_tables(network.unary)[0],
        "unary_sizes": np.array([len(t) for t in network.unary], dtype=np.int64),
        "pairwise": concat_tables(network.pairwise)[0],
        "pairwise_shapes": np.array([t.shape for t in network.pairwise], np.int64).reshape(-1, 2),
        "node_table": network.node_table,
        "edges": network.edges,
        "edge_table": network.edge_table,
    }
    memory = network.memory
    if memory is not None:
        data["intervals"] = memory.intervals
        data["usage"] = concat_tables(memory.usage_tables)[0]
        data["usage_sizes"] = np.array([len(t) for t in memory.usage_tables], dtype=np.int64)
        data["holder"] = memory.interval_variable
        data["usage_table"] = memory.interval_table
        data["limit"] = np.array(np.nan if memory.limit is None else memory.limit)
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **data)


def load(path: str | Path) -> CostNetwork:
    """Read what `save` wrote. Raises `ShardError` for a file of another version."""
    with np.load(path, allow_pickle=False) as data:
        if int(data["version"]) != VERSION:
            raise ShardError(f"{path}: cost network of version {int(data['version'])}, expected {VERSION}")
        memory = None
        if "intervals" in data:
            limit = float(data["limit"])
            memory = Memory(
                data["intervals"],
                _split_tables(data["usage"], [(int(n),) for n in data["usage_sizes"]]),
                data["holder"],
                data["usage_table"],
                None if np.isnan(limit) else limit,
            )
        return CostNetwork(
            _split_tables(data["unary"], [(int(n),) for n in data["unary_sizes"]]),
            _split_tables(data["pairwise"], [(int(a), int(b)) for a, b in data["pairwise_shapes"]]),
            data["node_table"],
            data["edges"],
            data["edge_table"],
            memory,
        )


def _split_tables(values: Floats, shapes: Iterable[tuple[int, ...]]) -> tuple[Floats, ...]:
    """The inverse of `concat_tables`."""
    tables, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        tables.append(values[at : at + size].reshape(shape).copy())
        at += size
    return tuple(tables)
