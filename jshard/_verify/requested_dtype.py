"""What the program requested behind an emitted collective: its type, and the names of combined collectives.

Compilers change types around collectives, and with them the bytes:

- CPU has no bfloat16 and no 8-bit float collectives and widens to float32 and float16;
- GPU promotes sums and extrema of 8- and 16-bit integers to 32 bits;
- TPU multiplies float32 in bfloat16 by default, and gathers a float32 argument that is narrowed already.

The `convert` beside the collective shows it: its other side has the requested type. A conversion that the program wrote
has metadata of its own (on TPU, where others have as well, `convert_element_type`) and does not count. A conversion on
one side suffices, since compilers drop the other where a value is computed or read in the wider type; but not on TPU,
where products narrow what they read. Narrowing is recognized only for arguments: inside the program, TPU computes
bfloat16 in float32, and every result is a conversion.
"""

from __future__ import annotations

import re

from jshard._verify.hlo_dataflow import FORWARDING, Frame, called_computation, resolve, users_of_result
from jshard._verify.hlo_parser import Computation, Instruction, Module, Shape, element_bits


# For each type, the narrower types that a compiler may have promoted to it.
_PROMOTED_FROM = {
    "f32": re.compile(r"bf16|f16|f8\w+"), "f16": re.compile(r"f8\w+"), "bf16": re.compile(r"f8\w+"),
    "s32": re.compile(r"s8|s16"), "u32": re.compile(r"u8|u16"),
}  # fmt: skip
_NARROW_FLOATS = ("bf16", "f16")  # types in which a compiler sends a float32
_FORWARDING_OR_SLICING = FORWARDING | {"slice", "dynamic-slice", "concatenate", "pad"}


def requested_dtype(
    frame: Frame, inst: Instruction, shapes: tuple[Shape, ...], indices: tuple[int, ...]
) -> tuple[str, float]:
    """The type that the program requested, and emitted over requested bytes; `("", 1.0)` if unchanged.

    `shapes` are those of the operands with these `indices`.
    """
    emitted = {s.dtype for s in shapes}
    if len(emitted) != 1 or not emitted & _PROMOTED_FROM.keys():
        return "", 1.0
    (wide,) = emitted
    origins = [_converted_from(frame, inst, k) for k in indices]
    promoted = _promoted_by_name_only(frame, inst, wide)
    # One part, or parts that are no operands of their own.
    whole = len(indices) == 1 or len(indices) != len(shapes)
    if len(set(origins)) == 1 and (origins[0] or whole):
        narrow = _narrower_dtype(frame.module, wide, origins[0], _dtypes_read_as(frame, inst, inst), promoted)
        return narrow, (element_bits(wide) or 1) / (element_bits(narrow or wide) or 1)
    requested, names = 0.0, set()
    for k, shape, origin in zip(indices, shapes, origins, strict=True):
        narrow = _narrower_dtype(frame.module, wide, origin, _part_read_as(frame, inst, k), promoted)
        names |= {narrow} - {""}
        requested += shape.elements * (element_bits(narrow or wide) or 8) / 8
    return (min(names), sum(s.bytes for s in shapes) / requested) if names and requested else ("", 1.0)


def _promoted_by_name_only(frame: Frame, inst: Instruction, wide: str) -> bool:
    """Whether the reducer alone, named by XLA's AllReducePromotion, says that type `wide` is not the requested one.

    The parts of a combined collective have one reducer. If the conversions of one part explain its name, the name says
    nothing of the others.
    """
    if "promoted" not in (inst.attr("to_apply") or ""):
        return False
    parts = range(len(inst.operands)) if len(inst.operands) > 1 else ()
    return not any(
        _narrower_dtype(
            frame.module, wide, _converted_from(frame, inst, k), _part_read_as(frame, inst, k), promoted=False
        )
        for k in parts
    )


def _part_read_as(frame: Frame, inst: Instruction, k: int) -> set[str]:
    """`_dtypes_read_as` of the users of result `k` of a collective."""
    return {d for r in users_of_result(frame.computation, inst, k) for d in _dtypes_read_as(frame, inst, r)}


def _narrower_dtype(module: Module, wide: str, origin: str, after: set[str], promoted: bool) -> str:
    """The type behind one operand of a collective in type `wide`; empty if it is that type.

    `origin` is the type that it was converted from, `after` the types that its users first convert it to, with an empty
    name for users that do not.
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


def op_names(frame: Frame, inst: Instruction, indices: tuple[int, ...] | None = None) -> str:
    """Metadata of a collective; if several were combined into one, those of its parts, joined by `;`.

    `indices` limit them to some of the results, if those have names of their own; if not, and the whole is named after
    one of the other results, these have no name. The GPU compiler combines all-reduces
    into one of a concatenation and keeps no name at all. The names of its operands and users would be those of other
    operators, so it stays without.
    """
    names = [inst.op_name]
    if not inst.op_name:
        callers = [call for _, call in frame.callers[::-1] if call.opcode not in ("while", "conditional")]
        names += [call.op_name for call in callers[:1]]
    users = frame.computation.users
    ends = [inst, *(u for u in users.get(inst.name, ()) if u.opcode.endswith("-done"))]
    elements = [u for e in ends for u in users.get(e.name, ()) if u.opcode == "get-tuple-element"]
    named = [(u.op_name, indices is None or int(u.attr("index") or 0) in indices) for u in elements]
    own = [name for name, is_own in named if is_own]
    of_others = {name for name, is_own in named if name and not is_own}
    if indices is not None and (any(own) or inst.op_name in of_others):
        names = own
    else:
        names += own
    return ";".join(dict.fromkeys(n for n in names if n))


def _converted_from(frame: Frame, inst: Instruction, k: int) -> str:
    """The type that the compiler converted operand `k` of a collective from; empty if it did not."""
    converted = resolve(frame, inst.operands[k], _FORWARDING_OR_SLICING)
    if converted is None or not _is_compiler_convert(frame, converted[1], inst):
        return ""
    place, convert = converted
    source = place.computation.by_name.get(convert.operands[0])
    dtype = source.shapes[0].dtype if source is not None and source.shapes else ""
    if dtype != "f32":
        return dtype
    origin = resolve(place, convert.operands[0], _FORWARDING_OR_SLICING)
    return dtype if origin is not None and origin[1].opcode == "parameter" and not origin[0].callers else ""


def _is_compiler_convert(frame: Frame, inst: Instruction, collective: Instruction) -> bool:
    """Whether an instruction is a conversion that the compiler wrote for a collective, or for a part of a combined one.

    `frame`: of the collective.
    """
    if inst.opcode != "convert":
        return False
    if frame.module.tiled:
        return "convert_element_type" not in inst.op_name
    return inst.op_name in ("", collective.op_name, *op_names(frame, collective).split(";"))


def _dtypes_read_as(frame: Frame, collective: Instruction, inst: Instruction) -> set[str]:
    """The types that the compiler converts a value to before it is used; an empty name where it is used unconverted.

    The value is that of `inst`: the collective, or an instruction that takes one of its results.
    """
    module = frame.module
    out: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def visit(computation: Computation, name: str) -> None:
        if (computation.name, name) in seen:
            return
        seen.add((computation.name, name))
        users = computation.users.get(name, ())
        if not users or computation.by_name[name].root:
            out.add("")
        for user in users:
            inner = called_computation(module, user)
            if user.opcode == "convert":
                out.add(user.shapes[0].dtype if _is_compiler_convert(frame, user, collective) else "")
            elif user.opcode in FORWARDING or user.opcode in ("slice", "dynamic-slice", "concatenate"):
                visit(computation, user.name)
            elif inner is not None:
                for k, o in enumerate(user.operands):
                    if o == name and k in inner.parameters:
                        visit(inner, inner.parameters[k].name)
            else:
                out.add("")

    visit(frame.computation, inst.name)
    return out
