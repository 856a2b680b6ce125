"""Bytes that an instruction reads and writes in device memory, as XLA's cost analysis counts them.

A slice reads what it takes and no more, and an update in place writes its part alone; inside a fusion only parameters
and results are in memory. Source: `HloCostAnalysis` of XLA, `FusionParameterReadBytes`.

>>> from jshard._verify.hlo_parser import parse
>>> m = parse('''
... ENTRY %main (a: f32[64,8], i: s32[]) -> f32[1,8] {
...   %a = f32[64,8] parameter(0)
...   %i = s32[] parameter(1)
...   ROOT %d = f32[1,8] dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
... }''')
>>> accessed_bytes(m, m.computations["main"], m.computations["main"].root)
72.0
"""

from __future__ import annotations

from jshard._verify.hlo_parser import Computation, Instruction, Module


_SLICES = ("dynamic-slice", "slice", "gather")
_MOVES_NOTHING = ("bitcast", "get-tuple-element", "tuple", "reshape")


def accessed_bytes(module: Module, computation: Computation, inst: Instruction) -> float:
    """Bytes that an instruction reads and writes."""
    inner = module.computations.get(inst.called[0]) if inst.opcode == "fusion" and inst.called else None
    if inner is None:
        sources = [computation.by_name.get(o) for o in inst.operands]
        read = [float(_size(s)) for s in sources]
        if inst.opcode in _SLICES:
            read[:1] = [float(_size(inst))]
        if inst.opcode == "dynamic-update-slice" and len(read) > 1:
            return sum(read[1:]) + read[1]
        return sum(read) + _size(inst)
    read = sum(_parameter_bytes(inner, p) for p in inner.parameters.values())
    return read + _written(inner, inst)


def _size(inst: Instruction | None) -> int:
    return sum(s.bytes for s in inst.shapes) if inst is not None else 0


def _parameter_bytes(inner: Computation, parameter: Instruction) -> float:
    """Bytes of a fusion's parameter that it reads: the slices, if nothing else of it is used."""
    full, total = float(_size(parameter)), 0.0
    todo, seen = [parameter], set()
    while todo:
        value = todo.pop()
        for user in inner.users.get(value.name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            first = bool(user.operands) and user.operands[0] == value.name
            if user.opcode in _SLICES and first:
                total += _size(user)
            elif user.opcode == "dynamic-update-slice" and first:
                continue  # in place: the rest of the array stays
            elif user.opcode in _MOVES_NOTHING:
                todo.append(user)
            else:
                return full
    return min(full, total)


def _written(inner: Computation, inst: Instruction) -> float:
    """Bytes that a fusion writes: of an update in place its part."""
    root = inner.root
    if root is None:
        return float(_size(inst))
    ends = [inner.by_name.get(o) for o in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for end in ends:
        while end is not None and end.opcode in ("bitcast", "reshape") and end.operands:
            end = inner.by_name.get(end.operands[0])
        if end is not None and end.opcode == "dynamic-update-slice" and len(end.operands) > 1:
            total += _size(inner.by_name.get(end.operands[1]))
        else:
            total += _size(end)
    return total
