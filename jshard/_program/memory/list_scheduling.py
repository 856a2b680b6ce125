"""List scheduling: the order in which a compiler runs a training step, which frees memory first.

Problem.  A traced step computes all gradients and then all updates, and in every layer the gradient of the weight before
that of the input. Run so, every gradient is live until the end. No compiler does that: an update overwrites the old
parameter as soon as that is dead, and so needs no memory at all.

Idea.  List scheduling with a look-ahead of 8 units: of the operators that are ready, run the one that frees most, or
allocates least. What is materialized is known without a plan (`liveness.py`), and its size by whole tensors, as if all
were sharded alike. Of the units that are ready only the first few are candidates, and updates; else a program would
start with everything that is small. The new order is taken only if its peak, counted so, is clearly lower.

    w2's gradient, 16 MB | input's gradient, 2 MB | ... | w2 - gradient, over w2       traced: 16 MB more
    input's gradient, 2 MB | w2's gradient, w2 - gradient, over w2 | ...               run:     2 MB more

The TPU compiler runs the MLP of `benchmarks/workloads.py` with 512 rows in the second order, and with 65,536 rows in the
first, because there the gradient of the input is larger than that of the weight. Operators keep the names that they
have in the traced program. Without donated arguments there is nothing to overwrite, and the order stays.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.arrays import Bools, Floats
from jshard._core.row_codes import concat_ranges
from jshard._program.graph import Block, Call, Literal, Operator, Program, Tensor, operator_name
from jshard._program.memory.fusion_traits import fusion_traits, is_duplicable
from jshard._program.memory.liveness import Liveness, liveness
from jshard._program.operators import PRODUCTS


# Units, from the first that is not run; how far compilers look is not known, and 4 to 16 do the same.
_LOOKAHEAD = 8
_MAX_FANIN = 32  # tensors read for a fused value; the sum of all layers would read them all
_MIN_GAIN = 0.97  # of the traced order's peak: for less, the count is not exact enough


def reorder_for_memory(program: Program, donated: Collection[int]) -> Program:
    """The program in the order with the lowest peak; itself if the traced order is about as good.

    `donated` are the flat indices of the donated arguments.
    """
    if not donated:
        return program
    live = liveness(program, donated)
    is_update, curve = _final_updates(program), live_bytes_curve(program, live)
    peak = float(curve.max())
    if (curve - _waiting_gradients_curve(program, live, is_update)).max() >= _MIN_GAIN * peak:
        return program  # as much is live where no gradient waits for its update
    other = with_body_order(program, _ListScheduler(program, live, donated, is_update).schedule())
    return other if live_bytes_curve(other, liveness(other, donated)).max() < _MIN_GAIN * peak else program


def _waiting_gradients_curve(program: Program, live: Liveness, is_update: Bools) -> Floats:
    """(operators,) bytes of gradients: values that only updates read, from when they are made until then."""
    a, n = program.use_def, len(program.operators)
    num_uses = np.bincount(a.use_tensor, minlength=len(a.def_op))
    other_uses = np.bincount(a.use_tensor, ~is_update[a.use_op], len(a.def_op))
    in_memory = np.array(live.materialized, dtype=bool) | (np.array(live.epilogue_bytes) > 0)
    waits = (num_uses > 0) & (other_uses == 0) & ~a.has_kind("input", "const")[a.def_op] & in_memory
    last_use = np.array(live.last_use, dtype=np.int64)[waits]
    made = np.bincount(a.def_op[waits], a.nbytes[waits], n + 1)
    freed = np.bincount(last_use + 1, a.nbytes[waits], n + 1)
    return np.cumsum(made - freed, dtype=np.float64)[:-1]


def _final_updates(program: Program) -> Bools:
    """(operators,) whether it is duplicable, outside loops and calls, and leads to such operators and outputs only."""
    a = program.use_def
    steps = np.array([s for s in program.body.steps if isinstance(s, int)], dtype=np.int64)
    out = np.zeros(len(program.operators), dtype=bool)
    out[steps] = fusion_traits(program).duplicable[steps]
    if program.jaxpr is None or compat.has_effects(program.jaxpr):
        effects = [
            i for i in np.flatnonzero(out).tolist() if getattr(program.operators[i].eqn, "effects", ())
        ]
        out[effects] = False
    ends = np.zeros(len(out), dtype=bool)
    ends[list(program.outputs)] = True
    new = np.flatnonzero(~out & ~ends)
    while len(new):
        # An operator whose result one of these reads is no update.
        makers = np.unique(a.def_op[a.use_tensor[concat_ranges(a.use_begin[new], a.use_begin[new + 1])]])
        new = makers[out[makers]]
        out[new] = False
    return out


def live_bytes_curve(program: Program, live: Liveness) -> Floats:
    """(operators,) bytes live while each runs, if no tensor is sharded, or all alike."""
    a, n = program.use_def, len(program.operators)
    held, written = np.array(live.materialized, dtype=bool), np.array(live.epilogue_bytes)
    needed = np.array(live.last_use, dtype=np.int64)
    over = live.traits.may_alias_operand & (np.bincount(a.use_op, needed[a.use_tensor] == a.use_op, n) > 0)
    begin = np.where(a.has_kind("input", "const"), 0, np.arange(n) + over)[a.def_op]
    end = needed + 1
    more = np.bincount(a.def_op, written, n + 2) - np.bincount(a.def_op + 1, written, n + 2)
    size = np.where(held, a.nbytes, 0.0)
    more = more + np.bincount(np.minimum(begin, end), size, n + 2) - np.bincount(end, size, n + 2)
    return np.cumsum(more[:-2], dtype=np.float64)


@dataclasses.dataclass(eq=False)
class _FusedUnit:
    """Steps that run together: the materialized tensors that they read, the bytes of their results."""

    steps: list[int] = dataclasses.field(default_factory=list)
    reads: set[int] = dataclasses.field(default_factory=set)
    result_bytes: float = 0.0
    predecessors: set[int] = dataclasses.field(default_factory=set)  # units that run before
    is_update: bool = False


class _ReadyUnits:
    """The units that have not run: which are ready, and how many bytes each frees if it runs next.

    `frees` only grows, so a heap of the ready updates that allocate nothing stays valid.
    """

    def __init__(self, units: dict[int, _FusedUnit], tensors: Sequence[Tensor], always_live: Collection[int]):
        self.units, self.tensors, self.always_live = units, tensors, always_live
        self.readers: dict[int, set[int]] = {}  # tensor -> units that read it and have not run
        self.successors: dict[int, list[int]] = {}
        for u, unit in units.items():
            for t in unit.reads:
                self.readers.setdefault(t, set()).add(u)
            for w in unit.predecessors:
                self.successors.setdefault(w, []).append(u)
        self.num_waiting = {u: len(unit.predecessors) for u, unit in units.items()}
        self.frees = {u: -unit.result_bytes for u, unit in units.items()}
        self.free_updates: list[int] = []
        for u in units:
            self.push_if_free_update(u)
        for t, readers in self.readers.items():
            if len(readers) == 1:
                self.count_last_reader(t)
        # The units that have not run, as a doubly linked list; -1 and `end` are its ends.
        self.end = max(units, default=-1) + 1
        self.next = dict(itertools.pairwise([-1, *sorted(units), self.end]))
        self.previous = {u: t for t, u in self.next.items()}

    def push_if_free_update(self, u: int) -> None:
        if self.units[u].is_update and not self.num_waiting[u] and self.frees[u] >= 0:
            heapq.heappush(self.free_updates, u)

    def count_last_reader(self, t: int) -> None:
        """Tensor t has one reader left, which frees it."""
        (u,) = self.readers[t]
        if t not in self.always_live:
            before = self.frees[u]
            self.frees[u] += self.tensors[t].nbytes
            if before < 0:
                self.push_if_free_update(u)

    def best(self) -> int:
        """The unit to run next."""
        best, u = -1, self.next[-1]
        for _ in range(_LOOKAHEAD):
            if u == self.end:
                break
            if not self.num_waiting[u] and (best < 0 or self.frees[u] > self.frees[best]):
                best = u
            u = self.next[u]
        while self.free_updates and self.free_updates[0] not in self.previous:
            heapq.heappop(self.free_updates)
        if self.free_updates and self.frees[best] < 0:
            best = heapq.heappop(self.free_updates)
        return best

    def run(self, unit: int) -> None:
        """Remove a unit."""
        before, after = self.previous.pop(unit), self.next.pop(unit)
        self.next[before], self.previous[after] = after, before
        for t in self.units[unit].reads:
            self.readers[t].discard(unit)
            if len(self.readers[t]) == 1:
                self.count_last_reader(t)
        for u in self.successors.get(unit, ()):
            self.num_waiting[u] -= 1
            self.push_if_free_update(u)


class _ListScheduler:
    """Schedules the steps of a program's body; used once.

    A step whose results are fused runs in its readers. A product is one unit with its epilogue, such as the update that
    only it feeds. Units are named by their last step.
    """

    def __init__(
        self, program: Program, live: Liveness, donated: Collection[int], is_update: Sequence[bool] | Bools
    ):
        self.program, self.live = program, live
        self.tensors, ops = program.tensors, program.operators
        self.body_steps = program.body.steps
        self.is_update = [isinstance(s, int) and bool(is_update[s]) for s in self.body_steps]
        members = [[s] if isinstance(s, int) else _operators_of_call(s) for s in self.body_steps]
        step_of = {op: k for k, inside in enumerate(members) for op in inside}
        producers, consumers = program.defs(), program.uses()
        self.def_step = [step_of.get(op, -1) for op, _ in producers]
        self.effects = [any(getattr(ops[i].eqn, "effects", ()) for i in inside) for inside in members]
        readers = [{step_of.get(u, -1) for u, _ in users} for users in consumers]  # -1: the program's end
        self.results = [
            [r for i in m for r in ops[i].results if readers[r] - {k}] for k, m in enumerate(members)
        ]
        self.users = [set().union(*(readers[r] for r in made)) - {k} for k, made in enumerate(self.results)]
        self.operands = [self.operands_from_outside(k, inside) for k, inside in enumerate(members)]
        given = frozenset(donated)
        self.always_live = {ops[i].results[0] for k, i in enumerate(program.inputs) if k not in given}
        self.always_live.update(
            a for i in program.outputs for a in ops[i].operands if not isinstance(a, Literal)
        )

    def operands_from_outside(self, k: int, members: Sequence[int]) -> list[int]:
        """Tensors that a step reads and other steps make."""
        step = self.body_steps[k]
        read = [a for i in members for a in self.program.operators[i].operands]
        read += () if isinstance(step, int) else step.operands
        return list(dict.fromkeys(a for a in read if not isinstance(a, Literal) and self.def_step[a] != k))

    def schedule(self) -> list[int]:
        """Numbers of the steps in the new order."""
        units = self.fused_units()
        return self.topological_order([k for end in self.list_schedule(units) for k in units[end].steps])

    def fused_units(self) -> dict[int, _FusedUnit]:
        """The units by their last step; steps whose results are fused belong to none."""
        duplicable = [
            isinstance(s, int) and not self.effects[k] and is_duplicable(self.program.operators[s])
            for k, s in enumerate(self.body_steps)
        ]
        last = self.last_step_of_unit(duplicable)
        single = [True] * len(self.body_steps)
        for k, end in enumerate(last):
            if k != end:
                single[k] = single[end] = False
        units: dict[int, _FusedUnit] = {}
        sources: dict[int, set[int]] = {}  # of fused tensors, those from which they are recomputed
        last_effect = -1
        for k, end in enumerate(last):
            reads = set().union(*(sources.get(a, {a}) for a in self.operands[k]))
            fusible = duplicable[k] and single[k] and len(reads) <= _MAX_FANIN
            if fusible and not any(self.live.materialized[r] for r in self.results[k]):
                sources.update(dict.fromkeys(self.results[k], reads))
                continue
            unit = units.setdefault(end, _FusedUnit(is_update=self.is_update[end]))
            unit.steps.append(k)
            unit.reads |= reads
            if k == end:
                unit.result_bytes = float(sum(self.tensors[r].nbytes for r in self.results[k]))
            if self.effects[k]:
                unit.predecessors |= {last_effect}
                last_effect = end
        for end, unit in units.items():
            unit.reads.difference_update(*(self.results[k] for k in unit.steps))
            unit.predecessors |= {last[self.def_step[t]] for t in unit.reads if self.def_step[t] >= 0}
            unit.predecessors -= {end, -1}
        return units

    def last_step_of_unit(self, light: Sequence[bool]) -> list[int]:
        """For each step the last one of its unit."""
        last = list(range(len(self.body_steps)))
        for k, step in enumerate(self.body_steps):
            if not isinstance(step, int) or self.program.operators[step].primitive not in PRODUCTS:
                continue
            chain = [k]
            while len(self.users[chain[-1]]) == 1 and len(self.results[chain[-1]]) == 1:
                (r,), (u,) = self.results[chain[-1]], self.users[chain[-1]]
                if u < 0 or not light[u] or len(self.results[u]) != 1 or last[u] != u or (u in chain):
                    break
                absorbed = self.is_update[u] or not self.live.materialized[r]
                if not absorbed or self.tensors[self.results[u][0]].nbytes > self.tensors[r].nbytes:
                    break
                chain.append(u)
            for part in chain:
                last[part] = chain[-1]
        return last

    def list_schedule(self, units: dict[int, _FusedUnit]) -> list[int]:
        """The units in order: of those that are ready and within the look-ahead, the first that frees most."""
        ready = _ReadyUnits(units, self.tensors, self.always_live)
        order: list[int] = []
        while len(order) < len(units):
            unit = ready.best()
            ready.run(unit)
            order.append(unit)
        return order

    def topological_order(self, order: Sequence[int]) -> list[int]:
        """All steps, each after what it reads."""
        out: dict[int, None] = {}
        for k in (*order, *range(len(self.body_steps))):
            ahead = [k]
            while ahead:
                before = [self.def_step[a] for a in self.operands[ahead[-1]]]
                missing = [m for m in before if m >= 0 and m not in out]
                if missing and ahead[-1] not in out:
                    ahead += missing
                else:
                    out.setdefault(ahead.pop())
        return list(out)


def _operators_of_call(call: Call) -> list[int]:
    return sorted({*call.inner_operators, *(i for ids in call.boundary.values() for i in ids)})


def with_body_order(program: Program, steps: Sequence[int]) -> Program:
    """The program with the steps of its body in another order: operators numbered by it, arguments first."""
    ops, body = program.operators, [program.body.steps[k] for k in steps]
    order = [op.id for op in ops if op.kind in ("input", "const")]
    order += [op for step in body for op in ([step] if isinstance(step, int) else _operators_of_call(step))]
    order = list(dict.fromkeys((*order, *range(len(ops)))))
    new = {old: k for k, old in enumerate(order)}

    def block(b: Block) -> Block:
        return Block(b.inputs, b.outputs, tuple([new[s] if isinstance(s, int) else call(s) for s in b.steps]))

    def call(c: Call) -> Call:
        bound = {role: tuple([new[i] for i in ids]) for role, ids in c.boundary.items()}
        return dataclasses.replace(c, blocks=tuple([block(b) for b in c.blocks]), boundary=bound)

    def moved(old: int, k: int) -> Operator:
        op = ops[old]
        return dataclasses.replace(op, id=k, name=operator_name(op)) if k != old else op

    return dataclasses.replace(
        program,
        operators=tuple([moved(old, k) for k, old in enumerate(order)]),
        inputs=tuple([new[i] for i in program.inputs]),
        outputs=tuple([new[i] for i in program.outputs]),
        body=block(dataclasses.replace(program.body, steps=tuple(body))),
        pins=tuple([(new[op], *rest) for op, *rest in program.pins]),
        trace_order=tuple([new[old] for old in range(len(ops))]),
    )
