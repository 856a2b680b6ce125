"""The tables of a cost network: what an operator costs in each state, and what resharding costs between two.

Tables depend only on the class of an operator and on the tensor between two. Each distinct one is built once: a network
of thousands of edges has a few hundred tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._cost import resharding
from jshard._network.candidates import CandidateSet, TensorLayouts
from jshard._network.epilogue_charges import ChargeSeconds, EpilogueCharge, charge_seconds
from jshard._network.layout_pairs import equal_layouts, slices
from jshard._network.made_of_constants import without_gathers
from jshard._network.operator_cost import OperatorCost, operator_cost
from jshard._network.reshard_edges import NOT_SHARED, Relay, Sharing, SharingScopes
from jshard._network.shared_exchanges import SharedExchange, exchange_seconds, shared_exchange_table
from jshard._program.graph import Operator, Tensor
from jshard._program.memory.kernel_parts import Kernels


class CostTables:
    """The tables of one network, each built once; `unary` and `pairwise` are filled by its methods.

    Keys hold the `id` of candidate sets and layouts: the `CandidateCache` keeps one object for all equal ones, and the
    network keeps them alive.
    """

    def __init__(
        self,
        topology: Topology,
        level: int,
        kernels: Kernels,
        candidates: Sequence[CandidateSet],
        shared_exchanges: Sequence[SharedExchange] = (),
    ):
        self.topology, self.level = topology, level
        self.kernels, self.candidates = kernels, candidates  # `candidates`: by operator
        self.shared_operands: dict[int, list[int]] = {}  # of operators whose exchanges are tables of pairs
        for pair in shared_exchanges:
            self.shared_operands.setdefault(pair.op, []).append(pair.operand)
        self.unary: list[np.ndarray] = []
        self.pairwise: list[np.ndarray] = []
        self.operator_costs: dict[int, OperatorCost] = {}  # of one run, by number of the operator's table
        self._ids: dict[Hashable, int] = {}
        self._seconds: dict[Hashable, np.ndarray] = {}
        self._charges: dict[Hashable, ChargeSeconds] = {}
        self._id_of_object: dict[int, int] = {}
        self._id_of_layouts: dict[tuple[Layout, ...], int] = {}

    def _add(self, tables: list[np.ndarray], key: Hashable, table: np.ndarray) -> int:
        self._ids[key] = len(tables)
        tables.append(table)
        return self._ids[key]

    def zero_table(self, n: int) -> int:
        """A table of zeros for `n` states."""
        key = ("zero", n)
        return self._ids[key] if key in self._ids else self._add(self.unary, key, np.zeros(n))

    def operator_table(
        self,
        op: Operator,
        price: float = 0.0,
        unforced: CandidateSet | None = None,
        is_recomputed: bool = False,
    ) -> int:
        """What an operator costs by itself under each candidate, in all its runs; see `operator_cost`.

        All compute of an operator that `is_recomputed` is redundant.
        """
        candidates = self.candidates[op.id]
        if candidates.op is None or op.kind != "eqn":
            return self.zero_table(len(candidates))
        parts, fused = self.kernels.parts[op.id], self.kernels.fused_parts(op.id)
        launched = self.kernels.launched[op.id]
        shared = tuple(self.shared_operands.get(op.id, ()))
        key = (
            "operator",
            id(candidates),
            parts,
            fused,
            launched,
            op.repeat,
            price,
            id(unforced),
            is_recomputed,
            shared,
        )
        if key not in self._ids:
            cost = operator_cost(candidates, parts, fused, launched, self.topology, price, unforced)
            if is_recomputed:
                cost = dataclasses.replace(cost, redundant=cost.compute)
            for k in shared:
                own = cost.internal_collectives - exchange_seconds(candidates, k, self.topology)
                cost = dataclasses.replace(cost, internal_collectives=own)
            table = self._add(self.unary, key, cost.objective(self.level) * op.repeat)
            self.operator_costs[table] = cost
        return self._ids[key]

    def reshard_table(
        self,
        source: TensorLayouts,
        target: TensorLayouts,
        tensor: Tensor,
        count: float,
        *,
        returned_sum: bool = False,
        combined_with: int = 1,
        sharing: Sharing = NOT_SHARED,
        duplicates: tuple[TensorLayouts, ...] = (),
        charges: tuple[EpilogueCharge, ...] = (),
        is_constant: bool = False,
    ) -> int:
        """Seconds of resharding from each state of the producer or relay to each state of the relay or reader.

        Arguments:

        - `count`: how often in one call of the program.
        - `returned_sum`: the caller gets the sum in any layout, so a reduce-scatter costs the gather after it as well.
        - `combined_with`: how many sums share one latency.
        - `sharing`: which readers may share the second copy of a relay.
        - `duplicates`: layouts of earlier operands of the reader that read the same tensor: nothing is resharded in
            states in which one of them has the same layout.
        - `charges`: of epilogues between a product and whose root the edge is; their seconds are added.
        - `is_constant`: of a value made of constants, which is not sent: pairs of states that would are impossible.
        """
        key = (
            "reshard", id(source), id(target), tensor.shape, tensor.dtype, count, returned_sum, combined_with,
            sharing, charges, is_constant, *map(id, duplicates),
        )  # fmt: skip
        if key not in self._ids:
            seconds = self.seconds(source, target, tensor, returned_sum, combined_with)
            table = seconds[np.ix_(source.of_state, target.of_state)]
            if isinstance(target, Relay) and target.has_second_copies:
                within = self.seconds(target, target, tensor, returned_sum, combined_with)
                table = table + _second_copy_seconds(source, target, within, sharing.scopes)
            if isinstance(source, Relay) and sharing.num_readers:
                table = _split_among_sharers(table, source, target, sharing)
            table = zero_duplicate_reads(table * count, target, duplicates)
            table = without_gathers(table) if is_constant else table
            for charge in charges:
                seconds = self.charge_seconds(charge, source, target)
                table = table + seconds.table(self.level, source, target)
            self._add(self.pairwise, key, table)
        return self._ids[key]

    def seconds(
        self,
        source: TensorLayouts,
        target: TensorLayouts,
        tensor: Tensor,
        returned_sum: bool,
        combined_with: int,
    ) -> np.ndarray:
        """Seconds between the layouts themselves, of shape (layouts of the source, layouts of the target)."""
        key = (
            self._layouts_id(source), self._layouts_id(target), tensor.shape, tensor.itemsize, combined_with,
            returned_sum,
        )  # fmt: skip
        if key not in self._seconds:
            shape, itemsize = tensor.shape, tensor.itemsize
            table = resharding.seconds_table(
                source.layouts, target.layouts, shape, itemsize, self.topology, combined_with
            )
            if returned_sum:
                table = table + deferred_gather_seconds(
                    source.layouts, target.layouts, shape, itemsize, self.topology
                )
            self._seconds[key] = table
        return self._seconds[key]

    def charge_seconds(
        self, charge: EpilogueCharge, source: TensorLayouts, target: TensorLayouts
    ) -> ChargeSeconds:
        """What an epilogue costs on an edge, in all states of its ends."""
        key = (id(source), id(target), charge)
        if key not in self._charges:
            self._charges[key] = charge_seconds(charge, source, target, self.topology, self.operator_costs)
        return self._charges[key]

    def _layouts_id(self, layouts: TensorLayouts) -> int:
        """A number for the distinct layouts of a tensor: hashing them takes as long as building a table."""
        if id(layouts) not in self._id_of_object:
            self._id_of_object[id(layouts)] = self._id_of_layouts.setdefault(
                layouts.layouts, len(self._id_of_layouts)
            )
        return self._id_of_object[id(layouts)]

    def shared_exchange_table(self, pair: SharedExchange, repeat: float) -> int:
        """What the later operator of a pair sends in `repeat` runs, zero where the first has sent the same."""
        first, later = self.candidates[pair.first], self.candidates[pair.op]
        key = ("shared", id(first), id(later), pair.operand, pair.first_operand, repeat)
        if key not in self._ids:
            table = shared_exchange_table(pair, self.candidates, self.topology)
            self._add(self.pairwise, key, table * repeat)
        return self._ids[key]

    def equality_table(self, a: TensorLayouts, b: TensorLayouts) -> int:
        """Zero where two layouts are equal, infinite elsewhere."""
        key = ("equal", id(a), id(b))
        if key not in self._ids:
            distinct = np.array([[0.0 if p == q else np.inf for q in b.layouts] for p in a.layouts])
            self._add(self.pairwise, key, distinct[np.ix_(a.of_state, b.of_state)])
        return self._ids[key]


def zero_duplicate_reads(
    table: np.ndarray, target: TensorLayouts, duplicates: Sequence[TensorLayouts]
) -> np.ndarray:
    """A reshard table with zeros in the states of the reader in which an earlier operand has the same layout."""
    out = table.copy() if duplicates else table
    for d in duplicates:
        same = [d.layouts[a] == target.layouts[b] for a, b in zip(d.of_state, target.of_state, strict=True)]
        out[:, np.array(same)] = 0.0
    return out


def _second_copy_seconds(
    produced: TensorLayouts, relay: Relay, within: np.ndarray, scopes: SharingScopes
) -> np.ndarray:
    """Seconds of making the second copies of a relay from its stored layout; none where the tensor is produced so.

    `within` are the seconds between the relay's layouts. The result has the shape (states of the producer, of the relay).
    """
    paired = relay.second_copy >= 0
    once = np.where(paired, within[relay.of_state, relay.second_copy], 0.0)
    equal = equal_layouts(produced.layouts, relay.layouts)
    as_produced = paired & equal[np.ix_(produced.of_state, relay.second_copy)]
    out = np.zeros(as_produced.shape)
    for k, (ratio, available) in enumerate(scopes):
        in_scope = (relay.second_copy_scopes >> k & 1) * once * ratio
        out += np.where(as_produced, 0.0, in_scope) if available else in_scope
    return out


def _split_among_sharers(
    table: np.ndarray, relay: Relay, target: TensorLayouts, sharing: Sharing
) -> np.ndarray:
    """What a reader pays beside a relay with a second copy: nothing for that one, a share of any other.

    Only copies of which the stored layout is no local slice are shared: others are paid in full.
    """
    shareable = ~slices(target.layouts, relay.layouts).T
    shareable = shareable[np.ix_(relay.of_state, target.of_state)]
    if sharing.scope_bit < 0:  # a scope beyond the first `MAX_SHARING_SCOPES`
        return np.where(shareable, table / sharing.readers_in_scope, table)
    equal = equal_layouts(relay.layouts, target.layouts)
    paired = (relay.second_copy >= 0)[:, None]
    has_copy = (relay.second_copy_scopes >> sharing.scope_bit & 1 > 0)[:, None]
    sharers = np.where(has_copy, max(1, sharing.num_readers - 2), sharing.readers_in_scope)
    out = np.where(shareable & paired, table / sharers, table)
    return np.where(has_copy & equal[np.ix_(relay.second_copy, target.of_state)], 0.0, out)


def deferred_gather_seconds(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    itemsize: float,
    topology: Topology,
) -> np.ndarray:
    """Seconds of gathering a sum that is reduce-scattered: the half of an all-reduce that is left to the caller.

    Zero where a partial sum ends in an all-reduce, or there is none. Of shape `(len(sources), len(targets))`.
    """
    out = np.zeros((len(sources), len(targets)))
    for i, a in enumerate(sources):
        if not a.partial:
            continue
        for j, b in enumerate(targets):
            scattered = set(a.partial) & {x for d in b.dims for x in d}
            if scattered:
                gathered = Layout(tuple(tuple(x for x in d if x not in scattered) for d in b.dims))
                table = resharding.seconds_table([Layout(b.dims)], [gathered], shape, itemsize, topology)
                out[i, j] = table[0, 0]
    return out
