"""The schedule of a compiled program: which instructions compute, and where collectives start and end.

The text of a compiled program lists the instructions of a computation in the order in which they run
(`is_scheduled=true`). A collective is synchronous, or it starts at one instruction and ends at a later one:

- GPU, and permutes on TPU: `all-gather-start ... all-gather-done`, unless its `backend_config` says `is_sync`;
- TPU: a fusion with `AsyncCollectiveStart`, fusions of products that carry it on, one with `AsyncCollectiveDone`;
- `async-start ... async-done` around a computation; `send ... send-done` between slices.

A fusion may also hold both a product and a collective: they run side by side.

>>> from jshard._verify.hlo_parser import parse
>>> steps = read_schedule(parse('''
... HloModule jit_f, is_scheduled=true, num_partitions=4
... ENTRY %main (p: f32[4,8], q: f32[8,8]) -> (f32[16,8], f32[4,8]) {
...   %p = f32[4,8] parameter(0)
...   %q = f32[8,8] parameter(1)
...   %s = (f32[4,8], f32[16,8]) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
...   %d = f32[4,8] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
...   %e = f32[16,8] all-gather-done(%s)
...   ROOT %t = (f32[16,8], f32[4,8]) tuple(%e, %d)
... }''')).steps
>>> [(s.kind, s.name, s.flops) for s in steps]
[('start', 's', 0.0), ('compute', 'd', 512.0), ('done', 'e', 0.0)]
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from jshard._verify.collective_rewrites import chain_id, is_continuation, started_chains
from jshard._verify.hlo_flops import cycles, flops
from jshard._verify.hlo_parser import COLLECTIVE_KINDS, Computation, Instruction, Module
from jshard._verify.hlo_trip_counts import trip_count
from jshard._verify.memory_traffic import accessed_bytes


StepKind = Literal["compute", "collective", "fused", "start", "done", "loop"]

_FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "optimization-barrier",
        "add-dependency",
        "recv",
        "recv-done",
        # Copies between memories run beside the rest, on engines of their own.
        "copy-start",
        "copy-done",
        "slice-start",
        "slice-done",
        "async-update",
    )
)
# Custom calls that say something about memory and compute nothing.
_FREE_CALLS = (
    "AsyncCollective",
    "ConcatBitcast",
    "AllocateBuffer",
    "Sharding",
    "SPMD",
    "AssumeGatherIndices",
)


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """One instruction that takes time, starts or ends a collective, or repeats others.

    - `kind`: `"compute"`; `"collective"`, a synchronous one; `"fused"`, a collective and a product in one instruction;
      `"start"` and `"done"` of an asynchronous one; `"loop"`, which runs `body` `trips` times (None: not known).
    - `cycles`: the compiler's own estimate, 0 without one; `flops`, `dtype` and `bytes` otherwise say how long it takes.
    - `collectives`: lines of the collectives in it; `started_by`: of a `"done"`, the name of the start.
    """

    kind: StepKind
    name: str
    line: int
    cycles: float = 0.0
    flops: float = 0.0
    dtype: str = ""
    bytes: float = 0.0
    collectives: tuple[int, ...] = ()
    started_by: str = ""
    body: tuple[ScheduledStep, ...] = ()
    trips: int | None = 1


@dataclasses.dataclass(frozen=True)
class ProgramSchedule:
    """The steps of a program in the order in which they run, and the lines that could not be read as one."""

    steps: tuple[ScheduledStep, ...] = ()
    unread: tuple[str, ...] = ()


def read_schedule(module: Module) -> ProgramSchedule:
    """The schedule of a compiled program; empty, with the line named, if the text is not that of a scheduled one."""
    entry = module.computations.get(module.entry)
    if entry is None:
        return ProgramSchedule()
    if not module.scheduled:
        return ProgramSchedule(
            unread=("line 1: the text has no is_scheduled=true: its order is not a schedule",)
        )
    reader = _Reader(module, started_chains(module))
    return ProgramSchedule(reader.steps(entry, ()), tuple(reader.unread))


class _Reader:
    """Reads the computations of one module; `unread` collects what has no known form."""

    def __init__(self, module: Module, chains: frozenset[str]):
        self.module, self.chains = module, chains
        self.unread: list[str] = []

    def steps(self, computation: Computation, callers: tuple[str, ...]) -> tuple[ScheduledStep, ...]:
        """The steps of a computation, of those that it calls too."""
        out: list[ScheduledStep] = []
        starts: dict[str, str] = {}  # name of a start, or number of a chain -> name of the step
        for inst in computation.instructions:
            out += self._read(inst, computation, starts, (*callers, computation.name))
        ended = {s.started_by for s in out if s.kind == "done"}
        open_ = [s for s in out if s.kind == "start" and s.name not in ended]
        self.unread += [f"line {s.line}: {s.name} starts a collective that nothing ends" for s in open_]
        return tuple(out)

    def _read(
        self, inst: Instruction, computation: Computation, starts: dict[str, str], callers: tuple[str, ...]
    ) -> list[ScheduledStep]:
        opcode = inst.opcode
        if opcode == "while":
            return self._loop(inst, computation, callers)
        if opcode in ("call", "conditional"):
            inner = [self.module.computations.get(n) for n in inst.called]
            return [
                s for c in inner if c is not None and c.name not in callers for s in self.steps(c, callers)
            ]
        if opcode in COLLECTIVE_KINDS:
            return [ScheduledStep("collective", inst.name, inst.line, collectives=(inst.line,))]
        if opcode.endswith("-done") and opcode not in _FREE:
            return self._done(inst, starts)
        lines = self._collectives(inst)
        if opcode.endswith("-start") and opcode not in _FREE or opcode == "send":
            return self._start(inst, lines, starts)
        chain, end = self._chain(inst)
        step = self._compute(inst, computation, "compute")
        if chain and not end:
            starts[chain] = inst.name
            return [ScheduledStep("start", inst.name, inst.line, collectives=lines)]
        if chain and chain in starts:
            done = ScheduledStep("done", inst.name, inst.line, started_by=starts.pop(chain))
            return [*(s for s in step if s.cycles), done]
        if lines:
            multiplies = any(s.flops for s in step)
            kind = "fused" if multiplies else "collective"
            return [dataclasses.replace(s, kind=kind, collectives=lines) for s in step] or [
                ScheduledStep("collective", inst.name, inst.line, collectives=lines)
            ]
        return step

    def _loop(
        self, inst: Instruction, computation: Computation, callers: tuple[str, ...]
    ) -> list[ScheduledStep]:
        body = self.module.computations.get((inst.attr("body") or "").lstrip("%"))
        if body is None or body.name in callers:
            return []  # `read_program` lists it
        trips = trip_count(self.module, computation, inst)
        return [ScheduledStep("loop", inst.name, inst.line, body=self.steps(body, callers), trips=trips)]

    def _start(
        self, inst: Instruction, lines: tuple[int, ...], starts: dict[str, str]
    ) -> list[ScheduledStep]:
        lines = lines or (inst.line,)
        if not any(inst.opcode.startswith(c) for c in COLLECTIVE_KINDS) and inst.opcode != "send":
            lines = self._collectives(inst)
        if not lines:
            return []  # other asynchronous work, a copy in a computation of its own
        if '"is_sync":true' in inst.attrs:
            return [ScheduledStep("collective", inst.name, inst.line, collectives=lines)]
        starts[inst.name] = inst.name
        return [ScheduledStep("start", inst.name, inst.line, collectives=lines)]

    def _done(self, inst: Instruction, starts: dict[str, str]) -> list[ScheduledStep]:
        found = [starts.pop(o) for o in inst.operands if o in starts]
        return [ScheduledStep("done", inst.name, inst.line, started_by=s) for s in found]

    def _compute(self, inst: Instruction, computation: Computation, kind: StepKind) -> list[ScheduledStep]:
        if inst.opcode in _FREE or inst.opcode == "custom-call" and _is_free_call(inst):
            return []
        work, dtype = self._products(inst, computation)
        spent, moved = cycles(inst), accessed_bytes(self.module, computation, inst)
        if not (spent or work or moved):
            return []
        return [ScheduledStep(kind, inst.name, inst.line, spent, work, dtype, moved)]

    def _products(self, inst: Instruction, computation: Computation) -> tuple[float, str]:
        """FLOPs of the products in an instruction and the element type of the largest one's operand."""
        found = [(flops(inst, computation), inst, computation)]
        for inner in self._inner(inst):
            found += [(flops(i, inner), i, inner) for i in inner.instructions]
        largest, product, place = max(found, key=lambda f: f[0])
        operand = place.by_name.get(product.operands[0]) if largest and product.operands else None
        shapes = operand.shapes if operand is not None else ()
        return sum(f for f, _, _ in found), shapes[0].dtype if shapes else ""

    def _inner(self, inst: Instruction) -> list[Computation]:
        """The computations that an instruction runs, with those that they run."""
        out: list[Computation] = []
        todo = [self.module.computations.get(n) for n in inst.called]
        while todo:
            c = todo.pop()
            if c is not None and c not in out:
                out.append(c)
                todo += [self.module.computations.get(n) for i in c.instructions for n in i.called]
        return out

    def _collectives(self, inst: Instruction) -> tuple[int, ...]:
        """Lines of the collectives inside an instruction, without those that go on with another fusion's."""
        return tuple(
            i.line
            for c in self._inner(inst)
            for i in c.instructions
            if i.opcode.removesuffix("-start") in COLLECTIVE_KINDS and not is_continuation(c, i, self.chains)
        )

    def _chain(self, inst: Instruction) -> tuple[str, bool]:
        """The chain that a TPU fusion starts or ends, and whether it ends it; empty for other instructions."""
        for c in self._inner(inst) if inst.opcode == "fusion" else ():
            for i in c.instructions:
                target = i.attr("custom_call_target") if i.opcode == "custom-call" else None
                if target in ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"'):
                    numbers = [chain_id(c.by_name.get(o)) for o in i.operands]
                    number = next((n for n in numbers if n), "")
                    if number:
                        return number, "Done" in (target or "")
        return "", False


def _is_free_call(inst: Instruction) -> bool:
    target = (inst.attr("custom_call_target") or "").strip('"')
    return target.startswith(_FREE_CALLS) or bool(re.match(r"[$_]*(annotate|xla\.sdy)", target))
