"""Sums that compilers send together: each pays its share of one latency.

The gradients of all parameters end in results, and nothing but light work waits for them. The TPU and GPU
compilers put such small all-reduces into one (32 for a conv net with batch normalization, of which each would
take 21 us on 32 GPUs and almost no bytes). A plan that counts a latency for each would rather compute a
convolution several times than sum a gradient.

A loop ends the sums that it carries or stacks once, after its last turn, if they may wait for that
(`_rules/boundary.py`): these count as well.

The share is one over the number of such sums in the program. Gathers keep their full latency. On CPU devices
nothing is put together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jshard._cost.memory import heavy_of
from jshard._numbers import spans
from jshard._program.graph import Operator, Program
from jshard._rules.boundary import is_small
from jshard._topology import Topology


SUMS = ("dot_general", "conv_general_dilated", "reduce_sum", "jshard_fused")


def combined(program: Program, topology: Topology) -> Mapping[int, int]:
    """Tensors on the way from sums to results, through light work alone, and how many sums go together."""
    if any(w.kind == "shared" for name in topology.mesh.names for w in topology.link(name).wires):
        return {}
    ending = on_the_way(program, set(program.outputs))
    a = program.arrays
    ends = np.zeros(len(a.maker), dtype=bool)
    ends[list(ending)] = True
    adds = a.which(frozenset(SUMS))
    for i in np.flatnonzero(a.of_kind("scan_ys", "scan_sum")).tolist():
        adds[i] = _waits(program.operators[i], program)
    adds &= (a.repeat == 1) & (np.bincount(a.maker, ends, len(adds)) > 0)
    together = int(adds.sum())
    return dict.fromkeys(ending, together) if together > 1 else {}


def _waits(op: Operator, program: Program) -> bool:
    """Whether a loop may hand out a sum unfinished."""
    if op.kind != "scan_ys":
        return op.kind == "scan_sum"
    a = op.operands[0]
    return isinstance(a, int) and is_small(program.tensors[a])


def on_the_way(program: Program, passing: set[int], asked: frozenset[int] = frozenset()) -> set[int]:
    """Tensors that go nowhere but, through light operators (none of `asked`), to the operators in `passing`."""
    a, n = program.arrays, len(program.operators)
    light = a.of_kind("eqn") & ~heavy_of(program)
    light[list(asked)] = False
    passes, ends = np.zeros(n, dtype=bool), np.zeros(len(a.maker), dtype=bool)
    left = np.bincount(a.read, minlength=len(a.maker))  # readers that do not pass
    missing = np.diff(a.result_begin)  # results that end elsewhere
    new = np.union1d(np.array(sorted(passing), dtype=np.int64), np.flatnonzero(light & (missing == 0)))
    while len(new):
        passes[new] = True
        read = a.read[spans(a.begin[new], a.begin[new + 1])]
        np.subtract.at(left, read, 1)
        read = np.unique(read)
        done = read[left[read] == 0]
        ends[done] = True
        makers = a.maker[done]
        np.subtract.at(missing, makers, 1)
        makers = np.unique(makers)
        new = makers[light[makers] & (missing[makers] == 0) & ~passes[makers]]
    return set(np.flatnonzero(ends).tolist())
