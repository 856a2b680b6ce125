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

from jshard._cost.memory import is_heavy
from jshard._program.graph import Operator, Program
from jshard._rules.boundary import is_small
from jshard._topology import Topology


SUMS = ("dot_general", "conv_general_dilated", "reduce_sum", "jshard_fused")


def combined(program: Program, topology: Topology) -> Mapping[int, int]:
    """Tensors on the way from sums to results, through light work alone, and how many sums go together."""
    if any(w.kind == "shared" for name in topology.mesh.names for w in topology.link(name).wires):
        return {}
    ending = on_the_way(program, set(program.outputs))
    together = sum(
        (op.primitive in SUMS or _waits(op, program))
        and op.repeat == 1
        and any(r in ending for r in op.results)
        for op in program.operators
    )
    return dict.fromkeys(ending, together) if together > 1 else {}


def _waits(op: Operator, program: Program) -> bool:
    """Whether a loop may hand out a sum unfinished."""
    if op.kind != "scan_ys":
        return op.kind == "scan_sum"
    a = op.operands[0]
    return isinstance(a, int) and is_small(program.tensors[a])


def on_the_way(program: Program, passing: set[int], asked: frozenset[int] = frozenset()) -> set[int]:
    """Tensors that go nowhere but, through light operators (none of `asked`), to the operators in `passing`."""
    consumers = program.consumers()
    passing, ending = set(passing), set()
    for op in reversed(program.operators):
        for r in op.results:
            if consumers[r] and all([u in passing for u, _ in consumers[r]]):
                ending.add(r)
        if ending.issuperset(op.results) and op.kind == "eqn" and op.id not in asked and not is_heavy(op):
            passing.add(op.id)
    return ending
