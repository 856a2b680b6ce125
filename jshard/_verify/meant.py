"""What the program asked for behind what was emitted: the type, and the names of combined collectives.

Compilers change types around collectives, and the bytes with them:

- CPU has no bfloat16 collectives and widens to float32;
- TPU multiplies float32 in bfloat16 by default, and gathers a float32 argument narrowed already.

The `convert` beside the collective tells: its other side is the type asked for. A conversion that the program
wrote itself carries `convert_element_type` in its metadata and does not count. Narrowing is told only where
an argument is narrowed: inside, TPU computes bfloat16 in float32 and every result is a conversion.
"""

from __future__ import annotations

from jshard._verify.flow import MOVES, Calls, inner, resolve, taken
from jshard._verify.hlo import Computation, Instruction, Module, Shape, element_bits


_NARROW = ("bf16", "f16")
_SLICES = MOVES | {"slice", "dynamic-slice", "concatenate", "pad"}


def asked_type(
    module: Module,
    computation: Computation,
    calls: Calls,
    inst: Instruction,
    shapes: tuple[Shape, ...],
    part: tuple[int, ...],
) -> tuple[str, float]:
    """Type that the program asked for and emitted bytes over asked bytes; `("", 1.0)` when unchanged.

    `shapes` are those of the operands in `part`.
    """
    if not shapes or shapes[0].dtype not in ("f32", *_NARROW):
        return "", 1.0
    emitted = shapes[0].dtype
    origins = [_converted(module, computation, calls, inst.operands[k]) for k in part]
    before = set(origins)
    if len(before) > 1 and {s.dtype for s in shapes} == {"f32"}:
        return _widened_some(module, computation, inst, shapes, part, origins)
    asked = next(iter(before)) if len(before) == 1 else ""
    if emitted == "f32":
        after = _narrow_uses(module, computation, inst)
        if "promoted" in (inst.attr("to_apply") or ""):  # what XLA's AllReducePromotion names the reducer
            asked = next(iter(sorted(after | before & set(_NARROW))), "bf16")
        elif asked not in _NARROW or asked not in after:
            return "", 1.0
    elif asked != "f32":
        return "", 1.0
    return asked, (element_bits(emitted) or 1) / (element_bits(asked) or 1)


def _widened_some(
    module: Module,
    computation: Computation,
    inst: Instruction,
    shapes: tuple[Shape, ...],
    part: tuple[int, ...],
    origins: list[str],
) -> tuple[str, float]:
    """Of a combination of float32 sums with widened ones: the type of those, and the bytes over those asked."""
    asked, names = 0.0, set()
    for k, shape, origin in zip(part, shapes, origins, strict=True):
        results = taken(computation, inst, k)
        after = {d for r in results for d in _narrow_uses(module, computation, r)}
        narrow = origin if origin in _NARROW and origin in after else ""
        if not narrow and "promoted" in (inst.attr("to_apply") or ""):
            narrow = min(after, default="")
        names |= {narrow} - {""}
        asked += shape.elements * (element_bits(narrow or shape.dtype) or 8) / 8
    return (min(names), sum(s.bytes for s in shapes) / asked) if names else ("", 1.0)


def op_names(
    computation: Computation, calls: Calls, inst: Instruction, part: tuple[int, ...] | None = None
) -> str:
    """Metadata of a collective; when several were combined into one, those of its parts, joined by `;`.

    `part` limits them to some of the results, when those carry names of their own.
    The GPU compiler combines all-reduces into one of a concatenation and keeps no name at all. The names of
    what it reads and feeds would be those of other operators, so it stays without.
    """
    names = [inst.op_name]
    if not inst.op_name:
        names += [call.op_name for _, call in calls[::-1] if call.opcode not in ("while", "conditional")][:1]
    front = [inst]
    for user in computation.users.get(inst.name, ()):
        if user.opcode.endswith("-done"):
            front.append(user)
    parts = [u for f in front for u in computation.users.get(f.name, ()) if u.opcode == "get-tuple-element"]
    mine = [u.op_name for u in parts if part is None or int(u.attr("index") or 0) in part]
    names = mine if part is not None and any(mine) else names + mine
    return ";".join(dict.fromkeys(n for n in names if n))


def _converted(module: Module, computation: Computation, calls: Calls, name: str) -> str:
    """The type that the compiler converted a value from; empty if it did not."""
    found = resolve(module, computation, calls, name, _SLICES)
    if found is None or found[2].opcode != "convert":
        return ""
    comp, above, convert = found
    source = comp.by_name.get(convert.operands[0])
    dtype = source.shapes[0].dtype if source is not None and source.shapes else ""
    if dtype != "f32":
        return dtype
    origin = resolve(module, comp, above, convert.operands[0], _SLICES)
    argument = origin is not None and origin[2].opcode == "parameter" and not origin[1]
    return dtype if argument and "convert_element_type" not in convert.op_name else ""


def _narrow_uses(module: Module, computation: Computation, inst: Instruction) -> set[str]:
    """Narrow types that readers convert a value to first."""
    out: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def visit(comp: Computation, name: str) -> None:
        if (comp.name, name) in seen:
            return
        seen.add((comp.name, name))
        for user in comp.users.get(name, ()):
            run = inner(module, user)
            if user.opcode == "convert" and user.shapes[0].dtype in _NARROW:
                out.add(user.shapes[0].dtype)
            elif user.opcode in MOVES or user.opcode in ("slice", "dynamic-slice", "concatenate"):
                visit(comp, user.name)
            elif run is not None:
                for k, o in enumerate(user.operands):
                    if o == name and k in run.parameters:
                        visit(run, run.parameters[k].name)

    visit(computation, inst.name)
    return out
