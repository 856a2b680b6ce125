"""Where values come from and go to, through moves, fusions, calls and loops.

A place in a program is a computation and the calls that led to it, outermost first, since a fusion's
parameter is its caller's operand.

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
>>> resolve(m, m.computations["main"], (), "c", MOVES)[2].opcode
'negate'
"""

from __future__ import annotations

from jshard._verify.hlo_parser import Computation, Instruction, Module


CallStack = tuple[tuple[Computation, Instruction], ...]
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
CALLS = ("fusion", "call", "async-start", "call-start")


def called_computation(module: Module, inst: Instruction) -> Computation | None:
    """The computation that a fusion or call runs."""
    if inst.opcode not in CALLS or not inst.called:
        return None
    return module.computations.get(inst.called[0])


def resolve(
    module: Module, computation: Computation, calls: CallStack, name: str, through: frozenset[str]
) -> tuple[Computation, CallStack, Instruction] | None:
    """What produced a value: through operations of `through`, into fusions, out of parameters and loops."""
    comp, above = computation, calls
    for _ in range(500):
        inst = comp.by_name.get(name)
        if inst is None:
            return None
        run = called_computation(module, inst)
        source = comp.by_name.get(inst.operands[0]) if inst.operands else None
        if inst.opcode == "get-tuple-element" and source is not None:
            index = int(inst.attr("index") or 0)
            held = called_computation(module, source)
            if source.opcode == "tuple" and index < len(source.operands):
                name = source.operands[index]
            elif held is not None and held.root is not None and held.root.opcode == "tuple":
                comp, above, name = held, (*above, (comp, source)), held.root.operands[index]
            elif source.opcode == "parameter" and _loop_invariant_operand(comp, above, index):
                comp, above, name = above[-1][0], above[:-1], _loop_invariant_operand(comp, above, index)
            else:
                name = source.name
        elif inst.opcode in through and inst.operands:
            name = inst.operands[0]
        elif run is not None and run.root is not None and len(inst.shapes) == 1:
            comp, above, name = run, (*above, (comp, inst)), run.root.name
        elif inst.opcode == "parameter" and above and above[-1][1].opcode in CALLS:
            comp, call = above[-1]
            above, name = above[:-1], call.operands[int(inst.literal)]
        else:
            return comp, above, inst
    return None


def _loop_invariant_operand(body: Computation, above: CallStack, index: int) -> str:
    """Name outside of a value that a loop's body hands on unchanged; empty when it changes."""
    if not above or above[-1][1].opcode != "while" or body.root is None or body.root.opcode != "tuple":
        return ""
    comp, loop = above[-1]
    init = comp.by_name.get(loop.operands[0])
    if index >= len(body.root.operands) or init is None or init.opcode != "tuple":
        return ""
    kept = body.by_name.get(body.root.operands[index])
    while kept is not None and kept.opcode in ("copy", "copy-done", "copy-start") and kept.operands:
        kept = body.by_name.get(kept.operands[0])
    source = body.by_name.get(kept.operands[0]) if kept is not None and kept.operands else None
    same = kept is not None and kept.opcode == "get-tuple-element" and int(kept.attr("index") or 0) == index
    return init.operands[index] if same and source is not None and source.opcode == "parameter" else ""


def users_through(computation: Computation, name: str, through: frozenset[str]) -> list[Instruction]:
    """Readers of a value, through operations of `through`."""
    out: list[Instruction] = []
    for user in computation.users.get(name, ()):
        out += users_through(computation, user.name, through) if user.opcode in through else [user]
    return out


def depends_on_device(module: Module, computation: Computation, calls: CallStack, name: str) -> bool:
    """Whether a value depends on which device runs: `partition-id` is among what it is computed from."""
    seen: set[tuple[str, str]] = set()

    def visit(comp: Computation, above: CallStack, at: str) -> bool:
        inst = comp.by_name.get(at)
        if inst is None or (comp.name, at) in seen:
            return False
        seen.add((comp.name, at))
        if inst.opcode in ("partition-id", "replica-id"):
            return True
        if inst.opcode == "parameter":
            return outside(above, int(inst.literal or 0), None)
        source = comp.by_name.get(inst.operands[0]) if inst.operands else None
        if inst.opcode == "get-tuple-element" and source is not None and source.opcode == "parameter":
            return outside(above, int(source.literal or 0), int(inst.attr("index") or 0))
        run = called_computation(module, inst)
        if run is not None and any(i.opcode in ("partition-id", "replica-id") for i in run.instructions):
            return True
        return any(visit(comp, above, o) for o in inst.operands)

    def outside(above: CallStack, number: int, index: int | None) -> bool:
        if not above:
            return False
        comp, call = above[-1]
        if call.opcode == "conditional" or number >= len(call.operands):
            return any(visit(comp, above[:-1], o) for o in call.operands)
        given = comp.by_name.get(call.operands[number])
        if given is not None and given.opcode == "tuple" and index is not None:
            return index < len(given.operands) and visit(comp, above[:-1], given.operands[index])
        return visit(comp, above[:-1], call.operands[number])

    return visit(computation, calls, name)


def users_of_result(computation: Computation, inst: Instruction, k: int) -> list[Instruction]:
    """The instructions that take result `k` out of a combined collective."""
    ends = [inst, *(u for u in computation.users.get(inst.name, ()) if u.opcode.endswith("-done"))]
    readers = [u for e in ends for u in computation.users.get(e.name, ())]
    return [u for u in readers if u.opcode == "get-tuple-element" and int(u.attr("index") or 0) == k]
