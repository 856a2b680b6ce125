"""Def-use chains of HLO through data movement, fusions, calls and loops.

>>> from jshard._verify.hlo_parser import parse
>>> m = parse('''
... %f (q: f32[4]) -> f32[4] {
...   %q = f32[4] parameter(0)
...   ROOT %n = f32[4] negate(%q)
... }
... ENTRY %main (p: f32[4]) -> f32[4] {
...   %p = f32[4] parameter(0)
...   %fusion = f32[4] fusion(%p), kind=kLoop, calls=%f
...   ROOT %c = f32[4] copy(%fusion)
... }''')
>>> resolve(Frame(m, m.computations["main"]), "c", FORWARDING)[1].opcode
'negate'
"""

from __future__ import annotations

import dataclasses

from jshard._verify.hlo_parser import Computation, Instruction, Module


FORWARDING = frozenset(
    (
        "copy",
        "bitcast",
        "reshape",
        "transpose",
        "copy-start",
        "copy-done",
        "get-tuple-element",
        "all-reduce-done",
        "all-gather-done",
        "reduce-scatter-done",
        "all-to-all-done",
        "collective-permute-done",
        "async-done",
        "call-done",
        "optimization-barrier",
    )
)
"""Operations whose result is their first operand in another place or shape."""

CALLS = ("fusion", "call", "async-start", "call-start")
"""Operations that run one computation once, on their operands."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation and the calls that led to it, outermost first: a fusion's parameter is its caller's operand."""

    module: Module
    computation: Computation
    callers: tuple[tuple[Computation, Instruction], ...] = ()

    @property
    def call(self) -> Instruction | None:
        """The instruction that runs this computation; None for the entry."""
        return self.callers[-1][1] if self.callers else None

    @property
    def outer(self) -> Frame:
        """The frame of that instruction."""
        return Frame(self.module, self.callers[-1][0], self.callers[:-1])

    def inside(self, computation: Computation, call: Instruction) -> Frame:
        """The frame of a computation that `call`, an instruction of this one, runs."""
        return Frame(self.module, computation, (*self.callers, (self.computation, call)))

    def called(self, inst: Instruction) -> Frame | None:
        """The frame of the computation that a fusion or call runs; None for other instructions."""
        computation = called_computation(self.module, inst)
        return None if computation is None else self.inside(computation, inst)


def called_computation(module: Module, inst: Instruction) -> Computation | None:
    """The computation that a fusion or call runs."""
    if inst.opcode not in CALLS or not inst.called:
        return None
    return module.computations.get(inst.called[0])


def resolve(frame: Frame, name: str, through: frozenset[str]) -> tuple[Frame, Instruction] | None:
    """The instruction that produces a value, through operations of `through`, fusions, parameters and loops."""
    for _ in range(500):
        inst = frame.computation.by_name.get(name)
        if inst is None:
            return None
        inner = frame.called(inst)
        source = frame.computation.by_name.get(inst.operands[0]) if inst.operands else None
        if inst.opcode == "get-tuple-element" and source is not None:
            frame, name = _element(frame, source, int(inst.attr("index") or 0))
        elif inst.opcode in through and inst.operands:
            name = inst.operands[0]
        elif inner is not None and inner.computation.root is not None and len(inst.shapes) == 1:
            frame, name = inner, inner.computation.root.name
        elif inst.opcode == "parameter" and frame.call is not None and frame.call.opcode in CALLS:
            frame, name = frame.outer, frame.call.operands[int(inst.literal)]
        else:
            return frame, inst
    return None


def _element(frame: Frame, source: Instruction, index: int) -> tuple[Frame, str]:
    """Where element `index` of a tuple comes from, if that is known, else the tuple."""
    inner = frame.called(source)
    root = inner.computation.root if inner is not None else None
    if source.opcode == "tuple" and index < len(source.operands):
        return frame, source.operands[index]
    if inner is not None and root is not None and root.opcode == "tuple":
        return inner, root.operands[index]
    if source.opcode == "parameter":
        invariant = _loop_invariant_operand(frame, index)
        if invariant:
            return frame.outer, invariant
    return frame, source.name


def _loop_invariant_operand(frame: Frame, index: int) -> str:
    """The name, outside a loop, of a carried value that the body returns unchanged; empty if it changes."""
    body, loop = frame.computation, frame.call
    if loop is None or loop.opcode != "while" or body.root is None or body.root.opcode != "tuple":
        return ""
    init = frame.outer.computation.by_name.get(loop.operands[0])
    if index >= len(body.root.operands) or init is None or init.opcode != "tuple":
        return ""
    carried = body.by_name.get(body.root.operands[index])
    while carried is not None and carried.opcode in ("copy", "copy-done", "copy-start") and carried.operands:
        carried = body.by_name.get(carried.operands[0])
    if carried is None or carried.opcode != "get-tuple-element" or int(carried.attr("index") or 0) != index:
        return ""
    source = body.by_name.get(carried.operands[0]) if carried.operands else None
    return init.operands[index] if source is not None and source.opcode == "parameter" else ""


def users_through(computation: Computation, name: str, through: frozenset[str]) -> list[Instruction]:
    """The users of a value, through operations of `through`."""
    out: list[Instruction] = []
    for user in computation.users.get(name, ()):
        out += users_through(computation, user.name, through) if user.opcode in through else [user]
    return out


def depends_on_device(frame: Frame, name: str) -> bool:
    """Whether a value is computed from `partition-id` or `replica-id`."""
    seen: set[tuple[str, str]] = set()

    def visit(frame: Frame, name: str) -> bool:
        computation = frame.computation
        inst = computation.by_name.get(name)
        if inst is None or (computation.name, name) in seen:
            return False
        seen.add((computation.name, name))
        if inst.opcode in ("partition-id", "replica-id"):
            return True
        if inst.opcode == "parameter":
            return visit_operand(frame, int(inst.literal or 0), None)
        source = computation.by_name.get(inst.operands[0]) if inst.operands else None
        if inst.opcode == "get-tuple-element" and source is not None and source.opcode == "parameter":
            return visit_operand(frame, int(source.literal or 0), int(inst.attr("index") or 0))
        inner = called_computation(frame.module, inst)
        if inner is not None and any(i.opcode in ("partition-id", "replica-id") for i in inner.instructions):
            return True
        return any(visit(frame, o) for o in inst.operands)

    def visit_operand(frame: Frame, number: int, index: int | None) -> bool:
        """Visit an operand of the call that runs the computation; of a tuple, only element `index`."""
        call = frame.call
        if call is None:
            return False
        outer = frame.outer
        if call.opcode == "conditional" or number >= len(call.operands):
            return any(visit(outer, o) for o in call.operands)
        operand = outer.computation.by_name.get(call.operands[number])
        if operand is not None and operand.opcode == "tuple" and index is not None:
            return index < len(operand.operands) and visit(outer, operand.operands[index])
        return visit(outer, call.operands[number])

    return visit(frame, name)


def users_of_result(computation: Computation, inst: Instruction, k: int) -> list[Instruction]:
    """The `get-tuple-element`s of result `k` of a combined collective."""
    ends = [inst, *(u for u in computation.users.get(inst.name, ()) if u.opcode.endswith("-done"))]
    readers = [u for e in ends for u in computation.users.get(e.name, ())]
    return [u for u in readers if u.opcode == "get-tuple-element" and int(u.attr("index") or 0) == k]
