"""The cost network with memory: the bytes that every state holds, and when, copies in other layouts included.

Problem.  A state of an operator determines the size of its results' blocks. But a reader that needs another layout makes
a copy, and whether there is one depends on two variables at once: `copy_variables.py`. And a bound on this network is a
bound on the peak of the schedule only if nothing is counted that some schedule does not hold.

Idea.  Two networks. The *lower bound* holds no more than the schedule of any plan. While an operator runs, its operands
are in memory in the layouts in which it reads them, whatever they were resharded from; between its readers a tensor is
in its stored layout; an argument throughout; and of what is recomputed later, what must flow there (`remat_flow.py`).
The *estimate* counts as the schedules of most plans do (`_schedule/peak.py` counts those exactly): beside a copy also
its source, and the operands of a fused reader until its own readers have run. The search looks for plans in it.

    tensor                                variable   live interval                               bytes
    ------------------------------------  ---------  ------------------------------------------  -------------------
    result                                operator   from the run to the first reshard           its block
    result that is always live            operator   the whole program                           its block
    result of a loop, unread              operator   until the loop ends                         its block
    fused product                         operator   while it runs                               epilogue's block
    next iteration's value (estimate)     operator   from the run until it is stored             if a partial sum
    stored tensor                         relay      between the uses, to the last reshard       its block
    operand                               reader     `disjoint_intervals`                        the layouts it reads
    stored tensor (lower bound)           operator   until its last use                          its flow
    workspace                             operator   while it runs                               `Rule.workspace`
    copy                                  copy       `copy_variables.copy_intervals`             its block less flows

Lemma (`tests/network/test_memory_network.py`): for every assignment, the peak of the lower-bound network is at most
that of the schedule, if every tensor is stored in the smallest layout that it has anywhere in the plan.

Worked case.  A weight cut 8 ways, gathered for one product: the argument holds 1/8 all the time, the copy variable 1
while the product runs, and nothing if the product reads the weight as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._network.build import PlanningNetwork, ReshardEdge
from jshard._network.candidates import TensorLayouts
from jshard._network.copy_variables import (
    CopiedTensor,
    CopyInterval,
    CopyState,
    CopyStates,
    CopyVariable,
    copy_intervals,
)
from jshard._network.kept_operands import NO_PATHS, kept_operands
from jshard._network.recomputed_casts import RecomputedCast, cast_bytes, cast_tables, recomputed_cast
from jshard._program.graph import Operator
from jshard._program.memory.in_place import CARRY_KINDS
from jshard._program.memory.live_intervals import (
    InPlace,
    LiveIntervals,
    LowerBoundIntervals,
    disjoint_intervals,
    live_intervals,
)
from jshard._program.memory.remat_flow import remat_flow
from jshard._program.memory.unfusible import is_unfusible
from jshard._rules.rule import workspace_bytes
from jshard._search import CostNetwork, Memory


# Tensors get no copy variable that are smaller than the first share of the largest one and, whole, than the second share
# of its even part: their copies hardly show in the peak.
_MIN_COPY_SHARE, _MIN_COPY_PARTS = 1 / 512, 1 / 16


def memory_network(network: PlanningNetwork, *, lower_bound: bool = False) -> CostNetwork:
    """The cost network of a program with copy variables and memory, and no limit yet: the lower bound or the estimate."""
    live = live_intervals(network.program, network.donated, lower_bound=lower_bound)
    return _MemoryNetworkBuilder(network, live).build()


def with_copies(memory: CostNetwork, states: Ints) -> Ints:
    """The assignment of a memory network, given the states of the variables of the network without memory.

    A copy variable stands between two of them, which leave one of its states possible.
    """
    n, (first, second) = len(states), memory.edges.T
    of_casts = np.flatnonzero((first >= n) & (second >= n))  # between copy variables: `recomputed_casts.py`
    casts = np.unique(second[of_casts])
    made = np.flatnonzero((first < n) & (second >= n))
    read = np.flatnonzero((first >= n) & (second < n) & ~np.isin(first, casts))
    made, read = made[np.argsort(second[made])], read[np.argsort(first[read])]
    columns = memory.edge_table[made], states[first[made]], memory.edge_table[read], states[second[read]]
    codes, distinct = first_occurrence_codes(row_codes(*columns))
    rows = zip(*[c[distinct].tolist() for c in columns], strict=True)
    best = [int((memory.pairwise[a][i] + memory.pairwise[b][:, j]).argmin()) for a, i, b, j in rows]
    out = np.zeros(memory.size, dtype=np.int64)
    out[:n], out[second[made]] = states, np.array(best, dtype=np.int64)[codes]
    for cast in casts.tolist():
        tables = [memory.pairwise[memory.edge_table[e]][out[first[e]]] for e in of_casts if second[e] == cast]
        reads = [
            memory.pairwise[memory.edge_table[e]][:, out[second[e]]] for e in np.flatnonzero(first == cast)
        ]
        out[cast] = int(np.sum([*tables, *reads], axis=0).argmin())
    return out


def _large_together(nbytes: Mapping[int, int], least: float) -> frozenset[int]:
    """The tensors left when the smallest are taken out that have at most `least` bytes together.

    A copy that several readers share may be kept as long as all others, as the small weights of low-rank adapters.

    >>> sorted(_large_together({1: 2, 2: 5, 3: 4, 4: 1}, 5.0))
    [2, 3]
    """
    smallest = sorted(nbytes, key=lambda t: nbytes[t])
    total = itertools.accumulate(nbytes[t] for t in smallest)
    return frozenset(t for t, upto in zip(smallest, total, strict=True) if upto > least)


class _MemoryNetworkBuilder:
    """Collects the arrays of one network; used once."""

    def __init__(self, network: PlanningNetwork, live: LiveIntervals):
        self.network, self.live = network, live
        self.program, self.mesh = network.program, network.topology.mesh
        self.liveness, self.clock = live.liveness, live.clock
        self.is_lower_bound = isinstance(live, LowerBoundIntervals)
        stored = [
            t
            for t, materialized in enumerate(self.liveness.materialized)
            if self.is_lower_bound and materialized and not live.counted_elsewhere(t)
        ]
        self.flows, self.flow_through = remat_flow(live, stored, self.mesh.total)
        largest = max((self.program.tensors[e.tensor].nbytes for e in network.reshard_edges), default=0)
        # Bytes of the smallest tensor whose copies get variables.
        self.least_with_copies = largest * min(_MIN_COPY_SHARE, _MIN_COPY_PARTS / self.mesh.total)
        self.with_stored_copies = _large_together(
            {t: self.program.tensors[t].nbytes for t in network.relays}, self.least_with_copies
        )
        self.paths = (
            kept_operands(network, live, stored, self.flows, self.flow_through, self.least_with_copies)
            if self.is_lower_bound
            else NO_PATHS
        )
        base = network.cost_network
        self.unary, self.pairwise = list(base.unary), list(base.pairwise)
        self.node_tables = base.node_table.tolist()
        self.edges = base.edges.tolist()
        self.edge_tables = base.edge_table.tolist()
        self.intervals: list[tuple[int, int, int, int]] = []  # variable, start, end, table
        self.usage_tables: list[Floats] = []
        self.table_ids: dict[Hashable, int] = {}
        # By class of edges: the first of its two tables, its unary table, and its states, one object for equal ones.
        self.copy_tables: dict[Hashable, tuple[int, int, CopyStates]] = {}
        self.copy_states: dict[CopyStates, CopyStates] = {}

    def build(self) -> CostNetwork:
        for op in self.program.operators:
            for k in range(len(op.results)):
                self.add_result(op, k)
            self.add_workspace(op)
        for t in range(len(self.program.tensors)):
            if self.liveness.materialized[t] and not self.live.counted_elsewhere(t) and self.live.uses[t]:
                self.add_uses(t)
        for tensor, edges in itertools.groupby(self.network.reshard_edges, key=lambda edge: edge.tensor):
            if self.has_copy_variables(tensor):
                self.add_copy_variables(tensor, [edge for edge in edges if not edge.duplicates])
            elif self.is_lower_bound and not self.is_small(tensor):
                cast = recomputed_cast(self.network, self.live, list(edges))
                if cast is not None:
                    self.add_recomputed_cast(cast)
        columns = np.array(self.intervals, dtype=np.int64).reshape(-1, 4)
        memory = Memory(columns[:, 1:3], tuple(self.usage_tables), columns[:, 0], columns[:, 3], None)
        return CostNetwork(
            unary=tuple(self.unary),
            pairwise=tuple(self.pairwise),
            node_table=np.array(self.node_tables, dtype=np.int64),
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            edge_table=np.array(self.edge_tables, dtype=np.int64),
            memory=memory,
        )

    def add_interval(
        self, variable: int, start: int, end: int, key: Hashable, table: Callable[[], Floats]
    ) -> None:
        """A variable's bytes by state from one time point to before another; `table` makes them if `key` is new."""
        if end <= start:
            return
        if key not in self.table_ids:
            self.table_ids[key] = len(self.usage_tables)
            self.usage_tables.append(table())
        self.intervals.append((variable, start, end, self.table_ids[key]))

    def add_block(self, variable: int, start: int, end: int, layouts: TensorLayouts, nbytes: float) -> None:
        """A tensor in the layouts of a variable's states."""
        self.add_interval(
            variable, start, end, (id(layouts), nbytes), lambda: nbytes / layouts.num_shards(self.mesh)
        )

    def is_small(self, tensor: int) -> bool:
        """Whether the copies of a tensor hardly show in the peak."""
        return self.program.tensors[tensor].nbytes < self.least_with_copies

    def has_copy_variables(self, tensor: int) -> bool:
        """Whether copies of a tensor get variables: where they are live beside their source.

        A materialized value dies when it was resharded; between its copies it is live, or something no larger. Its
        stored layout is not known at a reader, so only the estimate counts both.
        """
        if self.is_small(tensor) and tensor not in self.with_stored_copies:
            return False
        if not self.is_lower_bound:
            return True
        if tensor in self.live.next_iteration:
            return False  # its copy may be in the carry's buffer
        return not self.liveness.materialized[tensor] or self.live.counted_elsewhere(tensor)

    def add_result(self, op: Operator, k: int) -> None:
        """A result until it is resharded; an always live one, throughout."""
        t, live, begin = op.results[k], self.live, self.clock.begin
        layouts, nbytes = self.network.candidates[op.id].results[k], self.program.tensors[t].nbytes
        started = live.result_start(op)
        elsewhere = live.counted_elsewhere(t)
        if not self.liveness.materialized[t]:
            if op.kind in CARRY_KINDS and t in self.clock.allocated_at and not elsewhere:
                # The loop carries it, though it is not read after the loop.
                end = begin[self.clock.loop_spans[op.id][1] + 1]
                self.add_block(op.id, live.allocation_point(t, started), end, layouts, nbytes)
            elif self.liveness.epilogue_bytes[t]:
                run = self.clock.run_point(op.id)
                self.add_block(op.id, run, run + 1, layouts, self.liveness.epilogue_bytes[t])
            return
        if op.kind not in ("input", "const", "eqn") and t not in self.clock.allocated_at:
            return  # what a loop hands to its body is part of what the loop was handed
        if t in live.always_live:
            self.add_block(op.id, live.allocation_point(t, started), begin[-1], layouts, nbytes)
        elif not elsewhere:
            end = self.result_end(t, layouts)
            self.add_block(op.id, live.allocation_point(t, started), end, layouts, nbytes)
        elif t in live.next_iteration and not self.is_lower_bound:
            self.add_partial_sum(op, k, started)

    def add_workspace(self, op: Operator) -> None:
        """What the local implementation of an operator has in memory while it runs."""
        candidates = self.network.candidates[op.id]
        if candidates.rule.workspace:
            run, codes = self.clock.run_point(op.id), candidates.axis_codes
            self.add_interval(
                op.id, run, run + 1, ("workspace", id(candidates)),
                lambda: workspace_bytes(candidates.rule, codes, self.mesh),
            )  # fmt: skip

    def result_end(self, tensor: int, layouts: TensorLayouts) -> int:
        """Until when a materialized tensor is surely in the layout in which it is made."""
        uses = self.live.uses[tensor]
        if not uses:
            return self.clock.begin[self.liveness.last_use[tensor] + 1]
        if tensor in self.network.relays or any(layout.partial for layout in layouts.layouts):
            return min(use.stored_at for use in uses) + 1
        return uses[0].resharded_at + 1

    def add_partial_sum(self, op: Operator, k: int, started: int) -> None:
        """A value for the next iteration is beside the carry's buffer while it is a partial sum."""
        layouts, t = self.network.candidates[op.id].results[k], op.results[k]
        nbytes = self.program.tensors[t].nbytes
        end = min((use.stored_at for use in self.live.uses[t]), default=started) + 1

        def table() -> Floats:
            partial = np.array([bool(layout.partial) for layout in layouts.layouts])[layouts.of_state]
            return np.where(partial, nbytes / layouts.num_shards(self.mesh), 0.0)

        self.add_interval(op.id, started, end, ("partial sum", id(layouts), nbytes), table)

    def add_uses(self, tensor: int) -> None:
        """A materialized tensor, in its readers' layouts while they need it, in between in its stored layout."""
        uses, relay = self.live.uses[tensor], self.network.relays.get(tensor)
        nbytes = self.program.tensors[tensor].nbytes
        at = min(use.stored_at for use in uses) + 1
        resharded = [use.resharded_at for use in uses if not self.live.recomputes_cast(tensor, use.reader)]
        stored_until = max(resharded, default=-1) + 1
        if self.has_copy_variables(tensor):
            if relay is not None:
                self.add_block(self.network.relay_variable[tensor], at, stored_until, relay, nbytes)
            return
        for reader, start, end in disjoint_intervals(uses, self.clock.begin):
            # The stored block is live while it is resharded; the reader's own block from the next time point on.
            start += any(use.reader == reader and use.resharded_at == start for use in uses)
            if relay is not None and at < stored_until:
                variable = self.network.relay_variable[tensor]
                self.add_block(variable, at, min(start, stored_until), relay, nbytes)
            self.add_operand(tensor, reader, max(start, at), end)
            at = max(at, end)
        self.add_flow(tensor, at)

    def add_flow(self, tensor: int, start: int) -> None:
        """What flows from a tensor to its last reader, after the uses that hold it whole."""
        def_op, last = self.program.defs()[tensor][0], self.liveness.last_use[tensor]
        states = len(self.network.candidates[def_op])
        # Where it ends, a result may overwrite it.
        at_last = self.clock.begin[last + 1] - (self.live.in_place(last) is InPlace.COUNT_RESULTS)
        for flow in self.flows.get(tensor, ()):
            end, nbytes = at_last if flow.until is None else self.clock.begin[flow.until], flow.nbytes
            key = ("flow", states, nbytes)
            self.add_interval(def_op, start, end, key, lambda nbytes=nbytes: np.full(states, nbytes))

    def add_operand(self, tensor: int, reader: int, start: int, end: int) -> None:
        """What an operator reads of a tensor, each layout once."""
        operands = self.network.candidates[reader].operands
        ks = [k for u, k in self.program.uses()[tensor] if u == reader]
        distinct = list({id(operands[k]): operands[k] for k in ks}.values())
        nbytes = self.program.tensors[tensor].nbytes
        if len(distinct) == 1:
            self.add_block(reader, start, end, distinct[0], nbytes)
            return

        def table() -> Floats:
            states = range(len(distinct[0].of_state))
            blocks = [{layouts.layout(s) for layouts in distinct} for s in states]
            return np.array([sum(nbytes / layout.pieces(self.mesh) for layout in block) for block in blocks])

        self.add_interval(reader, start, end, (tuple(map(id, distinct)), nbytes), table)

    def add_copy_variables(self, tensor: int, edges: Sequence[ReshardEdge]) -> None:
        """Split the edges of a tensor by copy variables; each reader's holds memory once, however often it reads."""
        copied = CopiedTensor(tensor, self.program, self.live)
        fused = not self.liveness.materialized[tensor]
        by_source = fused and is_unfusible(self.program.operators[self.program.defs()[tensor][0]])
        flow, kept = float(self.flow_through[tensor]), self.paths.kept.get(tensor)
        has_relay, counted = tensor in self.network.relays, set()
        for edge in edges:
            to_relay = edge.reader < 0
            inside = (
                self.paths.inside(tensor, copied.disjoint.get(edge.reader, ()))
                if kept and not by_source
                else []
            )
            variable, states, copy = self.split_edge(edge, fused, by_source, bool(inside))
            if edge.reader in counted:
                continue
            counted.add(edge.reader)
            for start, end in inside:
                self.add_gathered(variable, copy, states, start, end)
            for held in copy_intervals(edge, fused, by_source, copied, has_relay, self.mesh.total):
                # The copy that is stored counts beside what is kept: a value is one or the other.
                if (kept and to_relay) or tensor not in self.paths.windows:
                    self.add_copy(variable, states, held, flow)
                    continue
                for start, end in self.paths.outside(tensor, held.start, held.end):
                    self.add_copy(variable, states, held._replace(start=start, end=end), flow)
            if kept and (to_relay or not has_relay):
                held_in = CopyState.SAME, CopyState.FUSED_SLICE
                held = CopyInterval(kept.start, kept.end, kept.nbytes, held_in=held_in)
                self.add_copy(variable, states, held, kept.counted)

    def add_recomputed_cast(self, cast: RecomputedCast) -> None:
        """The copy variables of a cast's store, of the reader that needs it, and of those that recompute it."""
        uses = {use.reader: use for use in self.live.uses[cast.tensor]}
        nbytes = float(self.program.tensors[cast.tensor].nbytes)

        def add(edge: ReshardEdge, start: int, end: int) -> int:
            variable, states, _ = self.split_edge(edge, False, False, False)
            self.add_copy(variable, states, CopyInterval(start, end, nbytes), 0.0)
            return variable

        at = min(use.stored_at for use in uses.values())
        ends = [add(cast.stored_edge, at, at + 1)]
        if cast.before_edge is not None:
            at = uses[cast.before_edge.reader].resharded_at
            ends.append(add(cast.before_edge, at, at + 1))
        for edge in () if cast.is_read_later else cast.later_edges:
            add(edge, uses[edge.reader].resharded_at, self.clock.begin[edge.reader + 1])
        of_store, of_before, own = cast_tables(cast, self.network)
        variable, row = len(self.node_tables), cast.reader_edge.edge
        self.node_tables.append(len(self.unary))
        self.unary.append(np.zeros(len(own)))
        ends.append(self.edges[row][1])
        tables = [of_store, own] if of_before is None else [of_store, of_before, own]
        numbers = range(len(self.pairwise), len(self.pairwise) + len(tables))
        self.pairwise += tables
        self.edges[row], self.edge_tables[row] = [ends[0], variable], numbers[0]
        self.edges += [*([end, variable] for end in ends[1:-1]), [variable, ends[-1]]]
        self.edge_tables += numbers[1:]
        flows = sum(flow.nbytes for flow in self.flows.get(cast.source, ()))
        for start, end, table in cast_bytes(cast, self.live, self.mesh, flows):
            self.add_interval(variable, start, end, ("cast", variable, start), lambda table=table: table)

    def add_gathered(
        self, variable: int, copy: CopyVariable, states: CopyStates, start: int, end: int
    ) -> None:
        """What a copy gathered from the stored value holds beyond what is kept for that, while its reader runs."""
        tensor = copy.edge.tensor
        kept, nbytes = self.paths.kept[tensor], self.program.tensors[tensor].nbytes
        key = ("beyond source", id(states), id(copy.edge.source), nbytes, kept.nbytes, kept.counted)

        def table() -> Floats:
            beyond = copy.beyond_source(nbytes, kept.nbytes, kept.counted, self.mesh)
            return states.bytes_by_state(beyond, (CopyState.GATHERED,))

        self.add_interval(variable, start, end, key, table)

    def add_copy(self, variable: int, states: CopyStates, held: CopyInterval, flow: float) -> None:
        """What a copy variable holds; `flow` bytes of it count already."""
        key = (id(states), flow, held.nbytes, held.extra, held.held_in)
        self.add_interval(variable, held.start, held.end, key, lambda: self.copy_bytes(states, held, flow))

    def copy_bytes(self, states: CopyStates, interval: CopyInterval, flow: float) -> Floats:
        """(states,) bytes of a copy less the `flow` that counts already."""
        blocks = np.array([interval.nbytes / layout.pieces(self.mesh) for layout in states.layouts])
        return states.bytes_by_state(np.maximum(0.0, blocks - flow) + interval.extra, interval.held_in)

    def split_edge(
        self, edge: ReshardEdge, fused: bool, by_source: bool, tells_gathers: bool
    ) -> tuple[int, CopyStates, CopyVariable]:
        """Put a new variable between the two ends of an edge: its number, its states, and what it stands for."""
        tensor = self.program.tensors[edge.tensor]
        charges = tuple([one.charge for one in self.network.epilogue_charges.get(edge.edge, ())])
        key = (
            id(edge.source), id(edge.target), tensor.shape, tensor.itemsize, edge.repeats, edge.returned_sum,
            edge.combined_with, by_source, fused, charges, edge.is_constant, tells_gathers,
        )  # fmt: skip
        found, copy = self.copy_tables.get(key), CopyVariable(edge, fused, by_source, charges, tells_gathers)
        if found is None:
            states = self.copy_states.setdefault(copy.states, copy.states)
            if ("free", len(states)) not in self.table_ids:
                self.table_ids["free", len(states)] = len(self.unary)
                self.unary.append(np.zeros(len(states)))
            found = self.copy_tables[key] = len(self.pairwise), self.table_ids["free", len(states)], states
            self.pairwise += copy.tables(self.network)
        table, unary, states = found
        source, target = self.edges[edge.edge]
        variable = len(self.node_tables)
        self.node_tables.append(unary)
        self.edges[edge.edge], self.edge_tables[edge.edge] = [source, variable], table
        self.edges.append([variable, target])
        self.edge_tables.append(table + 1)
        return variable, states, copy
