"""The cost network of a program: one variable an operator, one more for a tensor that several operators read.

A variable's states are the operator's candidates; its table is what the operator costs by itself. An edge
joins the maker of a tensor to its reader and costs the resharding between the layout made and the layout
read. A tensor with several readers gets a *relay*: a variable for the layout in which it is kept for them, so
that one gather serves all, and is paid once (`reshard_edges.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._core.topology import Topology
from jshard._memory.hbm_traffic import HbmTraffic, hbm_traffic
from jshard._memory.liveness import Liveness, liveness
from jshard._network.allreduce_combining import SUM_PRIMITIVES, combinable_sums, tensors_reaching_only
from jshard._network.candidates import CandidateCache, CandidateSet, LayoutTest, TensorLayouts
from jshard._network.cost_tables import CostTables
from jshard._network.op_classes import (
    cost_classes,
    distinct_candidate_sets,
    operator_classes,
    reshard_counts,
    singleton_classes,
)
from jshard._network.operator_cost import OperatorCost
from jshard._network.replication_price import REPLICATION_PRICE, priced_products
from jshard._network.reshard_edges import EdgeTable, Relay, build_edge_table
from jshard._program.graph import Program
from jshard._search import CostNetwork


MAX_SECOND_COPY_AXES = 2  # of a mesh for whose tensors the pairs of layouts are few enough to be told apart

Pins = Mapping[int, Sequence[tuple[str, int, Any, LayoutTest]]]  # operator -> its pins


@dataclasses.dataclass(frozen=True, eq=False)
class ReshardEdge:
    """What an edge of the network carries: a tensor, from its maker or relay to a reader (-1: to its relay)."""

    edge: int
    tensor: int
    source: TensorLayouts
    target: TensorLayouts
    reader: int
    count: float
    returned_sum: bool
    combined_with: int = 1
    duplicates: tuple[TensorLayouts, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningNetwork:
    """A program as a cost network, and what each variable of it means."""

    program: Program
    topology: Topology
    level: int
    candidates: tuple[CandidateSet, ...]
    relays: Mapping[int, Relay]
    relay_variable: Mapping[int, int]
    hbm_traffic: HbmTraffic
    cost_network: CostNetwork
    tensor_edges: EdgeTable
    cost_tables: CostTables
    returned_sums: frozenset[int]  # sums that go to results whose layout nobody fixed
    combined_with: Mapping[int, int]  # how many sums go together with a tensor's, where it is more than one
    one_shared_copy: bool  # whether the network's cost is one of plans with a single shared copy a tensor
    donated: tuple[int, ...]

    @property
    def operator_costs(self) -> Mapping[int, OperatorCost]:
        """Times of one run of an operator, by number of its own table."""
        return self.cost_tables.operator_costs

    @property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs for which it is moved."""
        return self.tensor_edges.readers_of_tensor

    @functools.cached_property
    def reshard_edges(self) -> tuple[ReshardEdge, ...]:
        """What the edges carry, as objects; only memory needs them."""
        e = self.tensor_edges
        return tuple(
            ReshardEdge(
                k, t, e.layouts[source], e.layouts[target], reader, repeat, t in self.returned_sums,
                self.combined_with.get(t, 1), e.duplicate_layouts[twins],
            )
            for k, (t, source, target, reader, repeat, twins) in enumerate(
                zip(*(x.tolist() for x in (e.tensor, e.source_layouts, e.target_layouts, e.reader, e.count, e.duplicates)),
                    strict=True)
            )
        )  # fmt: skip

    @functools.cached_property
    def liveness(self) -> Liveness:
        """What a compiled program holds in memory, and until when."""
        return liveness(self.program, self.donated)


def build_network(
    program: Program,
    topology: Topology,
    pins: Pins,
    *,
    forced: Pins | None = None,
    pinned_results: Collection[int] | None = None,
    level: int = 0,
    ties: Sequence[tuple[int, int]] = (),
    donated: Collection[int] = (),
    replication_price: float = REPLICATION_PRICE,
    second_copies: bool = True,
    price_returned_sums: bool = True,
) -> PlanningNetwork:
    """Build the network of a program under a level.

    Arguments:

    - `forced`: pins that a what-if adds to the user's: they leave the price of repeated products as it was.
    - `pinned_results`: the output operators that the user pinned, where `pins` has others.
    - `ties`: (output operator, input operator) pairs that must have one layout.
    - `donated`: flat indices of donated arguments.
    - `replication_price`: what a second of repeated product work counts (`replication_price.py`); nothing at level 1.
    - `second_copies`: whether copies that several operators share are counted once (`reshard_edges.py`), on a mesh of
        at most two axes.
    - `price_of_scattering`: whether sums that the caller gets in pieces pay for what it takes to gather them; not at
        level 1.

    The network is without memory, which `memory_network.py` adds where a level or a budget asks for it.
    """
    interner = CandidateCache(program, topology.mesh)
    life = hbm_traffic(program, donated)
    form = operator_classes(program)
    priced = priced_products(program, interner, form) if replication_price and level != 1 else frozenset()
    # State may lie in any order of axes; what it becomes lies in the same.
    ends = {out: [("operand", 0, k, test) for _, _, k, test in pins.get(inp, ())] for out, inp in ties}
    # Operators that are alike are asked once; those with pins by themselves.
    n, forced = len(program.operators), forced or {}
    pinned = {*pins, *forced, *(out for out, asked in ends.items() if asked)}
    alike, some = first_occurrence_codes(row_codes(form, singleton_classes(n, pinned)))
    each = [
        interner.candidates_of(op, [*pins.get(i, ()), *forced.get(i, ())] or ends.get(i, ()))
        for i, op in ((i, program.operators[i]) for i in some)
    ]
    states = tuple([each[k] for k in alike.tolist()])
    number, distinct = distinct_candidate_sets(alike, each)
    tables = CostTables(topology, level, life, states)
    may = np.zeros(n, dtype=np.int64)
    may[list(priced)] = 1
    alike, some = first_occurrence_codes(
        row_codes(cost_classes(program, number, life), may, singleton_classes(n, forced))
    )
    wished = {i: interner.candidates_of(program.operators[i], pins.get(i, ())) for i in forced if i in priced}
    own = [
        tables.operator_table(program.operators[i], replication_price if i in priced else 0.0, wished.get(i))
        for i in some
    ]
    pairs = second_copies and sum(n > 1 for n in topology.mesh.sizes) <= MAX_SECOND_COPY_AXES
    edges, relays = build_edge_table(program, number, distinct, reshard_counts(program), pairs)
    kept = [tables.zero_table(len(c.of_state)) for c in relays.values()]
    if pinned_results is None:
        pinned_results = {
            op for op, some in pins.items() if any(not isinstance(key, str) for _, _, key, _ in some)
        }
    price_sums = price_returned_sums and level != 1
    returned = _returned_sums(program, ties, frozenset(pinned_results)) if price_sums else frozenset()
    together = combinable_sums(program, topology)
    heads, tails, numbers = (
        edges.source_variable.tolist(),
        edges.target_variable.tolist(),
        _reshard_tables(program, edges, tables, returned, together),
    )
    for out, inp in ties:
        heads.append(out)
        tails.append(inp)
        numbers.append(tables.equality_table(states[out].operands[0], states[inp].results[0]))
    network = CostNetwork(
        unary=tuple(tables.unary),
        pairwise=tuple(tables.pairwise),
        node_table=np.concatenate([np.array(own, dtype=np.int64)[alike], np.array(kept, dtype=np.int64)]),
        edges=np.array([heads, tails], dtype=np.int64).T.copy(),
        edge_table=np.array(numbers, dtype=np.int64),
    )
    variable = dict(zip(relays, range(n, n + len(relays)), strict=True))
    return PlanningNetwork(
        program, topology, level, states, relays, variable, life, network, edges, tables, returned, together,
        not pairs and max(map(len, edges.readers_of_tensor), default=0) > 2, tuple(donated),
    )  # fmt: skip


def _reshard_tables(
    program: Program,
    e: EdgeTable,
    tables: CostTables,
    returned: frozenset[int],
    together: Mapping[int, int],
) -> list[int]:
    """The table of each edge; one of each kind is built."""
    a = program.use_def
    sums = np.ones(len(a.def_op), dtype=np.int64)
    sums[np.fromiter(together, np.int64, len(together))] = list(together.values())
    free = np.zeros(len(a.def_op), dtype=np.int64)
    free[list(returned)] = 1
    rate = np.unique(e.count, return_inverse=True)[1]
    alike, some = first_occurrence_codes(
        row_codes(
            e.source_layouts,
            e.target_layouts,
            a.aval_id[e.tensor],
            rate,
            free[e.tensor],
            sums[e.tensor],
            e.scope_bit + 1,
            e.num_sharers,
            e.readers_in_scope,
            e.sharing,
            e.duplicates,
        )
    )
    made = [
        tables.reshard_table(
            e.layouts[e.source_layouts[k]], e.layouts[e.target_layouts[k]], program.tensors[t], float(e.count[k]),
            returned=t in returned, together=together.get(t, 1),
            sharing=e.sharing_scopes[e.sharing[k]], bit=int(e.scope_bit[k]), sharers=int(e.num_sharers[k]), mates=int(e.readers_in_scope[k]),
            twins=e.duplicate_layouts[e.duplicates[k]],
        )
        for k, t in zip(some, e.tensor[some].tolist(), strict=True)
    ]  # fmt: skip
    return np.array(made, dtype=np.int64)[alike].tolist()


def _returned_sums(
    program: Program, ties: Sequence[tuple[int, int]], pinned_results: frozenset[int]
) -> frozenset[int]:
    """Sums that go, through light operators only, to results whose layout nobody fixed.

    A reduce-scatter there would only leave the second half of an all-reduce to the caller, so it costs that as well
    (`scatter_price`). Where a result is pinned, or tied to an argument (the new parameters of a training step), or
    something heavy reads the sum, scattering is what it is.
    """
    free = {i for i in program.outputs if i not in pinned_results} - {o for o, _ in ties}
    ending = tensors_reaching_only(program, free, pinned_results)
    sums = np.flatnonzero(program.use_def.has_primitive(frozenset(SUM_PRIMITIVES))).tolist()
    return frozenset(r for i in sums for r in program.operators[i].results if r in ending)
