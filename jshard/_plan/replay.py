"""The schedule of a saved plan: its candidates and relays, found again in a program of the same fingerprint."""

from __future__ import annotations

from jshard._core.errors import PlanMismatchError
from jshard._core.topology import Topology
from jshard._network.candidates import CandidateCache, PinOfSide
from jshard._network.shared_exchanges import shared_exchanges
from jshard._plan.record import PlanRecord
from jshard._program.fingerprint import fingerprint
from jshard._program.graph import Program
from jshard._schedule.schedule import Assignment, Schedule, schedule


def _refuse_other_shapes(program: Program, plan: PlanRecord) -> None:
    """Raise `PlanMismatchError` for the first argument whose shape or dtype is not the plan's."""
    tensors = [program.tensors[program.operators[i].results[0]] for i in program.inputs]
    for row, tensor in zip(plan.inputs, tensors, strict=False):  # captured arrays come last
        was, now = f"{row.dtype}{list(row.shape)}", f"{tensor.dtype}{list(tensor.shape)}"
        if was != now:
            raise PlanMismatchError(
                f"the plan is for {row.path} {was}, this call has {now}".replace(", ", ",").replace(
                    ",this", ", this"
                ),
                where=f"plan= of {program.name}",
                fix=f"a plan of these shapes: {program.name}.plan(*args), or the plan that was saved for them",
            )


def schedule_of_plan(program: Program, topology: Topology, plan: PlanRecord) -> Schedule:
    """The schedule of a saved plan for the same program; anything else is refused with what differs."""
    if plan.mesh != topology.mesh:
        raise PlanMismatchError(
            f"the plan was made for the mesh {plan.mesh}, this call has {topology.mesh}",
            where=f"plan= of {program.name}",
            fix="pass a mesh of the plan's axes and sizes, or plan again",
        )
    if plan.fingerprint != fingerprint(program):
        equations = sum(op.kind == "eqn" for op in program.operators)
        _refuse_other_shapes(program, plan)
        raise PlanMismatchError(
            f"the plan is of another program: {plan.name} with {len(plan.operators)} operators, "
            f"this one is {program.name} with {equations}",
            where=f"plan= of {program.name}",
            fix="load the plan of this function, shapes, dtypes and donated arguments, or plan again",
        )
    cache, endpoints = CandidateCache(program, topology.mesh), dict(plan.decision.endpoints)
    candidates, state = [], []
    for op, codes in zip(program.operators, plan.decision.candidates, strict=True):
        pins: list[PinOfSide] = []
        if codes is None:
            layout, side = endpoints[op.id], "operand" if op.kind == "output" else "result"
            pins = [(side, 0, layout, lambda lay, want=layout: lay == want)]
        s = cache.candidates_of(op, pins)
        candidates.append(s)
        state.append(0 if codes is None else s.index_of(codes))
    relays = dict(plan.decision.relays)
    shared = shared_exchanges(program, candidates) if plan.level != 1 else ()
    again, after = frozenset(plan.decision.regather), frozenset(plan.decision.regather_after)
    return schedule(
        Assignment(program, topology, tuple(candidates), tuple(state), relays, again, after, shared)
    )
