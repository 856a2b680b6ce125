"""The cost network with memory: what every choice holds, and when, copies in other layouts among it.

Problem.  A state of an operator says how large its results' blocks are. But a reader that wants another layout
has a copy made, and whether there is one depends on two variables at once. And a bound on this is a bound on the
peak of the schedule only if nothing is counted that some schedule does not hold.

Idea.  Two networks. In both, where a copy can be large beside what it is copied from, a *copy variable* stands
between the two: its states are (same, L) and (moved, L) for each layout L of one end. The edge to one end says which
L it is, the edge to the other end lets "same" only pass equal layouts and charges the move to "moved"; so every
answer of the network without memory is exactly one answer of these, at the same cost.

The *sure* network holds no more than the schedule of any plan, and bounds them. While an operator runs, what it reads
is there in the layout in which it reads it, whatever it was moved from; between its readers a tensor is there as it
is kept; an argument throughout; and of what is computed again later, what must flow to there (`remat_flow.py`). The
other network counts as the schedules of most plans do (`peak.py` counts those exactly): beside a copy also what it
was made from, and what a light reader reads until its own readers are done. The search looks for plans in it.

Worked case.  A weight cut 8 ways, gathered for one product: the argument holds 1/8 all the time, the copy
variable 1 while the product runs, and nothing if the product takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jshard._core.layout import Layout
from jshard._memory.hbm_traffic import is_unfusible
from jshard._memory.in_place import CARRY_KINDS
from jshard._memory.live_intervals import Use, disjoint_intervals, live_intervals
from jshard._memory.liveness import may_alias_operand
from jshard._memory.remat_flow import remat_flow
from jshard._network.build import PlanningNetwork, ReshardEdge
from jshard._network.candidates import TensorLayouts
from jshard._program.graph import Literal, Operator
from jshard._search import CostNetwork, Memory


# Tensors below this share of the largest one get no copy variable: their copies hardly show in the peak.
_MIN_COPY_SHARE = 1 / 512


def memory_network(problem: PlanningNetwork, *, lower_bound: bool = False) -> CostNetwork:
    """The network of a problem with copy variables and memory (and no limit yet).

    `sure` counts only what is held whatever else the plan does; the other is nearer to what most plans hold.
    """
    return _MemoryNetworkBuilder(problem, lower_bound).build()


class _MemoryNetworkBuilder:
    """Collects the arrays of one network; used once."""

    def __init__(self, problem: PlanningNetwork, lower_bound: bool):
        self.problem = problem
        self.program = problem.program
        self.mesh = problem.topology.mesh
        self.liveness = problem.liveness
        self.live = live_intervals(problem.program, self.liveness, problem.donated, lower_bound=lower_bound)
        self.producers = problem.program.defs()
        self.always_live, self.counted_elsewhere = self.live.always_live, self.live.counted_elsewhere
        stored = [
            t
            for t, held in enumerate(self.liveness.materialized)
            if lower_bound and held and not self.counted_elsewhere(t)
        ]
        self.flows, self.flow_through = remat_flow(self.live, stored, self.mesh.total)
        base = problem.cost_network
        self.unary, self.pairwise = list(base.unary), list(base.pairwise)
        self.node_tables = base.node_table.tolist()
        self.edges = base.edges.tolist()
        self.edge_tables = base.edge_table.tolist()
        self.intervals: list[tuple[int, int, int, int]] = []  # variable, start, end, table
        self.usage: list[np.ndarray] = []
        self.table_ids: dict[Any, int] = {}
        self.counted_copies: set[tuple[int, int]] = set()

    def build(self) -> CostNetwork:
        self.largest = max(
            (self.program.tensors[c.tensor].nbytes for c in self.problem.reshard_edges), default=0
        )
        self.add_results()
        self.add_uses()
        for c in self.problem.reshard_edges:
            if self.has_copy_variables(c.tensor) and not c.duplicates:
                self.add_copy_variable(c)
        found = np.array(self.intervals, dtype=np.int64).reshape(-1, 4)
        memory = Memory(found[:, 1:3], tuple(self.usage), found[:, 0], found[:, 3], None)
        return CostNetwork(
            unary=tuple(self.unary),
            pairwise=tuple(self.pairwise),
            node_table=np.array(self.node_tables, dtype=np.int64),
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            edge_table=np.array(self.edge_tables, dtype=np.int64),
            memory=memory,
        )

    def add_interval(
        self, variable: int, result_start: int, end: int, key: Any, table: Callable[[], np.ndarray]
    ) -> None:
        """A variable's bytes by state from one moment to before another; `table` makes them if they are new."""
        if end <= result_start:
            return
        if key not in self.table_ids:
            self.table_ids[key] = len(self.usage)
            self.usage.append(table())
        self.intervals.append((variable, result_start, end, self.table_ids[key]))

    def bytes_of(self, layouts: Sequence[Layout], nbytes: float) -> np.ndarray:
        return np.array([nbytes / lay.pieces(self.mesh) for lay in layouts], dtype=np.float64)

    def add_layout_interval(
        self, variable: int, start: int, end: int, choices: TensorLayouts, nbytes: float
    ) -> None:
        """A tensor in the layouts of a variable's choices."""
        self.add_interval(
            variable, start, end, (id(choices), nbytes), lambda: nbytes / choices.num_shards(self.mesh)
        )

    def has_copy_variables(self, tensor: int) -> bool:
        """Whether copies of a tensor get variables: where they are beside what they are copied from.

        A stored value goes when it was moved; between its copies it is there, or something no larger. How it is kept
        is not known at a reader, so only the network that is near to schedules counts both.
        """
        if self.program.tensors[tensor].nbytes < self.largest * _MIN_COPY_SHARE:
            return False
        if self.live.lower_bound and tensor in self.live.next_iteration:
            return False  # its copy may lie in the buffer that goes round
        return (
            not self.liveness.materialized[tensor]
            or self.counted_elsewhere(tensor)
            or not self.live.lower_bound
        )

    def add_results(self) -> None:
        """What operators make, until a reader or the relay has it moved; what is given, throughout."""
        program, life, times = self.program, self.liveness, self.live
        for op in program.operators:
            begun = self.start(op)
            for k, r in enumerate(op.results):
                made = self.problem.candidates[op.id].results[k]
                if (
                    op.kind in CARRY_KINDS
                    and r in times.allocated_at
                    and not life.materialized[r]
                    and not self.counted_elsewhere(r)
                ):
                    # It goes round, though nobody reads it after.
                    end = times.begin[times.loop_spans[op.id][1] + 1]
                    self.add_layout_interval(
                        op.id, times.allocation_point(r, begun), end, made, program.tensors[r].nbytes
                    )
                    continue
                if not life.materialized[r]:
                    if life.epilogue_bytes[r]:
                        run = times.run_point(op.id)
                        self.add_layout_interval(op.id, run, run + 1, made, life.epilogue_bytes[r])
                    continue
                if op.kind not in ("input", "const", "eqn") and r not in times.allocated_at:
                    continue  # what a loop's boundary hands to its body is part of what it was handed
                nbytes = program.tensors[r].nbytes
                if r not in self.always_live and self.counted_elsewhere(r):
                    if r in times.next_iteration and not times.lower_bound:
                        self.add_partial_sum(op, k, begun, nbytes)
                    continue
                start = times.allocation_point(r, begun)
                if r in self.always_live:
                    self.add_layout_interval(op.id, start, times.begin[-1], made, nbytes)
                    continue
                readings = times.uses[r]
                if not readings:
                    end = times.begin[life.last_use[r] + 1]
                elif r in self.problem.relays or any(lay.partial for lay in made.layouts):
                    end = min(one.stored_at for one in readings) + 1
                else:
                    end = readings[0].resharded_at + 1
                self.add_layout_interval(op.id, start, end, made, nbytes)

    def add_partial_sum(self, op: Operator, k: int, begun: int, nbytes: float) -> None:
        """What the next turn gets is beside the loop's buffer while it is a partial sum."""
        made, r = self.problem.candidates[op.id].results[k], op.results[k]
        end = min((one.stored_at for one in self.live.uses[r]), default=begun) + 1

        def table() -> np.ndarray:
            partial = np.array([bool(lay.partial) for lay in made.layouts])[made.of_state]
            return np.where(partial, nbytes / made.num_shards(self.mesh), 0.0)

        self.add_interval(op.id, begun, end, ("sums", id(made), nbytes), table)

    def start(self, op: Operator) -> int:
        """When results begin to take room: after an operand whose room they take over."""
        if op.kind in ("input", "const"):
            return 0
        run, add_operand_interval = (
            self.live.run_point(op.id),
            [a for a in op.operands if not isinstance(a, Literal)],
        )
        if op.kind != "eqn" or not may_alias_operand(op):
            return run
        if self.live.lower_bound:
            return run + (self.live.results_dominate(op.id) is False)
        later = all(self.liveness.last_use[r] > op.id for r in op.results)
        return run + (later and any(self.liveness.last_use[a] == op.id for a in add_operand_interval))

    def add_uses(self) -> None:
        """What is read, in the reader's layout while it is needed; in between, in the layout in which it is kept."""
        for t in range(len(self.producers)):
            readings = (
                self.live.uses[t] if self.liveness.materialized[t] and not self.counted_elsewhere(t) else []
            )
            if not readings:
                continue
            relay, nbytes = self.problem.relays.get(t), self.program.tensors[t].nbytes
            at = min(r.stored_at for r in readings) + 1
            last = max(
                [r.resharded_at for r in readings if not self.live.rematerializes(t, r.reader)], default=-1
            )
            if self.has_copy_variables(t):
                if relay is not None:
                    self.add_layout_interval(self.problem.relay_variable[t], at, last + 1, relay, nbytes)
                continue
            for u, start, end in disjoint_intervals(readings, self.live.begin):
                # What is moved is there until it is: the reader's own block from the next moment on.
                start += any(r.reader == u and r.resharded_at == start for r in readings)
                if relay is not None and at <= last:
                    self.add_layout_interval(
                        self.problem.relay_variable[t], at, min(start, last + 1), relay, nbytes
                    )
                self.read(t, u, max(start, at), end)
                at = max(at, end)
            if share := self.flows.get(t, 0.0):
                maker, last = self.producers[t][0], self.liveness.last_use[t]
                n = len(self.problem.candidates[maker])
                # Where it ends, a result may be written over it.
                end = self.live.begin[last + 1] - (self.live.results_dominate(last) is True)
                self.add_interval(
                    maker, at, end, ("flow", n, share), lambda n=n, share=share: np.full(n, share)
                )

    def read(self, tensor: int, reader: int, start: int, end: int) -> None:
        """What an operator reads of a tensor, each layout once."""
        operands = self.problem.candidates[reader].operands
        ks = [k for u, k in self.program.uses()[tensor] if u == reader]
        found = list({id(operands[k]): operands[k] for k in ks}.values())
        nbytes = self.program.tensors[tensor].nbytes
        if len(found) == 1:
            self.add_layout_interval(reader, start, end, found[0], nbytes)
            return

        def table() -> np.ndarray:
            states = len(found[0].of_state)
            return np.array(
                [self.bytes_of(list({c.layout(s) for c in found}), nbytes).sum() for s in range(states)]
            )

        self.add_interval(reader, start, end, (tuple(map(id, found)), nbytes), table)

    def add_copy_variable(self, c: ReshardEdge) -> None:
        """Split an edge by a copy variable, where what is moved is beside what it is moved from."""
        tensor = self.program.tensors[c.tensor]
        fluid, to_relay = not self.liveness.materialized[c.tensor], c.reader < 0
        relayed = c.tensor in self.problem.relays
        # A product that its reader absorbs is written out when it moves, and a partial sum is large before it does.
        by_source = fluid and is_unfusible(self.program.operators[self.producers[c.tensor][0]])
        layouts = c.source.layouts if by_source else c.target.layouts
        kinds = ("same", "moved", "view") if fluid else ("same", "moved")
        n = len(layouts) * len(kinds)
        key = (
            "copy", id(c.source), id(c.target), tensor.shape, tensor.itemsize, c.count, c.returned_sum, c.combined_with,
            by_source, fluid,
        )  # fmt: skip
        if key not in self.table_ids:
            self.table_ids[key] = len(self.pairwise)
            self.pairwise += self.copy_tables(c, by_source, fluid)
        if ("free", n) not in self.table_ids:
            self.table_ids["free", n] = len(self.unary)
            self.unary.append(np.zeros(n))
        i, j = self.edges[c.edge]
        v = len(self.node_tables)
        self.node_tables.append(self.table_ids["free", n])
        self.edges[c.edge], self.edge_tables[c.edge] = [i, v], self.table_ids[key]
        self.edges.append([v, j])
        self.edge_tables.append(self.table_ids[key] + 1)
        if (c.tensor, c.reader) in self.counted_copies:
            return  # read twice, and maybe alike: counted once
        self.counted_copies.add((c.tensor, c.reader))
        less = float(self.flow_through[c.tensor])

        def hold(start: int, end: int, nbytes: float, more: float = 0.0, same: bool = False) -> None:
            """The block in the copy's layout, and `more`, where it is moved; also where it is not, if `same`."""

            def table() -> np.ndarray:
                block = np.maximum(0.0, self.bytes_of(layouts, nbytes) - less) + more
                return np.concatenate([block * same, block, np.zeros(n - 2 * len(block))])

            self.add_interval(v, start, end, ("held", layouts, nbytes, less, more, same, n), table)

        whole = tensor.nbytes
        readings = self.live.uses[c.tensor]
        first, begin = min(r.stored_at for r in readings), self.live.begin
        at = first if to_relay else next(r.resharded_at for r in readings if r.reader == c.reader)
        # A value that is not stored is written out to be moved: at least an even share of it, for that moment.
        even = whole / self.mesh.total if fluid and (to_relay or not relayed) else 0.0
        if by_source or even:
            hold(at, at + 1, whole if by_source else 0.0, even)
        if by_source:
            return
        if not fluid and not self.counted_elsewhere(c.tensor):
            self.add_stored_copies(c, readings, hold)
        elif not to_relay:
            for u, start, end in disjoint_intervals(readings, begin):
                if u == c.reader:
                    hold(start, end, whole)
        elif fluid and any(lay.partial for lay in c.source.layouts):
            # Who needs a sum whole has it moved, if not to the relay then from there: counted there.
            for _, start, end in disjoint_intervals(readings, begin):
                hold(first, min(start, max(r.resharded_at for r in readings)), whole)
                first = max(first, end)
        else:
            hold(first, max(r.live_until for r in readings), whole)

    def add_stored_copies(self, c: ReshardEdge, readings: Sequence[Use], hold: Callable[..., None]) -> None:
        """The copies of a stored value, which is itself there until the last of them is made.

        Who needs it longest holds it from then on, moved or as it is.
        """
        whole = self.program.tensors[c.tensor].nbytes
        if c.reader < 0:
            first = min(r.stored_at for r in readings)
            hold(first, first + 1, whole)
            return
        needing = [r for r in readings if not self.live.rematerializes(c.tensor, r.reader)] or readings
        reading = next(r for r in readings if r.reader == c.reader)
        longest = max(needing, key=lambda r: (r.live_until, r.resharded_at))
        gone = max(r.resharded_at for r in needing) + 1 if reading is longest else reading.live_until
        both = max(reading.resharded_at, gone)
        hold(reading.resharded_at, both, whole)
        hold(both, reading.live_until, whole, same=True)

    def copy_tables(self, c: ReshardEdge, by_source: bool, fluid: bool) -> list[np.ndarray]:
        """Tables maker x copy and copy x reader: one tells the layout, the other allows and charges."""
        tensor, tables = self.program.tensors[c.tensor], self.problem.cost_tables
        sources, targets = c.source.layouts, c.target.layouts
        moved = c.count * tables.seconds(c.source, c.target, tensor, c.returned_sum, c.combined_with)
        same = np.array([[a == b for b in targets] for a in sources])
        kinds = [np.where(same, 0.0, np.inf), np.where(same, np.inf, moved)]
        if fluid:
            view = np.array([[_is_slice(a, b) for b in targets] for a in sources])
            kinds = [kinds[0], np.where(view, np.inf, kinds[1]), np.where(view, kinds[1], np.inf)]
        own = c.source if by_source else c.target
        tells = np.where(own.of_state[:, None] == np.arange(len(own.layouts))[None, :], 0.0, np.inf)
        tells = np.hstack([tells] * len(kinds))
        if by_source:  # a row of the copy: a kind and a layout of the maker
            return [tells, np.ascontiguousarray(np.vstack(kinds)[:, c.target.of_state])]
        return [np.ascontiguousarray(np.hstack(kinds)[c.source.of_state]), np.ascontiguousarray(tells.T)]


def _is_slice(source: Layout, target: Layout) -> bool:
    """Whether each device has what it will need: the target only cuts further."""
    return source != target and source.partial == target.partial and all(
        b[: len(a)] == a for a, b in zip(source.dims, target.dims, strict=True)
    )  # fmt: skip
