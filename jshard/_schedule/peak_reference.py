"""Peak memory of a schedule, action by action: the reference for `peak_vectorized.py`, and the only one for programs
with loops and branches.

Every value (a tensor in a layout) is live from the action that makes it to the last one that needs it; a copy that is made
again, each time for itself (`regathered_copies.py`). Fused values are never in memory. Arguments are live throughout unless
donated.

When an action makes values, their buffers are allocated beside its operands; an operator that may alias an operand
overwrites those that die. A fused value is materialized to be resharded, and a product writes the result of its
epilogue beside its operands: bytes that are live only while the action runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jshard._program.graph import Literal
from jshard._program.memory.fusion_traits import may_alias_operand
from jshard._program.memory.in_place import is_update
from jshard._program.memory.liveness import Liveness
from jshard._program.memory.memory_layout import memory_layout
from jshard._program.memory.unfusible import unfusible_operators
from jshard._schedule.assignment import Value
from jshard._schedule.buffers import ActionScope, Buffer, BufferSizes
from jshard._schedule.call_memory import BodyMemory, branch_memory, loop_memory
from jshard._schedule.donated_results import results_over_arguments
from jshard._schedule.last_uses import ends_of_values, is_fused_slice
from jshard._schedule.peak_profile import COPIES, INTERMEDIATE, HeldValue, PeakProfile
from jshard._schedule.regathered_copies import RegatheredCopy, regathered_copies
from jshard._schedule.schedule import Schedule
from jshard._schedule.writer import Action, Reshard, RunCall, RunOperator


_Placed = list[tuple[Value, Buffer]]


class CopyGap(NamedTuple):
    """Between a copy and the one made again of its tensor and layout: from when the one is gone until the other is there.

    By positions in `PeakWalk.over_time`, as `made_at`, where the other is made. `product`: as `RegatheredCopy`.
    """

    reshard: Reshard
    nbytes: float
    freed_at: int
    early_at: int
    made_at: int
    product: int


def peak_reference(
    schedule: Schedule,
    liveness: Liveness,
    donated: Collection[int] = (),
    share: Mapping[int, float] | None = None,
) -> PeakProfile:
    """The memory of any schedule.

    `donated` are the flat indices of the donated arguments; `share`: tensor -> the part of it that is kept, if not all.
    """
    return PeakWalk(schedule, liveness, share).profile(frozenset(donated))


def finished_walk(schedule: Schedule, liveness: Liveness, donated: Collection[int]) -> PeakWalk:
    """The walk through a schedule at its end, with `over_time`, `gaps` and `peak`; arguments as `peak_reference`."""
    walk = PeakWalk(schedule, liveness)
    walk.profile(frozenset(donated))
    return walk


class PeakWalk:
    """Walks through a schedule action by action; used once."""

    def __init__(self, schedule: Schedule, liveness: Liveness, share: Mapping[int, float] | None = None):
        self.schedule, self.liveness, self.assignment = schedule, liveness, schedule.assignment
        self.program, self.mesh = self.assignment.program, self.assignment.topology.mesh
        self.sizes = BufferSizes(self.assignment, liveness, share or {})
        self.curve: dict[int, float] = {}
        self.changes: list[
            tuple[Value, float, bool]
        ] = []  # value, bytes more or less, whether a reshard makes it
        self.peak_live, self.changes_before_peak = -1.0, 0
        self.made_by_reshard: set[Value] = set()
        self.over_arguments: Collection[Value] = ()  # results in the buffers of donated arguments
        # Edges that wait for another operator; the two operators count theirs as workspace.
        self.edges: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for kept in self.assignment.kept_edges:
            for at, op in zip(self.edges, (kept.op, kept.until), strict=True):
                at[op] = at.get(op, 0.0) + kept.nbytes
        self.outputs = {v for v in schedule.outputs if not isinstance(v, Literal)}
        self.over_time: list[float] = []  # bytes while each action runs, those of bodies before their call
        self.gaps: list[CopyGap] = []
        self.peak = 0.0
        self.unfusible: frozenset[int] = frozenset()
        if self.assignment.regather:
            self.unfusible = frozenset(np.flatnonzero(unfusible_operators(self.program)).tolist())
        layout = memory_layout(self.program, self.assignment.topology.chip)
        self.transposed_carries = layout.transposed_carries
        self.transposed_operands: dict[int, list[int]] = {}
        for op, k in layout.transposed_operands:
            self.transposed_operands.setdefault(op, []).append(k)

    def profile(self, donated: frozenset[int]) -> PeakProfile:
        """Walk the whole schedule."""
        self.over_arguments = results_over_arguments(self.assignment, self.schedule.outputs, donated)
        buffers: dict[Value, Buffer] = {}
        outliving = set(self.outputs)
        for k, i in enumerate(self.program.inputs):
            v = self.assignment.values[self.program.operators[i].results[0]]
            buffers[v] = Buffer(self.sizes.nbytes(v))
            self.changes.append((v, buffers[v].nbytes, False))
            if k not in donated:
                outliving.add(v)
        self.peak = self.walk(self.schedule.actions, buffers, outliving, 0.0, {})
        held = self.held()
        by_class: dict[str, float] = {}
        for value in held:
            by_class[value.kind] = by_class.get(value.kind, 0.0) + value.nbytes
        return PeakProfile.of(self.peak, self.curve, by_class, held)

    def walk(
        self, actions: Sequence[Action], buffers: dict[Value, Buffer], outliving: Collection[Value], base: float,
        next_iteration: Mapping[Value, Buffer],
    ) -> float:  # fmt: skip
        """Peak of a list of actions above `base`, the bytes that callers hold; `buffers` are left as they end."""
        ends = ends_of_values(actions, self.liveness, self.assignment)
        last = {end.value: end.until for end in ends}
        regathered = regathered_copies(actions, ends, self.liveness, self.assignment, self.unfusible)
        # Copies whose last use comes after they are made again: in memory beside the later ones (`counted_beside`).
        beside = {copy.before for copy in regathered if copy.before.until >= copy.made_at}
        released: dict[int, list[Value]] = {}
        for end in ends:
            if end not in beside:
                released.setdefault(end.until, []).append(end.value)
        live = sum(b.nbytes for b in buffers.values() if not b.owned_by_caller)
        scope = ActionScope(buffers, outliving, last, base, next_iteration, live)
        peak, copies = scope.live, self.transposed_copies(actions)
        at_actions = self.counted_beside(regathered)
        times: list[int] = []  # of the actions in `over_time`
        edges_after, edges_until = self.edges
        self.record_live(-1, base + scope.live)
        for scope.action, a in enumerate(actions):
            for v, nbytes in at_actions.get(scope.action, ()):
                self.changes.append((v, nbytes, True))
                scope.live += nbytes
            if isinstance(a, RunOperator):
                scope.live -= edges_until.get(a.op, 0.0)
            scope.dying = [v for v in released.get(scope.action, ()) if v in buffers and v not in outliving]
            if isinstance(a, RunCall):
                made, highest = self.run_call(a, scope)
                peak = max(peak, highest)
                self.over_time.append(base + scope.live)
            else:
                made, extra = (
                    self.reshard(a, scope) if isinstance(a, Reshard) else self.run_operator(a, scope)
                )
                extra += copies.get(scope.action, 0.0)
                peak = max(peak, scope.live + extra)
                self.record_live(a.op if isinstance(a, RunOperator) else -1, base + scope.live + extra)
                self.over_time.append(base + scope.live + extra)
                scope.live += edges_after.get(a.op, 0.0) if isinstance(a, RunOperator) else 0.0
            times.append(len(self.over_time) - 1)
            for v in [*released.get(scope.action, ()), *(v for v, _ in made if v not in last)]:
                if v in buffers and v not in outliving:
                    self.free(v, scope)
        for copy in regathered:
            freed, early, made_at = times[copy.before.until] + 1, times[copy.early_at], times[copy.made_at]
            nbytes = self.copy_nbytes(copy.reshard)
            self.gaps.append(CopyGap(copy.reshard, nbytes, freed, early, made_at, copy.product))
        self.changes.extend((v, nbytes, True) for v, nbytes in at_actions.get(len(actions), ()))
        remaining = [(v, b) for v, b in buffers.items() if b.nbytes and not b.owned_by_caller]
        self.changes.extend((v, -b.nbytes, False) for v, b in remaining)
        return peak

    def counted_beside(self, regathered: Sequence[RegatheredCopy]) -> dict[int, list[tuple[Value, float]]]:
        """Action -> copies that begin to count there, or end, beside the values in buffers, with the bytes more.

        Those made again before they are made, those before them after that.
        """
        out: dict[int, list[tuple[Value, float]]] = {}
        for copy in regathered:
            nbytes = self.copy_nbytes(copy.reshard)
            for start, end in ((copy.early_at, copy.made_at), (copy.made_at, copy.before.until + 1)):
                if start < end:
                    out.setdefault(start, []).append((copy.value, nbytes))
                    out.setdefault(end, []).append((copy.value, -nbytes))
        return out

    # One method a kind of action. Each allocates what the action makes, and gives that and the bytes that are live
    # beside it while the action runs; of a call, the most that was live.

    def reshard(self, a: Reshard, scope: ActionScope) -> tuple[_Placed, float]:
        source, target = (a.tensor, a.source), (a.tensor, a.target)
        nbytes = self.copy_nbytes(a)
        extra = 0.0
        if nbytes and not self.liveness.materialized[a.tensor] and source not in self.made_by_reshard:
            extra = self.sizes.nbytes(source)  # a fused value is materialized to be resharded
        if target in self.over_arguments and any(n >= 0 for n in a.collective_ids):
            extra += nbytes  # the collective's own buffer, which is copied into the argument's
        if a.regathered and target in scope.buffers:
            self.free(target, scope)
        if target not in scope.buffers:
            self.made_by_reshard.add(target)
        made = [(target, scope.next_iteration_buffer(target, over_dying=False) or Buffer(nbytes))]
        self.allocate(made, scope)
        return made, extra

    def copy_nbytes(self, a: Reshard) -> float:
        """Bytes of what a reshard makes."""
        return 0.0 if is_fused_slice(a, self.liveness) else self.sizes.nbytes((a.tensor, a.target))

    def run_operator(self, a: RunOperator, scope: ActionScope) -> tuple[_Placed, float]:
        op = self.program.operators[a.op]
        updated = a.reads[0] if a.reads and is_update(op.primitive) else None
        overwritten = None
        if updated in scope.dying and not isinstance(updated, Literal):
            overwritten = scope.buffers.get(updated)
        aliases = may_alias_operand(op)
        made = []
        for v in (self.assignment.values[t] for t in op.results):
            if overwritten is not None and overwritten.owned_by_caller:
                buffer = overwritten
            else:
                buffer = scope.next_iteration_buffer(v, over_dying=aliases)
            made.append((v, buffer or Buffer(self.sizes.result_nbytes(v))))
        allocated = self.allocate(made, scope)
        if aliases:  # the results overwrite dying operands
            dying = sum(scope.buffers[v].nbytes for v in scope.dying if not scope.buffers[v].owned_by_caller)
            return made, -min(dying, allocated)
        epilogue_bytes = self.liveness.epilogue_bytes
        layouts = [self.assignment.result_layout(t) for t in op.results]
        return made, self.assignment.workspaces.get(a.op, 0.0) + sum(
            epilogue_bytes[t] / layout.pieces(self.mesh)
            for t, layout in zip(op.results, layouts, strict=True)
        )

    def run_call(self, a: RunCall, scope: ActionScope) -> tuple[_Placed, float]:
        if not a.call.boundary:
            return self.run_inlined(a, scope)
        if a.call.kind == "cond":
            memory = branch_memory(a, scope, self.sizes)
        else:
            memory = loop_memory(a, scope, self.sizes, self.transposed_carries)
        for v, nbytes in memory.while_running:
            self.record_change(v, nbytes)
        base = scope.base + scope.live + sum(nbytes for _, nbytes in memory.while_running)
        peaks = [
            self.walk(
                actions,
                {**body.lent, **self.copied(body)},
                {*body.outliving, *(v for v in returns if not isinstance(v, Literal))},
                base,
                body.next_iteration,
            )
            for actions, returns, body in zip(a.bodies, a.returns, memory.bodies, strict=True)
        ]
        highest = base - scope.base + max(peaks, default=0.0)
        for v, nbytes in memory.while_running:
            self.record_change(v, -nbytes)
        for v in memory.overwritten:
            self.free(v, scope)
        self.allocate(memory.results, scope)
        self.record_live(-1, scope.base + scope.live)
        return memory.results, max(highest, scope.live)

    def copied(self, body: BodyMemory) -> dict[Value, Buffer]:
        """The slices of stacks that are copied when an iteration begins."""
        for v, nbytes in body.copied_slices:
            self.record_change(v, nbytes)
        return {v: Buffer(nbytes) for v, nbytes in body.copied_slices}

    def run_inlined(self, a: RunCall, scope: ActionScope) -> tuple[_Placed, float]:
        """A call that compilers inline: its results are the values that its body makes."""
        lent = {
            v: scope.buffers[v] for v in a.entry[0] if v in scope.dying and scope.buffers[v].owned_by_caller
        }
        others = {id(b) for v, b in scope.buffers.items() if v not in lent}
        next_iteration = {v: b for v, b in scope.next_iteration.items() if id(b) not in others}
        returns = [v for v in a.returns[0] if not isinstance(v, Literal)]
        inside = dict(lent)
        peak = self.walk(a.bodies[0], inside, returns, scope.base + scope.live, next_iteration)
        highest = scope.live + peak
        made = [(v, inside.get(v) or Buffer(self.sizes.result_nbytes(v))) for v in returns]
        self.allocate(made, scope)
        self.record_live(-1, scope.base + scope.live)
        return made, max(highest, scope.live)

    def allocate(self, made: _Placed, scope: ActionScope) -> float:
        """Add values that are not in memory yet; the bytes that they take."""
        before = scope.live
        for v, buffer in made:
            if v not in scope.buffers:
                scope.buffers[v] = buffer
                if not buffer.owned_by_caller:
                    scope.live += buffer.nbytes
                    self.record_change(v, buffer.nbytes)
        return scope.live - before

    def free(self, v: Value, scope: ActionScope) -> None:
        """Remove a value."""
        buffer = scope.buffers.pop(v)
        if not buffer.owned_by_caller:
            scope.live -= buffer.nbytes
            self.record_change(v, -buffer.nbytes)

    def record_live(self, op: int, live: float) -> None:
        """Record the live bytes at an action (`op`: the operator that runs, -1 for none)."""
        if op >= 0:
            self.curve[op] = max(self.curve.get(op, 0.0), live)
        if live > self.peak_live:
            self.peak_live, self.changes_before_peak = live, len(self.changes)

    def record_change(self, v: Value, nbytes: float) -> None:
        if nbytes:
            self.changes.append((v, nbytes, nbytes > 0 and v in self.made_by_reshard))

    def transposed_copies(self, actions: Sequence[Action]) -> dict[int, float]:
        """Action -> bytes of the copies that products read transposed: from when they are made until the product runs."""
        if not self.transposed_operands:
            return {}
        made_at = {v: i for i, a in enumerate(actions) for v in self.values_made_by(a)}
        out: dict[int, float] = {}
        for i, a in enumerate(actions):
            if not isinstance(a, RunOperator):
                continue
            for v in (a.reads[k] for k in self.transposed_operands.get(a.op, ())):
                if isinstance(v, Literal):
                    continue
                for j in range(made_at.get(v, i - 1) + 1, i + 1):
                    out[j] = out.get(j, 0.0) + self.sizes.nbytes(v)
        return out

    def values_made_by(self, a: Action) -> list[Value]:
        if isinstance(a, Reshard):
            return [(a.tensor, a.target)]
        if isinstance(a, RunCall) and not a.call.boundary:
            return [v for v in a.returns[0] if not isinstance(v, Literal)]
        results = self.program.operators[a.op].results if isinstance(a, RunOperator) else a.call.results
        return [self.assignment.values[t] for t in results]

    def held(self) -> tuple[HeldValue, ...]:
        """The values in memory at the peak."""
        live: dict[Value, list[tuple[float, bool]]] = {}
        for v, nbytes, by_reshard in self.changes[: self.changes_before_peak]:
            if nbytes > 0:
                live.setdefault(v, []).append((nbytes, by_reshard))
            elif nbytes < 0:
                live[v].pop()
        return tuple(
            HeldValue(v[0], nbytes, self.class_of(v, by_reshard))
            for v, parts in live.items()
            for nbytes, by_reshard in parts
        )

    def class_of(self, v: Value, by_reshard: bool) -> str:
        op = self.program.operators[self.assignment.producers[v[0]][0]]
        if by_reshard:
            return "results" if v in self.outputs else COPIES
        if op.kind == "const":
            return "captured arrays"
        if op.kind == "input":
            return "argument " + op.name.split(".")[0]
        return "results" if v[0] in {w[0] for w in self.outputs} else INTERMEDIATE
