"""What the epilogue of a product costs, on the edges between the product and it.

Problem.  An operator in a product's kernel runs in the product's layout. If the value between them is resharded (a gradient
is summed over devices, or its update is laid out otherwise), it is a kernel of its own, which reads what the product wrote.
Charged to the product alone, the layout of the operator would be free.

Idea.  Both cases are seen on one edge of the network, from the product towards the operator: where its layouts agree
the edge costs the seconds by which the product's kernel is longer, where they differ those of the kernel of its own, in
shards of the layout that is read. Further edges of the way cost nothing where their layouts agree. A value that is
stored for several readers is between two edges, each of which counts.

A scatter that sets one element a row (the gradient of a cross entropy) is fused into its readers, but where these read it
in another layout, a slice too, its kernel writes the whole of its own block. That is charged the same way, in shards of the
layout that it has.

Tables of edges and the cost of a schedule (`_plan/schedule_cost.py`) both use `charge_seconds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._core.topology import Topology
from jshard._network.candidates import TensorLayouts
from jshard._network.kernel_seconds import alone_seconds
from jshard._network.layout_pairs import equal_layouts
from jshard._network.operator_cost import OperatorCost
from jshard._network.reshard_edges import EdgeTable
from jshard._program.graph import Program
from jshard._program.memory.kernel_parts import Epilogue, KernelPart, Kernels, VectorWork
from jshard._program.memory.liveness import Liveness
from jshard._program.memory.unfusible import unfusible_operators
from jshard._program.operators import PRODUCTS


class EpilogueCharge(NamedTuple):
    """What an epilogue costs on an edge, equal for edges of equal tables.

    - `table`, `number`: of the first edge, the product's table of its own and which of its epilogues this is; else -1.
    - `alone`, `launched`: as a kernel of its own.
    - `is_recomputed`: whether all its seconds are redundant.
    - `of_source`: whether the kernel of its own is divided as the source of the edge is, and not as the target.
    """

    table: int
    number: int
    alone: KernelPart
    launched: bool
    repeat: float
    is_recomputed: bool
    of_source: bool = False


class ChargedEpilogue(NamedTuple):
    """An epilogue on an edge: its operators and what it costs there."""

    product: int
    root: int
    charge: EpilogueCharge


@dataclasses.dataclass(frozen=True, eq=False)
class ChargeSeconds:
    """What an epilogue costs on an edge in all its runs, by what of its ends it depends on.

    - `fused`: (states of the source,) seconds in the product's kernel, where both layouts are one and no partial sum.
    - `alone`: (layouts of the source, of the target) seconds of a kernel of its own, where they are two.
    - `even`: the even share, which level 0 does not count.
    - `same`, `complete`: (layouts of the source, of the target), (layouts of the target,) which of these it is.
    """

    fused: Floats
    alone: Floats
    even: float
    same: Bools
    complete: Bools

    def fused_objective(self, level: int) -> Floats:
        """(states of the source,) what a level counts of `fused`: 0 what exceeds the even share, others all."""
        return np.maximum(0.0, self.fused - self.even) if level == 0 else self.fused

    def alone_objective(self, level: int) -> Floats:
        """(layouts of the source, of the target) the same of `alone`."""
        return np.maximum(0.0, self.alone - self.even) if level == 0 else self.alone

    def table(self, level: int, source: TensorLayouts, target: TensorLayouts) -> Floats:
        """(states of the source, of the target) what a level counts."""
        inside = np.where(self.complete, self.fused_objective(level)[:, None], 0.0)
        alone = self.alone_objective(level)[source.of_state]
        return np.where(self.same[source.of_state], inside, alone)[:, target.of_state]

    def of_schedule(self, state: int, source: int, target: int) -> tuple[bool, float, float]:
        """Whether it is in the product's kernel, its seconds and those beyond an even share.

        Arguments: the state of the source, and the numbers of the layouts.
        """
        inside = bool(self.same[source, target])
        if inside:
            seconds = float(self.fused[state]) if self.complete[target] else 0.0
        else:
            seconds = float(self.alone[source, target])
        return inside, seconds, max(0.0, seconds - self.even)


def charge_seconds(
    charge: EpilogueCharge,
    source: TensorLayouts,
    target: TensorLayouts,
    topology: Topology,
    costs: Mapping[int, OperatorCost],
) -> ChargeSeconds:
    """The seconds of an epilogue on an edge; `costs` are those of operators by number of their table."""
    divided = source if charge.of_source else target
    shards = np.array([layout.pieces(topology.mesh) for layout in divided.layouts])
    alone = alone_seconds(charge.alone, charge.launched, shards, topology.chip)
    alone = alone[:, None] if charge.of_source else alone[None, :]
    fused, even = np.zeros(len(source.of_state)), 0.0
    if charge.table >= 0:
        fused, even = costs[charge.table].epilogues[charge.number]
    return ChargeSeconds(
        fused=fused * charge.repeat,
        alone=np.broadcast_to(alone * charge.repeat, (len(source.layouts), len(target.layouts))),
        even=0.0 if charge.is_recomputed else even * charge.repeat,
        same=equal_layouts(source.layouts, target.layouts),
        # A sum that is still partial for its reader is completed on a later edge.
        complete=np.array([not layout.partial for layout in target.layouts]),
    )


def epilogue_charges(
    program: Program,
    kernels: Kernels,
    live: Liveness,
    edges: EdgeTable,
    operator_tables: Ints,
) -> dict[int, list[ChargedEpilogue]]:
    """Edge -> what epilogues cost there.

    Arguments:

    - `operator_tables`: (operators,) the number of each operator's own table.
    """
    found = [e for of_product in kernels.epilogues.values() for e in of_product]
    out = _written_whole(program, live, edges)
    if not found:
        return out
    row = _rows_of(edges, {t for e in found for t, _ in e.path})
    for product, of_product in kernels.epilogues.items():
        table = int(operator_tables[product])
        for number, e in enumerate(of_product):
            repeat, again = program.operators[e.root].repeat, e.root in program.recomputed
            first = EpilogueCharge(table, number, e.alone, e.launched, repeat, again)
            later = first._replace(table=-1, number=-1)
            for k, edge in enumerate(_edges_of(e, row)):
                charge = later if k else first
                out.setdefault(edge, []).append(ChargedEpilogue(product, e.root, charge))
    return out


def _written_whole(program: Program, live: Liveness, edges: EdgeTable) -> dict[int, list[ChargedEpilogue]]:
    """Edge -> what a fused operator that is not elementwise costs there, if it writes its block to be resharded."""
    unfusible, ops = unfusible_operators(program), program.use_def.def_op[edges.tensor]
    stored = np.array(live.materialized, dtype=bool)[edges.tensor]
    fused = unfusible[ops] & ~stored
    out: dict[int, list[ChargedEpilogue]] = {}
    for e in np.flatnonzero(fused).tolist():
        op, tensor = program.operators[int(ops[e])], program.tensors[edges.tensor[e]]
        if op.primitive not in PRODUCTS:
            work = VectorWork(simple=float(tensor.size), arrays=float(tensor.size))
            part = KernelPart(True, 0, float(tensor.nbytes), work, float(tensor.nbytes))
            charge = EpilogueCharge(-1, -1, part, True, op.repeat, is_recomputed=True, of_source=True)
            out[e] = [ChargedEpilogue(op.id, op.id, charge)]
    return out


def _edges_of(e: Epilogue, row: Mapping[tuple[int, int], int]) -> Sequence[int]:
    """The edges from a product to an epilogue; -1 as a reader is a relay."""
    out: list[int] = []
    for tensor, reader in e.path:
        if (tensor, -1) in row and row[tensor, -1] not in out:
            out.append(row[tensor, -1])
        out.append(row[tensor, reader])
    return out


def _rows_of(edges: EdgeTable, tensors: set[int]) -> dict[tuple[int, int], int]:
    """(tensor, reader) -> the first edge."""
    at = np.flatnonzero(np.isin(edges.tensor, np.fromiter(tensors, np.int64, len(tensors))))
    out: dict[tuple[int, int], int] = {}
    for e, t, r in zip(at.tolist(), edges.tensor[at].tolist(), edges.reader[at].tolist(), strict=True):
        out.setdefault((t, r), e)
    return out
