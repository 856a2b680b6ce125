"""Why no plan fits a memory budget, as data: what is in memory at the peak, and what a checkpoint would leave of it.

The figures are those of the plan of lowest peak that was found. The texts are in `_report/refusal_text.py`, the remedies
that are tried in `_api/remedies.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from jshard._core.errors import MemoryBudgetError
from jshard._core.layout import MeshAxes
from jshard._plan.scheduled_solution import ScheduledSolution
from jshard._program.graph import Operator
from jshard._schedule.checkpoint_estimate import CheckpointEstimate, checkpoint_estimate
from jshard._schedule.peak import HeldValue, peak_bytes
from jshard._schedule.peak_profile import INTERMEDIATE


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


@dataclasses.dataclass(frozen=True)
class Holder:
    """What holds memory at the peak: its class (as in `Memory.held`), the modules or arguments, bytes on a device."""

    kind: str
    name: str
    nbytes: float


@dataclasses.dataclass(frozen=True)
class MemoryRefusal:
    """Why no plan fits.

    - `limit`: the budget; `peak`: the lowest that was found; `bound`: none is lower, or 0; bytes on a device.
    - `chip_bytes`: the memory of the chip, None where it is not known. `mesh`, `chip`: the machine.
    - `holders`: what is in memory at the peak, largest first.
    - `argument_bytes`: the least that the arguments take, however they are cut.
    - `peak_if_donated`: that of the same plan if state that is passed from call to call were donated.
    - `step_seconds`: of the plan of that peak. `operators`: of the program.
    - `checkpoint`: what `jax.checkpoint` would leave, None where that is not known to help; `checkpoint_seconds`: the
        step with it.
    """

    limit: float
    peak: float
    bound: float
    chip_bytes: float | None
    mesh: MeshAxes
    chip: str
    holders: tuple[Holder, ...]
    argument_bytes: float
    peak_if_donated: float
    step_seconds: float
    operators: int
    checkpoint: CheckpointEstimate | None = None
    checkpoint_seconds: float = 0.0


_LEAST_SAVING = 0.95  # of the peak: a checkpoint that leaves more is not worth a line


def refuse(solution: ScheduledSolution, plan: PlanRecord, limit: float) -> MemoryBudgetError:
    """The error for a budget of `limit` bytes; `plan` is the record of the solution of lowest peak."""
    refusal = memory_refusal(solution, plan, limit)
    fixes = ["more devices", "smaller shapes"]
    if budget_advice(refusal):
        fixes.insert(0, f"memory_budget={budget_advice(refusal)}")
    held = [f"{kind} {nbytes:,.0f}" for kind, nbytes in plan.memory.held[:3]]
    return MemoryBudgetError(
        _what(refusal),
        where=f"memory_budget; at the peak most is held by {', '.join(held)}",
        fix=", ".join(fixes[:-1]) + f", or {fixes[-1]}",
        refusal=refusal,
        least_found=plan.cost.peak_bytes,
        proved_least=solution.peak_bound,
    )


def _what(refusal: MemoryRefusal) -> str:
    proof = ""
    if 0 < refusal.bound < refusal.peak * 0.999:
        proof = f", and none needs less than {refusal.bound:,.0f}"
    return (
        f"no plan fits {refusal.limit:,.0f} bytes a device; the least found needs {refusal.peak:,.0f}{proof}"
    )


def with_other_bound(error: MemoryBudgetError, bound: float) -> MemoryBudgetError:
    """The error where bytes are proved of more plans than its search was for: at least those of the arguments.

    `bound`: bytes that each of these plans needs, 0 where that is not known.
    """
    refusal = error.refusal
    if not isinstance(refusal, MemoryRefusal):
        return error
    refusal = dataclasses.replace(refusal, bound=max(bound, refusal.argument_bytes))
    return MemoryBudgetError(
        _what(refusal), where=error.where, fix=error.fix, refusal=refusal, remedies=error.remedies,
        least_found=error.least_found, proved_least=refusal.bound,
    )  # fmt: skip


def budget_advice(refusal: MemoryRefusal) -> int | None:
    """A budget in which the plan that was found fits; None where the chip has less."""
    budget = int(refusal.peak * 1.01) + 1
    return budget if refusal.chip_bytes is None or budget <= refusal.chip_bytes else None


def memory_refusal(solution: ScheduledSolution, plan: PlanRecord, limit: float) -> MemoryRefusal:
    """What is known of the memory of a solution that exceeds the limit."""
    network, request, made = solution.network, solution.request, solution.schedule
    program, topology = network.program, network.topology
    held = solution.profile.held
    estimate = checkpoint_estimate(made, network.liveness, request.donated)
    seconds = plan.step_seconds
    if estimate is not None and estimate.peak > _LEAST_SAVING * solution.peak:
        estimate = None
    return MemoryRefusal(
        limit=limit,
        peak=solution.peak,
        bound=solution.peak_bound,
        chip_bytes=topology.chip.hbm_bytes,
        mesh=topology.mesh,
        chip=topology.chip.name,
        holders=_holders(held, solution),
        argument_bytes=sum(
            program.tensors[program.operators[i].results[0]].nbytes
            / float(network.candidates[i].results[0].num_shards(topology.mesh).max(initial=1.0))
            for i in program.inputs
        ),
        peak_if_donated=_peak_if_donated(solution),
        step_seconds=seconds,
        operators=len(program.operators),
        checkpoint=estimate,
        checkpoint_seconds=0.0 if estimate is None else seconds + _seconds_again(solution, estimate),
    )


def _peak_if_donated(solution: ScheduledSolution) -> float:
    network, request = solution.network, solution.request
    number = {op: k for k, op in enumerate(network.program.inputs)}
    donated = {*request.donated, *(number[i] for _, i in request.ties if i in number)}
    return min(solution.peak, peak_bytes(solution.schedule, network.liveness, tuple(donated)))


def _seconds_again(solution: ScheduledSolution, estimate: CheckpointEstimate) -> float:
    """Seconds of the operators that a checkpoint runs a second time, with their collectives."""
    costs, again = solution.schedule_cost, set(estimate.repeated)
    equations = np.flatnonzero(solution.network.program.use_def.has_kind("eqn")).tolist()
    compute = sum(s for i, s in zip(equations, costs.seconds, strict=True) if i in again)
    return compute + sum(row.seconds * row.count for row, op in costs.collectives if op in again)


def _holders(held: tuple[HeldValue, ...], solution: ScheduledSolution) -> tuple[Holder, ...]:
    """What is in memory at the peak by class and module; what an operator holds while it runs comes to its class."""
    program = solution.network.program
    producers = program.defs()
    names: dict[int, str] = {}
    out: dict[tuple[str, str], float] = {}
    for tensor, nbytes, kind in held:
        op = producers[tensor][0]
        if op not in names:
            names[op] = place_of(program.operators[op])
        key = kind, "" if kind.startswith("argument ") else names[op]
        out[key] = out.get(key, 0.0) + nbytes
    missing = solution.peak - sum(out.values())
    if missing > 0:
        out[INTERMEDIATE, "an operator as it runs"] = missing
    return tuple(
        sorted((Holder(kind, name, nbytes) for (kind, name), nbytes in out.items()), key=lambda h: -h.nbytes)
    )


def place_of(op: Operator) -> str:
    """Where an operator is in the user's code: its module, its numbers replaced, or its function; "" for neither."""
    parts = [p for p in op.module.split("/") if p and "->" not in p]
    if parts:
        return re.sub(r"\d+", "*", "/".join(parts))
    if op.name:
        return re.sub(r"\d+", "*", op.name)
    return op.source.partition(" (")[2].removesuffix(")").rsplit(".", 1)[-1]
