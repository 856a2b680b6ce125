"""What a rewritten collective amounts to.

The compilers' rewrites, each seen in the text of a real compiler:

- `all-reduce` whose every reader takes the slice of its own device: a reduce-scatter. Where the slice has
  one n-th of the elements and its offset comes from `partition-id`.
- `all-reduce` of zeros with the device's own block written in: an all-gather.
- on TPU that pair may pad first (8192 rows to 8512) and then pass the edges on by `collective-permute`: the
  program asked for neither.
- on TPU one collective may be spread over several fusions with the same `chain_id`: it starts once.
- `collective-permute` of a block in a loop: the block is passed on unchanged (all-gather) or is an
  accumulator (reduce-scatter). JAX's own `ppermute` is left as it is.

>>> from jshard._verify.hlo_parser import parse
>>> m = parse('''
... HloModule jit_f, num_partitions=4
... ENTRY %main (p: f32[16]) -> f32[4] {
...   %p = f32[16] parameter(0)
...   %ar = f32[16] all-reduce(%p), replica_groups={}
...   %id = u32[] partition-id()
...   %four = u32[] constant(4)
...   %at = u32[] multiply(%id, %four)
...   ROOT %ds = f32[4] dynamic-slice(%ar, %at), dynamic_slice_sizes={4}
... }''')
>>> main = m.computations["main"]
>>> meaning(m, main, (), main.by_name["ar"], "all_reduce", 64, 4)
Meaning(kind='reduce_scatter', operand=64, form='all-reduce + slice', asked=0.5, moves='all_reduce')
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jshard._verify import megascale_transfers
from jshard._verify.hlo_dataflow import (
    FORWARDING,
    CallStack,
    called_computation,
    depends_on_device,
    resolve,
    users_of_result,
    users_through,
)
from jshard._verify.hlo_parser import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class RecognizedCollective:
    """What a collective amounts to.

    `operand` is its local bytes, `form` how it is written when that is not the plain collective, `asked` the
    part of the bytes that the program asked for. `moves` is the kind whose formula gives the bytes on the
    wire, when that is not `kind`: a step of a ring moves like a permute, an all-reduce that is only sliced
    like an all-reduce, twice what a reduce-scatter would.
    """

    kind: str
    operand_bytes: float
    form: str = ""
    requested_fraction: float = 1.0
    wire_kind: str = ""


def recognize(
    module: Module,
    computation: Computation,
    calls: CallStack,
    inst: Instruction,
    kind: str,
    operand: float,
    size: int,
    part: tuple[int, ...] = (),
) -> RecognizedCollective:
    """What a collective of `operand` bytes in groups of `size` devices amounts to.

    `part` numbers the operands meant, when several were combined; empty for all.
    """
    operands = [inst.operands[k] for k in part or range(len(inst.operands))]
    if kind == "all_reduce":
        if _is_only_sliced(module, computation, calls, inst, size, part):
            real = _unpadded_fraction(module, computation, calls, operands)
            form = "all-reduce + slice" + (f", padded by {1 / real - 1:.1%}" if real != 1 else "")
            if calls and calls[-1][1].opcode == "fusion":  # TPU runs the pair as one reduce-scatter
                return RecognizedCollective("reduce_scatter", operand, form, real)
            return RecognizedCollective("reduce_scatter", operand, form, real / 2, wire_kind="all_reduce")
        if operands and all(_is_own_block_in_zeros(module, computation, calls, o, size) for o in operands):
            return RecognizedCollective(
                "all_gather", operand, "all-reduce of own block in zeros", 0.5, wire_kind="all_reduce"
            )
    if kind in ("all_gather", "reduce_scatter") and _is_level_of_slice_all_reduce(computation, inst):
        return RecognizedCollective(
            "all_reduce", operand, "level of an all-reduce over slices", wire_kind=kind
        )
    if inst.opcode.startswith("collective-permute") and "ppermute" not in inst.op_name:
        if _is_edge_of_padding(module, computation, calls, inst):
            return RecognizedCollective(kind, operand, "edge of a padded reduce-scatter", 0.0)
        ring = _ring_collective(module, computation, calls, inst)
        if ring:
            return RecognizedCollective(ring, operand, "a step of a ring of permutes", wire_kind="permute")
    return RecognizedCollective(kind, operand)


def split_combined(
    module: Module, computation: Computation, calls: CallStack, inst: Instruction, size: int
) -> list[tuple[int, ...]]:
    """Operands of a combined all-reduce, apart: those that are only sliced afterwards, and the others."""
    every = tuple(range(len(inst.operands)))
    if len(every) < 2 or not inst.opcode.startswith("all-reduce"):
        return [every]
    sliced = tuple(k for k in every if _is_only_sliced(module, computation, calls, inst, size, (k,)))
    return [p for p in (sliced, tuple(k for k in every if k not in sliced)) if p]


def _is_level_of_slice_all_reduce(computation: Computation, inst: Instruction) -> bool:
    """Whether a reduce-scatter goes into, or an all-gather comes out of, an all-reduce between slices."""
    ends = users_through(computation, inst.name, FORWARDING)
    source = computation.by_name.get(inst.operands[0])
    while source is not None and source.opcode in FORWARDING | {"recv-done"} and source.operands:
        source = computation.by_name.get(source.operands[0])
    if inst.opcode.startswith("all-gather"):
        ends = [source] if source is not None and source.opcode == "recv" else []
    return any(megascale_transfers.transfer_type(e) == "ALL_REDUCE" for e in ends)


def _unpadded_fraction(
    module: Module, computation: Computation, calls: CallStack, operands: Sequence[str]
) -> float:
    """The part of an all-reduce's elements that is not padding."""
    whole = real = 0
    for name in operands:
        found = resolve(module, computation, calls, name, FORWARDING | {"convert"})
        shapes = computation.by_name[name].shapes if name in computation.by_name else ()
        elements = sum(s.elements for s in shapes)
        whole += elements
        if found is not None and found[2].opcode == "pad":
            source = found[0].by_name.get(found[2].operands[0])
            elements = min(elements, source.shapes[0].elements) if source is not None else elements
        real += elements
    return real / whole if whole else 1.0


def _is_edge_of_padding(
    module: Module, computation: Computation, calls: CallStack, inst: Instruction
) -> bool:
    """Whether a permute passes on rows that padding pushed to the next device of a reduce-scatter."""
    if inst.op_name or not inst.operands:
        return False
    through = FORWARDING | {"slice", "slice-start", "slice-done", "concatenate"}
    found = resolve(module, computation, calls, inst.operands[0], through)
    if found is None or found[2].opcode != "dynamic-slice":
        return False
    comp, above, slice_ = found
    reduced = comp.by_name.get(slice_.operands[0])
    if reduced is None or reduced.opcode != "all-reduce":
        return False
    return _unpadded_fraction(module, comp, above, reduced.operands) < 1


def started_chains(module: Module) -> frozenset[str]:
    """Numbers of the TPU async-collective chains whose start is in the text."""
    out = set()
    for computation in module.computations.values():
        for inst in computation.instructions:
            if inst.opcode == "custom-call" and '"AsyncCollectiveStart"' in inst.attrs:
                out |= {_chain_id(computation.by_name.get(o)) for o in inst.operands}
    return frozenset(out - {""})


def is_continuation(computation: Computation, inst: Instruction, chains: frozenset[str]) -> bool:
    """Whether a collective only goes on with, or ends, what another fusion of its chain started."""
    if _chain_id(inst) not in chains:
        return False
    users = computation.users.get(inst.name, ())
    return not any('"AsyncCollectiveStart"' in u.attrs for u in users if u.opcode == "custom-call")


def _chain_id(inst: Instruction | None) -> str:
    m = re.search(r'chain_id="(\d+)"', inst.attrs) if inst is not None else None
    return m[1] if m else ""


def _is_only_sliced(
    module: Module,
    computation: Computation,
    calls: CallStack,
    inst: Instruction,
    size: int,
    part: tuple[int, ...] = (),
) -> bool:
    """Whether every reader of a result takes one `size`-th of it, at a place that depends on the device."""

    def visit(comp: Computation, above: CallStack, name: str) -> bool:
        users = comp.users.get(name, ())
        return bool(users) and all(reads_slice(comp, above, name, u) for u in users)

    def reads_slice(comp: Computation, above: CallStack, name: str, user: Instruction) -> bool:
        if user.opcode in FORWARDING or user.opcode == "convert":
            return visit(comp, above, user.name)
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            whole = comp.by_name[name].shapes[0].elements
            return user.shapes[0].elements * size == whole and any(
                depends_on_device(module, comp, above, o) for o in user.operands[1:]
            )
        run = called_computation(module, user)
        if run is None:
            return False
        return all(
            k in run.parameters and visit(run, (*above, (comp, user)), run.parameters[k].name)
            for k, o in enumerate(user.operands)
            if o == name
        )

    if not part or len(inst.operands) == 1:
        return visit(computation, calls, inst.name)
    return all(
        names and all(visit(computation, calls, n) for n in names)
        for names in ([r.name for r in users_of_result(computation, inst, k)] for k in part)
    )


def _is_own_block_in_zeros(
    module: Module, computation: Computation, calls: CallStack, name: str, size: int
) -> bool:
    """Whether a value is zeros with one `size`-th written in at the device's own place."""
    found = resolve(module, computation, calls, name, FORWARDING | {"convert"})
    if found is None or found[2].opcode != "dynamic-update-slice":
        return False
    comp, above, update = found
    block = comp.by_name.get(update.operands[1])
    base = resolve(module, comp, above, update.operands[0], FORWARDING | {"broadcast", "convert"})
    return (
        block is not None
        and block.shapes[0].elements * size == update.shapes[0].elements
        and base is not None
        and base[2].opcode == "constant"
        and base[2].literal.strip("{} ") in ("0", "-0", "")
        and any(depends_on_device(module, comp, above, o) for o in update.operands[2:])
    )


def _ring_collective(module: Module, computation: Computation, calls: CallStack, inst: Instruction) -> str:
    """The collective that a loop of this permute amounts to; empty when it is no such loop."""
    if not calls or calls[-1][1].opcode != "while":
        return ""
    through = FORWARDING | {"collective-permute", "collective-permute-start", "convert"}
    source = computation.by_name.get(inst.operands[0])
    while source is not None and source.opcode in through and source.operands:
        source = computation.by_name.get(source.operands[0])
    if source is None:
        return ""
    if not any(_contains(module, i, ("dot", "convolution")) for i in computation.instructions):
        return ""  # compilers write such loops around products only; this one is the program's own
    readers = users_through(computation, inst.name, through)
    if source.opcode == "parameter" and any(u.root for u in readers):
        return "all_gather"
    return "reduce_scatter" if any(_contains(module, u, ("add",)) for u in (source, *readers)) else ""


def _contains(module: Module, inst: Instruction, opcodes: tuple[str, ...]) -> bool:
    """Whether an instruction is, or a fusion holds, one of some operations."""
    run = called_computation(module, inst)
    return inst.opcode in opcodes or run is not None and any(i.opcode in opcodes for i in run.instructions)
