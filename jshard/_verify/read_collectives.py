"""The reader: from a compiled program to what it moves, computes and holds.

Idea: walk from the entry through loops, calls, branches and fusions, carrying how often each computation
runs. Every collective's bytes follow from its operand and its group. Compilers rewrite collectives; a form
that amounts to another one is named by what it amounts to:

- an all-reduce of which every device reads only its own slice is a reduce-scatter;
- an all-reduce of zeros with the device's own block written in is an all-gather;
- a loop of permutes that passes blocks around a ring is an all-gather, one that passes an accumulator is a
  reduce-scatter; permutes that the program itself asked for (`ppermute`) stay permutes;
- `-start` and `-done` are one, and so are the pieces of a TPU async-collective fusion.

>>> text = '''HloModule jit_f, num_partitions=4
... ENTRY %main (p: f32[4,8]) -> f32[16,8] {
...   %p = f32[4,8]{1,0} parameter(0)
...   ROOT %ag = f32[16,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
... }'''
>>> print(read(text))
jit_f on 4 devices: 384 B per device
  all_gather of f32[4,8] over 4: 384 B; ag, line 4
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jshard._verify import (
    collective_rewrites,
    hlo_flops,
    hlo_trip_counts,
    megascale_transfers,
    replica_groups,
    requested_dtype,
)
from jshard._verify.emitted import Emitted, EmittedProgram, wire_bytes
from jshard._verify.hlo_parser import Computation, Instruction, Module, Shape, parse


_KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}


@dataclasses.dataclass(frozen=True)
class _WalkContext:
    """Where the walk is: a computation, how often it runs, and the calls that led to it, outermost first."""

    computation: Computation
    executions: int
    calls: tuple[tuple[Computation, Instruction], ...] = ()
    conditional: bool = False
    in_open_loop: bool = False  # in a loop whose trip count is not known

    def enter(
        self,
        computation: Computation,
        call: Instruction,
        times: int,
        branch: bool = False,
        turn: bool = False,
    ) -> _WalkContext:
        """The place of a computation that `call`, an instruction here, runs `times` times."""
        return _WalkContext(
            computation,
            self.executions * times,
            (*self.calls, (self.computation, call)),
            self.conditional or branch,
            self.in_open_loop or turn,
        )


@dataclasses.dataclass
class _Accumulator:
    """What the walk collects."""

    collectives: list[Emitted]
    unread: list[str]
    open_loops: list[str] = dataclasses.field(default_factory=list)
    chains: frozenset[str] = frozenset()  # TPU async fusions whose start is in the text
    flops: float = 0.0
    cycles: float = 0.0
    slices: int = 1
    seen: set[str] = dataclasses.field(default_factory=set)  # computations that run


def read_program(program: Any) -> EmittedProgram:
    """What a compiled program moves, computes and holds.

    Args:
      program: HLO text, or a compiled object with `as_text()` (`jax.jit(f).lower(...).compile()`).

    Returns:
      An `EmittedProgram`. Nothing raises for text that cannot be read: it is listed in `unread`.
    """
    text = program if isinstance(program, str) else program.as_text()
    module = parse(text or "")
    found = _Accumulator([], list(module.unread), chains=collective_rewrites.started_chains(module))
    if module.entry:
        _walk(module, _WalkContext(module.computations[module.entry], 1), found)
        found.unread += _unreached_collectives(module, found.seen)
    peak = None if isinstance(program, str) else _peak(program)
    entry = module.computations.get(module.entry)
    inputs = tuple(str(s) for _, p in sorted(entry.parameters.items()) for s in p.shapes) if entry else ()
    return EmittedProgram(
        tuple(found.collectives),
        found.flops if module.entry else None,
        peak,
        found.cycles or None,
        tuple(found.unread),
        module.partitions * module.replicas * found.slices,
        inputs,
        module.name,
        tuple(found.open_loops),
    )


def _peak(compiled: Any) -> int | None:
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


def _walk(module: Module, place: _WalkContext, found: _Accumulator, fused: bool = False) -> None:
    found.seen.add(place.computation.name)
    for inst in place.computation.instructions:
        found.flops += place.executions * hlo_flops.flops(inst, place.computation)
        if not fused:
            found.cycles += place.executions * hlo_flops.cycles(inst)
        base = inst.opcode.removesuffix("-start")
        if base in _KINDS:
            _read_collective(module, place, inst, base, found)
            continue
        if inst.opcode.endswith("-done") or inst.opcode == "async-update":
            continue  # its start was read
        if inst.opcode == "send":
            _read_send(place, inst, found)
        elif inst.opcode == "while":
            _walk_loop(module, place, inst, found)
        else:
            for name in inst.called:
                inner = module.computations.get(name)
                if inner is None:
                    found.unread.append(f"line {inst.line}: computation {name} is not in the text")
                elif inner not in (c for c, _ in place.calls):
                    there = place.enter(inner, inst, 1, inst.opcode == "conditional")
                    _walk(module, there, found, fused or inst.opcode == "fusion")


def _walk_loop(module: Module, place: _WalkContext, inst: Instruction, found: _Accumulator) -> None:
    names = {key: (inst.attr(key) or "").lstrip("%") for key in ("body", "condition")}
    inner = {key: module.computations.get(name) for key, name in names.items()}
    body, condition = inner["body"], inner["condition"]
    if body is None or condition is None:
        found.unread.append(f"line {inst.line}: body or condition of the loop {inst.name} is not in the text")
        return
    trips = hlo_trip_counts.trip_count(module, place.computation, inst)
    before = len(found.collectives)
    unknown = trips is None
    turns, tests = (1, 1) if trips is None else (trips, trips + 1)
    _walk(module, place.enter(body, inst, turns, turn=unknown), found)
    _walk(module, place.enter(condition, inst, tests, turn=unknown), found)
    if unknown and len(found.collectives) > before:
        found.open_loops.append(f"line {inst.line}: trip count of the loop {inst.name} is not known")


def _unreached_collectives(module: Module, seen: set[str]) -> list[str]:
    """Collectives in computations that nothing runs: somewhere is a call in a form we do not know."""
    return [
        f"line {inst.line}: {inst.opcode} {inst.name} is in {name}, which nothing that was read runs"
        for name, computation in module.computations.items()
        if name not in seen
        for inst in computation.instructions
        if inst.opcode.removesuffix("-start") in _KINDS
    ]


def _operand_shapes(place: _WalkContext, inst: Instruction) -> list[tuple[Shape, ...]] | None:
    """Shapes of each operand; None when one is not in the text."""
    sources = [place.computation.by_name.get(name) for name in inst.operands]
    return [s.shapes for s in sources if s is not None] if all(sources) and sources else None


def _read_collective(
    module: Module, place: _WalkContext, inst: Instruction, opcode: str, found: _Accumulator
) -> None:
    if collective_rewrites.is_continuation(place.computation, inst, found.chains):
        return
    operands = _operand_shapes(place, inst)
    if operands is None:
        found.unread.append(f"line {inst.line}: operands of {inst.name} are not in the text")
        return
    if opcode == "ragged-all-to-all" or opcode == "collective-permute" and inst.attr("slice_sizes"):
        operands = operands[:1]  # the rest are the output buffer and offsets
    kind = _KINDS[opcode]
    devices = module.partitions * module.replicas
    try:
        if opcode == "collective-permute":
            text = inst.attr("source_target_pairs") or ""
            pairs = tuple((a, b) for a, b in replica_groups.read_pairs(text) if a != b)
            size = replica_groups.largest_component(pairs)
        else:
            text = inst.attr("replica_groups") or "{}"
            size = max((len(g) for g in replica_groups.read_groups(text, devices)), default=1)
    except ValueError as error:
        found.unread.append(f"line {inst.line}: {error}")
        return
    if size <= 1:
        return  # a group of one moves nothing
    for part in collective_rewrites.split_combined(module, place.computation, place.calls, inst, size):
        shapes = tuple(s for k in part if k < len(operands) for s in operands[k])
        found.collectives.append(_emitted(module, place, inst, kind, size, text, shapes, part))


def _emitted(
    module: Module,
    place: _WalkContext,
    inst: Instruction,
    kind: str,
    size: int,
    text: str,
    shapes: tuple[Shape, ...],
    part: tuple[int, ...],
) -> Emitted:
    """One collective, or one part of a combined one, with its bytes."""
    operand = sum(s.bytes for s in shapes)
    meaning = collective_rewrites.recognize(
        module, place.computation, place.calls, inst, kind, operand, size, part
    )
    asked_type, widening = requested_dtype.requested_dtype(
        module, place.computation, place.calls, inst, shapes, part
    )
    moved = wire_bytes(meaning.wire_kind or meaning.kind, meaning.operand_bytes, size)
    asked = moved * meaning.requested_fraction / widening
    rewritten = meaning.kind != kind
    unpadded = meaning.requested_fraction * (2 if meaning.wire_kind == "all_reduce" else 1)
    whole = len(part) == len(inst.operands)
    return Emitted(
        meaning.kind,
        moved,
        size,
        text,
        place.executions,
        ", ".join(map(str, shapes)),
        requested_dtype.op_names(place.computation, place.calls, inst, None if whole else part),
        module.source(inst),
        inst.line,
        inst.name,
        asked_type,
        None if asked == moved else asked,
        meaning.form,
        place.conditional,
        place.in_open_loop,
        kind if rewritten else "",
        wire_bytes(kind, meaning.operand_bytes, size) * unpadded / widening if rewritten else 0.0,
    )


def _read_send(place: _WalkContext, inst: Instruction, found: _Accumulator) -> None:
    """What crosses between slices; other transfers between devices count as permutes."""
    crossing = megascale_transfers.parse_transfer(inst, place.computation)
    if crossing is None:
        if "is_host_transfer=true" in inst.attrs:
            return  # to the host: outfeeds, callbacks
        shapes = _operand_shapes(place, inst) or []
        crossing = megascale_transfers.MegascaleTransfer(
            "permute", sum(s.bytes for leaves in shapes for s in leaves), 2, 1, ""
        )
    found.slices = max(found.slices, crossing.num_slices)
    if crossing.group_size > 1:
        moved = wire_bytes(crossing.kind, crossing.operand_bytes, crossing.group_size)
        found.collectives.append(
            Emitted(
                crossing.kind,
                moved,
                crossing.group_size,
                crossing.target,
                place.executions,
                str(inst.shapes[0]) if inst.shapes else "",
                inst.op_name,
                line=inst.line,
                name=inst.name,
                form="between slices" if crossing.num_slices > 1 else "send",
                conditional=place.conditional,
                in_open_loop=place.in_open_loop,
            )
        )
