"""All-reduce combining: sums that compilers send in one collective, each with a share of one latency.

The gradients of all parameters end in results, and no unfusible operator needs them before. The TPU and GPU compilers
combine such small all-reduces into one (XLA's AllReduceCombiner: 32 for a conv net with batch normalization, of which
each alone would take 21 us on 32 GPUs and almost no bytes). A plan that counts a latency for each would rather compute a
convolution several times than sum a gradient.

A loop finishes the sums that it carries or stacks once, after its last iteration, if they can be deferred
(`_rules/primitives/control_flow.py`): these count as well.

The share is one over the number of such sums that do not depend on each other: what needs the result of one cannot be
sent with it. Sums are grouped by the longest chain of sums that ends in them, so those of one group are independent (the
gradients, then their norms when they are clipped). Gathers keep their full latency. On CPU devices nothing is combined.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._core.row_codes import concat_ranges
from jshard._core.topology import Topology
from jshard._program.graph import Operator, Program
from jshard._program.memory.unfusible import ATTENTION, unfusible_operators
from jshard._rules.primitives.control_flow import is_small_sum


SUM_PRIMITIVES = ("dot_general", "conv_general_dilated", "reduce_sum", "jshard_fused", *sorted(ATTENTION))


def combinable_sums(program: Program, topology: Topology) -> Mapping[int, int]:
    """Tensors between sums and results, through fusible operators alone, and how many sums are combined with each."""
    key = ("combined", topology)
    if key not in program.memo:
        program.memo[key] = _combinable_sums(program, topology)
    return program.memo[key]


def _combinable_sums(program: Program, topology: Topology) -> Mapping[int, int]:
    if any(w.kind == "shared" for name in topology.mesh.names for w in topology.link(name).wires):
        return {}
    ending = tensors_reaching_only(program, set(program.outputs))
    a = program.use_def
    is_ending = np.zeros(len(a.def_op), dtype=bool)
    is_ending[list(ending)] = True
    sums = a.has_primitive(frozenset(SUM_PRIMITIVES))
    for i in np.flatnonzero(a.has_kind("scan_ys", "scan_sum")).tolist():
        sums[i] = _may_defer(program.operators[i], program)
    sums &= (a.repeat == 1) & (np.bincount(a.def_op, is_ending, len(sums)) > 0)
    depth = _chain_lengths(program, sums, is_ending)
    depth_of_op = np.zeros(len(sums), dtype=np.int64)
    np.maximum.at(depth_of_op, a.def_op, depth)
    count = np.bincount(depth_of_op[sums], minlength=2)
    return {t: int(count[depth[t]]) for t in sorted(ending) if depth[t] and count[depth[t]] > 1}


def _chain_lengths(program: Program, is_sum: Bools, is_ending: Bools) -> Ints:
    """(tensors,) the most sums on a path that ends in each, through tensors that only reach results."""
    a = program.use_def
    order, begin = a.uses_by_tensor
    length = np.zeros(len(a.def_op), dtype=np.int64)
    sums, step = np.flatnonzero(is_sum), 0
    while len(sums):
        step += 1
        reached = np.zeros(len(a.def_op), dtype=bool)
        frontier = a.result[concat_ranges(a.result_begin[sums], a.result_begin[sums + 1])]
        has_reached = np.zeros(len(is_sum), dtype=bool)
        while len(frontier):
            reached[frontier] = True
            readers = np.unique(a.use_op[order[concat_ranges(begin[frontier], begin[frontier + 1])]])
            has_reached[readers] = True
            results = a.result[concat_ranges(a.result_begin[readers], a.result_begin[readers + 1])]
            frontier = results[is_ending[results] & ~reached[results]]
        length[reached] = step
        sums = np.flatnonzero(has_reached & is_sum)
    return length


def _may_defer(op: Operator, program: Program) -> bool:
    """Whether a loop may return a sum that is still partial."""
    if op.kind != "scan_ys":
        return op.kind == "scan_sum"
    a = op.operands[0]
    return isinstance(a, int) and is_small_sum(program.tensors[a])


def tensors_reaching_only(program: Program, sinks: set[int], stop: frozenset[int] = frozenset()) -> set[int]:
    """Tensors all of whose paths reach operators in `sinks`, through fusible operators outside `stop`."""
    a, n = program.use_def, len(program.operators)
    fusible = a.has_kind("eqn") & ~unfusible_operators(program)
    fusible[list(stop)] = False
    passes, ends = np.zeros(n, dtype=bool), np.zeros(len(a.def_op), dtype=bool)
    open_uses = np.bincount(
        a.use_tensor, minlength=len(a.def_op)
    )  # (tensors,) uses by operators that do not pass
    open_results = np.diff(a.result_begin)  # (operators,) results with open uses
    new = np.union1d(np.array(sorted(sinks), dtype=np.int64), np.flatnonzero(fusible & (open_results == 0)))
    while len(new):
        passes[new] = True
        read = a.use_tensor[concat_ranges(a.use_begin[new], a.use_begin[new + 1])]
        np.subtract.at(open_uses, read, 1)
        read = np.unique(read)
        closed = read[open_uses[read] == 0]
        ends[closed] = True
        producers = a.def_op[closed]
        np.subtract.at(open_results, producers, 1)
        producers = np.unique(producers)
        new = producers[fusible[producers] & (open_results[producers] == 0) & ~passes[producers]]
    return set(np.flatnonzero(ends).tolist())
