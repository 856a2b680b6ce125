"""The cost network of a program: one variable an operator, one more for a tensor with several readers.

The states of an operator's variable are its candidates; its table is what the operator costs by itself. An edge joins
the producer of a tensor to its reader and costs the resharding between the layout produced and the layout read. A tensor
with several readers gets a *relay*: a variable for the layout in which it is stored, so that one gather serves all of
them and is paid once (`reshard_edges.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._core.topology import Topology
from jshard._network.allreduce_combining import SUM_PRIMITIVES, combinable_sums, tensors_reaching_only
from jshard._network.candidates import CandidateCache, CandidateSet, PinOfSide
from jshard._network.cost_tables import CostTables
from jshard._network.epilogue_charges import ChargedEpilogue, EpilogueCharge, epilogue_charges
from jshard._network.made_of_constants import made_of_constants
from jshard._network.op_classes import (
    cost_classes,
    distinct_candidate_sets,
    operator_classes,
    reshard_counts,
    singleton_classes,
)
from jshard._network.operator_cost import OperatorCost
from jshard._network.replication_price import REPLICATION_PRICE, priced_products
from jshard._network.reshard_edges import EdgeTable, Relay, ReshardEdge, build_edge_table
from jshard._network.shared_exchanges import SharedExchange, shared_exchanges
from jshard._program.graph import Program
from jshard._program.memory.kernel_fusion import kernels
from jshard._program.memory.kernel_parts import Kernels
from jshard._program.memory.liveness import Liveness, liveness
from jshard._search import CostNetwork


MAX_SECOND_COPY_AXES = 2
"""Mesh axes of size > 1 beyond which pairs of layouts are too many (`reshard_edges.py`)."""

Pins = Mapping[int, Sequence[PinOfSide]]
"""Operator -> its pins: (side, index, key that identifies the pin, test of layouts)."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningNetwork:
    """A program as a cost network, and what each variable of it means.

    Variable v is operator v, or from `len(program.operators)` on the relay of a tensor (`relay_variable`). The edges of
    the cost network are those of `tensor_edges`, row by row, then those of ties, then those of `shared_exchanges`.

    - `returned_sums`: sums that go to results of free layout.
    - `combined_with`: how many sums share one latency with a tensor's, where it is more than one.
    - `epilogue_charges`: edge -> epilogues whose seconds are in its table.
    - `one_shared_copy`: whether the cost is one of plans with a single shared copy a tensor.
    - `donated`: flat indices of donated arguments.
    - `shared_exchanges`: operators that may use the edges that others have exchanged.
    """

    program: Program
    topology: Topology
    level: int
    candidates: tuple[CandidateSet, ...]
    relays: Mapping[int, Relay]
    relay_variable: Mapping[int, int]
    kernels: Kernels
    epilogue_charges: Mapping[int, Sequence[ChargedEpilogue]]
    cost_network: CostNetwork
    tensor_edges: EdgeTable
    cost_tables: CostTables
    returned_sums: frozenset[int]
    combined_with: Mapping[int, int]
    one_shared_copy: bool
    donated: tuple[int, ...]
    shared_exchanges: tuple[SharedExchange, ...] = ()

    def __post_init__(self) -> None:
        rows, edges = self.tensor_edges, self.cost_network.edges
        assert np.array_equal(edges[: len(rows), 0], rows.source_variable)
        assert np.array_equal(edges[: len(rows), 1], rows.target_variable)
        assert self.cost_network.size == len(self.program.operators) + len(self.relays)

    @property
    def operator_costs(self) -> Mapping[int, OperatorCost]:
        """The cost of one run of an operator, by number of its own table."""
        return self.cost_tables.operator_costs

    @property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs for which it is resharded."""
        return self.tensor_edges.readers_of_tensor

    @functools.cached_property
    def reshard_edges(self) -> tuple[ReshardEdge, ...]:
        """The rows of `tensor_edges` as objects; only memory needs them."""
        return tuple(self.tensor_edges.rows(range(len(self.tensor_edges))))

    @functools.cached_property
    def liveness(self) -> Liveness:
        """What a compiled program keeps in memory, and until when."""
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
    """Build the network of a program for a level.

    Arguments:

    - `forced`: layouts required by `Plan.why` beside the user's pins; they leave the price of repeated products as it was.
    - `pinned_results`: the output operators that the user pinned, where `pins` has others.
    - `ties`: (output operator, input operator) pairs that must have one layout.
    - `donated`: flat indices of donated arguments.
    - `replication_price`: seconds charged for a second of repeated product work (`replication_price.py`); none at level 1.
    - `second_copies`: whether copies that several operators share are counted once (`reshard_edges.py`), on a mesh of
        at most `MAX_SECOND_COPY_AXES` axes.
    - `price_returned_sums`: whether sums that the caller gets reduce-scattered are charged for the gather that is left;
        not at level 1.

    The network is without memory, which `memory_network.py` adds where a level or a budget needs it.
    """
    cache, forced = CandidateCache(program, topology.mesh), forced or {}
    found = kernels(program, donated, into_products=topology.chip.units.fuses)
    classes = operator_classes(program)
    ids, distinct = _candidate_ids(program, cache, classes, _with_ties(pins, forced, ties), {*pins, *forced})
    candidates = tuple([distinct[k] for k in ids.tolist()])
    # Where memory is all that counts, no edges are kept.
    shared = shared_exchanges(program, candidates) if level != 1 else ()
    tables = CostTables(topology, level, found, candidates, shared)
    priced = priced_products(program, cache, classes) if replication_price and level != 1 else frozenset()
    unforced = {i: cache.candidates_of(program.operators[i], pins.get(i, ())) for i in forced if i in priced}
    operator_tables = _operator_tables(
        program,
        tables,
        ids,
        {i: replication_price for i in priced},
        unforced,
        {*forced, *(p.op for p in shared)},
    )
    if pinned_results is None:
        pinned_results = {
            op for op, of_op in pins.items() if any(not isinstance(key, str) for _, _, key, _ in of_op)
        }
    priced_sums = price_returned_sums and level != 1
    returned = _returned_sums(program, ties, frozenset(pinned_results)) if priced_sums else frozenset()
    combined = combinable_sums(program, topology)
    pairs = second_copies and sum(n > 1 for n in topology.mesh.sizes) <= MAX_SECOND_COPY_AXES
    edges, relays = build_edge_table(
        program, ids, distinct, reshard_counts(program), second_copies=pairs, returned_sums=returned,
        combined_with=combined, constants=[t for t in made_of_constants(program) if _may_be_whole(candidates, program, t)],
    )  # fmt: skip
    relay_tables = [tables.zero_table(len(relay.of_state)) for relay in relays.values()]
    charges = epilogue_charges(program, found, liveness(program, donated), edges, operator_tables)
    edge_tables = _reshard_tables(program, edges, tables, charges)
    tie_tables = [
        tables.equality_table(candidates[out].operands[0], candidates[inp].results[0]) for out, inp in ties
    ]
    more_tables = [
        *tie_tables,
        *(tables.shared_exchange_table(p, program.operators[p.op].repeat) for p in shared),
    ]
    more_ends = np.array([*ties, *((p.first, p.op) for p in shared)], dtype=np.int64).reshape(-1, 2)
    network = CostNetwork(
        unary=tuple(tables.unary),
        pairwise=tuple(tables.pairwise),
        node_table=np.concatenate([operator_tables, np.array(relay_tables, dtype=np.int64)]),
        edges=np.concatenate([np.stack([edges.source_variable, edges.target_variable], axis=1), more_ends]),
        edge_table=np.concatenate([edge_tables, np.array(more_tables, dtype=np.int64)]),
    )
    return PlanningNetwork(
        program=program,
        topology=topology,
        level=level,
        candidates=candidates,
        relays=relays,
        relay_variable=dict(zip(relays, itertools.count(len(program.operators)), strict=False)),
        kernels=found,
        epilogue_charges=charges,
        cost_network=network,
        tensor_edges=edges,
        cost_tables=tables,
        returned_sums=returned,
        combined_with=combined,
        one_shared_copy=not pairs and max(map(len, edges.readers_of_tensor), default=0) > 2,
        donated=tuple(donated),
        shared_exchanges=shared,
    )


def _with_ties(pins: Pins, forced: Pins, ties: Sequence[tuple[int, int]]) -> Pins:
    """The pins of every operator; a result without one has that of the argument it is tied to.

    A pin of pieces leaves the order of axes open, and what state becomes is laid out as the state is.
    """
    out = {i: [*pins.get(i, ()), *forced.get(i, ())] for i in {*pins, *forced}}
    tied = {
        result: [("operand", 0, key, test) for _, _, key, test in pins.get(arg, ())] for result, arg in ties
    }
    return {**{i: p for i, p in tied.items() if p}, **{i: p for i, p in out.items() if p}}


def _candidate_ids(
    program: Program, cache: CandidateCache, classes: Ints, pins: Pins, alone: Collection[int]
) -> tuple[Ints, list[CandidateSet]]:
    """(operators,) numbers of candidate sets, and these.

    The candidates of an operator class are built once; those of operators with pins, or in `alone`, each by itself.
    """
    alike, representatives = first_occurrence_codes(
        row_codes(classes, singleton_classes(len(program.operators), {*pins, *alone}))
    )
    each = [cache.candidates_of(program.operators[i], pins.get(i, ())) for i in representatives]
    return distinct_candidate_sets(alike, each)


def _operator_tables(
    program: Program,
    tables: CostTables,
    candidate_ids: Ints,
    prices: Mapping[int, float],
    unforced: Mapping[int, CandidateSet],
    alone: Collection[int],
) -> Ints:
    """(operators,) the number of each operator's own table.

    Arguments:

    - `prices`: of products whose repetition is charged.
    - `unforced`: of forced products the candidates that the user's pins allow.
    - `alone`: operators whose tables are built one by one.
    """
    n = len(program.operators)
    is_priced = np.zeros(n, dtype=np.int64)
    is_priced[list(prices)] = 1
    is_recomputed = np.zeros(n, dtype=np.int64)
    is_recomputed[list(program.recomputed)] = 1
    alike, representatives = first_occurrence_codes(
        row_codes(
            cost_classes(program, candidate_ids, tables.kernels),
            is_priced,
            is_recomputed,
            singleton_classes(n, alone),
        )
    )
    numbers = [
        tables.operator_table(
            program.operators[i], prices.get(i, 0.0), unforced.get(i), i in program.recomputed
        )
        for i in representatives
    ]
    return np.array(numbers, dtype=np.int64)[alike]


def _reshard_tables(
    program: Program,
    edges: EdgeTable,
    tables: CostTables,
    charged: Mapping[int, Sequence[ChargedEpilogue]],
) -> Ints:
    """(edges,) the number of each edge's table; one is built for all edges of equal costs."""
    of_edge = {e: tuple(one.charge for one in ones) for e, ones in charged.items()}
    ids: dict[tuple[EpilogueCharge, ...], int] = {(): 0}
    classes = np.zeros(len(edges), dtype=np.int64)
    classes[list(of_edge)] = [ids.setdefault(c, len(ids)) for c in of_edge.values()]
    alike, representatives = edges.classes(program.use_def.aval_id, classes)
    numbers = [
        tables.reshard_table(
            e.source, e.target, program.tensors[e.tensor], e.repeats, returned_sum=e.returned_sum,
            combined_with=e.combined_with, sharing=e.sharing, duplicates=e.duplicates, charges=of_edge.get(e.edge, ()),
            is_constant=e.is_constant,
        )
        for e in edges.rows(representatives)
    ]  # fmt: skip
    return np.array(numbers, dtype=np.int64)[alike]


def _may_be_whole(candidates: Sequence[CandidateSet], program: Program, tensor: int) -> bool:
    """Whether a tensor's operator has a candidate whose result no device lacks a part of."""
    op = program.operators[program.use_def.def_op[tensor]]
    layouts = candidates[op.id].results[op.results.index(tensor)].layouts
    return any(not x.partial and not any(x.dims) for x in layouts)


def _returned_sums(
    program: Program, ties: Sequence[tuple[int, int]], pinned_results: frozenset[int]
) -> frozenset[int]:
    """Sums that reach, through fusible operators only, results of free layout.

    A reduce-scatter there would only leave the second half of an all-reduce to the caller, so it costs that as well
    (`deferred_gather_seconds`). Where a result is pinned, or tied to an argument (the new parameters of a training
    step), or an operator that is not fusible reads the sum, a reduce-scatter is complete.
    """
    free = {i for i in program.outputs if i not in pinned_results} - {out for out, _ in ties}
    reaching = tensors_reaching_only(program, free, pinned_results)
    sums = np.flatnonzero(program.use_def.has_primitive(frozenset(SUM_PRIMITIVES))).tolist()
    return frozenset(r for i in sums for r in program.operators[i].results if r in reaching)
