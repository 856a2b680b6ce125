"""Bytes a device holds while a schedule runs: the peak, the curve over the program, and what is held at the peak.

Every value (a tensor in a layout) lives from where it is made to where it is last read. Values that a compiler
fuses into their only reader are never stored and count nothing. Arguments live throughout unless donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jshard._cost.residency import Residency, fuses, is_light, reuses
from jshard._layout import Layout
from jshard._plan.flat_peak import held_by
from jshard._plan.schedule import Action, Choice, Move, Nested, Run, Schedule, Value
from jshard._program.graph import Literal, Program


@dataclasses.dataclass(frozen=True)
class Profile:
    """`peak` bytes; `curve`, the live bytes while each operator runs; `held`, bytes at the peak by class."""

    peak: float
    curve: dict[int, float]
    held: tuple[tuple[str, float], ...]


def peak_bytes(schedule: Schedule, life: Residency, donated: Collection[int] = ()) -> float:
    """The largest sum of live bytes over the schedule."""
    return profile(schedule, life, donated).peak


def profile(schedule: Schedule, life: Residency, donated: Collection[int] = ()) -> Profile:
    """Peak, curve and what is held."""
    if schedule.flat is None:
        return walked(schedule, life, donated)
    found = held_by(schedule.flat, life, frozenset(donated))
    return _profile(found.peak, found.curve, found.classes)


def walked(schedule: Schedule, life: Residency, donated: Collection[int] = ()) -> Profile:
    """The profile of any schedule, action by action."""
    return _profile(*_walk(schedule, life, donated))


def _profile(peak: float, curve: dict[int, float], held: dict[str, float]) -> Profile:
    rest = peak - sum(held.values())  # results of a loop are allocated before its body runs
    if rest > 0:
        held["intermediate values"] = held.get("intermediate values", 0.0) + rest
    return Profile(peak, curve, tuple(sorted(held.items(), key=lambda item: -item[1])))


def _walk(
    schedule: Schedule, life: Residency, donated: Collection[int]
) -> tuple[float, dict[int, float], dict[str, float]]:
    """Peak, curve, and bytes by class at the peak."""
    choice = schedule.choice
    program, mesh = choice.program, choice.topology.mesh
    curve: dict[int, float] = {}
    changes: list[tuple[Value, float, bool]] = []  # value, bytes more or less, made by a move
    made_by_move: set[Value] = set()
    returned = {v[0] for v in schedule.outputs if not isinstance(v, Literal)}
    highest, when = -1.0, 0

    tensors, stored, values = program.tensors, life.held, choice.values
    pieces: dict[Layout, int] = {}

    def size(v: Value, moved: bool) -> float:
        if not moved and not stored[v[0]]:
            return 0.0
        if v[1] not in pieces:
            pieces[v[1]] = v[1].pieces(mesh)
        return tensors[v[0]].nbytes / pieces[v[1]]

    def class_of(v: Value, moved: bool) -> str:
        op = program.operators[choice.producers[v[0]][0]]
        if moved:
            return "results" if v in outputs else "redistributed copies"
        if op.kind == "const":
            return "captured arrays"
        if op.kind == "input":
            return "argument " + op.name.split(".")[0]
        return "results" if v[0] in returned else "intermediate values"

    def note(op: int, live: float) -> None:
        """Remember live bytes at an action, and where among the changes the most are live."""
        nonlocal highest, when
        if op >= 0:
            curve[op] = max(curve.get(op, 0.0), live)
        if live > highest:
            highest, when = live, len(changes)

    def walk(
        actions: Sequence[Action], held: dict[Value, float], kept: Collection[Value], base: float
    ) -> float:
        """Peak of an action list above what the caller holds (`base`); `held` are its own values."""
        last = _last_needs(actions, program, life, choice)
        released: dict[int, list[Value]] = {}
        for v, i in last.items():
            released.setdefault(i, []).append(v)
        live = sum(held.values())
        top = live
        note(-1, base + live)
        for i, a in enumerate(actions):
            made: list[tuple[Value, float]] = []
            extra = 0.0
            if isinstance(a, Move):
                made = [
                    ((a.tensor, a.target), 0.0 if _is_view(a, life) else size((a.tensor, a.target), True))
                ]
                if made[0][1] and not life.held[a.tensor] and (a.tensor, a.source) not in made_by_move:
                    extra = size((a.tensor, a.source), True)  # a fluid value is written out to be moved
                made_by_move.update(v for v, _ in made if v not in held)
            elif isinstance(a, Run):
                op = program.operators[a.op]
                made = [(values[t], size(values[t], False)) for t in op.results]
            else:
                made = [(values[t], size(values[t], False)) for t in a.call.results]
                alias = not a.call.boundary
                whole = sum(b for _, b in made)
                for body, returns in zip(a.bodies, a.returns, strict=True):
                    ends = [v for v in returns if not isinstance(v, Literal)]
                    inner = walk(body, {}, ends, base + live + (0.0 if alias else whole))
                    extra = max(extra, inner - (whole if alias else 0.0))
            if isinstance(a, Run):
                # What a product writes in its reader's place is there beside its operands.
                extra = sum(
                    life.written[t] / choice.made(t).pieces(mesh) for t in program.operators[a.op].results
                )
            if isinstance(a, Run) and reuses(program.operators[a.op]):
                # An elementwise result is written over an operand that nobody needs any more.
                dying = sum(held[v] for v in released.get(i, ()) if v in held and v not in kept)
                extra = -min(dying, sum(b for v, b in made if v not in held))
            for v, b in made:
                if v not in held:
                    held[v] = b
                    live += b
                    if b:
                        changes.append((v, b, v in made_by_move))
            top = max(top, live + extra)
            note(a.op if isinstance(a, Run) else -1, base + live + (0.0 if isinstance(a, Nested) else extra))
            for v, _ in made:
                if v not in last:
                    released.setdefault(i, []).append(v)
            for v in released.get(i, ()):
                if v in held and v not in kept:
                    b = held.pop(v)
                    live -= b
                    if b:
                        changes.append((v, -b, False))
        changes.extend((v, -b, False) for v, b in held.items() if b)
        return top

    held: dict[Value, float] = {}
    outputs = {v for v in schedule.outputs if not isinstance(v, Literal)}
    kept, given = set(outputs), frozenset(donated)
    for k, i in enumerate(program.inputs):
        t = program.operators[i].results[0]
        v = values[t]
        held[v] = program.tensors[t].nbytes / v[1].pieces(mesh)
        changes.append((v, held[v], False))
        if k not in given:
            kept.add(v)
    peak = walk(schedule.actions, held, kept, 0.0)
    there: dict[Value, list[tuple[float, bool]]] = {}
    for v, b, moved in changes[:when]:
        if b > 0:
            there.setdefault(v, []).append((b, moved))
        elif b < 0:
            there[v].pop()
    classes: dict[str, float] = {}
    for v, found in there.items():
        for b, moved in found:
            kind = class_of(v, moved)
            classes[kind] = classes.get(kind, 0.0) + b
    return peak, curve, classes


def _last_needs(
    actions: Sequence[Action], program: Program, life: Residency, choice: Choice
) -> dict[Value, int]:
    """The last action of a list that needs each value: a fluid reader needs it for as long as its own readers."""
    last: dict[Value, int] = {}
    values = choice.values
    through: dict[Value, int] = {}  # of values that some readers compute again
    for i in range(len(actions) - 1, -1, -1):
        a = actions[i]
        until = i
        again = False
        if isinstance(a, Run):
            op = program.operators[a.op]
            results = [values[r] for r in op.results]
            if results and not any([life.held[r] for r in op.results]) and is_light(op):
                until = max([i] + [last.get(v, i) for v in results])
            until = max([until] + [through.get(v, i) for v in results if life.copied[v[0]]])
            again = fuses(op)
        elif isinstance(a, Move) and _is_view(a, life):
            until = max(i, last.get((a.tensor, a.target), i))
        for v in _reads(a):
            # What was moved cannot be computed again.
            times = through if again and life.copied[v[0]] and v == values[v[0]] else last
            if times.get(v, i) <= until:
                times[v] = until
    return last


def _is_view(a: Move, life: Residency) -> bool:
    """A slice of a fluid value is computed where it is read, like the value itself."""
    return not life.held[a.tensor] and all(s.kind == "slice" for s in a.steps)


def _reads(a: Action) -> list[Value]:
    if isinstance(a, Move):
        return [(a.tensor, a.source)]
    return [v for v in a.reads if not isinstance(v, Literal)]
