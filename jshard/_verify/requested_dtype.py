"""What the program asked for behind what was emitted: the type, and the names of combined collectives.

Compilers change types around collectives, and the bytes with them:

- CPU has no bfloat16 and no 8-bit float collectives and widens to float32 and float16;
- GPU promotes sums and extrema of 8- and 16-bit integers to 32 bits;
- TPU multiplies float32 in bfloat16 by default, and gathers a float32 argument narrowed already.

The `convert` beside the collective tells: its other side is the type asked for. A conversion that the program
wrote itself carries metadata of its own (on TPU, where others do as well, `convert_element_type`) and does not
count. One side is enough, since compilers drop the other where a value is computed, or read, in the wider type; but
not on TPU, where products narrow what they read. Narrowing is told only where an argument is narrowed: inside, TPU
computes bfloat16 in float32 and every result is a conversion.
"""

from __future__ import annotations

import re

from jshard._verify.hlo_dataflow import FORWARDING, CallStack, called_computation, resolve, users_of_result
from jshard._verify.hlo_parser import Computation, Instruction, Module, Shape, element_bits


# Of which narrower types a compiler may send a type instead.
_PROMOTED_FROM = {
    "f32": re.compile(r"bf16|f16|f8\w+"), "f16": re.compile(r"f8\w+"), "bf16": re.compile(r"f8\w+"),
    "s32": re.compile(r"s8|s16"), "u32": re.compile(r"u8|u16"),
}  # fmt: skip
_NARROW_FLOATS = ("bf16", "f16")  # types in which a compiler sends a float32
_FORWARDING_OR_SLICING = FORWARDING | {"slice", "dynamic-slice", "concatenate", "pad"}


def requested_dtype(
    module: Module,
    computation: Computation,
    calls: CallStack,
    inst: Instruction,
    shapes: tuple[Shape, ...],
    part: tuple[int, ...],
) -> tuple[str, float]:
    """Type that the program asked for and emitted bytes over asked bytes; `("", 1.0)` when unchanged.

    `shapes` are those of the operands in `part`.
    """
    emitted = {s.dtype for s in shapes}
    if len(emitted) != 1 or not emitted & _PROMOTED_FROM.keys():
        return "", 1.0
    (wide,) = emitted
    origins = [_converted_from(module, computation, calls, inst, k) for k in part]
    promoted = "promoted" in (inst.attr("to_apply") or "")  # what XLA's AllReducePromotion names the reducer
    if len(set(origins)) == 1:
        narrow = _narrower_dtype(
            module, wide, origins[0], _dtypes_read_as(module, computation, inst, inst), promoted
        )
        return narrow, (element_bits(wide) or 1) / (element_bits(narrow or wide) or 1)
    asked, names = 0.0, set()
    for k, shape, origin in zip(part, shapes, origins, strict=True):
        # Of several, an instruction takes each result out.
        results = users_of_result(computation, inst, k)
        after = {d for r in results for d in _dtypes_read_as(module, computation, inst, r)}
        narrow = _narrower_dtype(module, wide, origin, after, promoted)
        names |= {narrow} - {""}
        asked += shape.elements * (element_bits(narrow or wide) or 8) / 8
    return (min(names), sum(s.bytes for s in shapes) / asked) if names and asked else ("", 1.0)


def _narrower_dtype(module: Module, wide: str, origin: str, after: set[str], promoted: bool) -> str:
    """The type behind one operand of a collective in type `wide`; empty when it is that.

    `origin` is the type that it was converted from, `after` those that its readers convert it to first, and an empty
    name for readers that do not.
    """
    if wide in _NARROW_FLOATS and origin == "f32":
        return "f32"
    fits = _PROMOTED_FROM[wide].fullmatch
    narrow = {d for d in after if fits(d)}
    if promoted:
        return min(narrow | ({origin} if fits(origin) else set()), default="bf16" if wide == "f32" else "")
    if fits(origin):
        return origin if origin in after or not module.tiled else ""
    return min(narrow) if len(after) == 1 and narrow and not module.tiled else ""


def op_names(
    computation: Computation, calls: CallStack, inst: Instruction, part: tuple[int, ...] | None = None
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


def _converted_from(
    module: Module, computation: Computation, calls: CallStack, inst: Instruction, k: int
) -> str:
    """The type that the compiler converted operand `k` of a collective from; empty if it did not."""
    found = resolve(module, computation, calls, inst.operands[k], _FORWARDING_OR_SLICING)
    if found is None or not _is_compiler_convert(module, found[2], inst):
        return ""
    comp, above, convert = found
    source = comp.by_name.get(convert.operands[0])
    dtype = source.shapes[0].dtype if source is not None and source.shapes else ""
    if dtype != "f32":
        return dtype
    origin = resolve(module, comp, above, convert.operands[0], _FORWARDING_OR_SLICING)
    return dtype if origin is not None and origin[2].opcode == "parameter" and not origin[1] else ""


def _is_compiler_convert(module: Module, inst: Instruction, collective: Instruction) -> bool:
    """Whether an instruction is a conversion that the compiler wrote for a collective."""
    if inst.opcode != "convert":
        return False
    if module.tiled:
        return "convert_element_type" not in inst.op_name
    return inst.op_name in ("", collective.op_name)


def _dtypes_read_as(
    module: Module, computation: Computation, collective: Instruction, inst: Instruction
) -> set[str]:
    """The types that the compiler converts a value to before it is read; an empty name where it is read as it is.

    The value is that of `inst`, the collective or what takes one of its results.
    """
    out: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def visit(comp: Computation, name: str) -> None:
        if (comp.name, name) in seen:
            return
        seen.add((comp.name, name))
        users = comp.users.get(name, ())
        if not users or comp.by_name[name].root:
            out.add("")
        for user in users:
            run = called_computation(module, user)
            if user.opcode == "convert":
                out.add(user.shapes[0].dtype if _is_compiler_convert(module, user, collective) else "")
            elif user.opcode in FORWARDING or user.opcode in ("slice", "dynamic-slice", "concatenate"):
                visit(comp, user.name)
            elif run is not None:
                for k, o in enumerate(user.operands):
                    if o == name and k in run.parameters:
                        visit(run, run.parameters[k].name)
            else:
                out.add("")

    visit(computation, inst.name)
    return out
