"""Bytes a device holds while a schedule runs: the peak, the curve over the program, and what is held at the peak.

Every value (a tensor in a layout) lives from where it is made to where it is last read. Values that a compiler
fuses into their only reader are never stored and count nothing. Arguments live throughout unless donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jshard._core.layout import Layout
from jshard._memory.in_place import is_update
from jshard._memory.liveness import Liveness, fuses_operands, is_duplicable, may_alias_operand
from jshard._memory.memory_layout import memory_layout
from jshard._program.graph import Literal, Program
from jshard._schedule.loop_stacks import carried_stacks
from jshard._schedule.peak_vectorized import peak_of_arrays
from jshard._schedule.schedule import Action, Assignment, Reshard, RunCall, RunOperator, Schedule, Value


@dataclasses.dataclass(frozen=True)
class PeakProfile:
    """`peak` bytes; `curve`, the live bytes while each operator runs; `held`, bytes at the peak by class."""

    peak: float
    curve: dict[int, float]
    by_class: tuple[tuple[str, float], ...]


def peak_bytes(schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()) -> float:
    """The largest sum of live bytes over the schedule."""
    return peak_profile(schedule, liveness, donated).peak


def peak_profile(schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()) -> PeakProfile:
    """Peak, curve and what is held."""
    if schedule.arrays is None:
        return peak_reference(schedule, liveness, donated)
    found = peak_of_arrays(schedule.arrays, liveness, frozenset(donated))
    return _profile(found.peak, found.curve, found.classes)


def peak_reference(schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()) -> PeakProfile:
    """The profile of any schedule, action by action."""
    return _profile(*_walk(schedule, liveness, donated))


def _profile(peak: float, curve: dict[int, float], held: dict[str, float]) -> PeakProfile:
    rest = peak - sum(held.values())  # what an operator holds while it runs
    if rest > 0:
        held["intermediate values"] = held.get("intermediate values", 0.0) + rest
    return PeakProfile(peak, curve, tuple(sorted(held.items(), key=lambda item: -item[1])))


@dataclasses.dataclass(eq=False)
class _Buffer:
    """Bytes of a value. What is `fixed` is counted by who gave it: what goes round a loop, or is lent to a branch."""

    size: float
    owned_by_caller: bool = False


@dataclasses.dataclass(eq=False)
class _WalkScope:
    """An action list that is walked: its values in memory, those that stay, when each is needed last.

    `base` are the bytes that callers hold, `live` its own, `turn` the buffers in which what a loop's next turn gets may
    lie. `at` is the action that happens, `dying` the values that nobody needs after it.
    """

    buffers: dict[Value, _Buffer]
    outliving: Collection[Value]
    last_use: dict[Value, int]
    base: float
    next_iteration: Mapping[Value, _Buffer]
    live: float = 0.0
    action: int = -1
    dying: list[Value] = dataclasses.field(default_factory=list)

    def is_free(self, buffer: _Buffer, over_operands: bool) -> bool:
        """Whether nobody needs what lies in a buffer; `over_operands`: what ends at this action may be written over."""
        until = self.action if over_operands else self.action - 1
        inside = [v for v, b in self.buffers.items() if b is buffer]
        return all(v not in self.outliving and self.last_use.get(v, -1) <= until for v in inside)

    def next_iteration_buffer(self, v: Value, over_operands: bool) -> _Buffer | None:
        """The buffer of a loop in which a new value may lie, if it is what the next turn gets."""
        buffer = self.next_iteration.get(v)
        return buffer if buffer is not None and self.is_free(buffer, over_operands) else None


def _walk(
    schedule: Schedule, life: Liveness, donated: Collection[int]
) -> tuple[float, dict[int, float], dict[str, float]]:
    """Peak, curve, and bytes by class at the peak."""
    return _PeakWalk(schedule, life).run(frozenset(donated))


class _PeakWalk:
    """Goes through a schedule action by action; used once.

    A loop's carry is one buffer from before the loop until after it: that of the initial value, if nobody needs that
    any more, else a new one. In the body, what the next turn gets lies in it as soon as nobody needs what this turn was
    given; else beside it until the turn ends. An update that writes over its operand stays in its buffer.
    """

    def __init__(self, schedule: Schedule, liveness: Liveness):
        self.schedule, self.life, self.assignment = schedule, liveness, schedule.assignment
        self.program, self.mesh = self.assignment.program, self.assignment.topology.mesh
        self.curve: dict[int, float] = {}
        self.changes: list[tuple[Value, float, bool]] = []  # value, bytes more or less, made by a move
        self.made_by_reshard: set[Value] = set()
        self.outputs = {v for v in schedule.outputs if not isinstance(v, Literal)}
        self.peak_live, self.peak_change = -1.0, 0
        self.pieces: dict[Layout, int] = {}
        order = memory_layout(self.program, self.assignment.topology.chip)
        self.transposed_operands: dict[int, list[int]] = {}
        for op, k in order.transposed_operands:
            self.transposed_operands.setdefault(op, []).append(k)
        self.transposed_carries = order.transposed_carries

    def run(self, given: frozenset[int]) -> tuple[float, dict[int, float], dict[str, float]]:
        held: dict[Value, _Buffer] = {}
        kept = set(self.outputs)
        for k, i in enumerate(self.program.inputs):
            v = self.assignment.values[self.program.operators[i].results[0]]
            held[v] = _Buffer(self.bytes_of(v))
            self.changes.append((v, held[v].size, False))
            if k not in given:
                kept.add(v)
        peak = self.walk(self.schedule.actions, held, kept, 0.0)
        return peak, self.curve, self.classes()

    def bytes_of(self, v: Value) -> float:
        if v[1] not in self.pieces:
            self.pieces[v[1]] = v[1].pieces(self.mesh)
        return self.program.tensors[v[0]].nbytes / self.pieces[v[1]]

    def stored_bytes(self, v: Value) -> float:
        """Bytes of a value as it is made; none for one that is computed where it is read."""
        return self.bytes_of(v) if self.life.materialized[v[0]] else 0.0

    def record_live(self, op: int, live: float) -> None:
        """Remember live bytes at an action, and where among the changes the most are live."""
        if op >= 0:
            self.curve[op] = max(self.curve.get(op, 0.0), live)
        if live > self.peak_live:
            self.peak_live, self.peak_change = live, len(self.changes)

    def record_change(self, v: Value, more: float) -> None:
        if more:
            self.changes.append((v, more, more > 0 and v in self.made_by_reshard))

    def walk(
        self, actions: Sequence[Action], held: dict[Value, _Buffer], kept: Collection[Value], base: float,
        turn: Mapping[Value, _Buffer] | None = None,
    ) -> float:  # fmt: skip
        """Peak of an action list above what the caller holds (`base`); `held` are its own values, and in the end all."""
        last = _last_uses(actions, self.program, self.life, self.assignment)
        released: dict[int, list[Value]] = {}
        for v, i in last.items():
            released.setdefault(i, []).append(v)
        s = _WalkScope(
            held, kept, last, base, turn or {}, sum(b.size for b in held.values() if not b.owned_by_caller)
        )
        top, copies = s.live, self.transposed_copies(actions)
        self.record_live(-1, base + s.live)
        for s.action, a in enumerate(actions):
            s.dying = [v for v in released.get(s.action, ()) if v in held and v not in kept]
            if isinstance(a, RunCall):
                made, highest = self.call(a, s)
                top = max(top, highest)
            else:
                made, extra = self.reshard(a, s) if isinstance(a, Reshard) else self.operator(a, s)
                new = self.allocate(made, s)
                if isinstance(a, RunOperator) and may_alias_operand(self.program.operators[a.op]):
                    # An elementwise result is written over an operand that nobody needs any more.
                    extra = -min(sum(held[v].size for v in s.dying if not held[v].owned_by_caller), new)
                extra += copies.get(s.action, 0.0)
                top = max(top, s.live + extra)
                self.record_live(a.op if isinstance(a, RunOperator) else -1, base + s.live + extra)
            for v in [*released.get(s.action, ()), *(v for v, _ in made if v not in last)]:
                if v in held and v not in kept:
                    self.free(v, s)
        self.changes.extend((v, -b.size, False) for v, b in held.items() if b.size and not b.owned_by_caller)
        return top

    def transposed_copies(self, actions: Sequence[Action]) -> dict[int, float]:
        """Bytes of the copies that products read transposed: from when that is made until they have run."""
        made = {
            v: i for i, a in enumerate(actions) if self.transposed_operands for v in self.values_made_by(a)
        }
        out: dict[int, float] = {}
        for i, a in enumerate(actions):
            reads = (
                [a.reads[k] for k in self.transposed_operands.get(a.op, ())]
                if isinstance(a, RunOperator)
                else []
            )
            for v in reads:
                if isinstance(v, Literal):
                    continue
                for j in range(made.get(v, i - 1) + 1, i + 1):
                    out[j] = out.get(j, 0.0) + self.bytes_of(v)
        return out

    def values_made_by(self, a: Action) -> list[Value]:
        if isinstance(a, Reshard):
            return [(a.tensor, a.target)]
        results = self.program.operators[a.op].results if isinstance(a, RunOperator) else a.call.results
        return [self.assignment.values[t] for t in results]

    def allocate(self, made: Sequence[tuple[Value, _Buffer]], s: _WalkScope) -> float:
        """Take new values into memory; the bytes that they take."""
        before = s.live
        for v, b in made:
            if v not in s.buffers:
                s.buffers[v] = b
                if not b.owned_by_caller:
                    s.live += b.size
                    self.record_change(v, b.size)
        return s.live - before

    def free(self, v: Value, s: _WalkScope) -> None:
        b = s.buffers.pop(v)
        if not b.owned_by_caller:
            s.live -= b.size
            self.record_change(v, -b.size)

    def reshard(self, a: Reshard, s: _WalkScope) -> tuple[list[tuple[Value, _Buffer]], float]:
        """What a move makes, and the bytes that are there beside it while it runs."""
        source, target = (a.tensor, a.source), (a.tensor, a.target)
        nbytes = 0.0 if _is_fused_slice(a, self.life) else self.bytes_of(target)
        extra = 0.0
        if nbytes and not self.life.materialized[a.tensor] and source not in self.made_by_reshard:
            extra = self.bytes_of(source)  # a fluid value is written out to be moved
        if target not in s.buffers:
            self.made_by_reshard.add(target)
        return [(target, s.next_iteration_buffer(target, False) or _Buffer(nbytes))], extra

    def operator(self, a: RunOperator, s: _WalkScope) -> tuple[list[tuple[Value, _Buffer]], float]:
        """The same for an operator."""
        op = self.program.operators[a.op]
        into = a.reads[0] if a.reads and is_update(op.primitive) else None
        over = s.buffers.get(into) if into in s.dying and not isinstance(into, Literal) else None
        made = []
        for v in (self.assignment.values[t] for t in op.results):
            there = (
                over
                if over is not None and over.owned_by_caller
                else s.next_iteration_buffer(v, may_alias_operand(op))
            )
            made.append((v, there or _Buffer(self.stored_bytes(v))))
        # What a product writes in its reader's place is there beside its operands.
        extra = sum(
            self.life.epilogue_bytes[t] / self.assignment.result_layout(t).pieces(self.mesh)
            for t in op.results
        )
        return made, extra

    def call(self, a: RunCall, s: _WalkScope) -> tuple[list[tuple[Value, _Buffer]], float]:
        """Run a call: its results, placed, and the most that was live in it."""
        if not a.call.boundary:
            return self.inlined(a, s)
        found = self.branches(a, s) if a.call.kind == "cond" else self.loop(a, s)
        for v, more in found.while_running:
            self.record_change(v, more)
        base = s.base + s.live + sum(b for _, b in found.while_running)
        inner = [
            self.walk(
                body, dict(given), {*kept, *(v for v in ends if not isinstance(v, Literal))}, base, turn
            )
            for body, ends, (given, kept, turn) in zip(a.bodies, a.returns, found.bodies, strict=True)
        ]
        highest = base - s.base + max(inner, default=0.0)
        for v, more in found.while_running:
            self.record_change(v, -more)
        for v in found.overwritten:
            self.free(v, s)
        self.allocate(found.results, s)
        self.record_live(-1, s.base + s.live)
        return found.results, max(highest, s.live)

    def inlined(self, a: RunCall, s: _WalkScope) -> tuple[list[tuple[Value, _Buffer]], float]:
        """A call that compilers run in place: what its body makes, it hands out."""
        lent = {v: s.buffers[v] for v in a.entry[0] if v in s.dying and s.buffers[v].owned_by_caller}
        others = {id(b) for v, b in s.buffers.items() if v not in lent}
        turn = {v: b for v, b in s.next_iteration.items() if id(b) not in others}
        ends = [v for v in a.returns[0] if not isinstance(v, Literal)]
        inside = dict(lent)
        highest = s.live + self.walk(a.bodies[0], inside, ends, s.base + s.live, turn)
        made = [
            (v, inside.get(v) or _Buffer(self.stored_bytes(v)))
            for v in (self.assignment.values[t] for t in a.call.results)
        ]
        self.allocate(made, s)
        self.record_live(-1, s.base + s.live)
        return made, max(highest, s.live)

    def loop(self, a: RunCall, s: _WalkScope) -> _CallMemory:
        """A loop: what goes round lies in one buffer each, stacked results are there before the first turn."""
        b, ops = a.call.boundary, self.program.operators
        first, n = len(b.get("test", ())) + len(b["const"]), len(b["carry"])
        # What goes round: boundary operator, the value before, the result.
        round_: list[tuple[int, Value | Literal, Value]] = [
            (i, a.reads[first + k], self.assignment.values[ops[i].results[-1]])
            for k, i in enumerate(b["carry"])
        ]
        stacks = carried_stacks(a, self.program, self.assignment.values)
        round_ += [(b["xs"][t.xs], t.initial, t.result) for t in stacks]
        made: list[tuple[Value, _Buffer]] = []
        during: list[tuple[Value, float]] = []
        over: list[Value] = []
        pins: list[_Buffer] = []
        # What a body reads in every turn, as a constant or slice by slice, is not written over.
        whole = (
            {k for k, _ in enumerate(a.reads)}
            - {first + k for k in range(n)}
            - {first + n + t.xs for t in stacks}
        )
        read = {a.reads[k] for k in whole if not isinstance(a.reads[k], Literal)}
        for _, given, final in round_:
            left, pin = _Buffer(self.stored_bytes(final)), _Buffer(self.bytes_of(final), owned_by_caller=True)
            if (
                not isinstance(given, Literal)
                and given in s.dying
                and given not in over
                and given not in read
            ):
                if s.buffers[given].owned_by_caller:
                    pin = left = s.buffers[given]
                else:
                    over.append(given)
            elif (there := s.next_iteration_buffer(final, True)) is not None:
                pin = left = there
            else:
                during.append((final, pin.size))
            pins.append(pin)
            made.append((final, left))
        # Those in another order in the loop are transposed one after the other: what is freed first takes the last.
        transposed = [
            (p.size, v, f)
            for (i, v, f), p in zip(round_, pins, strict=True)
            if i in self.transposed_carries and v in over
        ]
        for size, v, final in sorted(transposed, key=lambda t: t[0])[:-1]:
            over.remove(v)  # pyright: ignore[reportArgumentType]
            during.append((final, size))
        known = {v for v, _ in made}
        for v in (self.assignment.values[t] for t in a.call.results):
            if v not in known:
                there = s.next_iteration_buffer(v, False)
                made.append((v, there or _Buffer(self.stored_bytes(v))))
                during += [] if there else [(v, self.stored_bytes(v))]
        bodies = []
        for entry, ends in zip(a.entry, a.returns, strict=True):
            at = first if a.call.kind == "scan" else len(entry) - n
            given = dict(zip(entry[at : at + n], pins, strict=False))
            turns = len(ends) >= n and (a.call.kind == "scan" or entry is a.entry[-1])
            turn = dict(zip(ends[:n], pins, strict=False)) if turns else {}
            turn = {v: b for v, b in turn.items() if not isinstance(v, Literal) and v not in given}
            given |= {t.slice: p for t, p in zip(stacks, pins[n:], strict=True)}
            bodies.append((given, () if turns else tuple(given), turn))
        return _CallMemory(made, during, over, bodies)

    def branches(self, a: RunCall, s: _WalkScope) -> _CallMemory:
        """Branches: a result that each of them makes over one operand that ends here lies in that one's buffer."""
        lent = {v: s.buffers[v] for v in a.entry[0] if v in s.dying}
        given = {
            v: b if b.owned_by_caller else _Buffer(b.size, owned_by_caller=True) for v, b in lent.items()
        }
        made: list[tuple[Value, _Buffer]] = []
        during: list[tuple[Value, float]] = []
        over: list[Value] = []
        taken: set[Value] = set()
        for j, t in enumerate(a.call.results):
            v = self.assignment.values[t]
            sources = {
                _overwritten_source(
                    ends[j], body, self.program, _last_uses(body, self.program, self.life, self.assignment)
                )
                for body, ends in zip(a.bodies, a.returns, strict=True)
            }
            source = next(iter(sources)) if len(sources) == 1 else None
            if source is not None and source in lent and source not in taken:
                taken.add(source)
                if lent[source].owned_by_caller:
                    made.append((v, lent[source]))
                else:
                    over.append(source)
                    made.append((v, _Buffer(self.stored_bytes(v))))
            elif (there := s.next_iteration_buffer(v, False)) is not None:
                made.append((v, there))
            else:
                made.append((v, _Buffer(self.stored_bytes(v))))
                during.append((v, self.stored_bytes(v)))
        return _CallMemory(made, during, over, [(given, (), {})] * len(a.bodies))

    def classes(self) -> dict[str, float]:
        """Bytes by class when the most are live."""
        there: dict[Value, list[tuple[float, bool]]] = {}
        for v, b, moved in self.changes[: self.peak_change]:
            if b > 0:
                there.setdefault(v, []).append((b, moved))
            elif b < 0:
                there[v].pop()
        out: dict[str, float] = {}
        for v, found in there.items():
            for b, moved in found:
                kind = self.class_of(v, moved)
                out[kind] = out.get(kind, 0.0) + b
        return out

    def class_of(self, v: Value, moved: bool) -> str:
        op = self.program.operators[self.assignment.producers[v[0]][0]]
        if moved:
            return "results" if v in self.outputs else "redistributed copies"
        if op.kind == "const":
            return "captured arrays"
        if op.kind == "input":
            return "argument " + op.name.split(".")[0]
        return "results" if v[0] in {w[0] for w in self.outputs} else "intermediate values"


@dataclasses.dataclass(frozen=True, eq=False)
class _CallMemory:
    """How a call uses memory.

    `made` are its results; `during` the bytes that are there while it runs beside what the caller holds; `over` the
    values whose buffers results take over; `bodies` for each body the values that it is given in buffers of its own,
    those of them that stay, and the buffers for a next turn.
    """

    results: list[tuple[Value, _Buffer]]
    while_running: list[tuple[Value, float]]
    overwritten: list[Value]
    bodies: list[tuple[Mapping[Value, _Buffer], Collection[Value], Mapping[Value, _Buffer]]]


def _overwritten_source(
    v: Value | Literal, actions: Sequence[Action], program: Program, last: Mapping[Value, int]
) -> Value | None:
    """The value over which a list of actions makes another one, itself if it is not made there; None if over none."""
    if isinstance(v, Literal):
        return None
    for i in range(len(actions) - 1, -1, -1):
        a = actions[i]
        if isinstance(a, Reshard):
            made = [(a.tensor, a.target)] if a.source != a.target else []
        elif isinstance(a, RunOperator):
            made = [(r, None) for r in program.operators[a.op].results]
        else:
            made = [(r, None) for r in a.call.results]
        if not any(t == v[0] and layout in (None, v[1]) for t, layout in made):
            continue
        into = (
            a.reads[0]
            if isinstance(a, RunOperator) and a.reads and is_update(program.operators[a.op].primitive)
            else None
        )
        if into is None or isinstance(into, Literal) or last.get(into) != i:
            return None
        v = into
    return v


def _last_uses(
    actions: Sequence[Action], program: Program, life: Liveness, choice: Assignment
) -> dict[Value, int]:
    """The last action of a list that needs each value: a fluid reader needs it for as long as its own readers."""
    last: dict[Value, int] = {}
    values = choice.values
    through: dict[Value, int] = {}  # of values that some readers compute again
    for i in range(len(actions) - 1, -1, -1):
        a = actions[i]
        until = i
        again = False
        if isinstance(a, RunOperator):
            op = program.operators[a.op]
            results = [values[r] for r in op.results]
            if results and not any([life.materialized[r] for r in op.results]) and is_duplicable(op):
                until = max([i] + [last.get(v, i) for v in results])
            until = max([until] + [through.get(v, i) for v in results if life.duplicated_cast[v[0]]])
            again = fuses_operands(op)
        elif isinstance(a, Reshard) and _is_fused_slice(a, life):
            until = max(i, last.get((a.tensor, a.target), i))
        for v in _reads(a):
            # What was moved cannot be computed again.
            times = through if again and life.duplicated_cast[v[0]] and v == values[v[0]] else last
            if times.get(v, i) <= until:
                times[v] = until
    return last


def _is_fused_slice(a: Reshard, life: Liveness) -> bool:
    """A slice of a fluid value is computed where it is read, like the value itself."""
    return not life.materialized[a.tensor] and all(s.kind == "slice" for s in a.steps)


def _reads(a: Action) -> list[Value]:
    if isinstance(a, Reshard):
        return [(a.tensor, a.source)]
    return [v for v in a.reads if not isinstance(v, Literal)]
