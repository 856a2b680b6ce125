"""The order in which a compiler runs a training step: what frees memory first.

Problem.  A traced step computes all gradients and then all updates, and in every layer the gradient of the weight
before that of the input. Run so, every gradient is held to the end. No compiler does: an update is written over the
old parameter as soon as nobody reads that any more, and so needs no room at all.

Idea.  What compilers do: of the operators that could run next, the one that frees most, or takes least. What is
held is known without a plan (`liveness.py`), and how much by whole tensors, as if all were cut alike. Of what
waits, only the first few are looked at, and updates; else a program would start with everything that is small. The
new order is taken only if its peak, so counted, is clearly lower.

    w2's gradient, 16 MB | input's gradient, 2 MB | ... | w2 - gradient, over w2       traced: 16 MB more
    input's gradient, 2 MB | w2's gradient, w2 - gradient, over w2 | ...               run:     2 MB more

The TPU compiler runs the MLP of `benchmarks/workloads.py` with 512 rows in the second order, and with 65,536 rows
in the first, because there the gradient of the input is larger than that of the weight. Operators keep the names
that they have in the traced program. Without donated arguments there is nothing to write over, and the order is
left alone.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from jshard import _jaxcompat as compat
from jshard._core.row_codes import concat_ranges
from jshard._memory.fusion_traits import fusion_traits, is_duplicable
from jshard._memory.hbm_traffic import PRODUCTS
from jshard._memory.liveness import Liveness, liveness
from jshard._program.graph import Block, Call, Literal, Operator, Program, operator_name
from jshard._program.use_def import Bools, Floats


# Units from the first that waits on; how far compilers look is not known, and 4 to 16 do the same here.
_LOOKAHEAD = 8
_MAX_FANIN = 32  # tensors read for what is not in memory; the sum of all layers would read them all
_MIN_GAIN = 0.97  # of the traced order's peak: for less, the count is not exact enough


def reorder_for_memory(program: Program, donated: Collection[int]) -> Program:
    """The program in the order in which it holds least; itself where that is as it was traced.

    `donated` are the flat indices of the donated arguments.
    """
    if not donated:
        return program
    a, life = program.use_def, liveness(program, donated)
    update, curve = _final_updates(program), live_bytes_curve(program, life)
    # Gradients, which are held until their updates have read them.
    users = np.bincount(a.use_tensor, minlength=len(a.def_op))
    waits = (users > 0) & (np.bincount(a.use_tensor, ~update[a.use_op], len(a.def_op)) == 0)
    waits &= ~a.has_kind("input", "const")[a.def_op]
    waits &= np.array(life.materialized, dtype=bool) | (np.array(life.epilogue_bytes) > 0)
    needed = np.array(life.last_use, dtype=np.int64)[waits]
    waiting = np.cumsum(
        np.bincount(a.def_op[waits], a.nbytes[waits], len(curve) + 1)
        - np.bincount(needed + 1, a.nbytes[waits], len(curve) + 1)
    )[:-1]
    peak = float(curve.max())
    if (curve - waiting).max() >= _MIN_GAIN * peak:
        return program  # as much is held where no gradient waits for its update
    other = with_body_order(program, _ListScheduler(program, life, donated, update).schedule())
    return other if live_bytes_curve(other, liveness(other, donated)).max() < _MIN_GAIN * peak else program


def _final_updates(program: Program) -> Bools:
    """Of each operator whether it is light, and after it only light ones come, outside loops and calls."""
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
        # What one of these reads is made by none.
        makers = np.unique(a.def_op[a.use_tensor[concat_ranges(a.use_begin[new], a.use_begin[new + 1])]])
        new = makers[out[makers]]
        out[new] = False
    return out


def live_bytes_curve(program: Program, live: Liveness) -> Floats:
    """Bytes live while each operator runs if no tensor is cut, or all are cut alike."""
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
    """Steps that run together: the tensors in memory that they read, the bytes that they leave there."""

    steps: list[int] = dataclasses.field(default_factory=list)
    reads: set[int] = dataclasses.field(default_factory=set)
    result_bytes: float = 0.0
    predecessors: set[int] = dataclasses.field(default_factory=set)  # units that run before
    is_update: bool = False


class _ListScheduler:
    """Works out the order of a program's steps; used once.

    A step that leaves nothing in memory runs when somebody reads it. A product is one unit with what is written in
    its place, such as the update that it alone feeds. Units are named by their last step.
    """

    def __init__(
        self, program: Program, life: Liveness, donated: Collection[int], is_update: Sequence[bool] | Bools
    ):
        self.program, self.life = program, life
        self.tensors, ops = program.tensors, program.operators
        self.body_steps = program.body.steps
        self.update = [isinstance(s, int) and bool(is_update[s]) for s in self.body_steps]
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
        """Tensors that a step takes from before it."""
        step = self.body_steps[k]
        read = [a for i in members for a in self.program.operators[i].operands]
        read += () if isinstance(step, int) else step.operands
        return list(dict.fromkeys(a for a in read if not isinstance(a, Literal) and self.def_step[a] != k))

    def schedule(self) -> list[int]:
        """Numbers of the steps in the new order."""
        light = [
            isinstance(s, int) and not self.effects[k] and is_duplicable(self.program.operators[s])
            for k, s in enumerate(self.body_steps)
        ]
        last = self.last_step_of_unit(light)
        alone = [True] * len(self.body_steps)
        for k, end in enumerate(last):
            if k != end:
                alone[k] = alone[end] = False
        units: dict[int, _FusedUnit] = {}
        behind: dict[int, set[int]] = {}  # of what is not in memory: what it is computed from
        effect = -1
        for k, end in enumerate(last):
            reads = set().union(*(behind.get(a, {a}) for a in self.operands[k]))
            joins = light[k] and alone[k] and len(reads) <= _MAX_FANIN
            if joins and not any(self.life.materialized[r] for r in self.results[k]):
                behind.update(dict.fromkeys(self.results[k], reads))
                continue
            unit = units.setdefault(end, _FusedUnit(is_update=self.update[end]))
            unit.steps.append(k)
            unit.reads |= reads
            if k == end:
                unit.result_bytes = float(sum(self.tensors[r].nbytes for r in self.results[k]))
            if self.effects[k]:
                unit.predecessors |= {effect}
                effect = end
        for end, unit in units.items():
            unit.reads.difference_update(*(self.results[k] for k in unit.steps))
            unit.predecessors |= {last[self.def_step[t]] for t in unit.reads if self.def_step[t] >= 0}
            unit.predecessors -= {end, -1}
        return self.topological_order([k for end in self.list_schedule(units) for k in units[end].steps])

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
                absorbed = self.update[u] or not self.life.materialized[r]
                if not absorbed or self.tensors[self.results[u][0]].nbytes > self.tensors[r].nbytes:
                    break
                chain.append(u)
            for part in chain:
                last[part] = chain[-1]
        return last

    def list_schedule(self, units: dict[int, _FusedUnit]) -> list[int]:
        """Of the units that can run the one that frees most, and of those the first."""
        readers: dict[int, set[int]] = {}
        then: dict[int, list[int]] = {}
        for end, unit in units.items():
            for t in unit.reads:
                readers.setdefault(t, set()).add(end)
            for w in unit.predecessors:
                then.setdefault(w, []).append(end)
        waits = {end: len(unit.predecessors) for end, unit in units.items()}
        frees = {end: -unit.result_bytes for end, unit in units.items()}
        updates: list[int] = []  # a heap of those that can run and take nothing; what a unit frees only grows

        def last(t: int) -> None:
            """Nobody but one unit still reads a tensor."""
            (u,) = readers[t]
            if t not in self.always_live:
                before, frees[u] = frees[u], frees[u] + self.tensors[t].nbytes
                if before < 0 <= frees[u] and units[u].is_update and not waits[u]:
                    heapq.heappush(updates, u)

        for u, unit in units.items():
            if unit.is_update and not waits[u] and frees[u] >= 0:
                heapq.heappush(updates, u)
        for t, some in readers.items():
            if len(some) == 1:
                last(t)
        after = dict(
            itertools.pairwise([-1, *sorted(units), len(self.body_steps)])
        )  # a list that is cheap to take out of
        before = {u: t for t, u in after.items()}
        out: list[int] = []
        while len(out) < len(units):
            best, at = -1, after[-1]
            for _ in range(_LOOKAHEAD):
                if at == len(self.body_steps):
                    break
                if not waits[at] and (best < 0 or frees[at] > frees[best]):
                    best = at
                at = after[at]
            while updates and updates[0] not in before:
                heapq.heappop(updates)
            if updates and frees[best] < 0:
                best = heapq.heappop(updates)
            a, b = before.pop(best), after.pop(best)
            after[a], before[b] = b, a
            out.append(best)
            for t in units[best].reads:
                readers[t].discard(best)
                if len(readers[t]) == 1:
                    last(t)
            for u in then.get(best, ()):
                waits[u] -= 1
                if not waits[u] and units[u].is_update and frees[u] >= 0:
                    heapq.heappush(updates, u)
        return out

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
