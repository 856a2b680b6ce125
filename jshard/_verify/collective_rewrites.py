"""Collectives that compilers rewrote, recognized as what they amount to.

The rewrites, each seen in the text of a real compiler:

- an `all-reduce` all of whose users take the slice of their own device: a reduce-scatter. The slice has one n-th of the
  elements, and its offset is computed from `partition-id`.
- an `all-reduce` of zeros with the device's own block written in: an all-gather.
- on TPU such an all-reduce may be padded first (8192 rows to 8512), and the edges then passed on by
  `collective-permute`: the program requested neither.
- on TPU one collective may be spread over several fusions with the same `chain_id`: it starts once.
- a `collective-permute` of a block in a loop: the block is passed on unchanged (all-gather) or is an accumulator
  (reduce-scatter). JAX's own `ppermute` is left as it is, but for the parts of an all-to-all that the lowering sends by
  permutes and names so (`_lower/all_to_all_permutes.py`).

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
>>> found = recognize(Frame(m, main), main.by_name["ar"], "all_reduce", 64, 4)
>>> found.kind, found.form, found.requested_fraction, found.wire_kind
('reduce_scatter', 'all-reduce + slice', 0.5, 'all_reduce')
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jshard._verify import megascale_transfers
from jshard._verify.hlo_dataflow import (
    FORWARDING,
    Frame,
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

    - `kind`: of collective.
    - `operand_bytes`: bytes of the local operands.
    - `form`: how it is written, if that is not the plain collective.
    - `requested_fraction`: the part of the bytes on the wire that the program requested.
    - `wire_kind`: the kind whose formula gives the bytes on the wire, if that is not `kind`. A step of a ring moves as
      much as a permute; an all-reduce that is only sliced moves as much as an all-reduce, twice a reduce-scatter.
    """

    kind: str
    operand_bytes: float
    form: str = ""
    requested_fraction: float = 1.0
    wire_kind: str = ""


def recognize(
    frame: Frame, inst: Instruction, kind: str, operand_bytes: float, size: int, indices: tuple[int, ...] = ()
) -> RecognizedCollective:
    """What a collective amounts to.

    Arguments:

    - `frame`: where the instruction `inst` is.
    - `kind`: the kind that is written.
    - `operand_bytes`: bytes of the local operands.
    - `size`: devices of one group.
    - `indices`: of the operands in question, if several collectives were combined; empty for all.
    """
    operands = [inst.operands[k] for k in indices or range(len(inst.operands))]
    if kind == "all_reduce":
        if _is_only_sliced(frame, inst, size, indices):
            unpadded = _unpadded_fraction(frame, operands)
            form = "all-reduce + slice" + (f", padded by {1 / unpadded - 1:.1%}" if unpadded != 1 else "")
            # TPU runs both as one reduce-scatter.
            if frame.call is not None and frame.call.opcode == "fusion":
                return RecognizedCollective("reduce_scatter", operand_bytes, form, unpadded)
            return RecognizedCollective("reduce_scatter", operand_bytes, form, unpadded / 2, "all_reduce")
        if operands and all(_is_own_block_in_zeros(frame, o, size) for o in operands):
            form = "all-reduce of own block in zeros"
            return RecognizedCollective("all_gather", operand_bytes, form, 0.5, "all_reduce")
    if kind in ("all_gather", "reduce_scatter") and _is_level_of_slice_all_reduce(frame.computation, inst):
        form = "level of an all-reduce over slices"
        return RecognizedCollective("all_reduce", operand_bytes, form, wire_kind=kind)
    if inst.opcode.startswith("collective-permute") and inst.op_name.endswith("/all_to_all/ppermute"):
        return RecognizedCollective("all_to_all", operand_bytes, "a part by a permute", wire_kind="permute")
    if inst.opcode.startswith("collective-permute") and "ppermute" not in inst.op_name:
        if _is_edge_of_padding(frame, inst):
            return RecognizedCollective(kind, operand_bytes, "edge of a padded reduce-scatter", 0.0)
        ring = _ring_collective(frame, inst)
        if ring:
            form = "a step of a ring of permutes"
            return RecognizedCollective(ring, operand_bytes, form, wire_kind="permute")
    return RecognizedCollective(kind, operand_bytes)


def split_combined(frame: Frame, inst: Instruction, size: int) -> list[tuple[int, ...]]:
    """Indices of the operands of a combined all-reduce in two parts: results that are only sliced, and the others."""
    every = tuple(range(len(inst.operands)))
    if len(every) < 2 or not inst.opcode.startswith("all-reduce"):
        return [every]
    sliced = tuple(k for k in every if _is_only_sliced(frame, inst, size, (k,)))
    return [part for part in (sliced, tuple(k for k in every if k not in sliced)) if part]


def started_chains(module: Module) -> frozenset[str]:
    """Numbers of the TPU async-collective chains whose start is in the text."""
    out = set()
    for computation in module.computations.values():
        for inst in computation.instructions:
            if inst.opcode == "custom-call" and '"AsyncCollectiveStart"' in inst.attrs:
                out |= {chain_id(computation.by_name.get(o)) for o in inst.operands}
    return frozenset(out - {""})


def is_continuation(computation: Computation, inst: Instruction, chains: frozenset[str]) -> bool:
    """Whether a collective only goes on with, or ends, what another fusion of its chain started."""
    if chain_id(inst) not in chains:
        return False
    users = computation.users.get(inst.name, ())
    return not any('"AsyncCollectiveStart"' in u.attrs for u in users if u.opcode == "custom-call")


def chain_id(inst: Instruction | None) -> str:
    """The number of the TPU async-collective chain that a collective belongs to; empty without one."""
    m = re.search(r'chain_id="(\d+)"', inst.attrs) if inst is not None else None
    return m[1] if m else ""


def _is_level_of_slice_all_reduce(computation: Computation, inst: Instruction) -> bool:
    """Whether a reduce-scatter feeds, or an all-gather follows, an all-reduce between TPU slices."""
    ends = users_through(computation, inst.name, FORWARDING)
    source = computation.by_name.get(inst.operands[0])
    while source is not None and source.opcode in FORWARDING | {"recv-done"} and source.operands:
        source = computation.by_name.get(source.operands[0])
    if inst.opcode.startswith("all-gather"):
        ends = [source] if source is not None and source.opcode == "recv" else []
    return any(megascale_transfers.transfer_type(e) == "ALL_REDUCE" for e in ends)


def _unpadded_fraction(frame: Frame, operands: Sequence[str]) -> float:
    """The part of an all-reduce's elements that is not padding."""
    by_name = frame.computation.by_name
    total = unpadded = 0
    for name in operands:
        elements = sum(s.elements for s in by_name[name].shapes) if name in by_name else 0
        total += elements
        origin = resolve(frame, name, FORWARDING | {"convert"})
        if origin is not None and origin[1].opcode == "pad":
            source = origin[0].computation.by_name.get(origin[1].operands[0])
            elements = min(elements, source.shapes[0].elements) if source is not None else elements
        unpadded += elements
    return unpadded / total if total else 1.0


def _is_edge_of_padding(frame: Frame, inst: Instruction) -> bool:
    """Whether a permute passes on rows that padding shifted to the next device of a reduce-scatter."""
    if inst.op_name or not inst.operands:
        return False
    through = FORWARDING | {"slice", "slice-start", "slice-done", "concatenate"}
    origin = resolve(frame, inst.operands[0], through)
    if origin is None or origin[1].opcode != "dynamic-slice":
        return False
    place, slice_ = origin
    reduced = place.computation.by_name.get(slice_.operands[0])
    if reduced is None or reduced.opcode != "all-reduce":
        return False
    return _unpadded_fraction(place, reduced.operands) < 1


def _is_only_sliced(frame: Frame, inst: Instruction, size: int, indices: tuple[int, ...] = ()) -> bool:
    """Whether every user of a result takes one `size`-th of it, at an offset that depends on the device."""

    def only_sliced(frame: Frame, name: str) -> bool:
        users = frame.computation.users.get(name, ())
        return bool(users) and all(takes_slice(frame, name, u) for u in users)

    def takes_slice(frame: Frame, name: str, user: Instruction) -> bool:
        if user.opcode in FORWARDING or user.opcode == "convert":
            return only_sliced(frame, user.name)
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            elements = frame.computation.by_name[name].shapes[0].elements
            return user.shapes[0].elements * size == elements and any(
                depends_on_device(frame, o) for o in user.operands[1:]
            )
        inner = frame.called(user)
        if inner is None:
            return False
        parameters = inner.computation.parameters
        positions = [k for k, o in enumerate(user.operands) if o == name]
        return all(k in parameters and only_sliced(inner, parameters[k].name) for k in positions)

    if not indices or len(inst.operands) == 1:
        return only_sliced(frame, inst.name)
    results = [users_of_result(frame.computation, inst, k) for k in indices]
    return all(elements and all(only_sliced(frame, e.name) for e in elements) for elements in results)


def _is_own_block_in_zeros(frame: Frame, name: str, size: int) -> bool:
    """Whether a value is zeros with one `size`-th written in, at an offset that depends on the device."""
    origin = resolve(frame, name, FORWARDING | {"convert"})
    if origin is None or origin[1].opcode != "dynamic-update-slice":
        return False
    place, update = origin
    block = place.computation.by_name.get(update.operands[1])
    base = resolve(place, update.operands[0], FORWARDING | {"broadcast", "convert"})
    return (
        block is not None
        and block.shapes[0].elements * size == update.shapes[0].elements
        and base is not None
        and base[1].opcode == "constant"
        and base[1].literal.strip("{} ") in ("0", "-0", "")
        and any(depends_on_device(place, o) for o in update.operands[2:])
    )


def _ring_collective(frame: Frame, inst: Instruction) -> str:
    """The collective that a loop of this permute amounts to; empty if it is no such loop."""
    if frame.call is None or frame.call.opcode != "while":
        return ""
    computation = frame.computation
    through = FORWARDING | {"collective-permute", "collective-permute-start", "convert"}
    source = computation.by_name.get(inst.operands[0])
    while source is not None and source.opcode in through and source.operands:
        source = computation.by_name.get(source.operands[0])
    if source is None:
        return ""
    if not any(_contains(frame.module, i, ("dot", "convolution")) for i in computation.instructions):
        return ""  # compilers write such loops only around products; this one is the program's own
    users = users_through(computation, inst.name, through)
    if source.opcode == "parameter" and any(u.root for u in users):
        return "all_gather"
    return "reduce_scatter" if any(_contains(frame.module, u, ("add",)) for u in (source, *users)) else ""


def _contains(module: Module, inst: Instruction, opcodes: tuple[str, ...]) -> bool:
    """Whether an instruction is one of these operations, or a fusion that contains one."""
    inner = called_computation(module, inst)
    return (
        inst.opcode in opcodes or inner is not None and any(i.opcode in opcodes for i in inner.instructions)
    )
