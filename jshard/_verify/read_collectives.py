"""Reading a compiled program: the collectives it executes, its FLOPs and its peak memory.

The reader walks from the entry through loops, calls, branches and fusions and counts how often each computation runs.
The bytes of a collective follow from its operands and its group. `-start` and `-done` are one collective, and so are the
pieces of a TPU async-collective fusion. Compilers rewrite collectives; a form that amounts to another kind counts as that
kind (`collective_rewrites.py`).

>>> text = '''HloModule jit_f, num_partitions=4
... ENTRY %main (p: f32[4,8]) -> f32[16,8] {
...   %p = f32[4,8]{1,0} parameter(0)
...   ROOT %ag = f32[16,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
... }'''
>>> print(read_program(text))
jit_f on 4 devices: 384 B per device
  all_gather of f32[4,8] over 4: 384 B; ag, line 4
"""

from __future__ import annotations

import dataclasses

import jax

from jshard._verify.collective_rewrites import is_continuation, recognize, split_combined, started_chains
from jshard._verify.emitted import Emitted, EmittedProgram, wire_bytes
from jshard._verify.hlo_dataflow import Frame
from jshard._verify.hlo_flops import cycles, flops
from jshard._verify.hlo_parser import COLLECTIVE_KINDS, Computation, Instruction, Module, Shape, parse
from jshard._verify.hlo_trip_counts import trip_count
from jshard._verify.megascale_transfers import MegascaleTransfer, parse_transfer
from jshard._verify.replica_groups import largest_component, read_groups, read_pairs
from jshard._verify.requested_dtype import op_names, requested_dtype
from jshard._verify.scheduled_steps import read_schedule


@dataclasses.dataclass(frozen=True)
class _WalkContext:
    """A computation during the walk: its frame and how often it runs."""

    frame: Frame
    executions: int
    conditional: bool = False
    in_open_loop: bool = False  # in a loop whose trip count is not known

    def inside(
        self,
        computation: Computation,
        call: Instruction,
        executions: int,
        *,
        conditional: bool = False,
        open_loop: bool = False,
    ) -> _WalkContext:
        """The context of a computation that `call`, an instruction of this one, runs so many times."""
        return _WalkContext(
            self.frame.inside(computation, call),
            self.executions * executions,
            self.conditional or conditional,
            self.in_open_loop or open_loop,
        )


@dataclasses.dataclass
class _Accumulator:
    """The results of the walk."""

    collectives: list[Emitted]
    unread: list[str]
    open_loops: list[str] = dataclasses.field(default_factory=list)
    chains: frozenset[str] = frozenset()  # TPU async fusions whose start is in the text
    flops: float = 0.0
    cycles: float = 0.0
    slices: int = 1
    reached: set[str] = dataclasses.field(default_factory=set)  # names of the computations that run


def read_program(program: jax.stages.Compiled | str) -> EmittedProgram:
    """The collectives, FLOPs and peak memory of a compiled program.

    Arguments:

    - `program`: HLO text, or a compiled object with `as_text()` (`jax.jit(f).lower(...).compile()`).

    Nothing raises for text that cannot be read: it is listed in `unread`.
    """
    text = program if isinstance(program, str) else program.as_text()
    module = parse(text or "")
    out = _Accumulator([], list(module.unread), chains=started_chains(module))
    entry = module.computations.get(module.entry)
    if entry is not None:
        _walk(_WalkContext(Frame(module, entry), 1), out)
        out.unread += _unreached_collectives(module, out.reached)
    inputs = tuple(str(s) for _, p in sorted(entry.parameters.items()) for s in p.shapes) if entry else ()
    return EmittedProgram(
        tuple(out.collectives),
        flops=out.flops if module.entry else None,
        peak_bytes=None if isinstance(program, str) else _peak(program),
        estimated_cycles=out.cycles or None,
        unread=tuple(out.unread),
        partitions=module.partitions * module.replicas * out.slices,
        inputs=inputs,
        name=module.name,
        open_loops=tuple(out.open_loops),
        schedule=read_schedule(module) if entry is not None else None,
    )


def _peak(compiled: jax.stages.Compiled) -> int | None:
    """Peak bytes by the compiler's own account; arguments + results + temporaries where it keeps none."""
    try:
        stats = compiled.memory_analysis()
    except Exception:  # a backend without the analysis raises its own kinds of errors
        return None
    peak = getattr(stats, "peak_memory_in_bytes", 0) or 0
    if peak:
        return int(peak)
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    total = sum(getattr(stats, p, 0) or 0 for p in parts) - (getattr(stats, "alias_size_in_bytes", 0) or 0)
    return int(total) or None


def _walk(context: _WalkContext, out: _Accumulator, fused: bool = False) -> None:
    """Read a computation and those that it runs; `fused`: its cycles are those of the fusion that runs it."""
    module, computation = context.frame.module, context.frame.computation
    out.reached.add(computation.name)
    for inst in computation.instructions:
        out.flops += context.executions * flops(inst, computation)
        if not fused:
            out.cycles += context.executions * cycles(inst)
        if inst.opcode.removesuffix("-start") in COLLECTIVE_KINDS:
            _read_collective(context, inst, out)
        elif inst.opcode.endswith("-done") or inst.opcode == "async-update":
            continue  # its start was read
        elif inst.opcode == "send":
            _read_send(context, inst, out)
        elif inst.opcode == "while":
            _walk_loop(context, inst, out)
        else:
            for name in inst.called:
                inner = module.computations.get(name)
                if inner is None:
                    out.unread.append(f"line {inst.line}: computation {name} is not in the text")
                elif inner not in (c for c, _ in context.frame.callers):
                    branch = inst.opcode == "conditional"
                    _walk(
                        context.inside(inner, inst, 1, conditional=branch),
                        out,
                        fused or inst.opcode == "fusion",
                    )


def _walk_loop(context: _WalkContext, inst: Instruction, out: _Accumulator) -> None:
    frame = context.frame
    body, condition = (
        frame.module.computations.get((inst.attr(key) or "").lstrip("%")) for key in ("body", "condition")
    )
    if body is None or condition is None:
        out.unread.append(f"line {inst.line}: body or condition of the loop {inst.name} is not in the text")
        return
    trips = trip_count(frame.module, frame.computation, inst)
    before, unknown = len(out.collectives), trips is None
    bodies, tests = (1, 1) if trips is None else (trips, trips + 1)
    _walk(context.inside(body, inst, bodies, open_loop=unknown), out)
    _walk(context.inside(condition, inst, tests, open_loop=unknown), out)
    if unknown and len(out.collectives) > before:
        out.open_loops.append(f"line {inst.line}: trip count of the loop {inst.name} is not known")


def _unreached_collectives(module: Module, reached: set[str]) -> list[str]:
    """Collectives in computations that nothing runs: some call must have a form that is not known."""
    return [
        f"line {inst.line}: {inst.opcode} {inst.name} is in {name}, which nothing that was read runs"
        for name, computation in module.computations.items()
        if name not in reached
        for inst in computation.instructions
        if inst.opcode.removesuffix("-start") in COLLECTIVE_KINDS
    ]


def _operand_shapes(computation: Computation, inst: Instruction) -> list[tuple[Shape, ...]] | None:
    """The shapes of each operand; None if one is not in the text."""
    sources = [computation.by_name.get(name) for name in inst.operands]
    return [s.shapes for s in sources if s is not None] if all(sources) and sources else None


def _read_collective(context: _WalkContext, inst: Instruction, out: _Accumulator) -> None:
    frame, opcode = context.frame, inst.opcode.removesuffix("-start")
    if is_continuation(frame.computation, inst, out.chains):
        return
    operands = _operand_shapes(frame.computation, inst)
    if operands is None:
        out.unread.append(f"line {inst.line}: operands of {inst.name} are not in the text")
        return
    if opcode == "ragged-all-to-all" or opcode == "collective-permute" and inst.attr("slice_sizes"):
        operands = operands[:1]  # the rest are the output buffer and offsets
    try:
        text, size = _group(inst, opcode, frame.module.partitions * frame.module.replicas)
    except ValueError as error:
        out.unread.append(f"line {inst.line}: {error}")
        return
    if size <= 1:
        return  # a group of one device moves nothing
    for indices in split_combined(frame, inst, size):
        shapes = tuple(s for k in indices if k < len(operands) for s in operands[k])
        out.collectives.append(_emitted(context, inst, COLLECTIVE_KINDS[opcode], size, text, shapes, indices))


def _group(inst: Instruction, opcode: str, devices: int) -> tuple[str, int]:
    """The groups of a collective as written, and the number of devices of one group."""
    if opcode == "collective-permute":
        text = inst.attr("source_target_pairs") or ""
        return text, largest_component(tuple((a, b) for a, b in read_pairs(text) if a != b))
    text = inst.attr("replica_groups") or "{}"
    return text, max((len(g) for g in read_groups(text, devices)), default=1)


def _emitted(
    context: _WalkContext,
    inst: Instruction,
    kind: str,
    size: int,
    groups: str,
    shapes: tuple[Shape, ...],
    indices: tuple[int, ...],
) -> Emitted:
    """One collective, or the part of a combined one with the operands `indices`, with its bytes."""
    frame = context.frame
    found = recognize(frame, inst, kind, sum(s.bytes for s in shapes), size, indices)
    dtype, widening = requested_dtype(frame, inst, shapes, indices)
    bytes_ = wire_bytes(found.wire_kind or found.kind, found.operand_bytes, size)
    requested = bytes_ * found.requested_fraction / widening
    rewritten = found.kind != kind
    unpadded = found.requested_fraction * (2 if found.wire_kind == "all_reduce" else 1)
    return Emitted(
        found.kind,
        bytes_,
        size,
        groups,
        count=context.executions,
        shape=", ".join(map(str, shapes)),
        op_name=op_names(frame, inst, None if len(indices) == len(inst.operands) else indices),
        source=frame.module.source(inst),
        line=inst.line,
        name=inst.name,
        requested_dtype=dtype,
        requested_bytes=None if requested == bytes_ else requested,
        form=found.form,
        conditional=context.conditional,
        in_open_loop=context.in_open_loop,
        written_kind=kind if rewritten else "",
        written_bytes=wire_bytes(kind, found.operand_bytes, size) * unpadded / widening if rewritten else 0.0,
    )


def _read_send(context: _WalkContext, inst: Instruction, out: _Accumulator) -> None:
    """A transfer between TPU slices; other transfers between devices count as permutes."""
    computation = context.frame.computation
    transfer = parse_transfer(inst, computation)
    if transfer is None:
        if "is_host_transfer=true" in inst.attrs:
            return  # to the host: outfeeds, callbacks
        shapes = _operand_shapes(computation, inst) or []
        transfer = MegascaleTransfer("permute", sum(s.bytes for leaves in shapes for s in leaves), 2, 1, "")
    out.slices = max(out.slices, transfer.num_slices)
    if transfer.group_size <= 1:
        return
    out.collectives.append(
        Emitted(
            transfer.kind,
            wire_bytes(transfer.kind, transfer.operand_bytes, transfer.group_size),
            transfer.group_size,
            transfer.target,
            count=context.executions,
            shape=str(inst.shapes[0]) if inst.shapes else "",
            op_name=inst.op_name,
            line=inst.line,
            name=inst.name,
            form="between slices" if transfer.num_slices > 1 else "send",
            conditional=context.conditional,
            in_open_loop=context.in_open_loop,
        )
    )
