"""Floor 5, the search: cost networks as plain arrays in, proved assignments out.  No JAX, no tensors."""

from jshard._search.cost_network import (
    CostNetwork,
    Memory,
    Solution,
    build,
    evaluate,
    load,
    peak,
    save,
)
from jshard._search.exact.reduce import Contradiction
from jshard._search.solve import solve


__all__ = [
    "Contradiction",
    "CostNetwork",
    "Memory",
    "Solution",
    "build",
    "evaluate",
    "load",
    "peak",
    "save",
    "solve",
]
