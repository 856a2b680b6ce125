"""Sums that compilers send together: each pays its share of one latency.

The gradients of all parameters end in results, and nothing but light work waits for them. The TPU and GPU
compilers put such small all-reduces into one (32 for a conv net with batch normalization, of which each would
take 21 us on 32 GPUs and almost no bytes). A plan that counts a latency for each would rather compute a
convolution several times than sum a gradient.

A loop ends the sums that it carries or stacks once, after its last turn, if they may wait for that
(`_rules/primitives/control_flow.py`): these count as well.

The share is one over the number of such sums in the program that do not depend on each other: what needs the result
of one cannot be sent with it. Sums are counted by the most of them on a way that ends in them, so those of one count are
independent (the gradients, then their norms when they are clipped). Gathers keep their full latency. On CPU devices
nothing is put together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jshard._core.row_codes import Ints, concat_ranges
from jshard._core.topology import Topology
from jshard._memory.hbm_traffic import unfusible_operators
from jshard._program.graph import Operator, Program
from jshard._program.use_def import Bools
from jshard._rules.primitives.control_flow import is_small_sum


SUM_PRIMITIVES = ("dot_general", "conv_general_dilated", "reduce_sum", "jshard_fused")


def combinable_sums(program: Program, topology: Topology) -> Mapping[int, int]:
    """Tensors on the way from sums to results, through light work alone, and how many sums go together."""
    key = ("combined", topology)
    if key not in program.memo:
        program.memo[key] = _combinable_sums(program, topology)
    return program.memo[key]


def _combinable_sums(program: Program, topology: Topology) -> Mapping[int, int]:
    if any(w.kind == "shared" for name in topology.mesh.names for w in topology.link(name).wires):
        return {}
    ending = tensors_reaching_only(program, set(program.outputs))
    a = program.use_def
    ends = np.zeros(len(a.def_op), dtype=bool)
    ends[list(ending)] = True
    adds = a.has_primitive(frozenset(SUM_PRIMITIVES))
    for i in np.flatnonzero(a.has_kind("scan_ys", "scan_sum")).tolist():
        adds[i] = _may_defer(program.operators[i], program)
    adds &= (a.repeat == 1) & (np.bincount(a.def_op, ends, len(adds)) > 0)
    depth = _dependence_depths(program, adds, ends)
    most = np.zeros(len(adds), dtype=np.int64)
    np.maximum.at(most, a.def_op, depth)
    count = np.bincount(most[adds], minlength=2)
    return {t: int(count[depth[t]]) for t in sorted(ending) if depth[t] and count[depth[t]] > 1}


def _dependence_depths(program: Program, adds: Bools, ends: Bools) -> Ints:
    """(tensors,) the most sums on a way that ends in each, going through tensors that only end in results."""
    a = program.use_def
    order, begin = a.uses_by_tensor
    depth = np.zeros(len(a.def_op), dtype=np.int64)
    sums, level = np.flatnonzero(adds), 0
    while len(sums):
        level += 1
        reached = np.zeros(len(a.def_op), dtype=bool)
        new = a.result[concat_ranges(a.result_begin[sums], a.result_begin[sums + 1])]
        after = np.zeros(len(adds), dtype=bool)
        while len(new):
            reached[new] = True
            readers = np.unique(a.use_op[order[concat_ranges(begin[new], begin[new + 1])]])
            after[readers] = True
            made = a.result[concat_ranges(a.result_begin[readers], a.result_begin[readers + 1])]
            new = made[ends[made] & ~reached[made]]
        depth[reached] = level
        sums = np.flatnonzero(after & adds)
    return depth


def _may_defer(op: Operator, program: Program) -> bool:
    """Whether a loop may hand out a sum unfinished."""
    if op.kind != "scan_ys":
        return op.kind == "scan_sum"
    a = op.operands[0]
    return isinstance(a, int) and is_small_sum(program.tensors[a])


def tensors_reaching_only(program: Program, sinks: set[int], stop: frozenset[int] = frozenset()) -> set[int]:
    """Tensors that go nowhere but, through light operators (none of `asked`), to the operators in `passing`."""
    a, n = program.use_def, len(program.operators)
    light = a.has_kind("eqn") & ~unfusible_operators(program)
    light[list(stop)] = False
    passes, ends = np.zeros(n, dtype=bool), np.zeros(len(a.def_op), dtype=bool)
    left = np.bincount(a.use_tensor, minlength=len(a.def_op))  # readers that do not pass
    missing = np.diff(a.result_begin)  # results that end elsewhere
    new = np.union1d(np.array(sorted(sinks), dtype=np.int64), np.flatnonzero(light & (missing == 0)))
    while len(new):
        passes[new] = True
        read = a.use_tensor[concat_ranges(a.use_begin[new], a.use_begin[new + 1])]
        np.subtract.at(left, read, 1)
        read = np.unique(read)
        done = read[left[read] == 0]
        ends[done] = True
        makers = a.def_op[done]
        np.subtract.at(missing, makers, 1)
        makers = np.unique(makers)
        new = makers[light[makers] & (missing[makers] == 0) & ~passes[makers]]
    return set(np.flatnonzero(ends).tolist())
