"""Trip counts of loops: as the compiler annotates them, else from the comparison in the condition.

>>> from jshard._verify.hlo_parser import parse
>>> m = parse('''
... %cond (c: (s32[], f32[2])) -> pred[] {
...   %c = (s32[], f32[2]) parameter(0)
...   %i = s32[] get-tuple-element(%c), index=0
...   %n = s32[] constant(12)
...   ROOT %lt = pred[] compare(%i, %n), direction=LT
... }
... %body (b: (s32[], f32[2])) -> (s32[], f32[2]) {
...   %b = (s32[], f32[2]) parameter(0)
...   %j = s32[] get-tuple-element(%b), index=0
...   %x = f32[2] get-tuple-element(%b), index=1
...   %three = s32[] constant(3)
...   %next = s32[] add(%j, %three)
...   ROOT %t = (s32[], f32[2]) tuple(%next, %x)
... }
... ENTRY %main (p: f32[2]) -> (s32[], f32[2]) {
...   %p = f32[2] parameter(0)
...   %zero = s32[] constant(0)
...   %init = (s32[], f32[2]) tuple(%zero, %p)
...   ROOT %w = (s32[], f32[2]) while(%init), condition=%cond, body=%body
... }''')
>>> main = m.computations["main"]
>>> trip_count(m, main, main.root)
4
"""

from __future__ import annotations

import re

from jshard._verify.hlo_parser import Computation, Instruction, Module


_FORWARDING = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "get-tuple-element")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a `while` in `computation`; None if it is not a constant of the text."""
    known = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', loop.attrs)
    if known:
        return int(known[1])
    condition = module.computations.get((loop.attr("condition") or "").lstrip("%"))
    body = module.computations.get((loop.attr("body") or "").lstrip("%"))
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    test = _comparison(module, condition)
    if test is None:
        return None
    index, limit_index, limit, direction = test
    start = _initial_value(computation, loop, index)
    if limit is None and limit_index is not None and _is_loop_invariant(body, limit_index):
        limit = _initial_value(computation, loop, limit_index)  # a bound that is loop-invariant
    step = _increment(module, body, index)
    if start is None or step is None or limit is None or not step:
        return None
    last = {"LT": limit, "LE": limit + 1, "GT": limit, "GE": limit - 1, "NE": limit}[direction]
    span = last - start
    return max(0, -(-span // step)) if (span > 0) == (step > 0) or not span else 0


def _comparison(module: Module, condition: Computation) -> tuple[int, int | None, int | None, str] | None:
    """The carry index of i, the limit (its carry index, or its value) and the direction of `i < limit`."""
    root = condition.root
    assert root is not None
    while root.opcode in _FORWARDING and root.operands[0] in condition.by_name:
        root = condition.by_name[root.operands[0]]
    args = [condition.by_name.get(o) for o in root.operands]
    compare, inner = root, None
    if root.opcode == "fusion" and root.called:
        inner = module.computations.get(root.called[0])
        if inner is None or inner.root is None:
            return None
        compare = inner.root
        args = [_operand_outside(inner, o, condition, root) for o in compare.operands]
    if compare.opcode != "compare" or len(args) != 2:
        return None
    direction = compare.attr("direction") or ""
    left, right = args
    if left is not None and left.opcode == "constant":
        left, right = right, left
        direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    index = _carry_index(condition, left)
    if index is None or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    return index, _carry_index(condition, right), _constant(right), direction


def _operand_outside(
    inner: Computation, name: str, outer: Computation, call: Instruction
) -> Instruction | None:
    """The instruction outside a fusion behind a name inside it; a constant inside is itself."""
    inst = inner.by_name.get(name)
    while inst is not None and inst.opcode in _FORWARDING and inst.operands:
        inst = inner.by_name.get(inst.operands[0])
    if inst is not None and inst.opcode == "parameter":
        return outer.by_name.get(call.operands[int(inst.literal)])
    return inst


def _constant(inst: Instruction | None) -> int | None:
    if inst is None or inst.opcode != "constant":
        return None
    m = re.search(r"-?\d+", inst.literal)
    return int(m[0]) if m else None


def _carry_index(computation: Computation, inst: Instruction | None) -> int | None:
    """The index of the element of the loop's tuple that an instruction reads, through copies."""
    while inst is not None and inst.opcode in _FORWARDING:
        source = computation.by_name.get(inst.operands[0]) if inst.operands else None
        if inst.opcode == "get-tuple-element" and source is not None and source.opcode == "parameter":
            return int(inst.attr("index") or 0)
        inst = source
    return None


def _initial_value(computation: Computation, loop: Instruction, index: int) -> int | None:
    """The initial value of an element of the loop's tuple."""
    init = computation.by_name.get(loop.operands[0])
    if init is None or init.opcode != "tuple" or index >= len(init.operands):
        return None
    inst = computation.by_name.get(init.operands[index])
    while inst is not None and inst.opcode in _FORWARDING and inst.operands:
        inst = computation.by_name.get(inst.operands[0])
    return _constant(inst)


def _is_loop_invariant(body: Computation, index: int) -> bool:
    root = body.root
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return False
    return _carry_index(body, body.by_name.get(root.operands[index])) == index


def _increment(module: Module, body: Computation, index: int) -> int | None:
    """The increment of the induction variable in one trip."""
    root = body.root
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return None
    inst = body.by_name.get(root.operands[index])
    while inst is not None and inst.opcode in _FORWARDING and inst.operands:
        inst = body.by_name.get(inst.operands[0])
    if inst is None:
        return None
    add, args = inst, [body.by_name.get(o) for o in inst.operands]
    if inst.opcode == "fusion" and inst.called:
        inner = module.computations.get(inst.called[0])
        if inner is None or inner.root is None:
            return None
        add = inner.root
        args = [_operand_outside(inner, o, body, inst) for o in add.operands]
    if add.opcode not in ("add", "subtract") or len(args) != 2:
        return None
    constant = _constant(args[1])
    other = args[0]
    if constant is None and add.opcode == "add":
        constant, other = _constant(args[0]), args[1]
    if constant is None or _carry_index(body, other) != index:
        return None
    return constant if add.opcode == "add" else -constant
