"""A lower bound on a step for every program with a plan's placements: bytes per matrix product, seconds for the step.

The seconds are the largest of three that a program may overlap: an even share of all products at the chip's peak, an
even share of reading arguments and writing results once (`_program/memory/least_traffic.py`), and the bytes that the
products must receive, over all links at once. The programs are those in which all devices do the same (SPMD) and every
product is computed once.

A plan decides where operands are produced and how much of a product's arrays each device holds. Given that, a device
with an even share of the product must access a minimum of elements of the three arrays
(`_cost/communication_bounds.py`); those that it does not hold, it receives. A tensor is charged to the first product
that reads it, so that the bounds of products can be added. The rest of a step is the space gap: grids, latency,
redundant work, intermediate arrays, and work that does not overlap.

The placements are the plan's: a plan that keeps whole copies of its operands receives nothing, and pays in memory.

>>> round(even_share_footprint(1, 64, 64, 64, 8)), even_share_footprint(16, 4, 4, 4, 8)  # whole batches
(3072, 96.0)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from jshard._core.topology import Topology
from jshard._cost import communication_bounds
from jshard._plan.model_flops import highest_peak_flops
from jshard._plan.rows import ProductBound, StepLowerBound
from jshard._program.graph import Operator, operator_name
from jshard._program.memory.least_traffic import min_hbm_bytes, product_flops
from jshard._schedule.schedule import Assignment


def step_lower_bound(choice: Assignment, donated: Collection[int] = ()) -> StepLowerBound:
    """The bounds of every product, and of the step; `donated` are flat indices of donated arguments."""
    charged: set[int] = set()
    a, alike = choice.program.use_def, choice.state_classes[0]
    order, begin = a.uses_by_tensor
    bounds, cache = [], {}
    for i in np.flatnonzero(a.has_primitive(frozenset(("dot_general",)))).tolist():
        op = choice.program.operators[i]
        operands = a.use_tensor[a.use_begin[i] : a.use_begin[i + 1]].tolist()
        if len(operands) < 2:  # a literal
            continue
        read = order[begin[op.results[0]] : begin[op.results[0] + 1]]
        each_run = [r >= op.repeat for r in op.operand_repeat]
        first, second = operands
        first_read = (
            each_run[0] and first not in charged,
            each_run[1] and second != first and second not in charged,
        )
        # The sum is completed here if no reader takes it partial; else later, on a value derived from it.
        ends_sum = len(read) > 0 and all(
            not choice.operand_layout(u, k).partial
            and choice.program.operators[u].operand_repeat[k] >= op.repeat
            for u, k in zip(a.use_op[read].tolist(), a.use_operand[read].tolist(), strict=True)
        )
        produced = [(alike[a.def_op[t]], a.def_result[t], a.repeat[a.def_op[t]]) for t in operands]
        key = (alike[i], op.repeat, first_read, ends_sum, *produced)
        if key not in cache:
            cache[key] = _product_bound(choice, op, first_read, ends_sum)
        bound = cache[key]
        if bound is None:
            continue
        charged.update((first, second))
        if bound.bytes > 0:
            bounds.append(dataclasses.replace(bound, operator=operator_name(op)))
    total = sum(b.bytes * b.count for b in bounds)
    chip, devices = choice.topology.chip, choice.topology.mesh.total
    compute = sum(
        work / highest_peak_flops(choice.program.operators[i], choice.topology)
        for i, work in product_flops(choice.program).items()
    )
    memory = min_hbm_bytes(choice.program, donated) / chip.hbm_bandwidth
    seconds = {
        "products": compute / devices,
        "memory": memory / devices,
        "network": total / ingress_bandwidth(choice.topology),
    }
    limit = max(seconds, key=lambda k: seconds[k])
    return StepLowerBound(seconds[limit], total, tuple(bounds), limit)


def ingress_bandwidth(topology: Topology) -> float:
    """Bytes/s that can enter a device over all of its links."""
    chip = topology.chip
    return chip.links * chip.link_bandwidth + (chip.die_bandwidth or 0.0) + (chip.nic_bandwidth or 0.0)


def even_share_footprint(batch: int, m: int, n: int, k: int, devices: int) -> float:
    """The least elements of the three arrays that a device with an even share of `batch` products must access.

    Partitioning one product costs more than computing whole ones, so a device computes whole ones as far as its share goes.
    """
    share = batch / devices
    if share >= 1:
        return share * (m * n + m * k + n * k)
    held = (m * n + m * k + n * k) * share
    return communication_bounds.matmul(m, n, k, devices / batch, itemsize=1).bytes + held


def _product_bound(
    choice: Assignment, op: Operator, first_read: Sequence[bool], ends_sum: bool
) -> ProductBound | None:
    """The bytes that a device must receive for a product: of its operands, and to complete its result.

    Arguments:

    - `first_read`: for each operand whether no product before this one reads it.
    - `ends_sum`: whether the product completes its sum itself.
    """
    program, mesh = choice.program, choice.topology.mesh
    a, b = op.operands
    assert isinstance(a, int) and isinstance(b, int)
    batch, m, n, k = product_sizes(op, program.tensors[a].shape, program.tensors[b].shape)
    if not batch * m * n * k:
        return None
    held, count = 0.0, op.repeat
    for i, t in enumerate((a, b)):
        tensor, needed, made = program.tensors[t], choice.operand_layout(op.id, i), choice.result_layout(t)
        words = math.prod(tensor.shape)
        # A partial sum is at best reduce-scattered before it is read.
        pieces = made.pieces(mesh) * mesh.size(*made.partial) if first_read[i] else needed.pieces(mesh)
        held += words / max(1, pieces)
        if first_read[i]:
            # A tensor produced outside a loop may be resharded outside too, once.
            count = min(count, float(program.use_def.repeat[program.use_def.def_op[t]]))
    r = op.results[0]
    out = choice.result_layout(r)
    held += math.prod(program.tensors[r].shape) / (
        out.pieces(mesh) * (mesh.size(*out.partial) if ends_sum else 1)
    )
    itemsize = min(program.tensors[t].itemsize for t in (a, b, r))
    regime = communication_bounds.matmul(m, n, k, max(1, mesh.total / batch), itemsize=1).regime
    least = max(0.0, even_share_footprint(batch, m, n, k, mesh.total) - held) * itemsize
    return ProductBound(operator_name(op), regime, least, float(count))


def product_sizes(op: Operator, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Batch, rows, columns and contracted length of a product."""
    (ka, kb), (ba, bb) = op.equation.params["dimension_numbers"]
    batch, k = math.prod(a[i] for i in ba), math.prod(a[i] for i in ka)
    m = math.prod(s for i, s in enumerate(a) if i not in (*ba, *ka))
    n = math.prod(s for i, s in enumerate(b) if i not in (*bb, *kb))
    return batch, m, n, k
