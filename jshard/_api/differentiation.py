"""Layouts of a function that JAX differentiates from outside: forward and backward pass planned together.

The cheapest plan of a forward pass may be a bad one for training: sharding the batch costs the forward pass nothing,
but its gradients are then summed over all devices. So when JAX differentiates a sharded function, its program and the
vector-Jacobian product of the differentiated arguments are planned as one joint program under the same pins, where a
gradient has the layout of its argument and a cotangent that of its result. The forward pass takes its layouts and
strategies from this plan; the transposes of its collectives are the backward pass.

Operators of the forward pass are matched to those of the joint program by what they compute and their source line, in
order. Where the numbers of such operators differ (a derivative rule replaced a function), they are not matched, and
the search of the forward pass chooses their layouts.

>>> import jax, jax.numpy as jnp, jshard
>>> from jshard._api.prepare import prepare
>>> f = jshard.shard(lambda w, x: jnp.sum((x @ w) ** 2))
>>> p = prepare(f.request, (jnp.ones((8, 8)), jnp.ones((64, 8))), {})
>>> assignment = plan_for_gradient(p, (0,)).schedule.assignment
>>> p.plan.inputs[0].layout.dims, len(assignment.result_layout(0).dims)
(((), ()), 2)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jshard._api.call_pins import program_pins
from jshard._api.prepare import PlannedCall
from jshard._core import jaxcompat as compat
from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._core.layout import Layout
from jshard._plan.record import PlanRecord
from jshard._plan.replan import Replanner
from jshard._plan.request import Force, PlanRequest
from jshard._program.graph import Literal, Operator, Program
from jshard._program.operators import Atom
from jshard._program.trace import build
from jshard._schedule.schedule import Assignment, Schedule


NOTE_PREFIX = "differentiated from outside"
"""First words of the steps of a plan that report how the backward pass was planned."""

WITHOUT_PADDING = (
    f"{NOTE_PREFIX}: both passes run without the padding of this plan, whose program has no derivative rules"
)
"""The note for a call whose own program pads dimensions."""

INSIDE_THE_BUDGET = (
    "with the derivative inside, jshard.shard(jax.value_and_grad(f)), both passes are planned in the budget "
    "or refused"
)
"""What to write where only the forward pass fits the budget: JAX applies the derivative after its plan was accepted."""


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardSchedule:
    """The schedule of a forward pass under differentiation.

    `note`: for the plan's steps, why the two passes could not be planned (fully) together; "" if they were. `record`:
    the plan that the schedule stands for; None for that of the forward pass alone.
    """

    schedule: Schedule
    note: str = ""
    record: PlanRecord | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TracedGradient:
    """A planned forward pass under differentiation, before its search.

    `of`: the differentiated arguments, as " (w, b)". `joint`: both passes as one program; None where they are not planned
    together, for the reason `why`.
    """

    prepared: PlannedCall
    of: str
    joint: _JointProgram | None
    why: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class _JointProgram:
    """A forward pass followed by its vector-Jacobian product.

    Inputs: those of the forward pass, then a cotangent for each result in `with_cotangent`. Outputs: those of the
    forward pass, then a gradient for each argument in `differentiated`. All by number.
    """

    program: Program
    differentiated: Sequence[int]
    with_cotangent: Sequence[int]


def plan_for_gradient(prepared: PlannedCall, differentiated: Sequence[int]) -> ForwardSchedule:
    """The schedule of the forward pass if the flat arguments `differentiated`, by number, have tangents."""
    return plan_traced_gradient(trace_gradient(prepared, differentiated))


def trace_gradient(prepared: PlannedCall, differentiated: Sequence[int]) -> TracedGradient:
    """Both passes as one program, if the flat arguments `differentiated`, by number, have tangents."""
    replanner, program = prepared.plan.search_again, prepared.schedule.assignment.program
    of = argument_list(program, differentiated)

    def alone(why: str) -> TracedGradient:
        return TracedGradient(prepared, of, None, why)

    differentiated = [i for i in differentiated if i < len(prepared.in_avals)]
    if prepared.request.plan is not None or replanner is None:
        return alone("plan= gives the forward pass")
    if replanner.request.search != "optimal":
        return alone(f"search={replanner.request.search!r} plans a program as it stands")
    if any(compat.is_tracer(c) for c in program.constants):
        return alone("the function closes over values that are being traced")
    if not differentiated:
        return alone("only what the function closes over is differentiated")
    try:
        joint = _joint_program(program, prepared.in_avals, differentiated)
    except Exception as e:  # no derivative, as of `while`: the user's own `jax.grad` reports it
        return alone(f"JAX gives no pull-back of it: {type(e).__name__}: {_first_line(e)}")
    return alone("no result is real") if joint is None else TracedGradient(prepared, of, joint)


def plan_traced_gradient(traced: TracedGradient) -> ForwardSchedule:
    """The schedule of the forward pass in the plan of both passes, or that of the forward pass alone."""
    prepared, joint = traced.prepared, traced.joint
    replanner = prepared.plan.search_again
    if joint is None or replanner is None:
        return ForwardSchedule(prepared.schedule, planned_alone_note(traced.of, traced.why))
    try:
        request = _joint_request(prepared, replanner, joint)
        from jshard._plan.planner import make_plan  # at the first plan: it imports every search

        assignment = make_plan(joint.program, replanner.topology, request)[1].assignment
        ends, inside = _match_forward(prepared.schedule.assignment.program, joint.program, assignment)
    except SearchError as e:
        why = f"no plan of both together: {_first_line(e)}"
        if isinstance(e, MemoryBudgetError):
            why += "; " + INSIDE_THE_BUDGET
        return ForwardSchedule(prepared.schedule, planned_alone_note(traced.of, why))
    return _schedule_forward(prepared, replanner, traced.of, ends, inside)


def _schedule_forward(
    prepared: PlannedCall, replanner: Replanner, of: str, ends: tuple[Force, ...], inside: tuple[Force, ...]
) -> ForwardSchedule:
    """The forward pass with the layouts of the joint plan: all of them, else those of arguments and results."""
    program = prepared.schedule.assignment.program
    why = ""
    for forced in ((*ends, *inside), ends):
        request = dataclasses.replace(replanner.request, forced=forced)
        try:
            from jshard._plan.planner import make_plan  # at the first plan: it imports every search

            record, schedule = make_plan(program, replanner.topology, request)
        except SearchError as e:  # a derivative rule may allow layouts that the function's own body does not
            why = why or _first_line(e)
            continue
        note = f"{NOTE_PREFIX}{of}: of the plan of both passes only arguments and results are kept: {why}"
        return ForwardSchedule(schedule, note if why else "", record)
    why = f"the forward pass cannot lie as in the plan of both: {why}"
    return ForwardSchedule(prepared.schedule, planned_alone_note(of, why))


def planned_alone_note(of: str, why: str) -> str:
    """The note for a backward pass that was not planned; `of`: the differentiated arguments, as " (w, b)"."""
    return f"{NOTE_PREFIX}{of}: the forward pass was planned alone, and the backward pass follows it: {why}"


def argument_list(program: Program, numbers: Sequence[int]) -> str:
    """The differentiated arguments of a program, by number, as " (w, b)"; "" for none."""
    paths = [program.operators[i].name for i in program.inputs]
    names = ", ".join(paths[i] for i in numbers[:3])
    return f" ({names}{', ...' if len(numbers) > 3 else ''})" if numbers else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _joint_program(
    program: Program, avals: Sequence[Any], differentiated: Sequence[int]
) -> _JointProgram | None:
    """The program followed by its vector-Jacobian product; None if no result is inexact (float or complex)."""
    n = len(avals)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding) for a in avals
    ]
    assert program.jaxpr is not None
    run = compat.as_function(program.jaxpr)
    results = [_result_aval(program, i) for i in program.outputs]
    with_cotangent = [k for k, r in enumerate(results) if jax.numpy.issubdtype(r.dtype, np.inexact)]
    if not with_cotangent:
        return None

    def both_passes(*values: jax.Array) -> list[jax.Array]:
        arguments, cotangents = list(values[:n]), iter(values[n:])

        def forward(*primals: jax.Array) -> list[jax.Array]:
            for i, x in zip(differentiated, primals, strict=True):
                arguments[i] = x
            return list(run(*arguments))

        out, vjp = jax.vjp(forward, *(arguments[i] for i in differentiated))
        gradients = vjp(
            [
                next(cotangents) if k in with_cotangent else np.zeros(r.shape, jax.dtypes.float0)
                for k, r in enumerate(results)
            ]
        )
        return [*out, *gradients]

    with compat.context_of_trace(program.explicit_mesh):
        closed = compat.make_jaxpr(both_passes, *shapes, *(results[k] for k in with_cotangent))
    names = [program.operators[i].name for i in program.inputs[:n]]
    names += [f"cotangent of {program.operators[program.outputs[k]].name}" for k in with_cotangent]
    outs = [program.operators[i].name for i in program.outputs]
    outs += [f"gradient of {names[i]}" for i in differentiated]
    joint = build(closed, name=program.name, input_names=names, output_names=outs)
    joint = dataclasses.replace(joint, explicit_mesh=program.explicit_mesh)
    return _JointProgram(joint, differentiated, with_cotangent)


def _joint_request(prepared: PlannedCall, replanner: Replanner, joint: _JointProgram) -> PlanRequest:
    """The user's request for the joint program: same pins and ties; cotangents and gradients tied as well."""
    program, both = prepared.schedule.assignment.program, joint.program
    n, m = len(prepared.in_avals), len(program.outputs)
    in_joint = dict(zip(program.inputs[:n], both.inputs, strict=False))
    in_joint |= dict(zip(program.outputs, both.outputs, strict=False))
    pins = [(in_joint[op], side, k, pin) for op, side, k, pin in replanner.request.pins if op in in_joint]
    pins += program_pins(both, prepared.chosen, replanner.topology)
    ties = [(in_joint[o], in_joint[i]) for o, i in replanner.request.ties]
    ties += [(both.outputs[m + k], both.inputs[i]) for k, i in enumerate(joint.differentiated)]
    ties += [(both.outputs[k], both.inputs[n + j]) for j, k in enumerate(joint.with_cotangent)]
    return dataclasses.replace(replanner.request, pins=tuple(pins), ties=tuple(ties), donated=())


def _match_forward(
    program: Program, joint: Program, assignment: Assignment
) -> tuple[tuple[Force, ...], tuple[Force, ...]]:
    """The joint plan's layouts of the forward pass: of its arguments and results, and of operators inside."""
    n = len(program.inputs)
    ends: list[Force] = []
    inside: list[Force] = []
    arguments = [i for i in program.inputs if program.operators[i].kind == "input"]
    for i, j in zip(arguments, joint.inputs[:n], strict=False):
        ends.append(_pin_exactly(i, "result", 0, assignment.result_layout(joint.operators[j].results[0])))
    for i, j in zip(program.outputs, joint.outputs, strict=False):
        ends.append(_pin_exactly(i, "operand", 0, assignment.operand_layout(j, 0)))
    in_joint = _forward_ops_by_kind(joint)
    for kind, ops in _forward_ops_by_kind(program).items():
        twins = in_joint.get(kind, [])
        if len(ops) != len(twins):
            continue
        for op, twin in zip(ops, twins, strict=True):
            states, k = assignment.states[twin.id], assignment.state[twin.id]
            inside += [_pin_exactly(op.id, "operand", i, c.layout(k)) for i, c in enumerate(states.operands)]
            inside += [_pin_exactly(op.id, "result", i, c.layout(k)) for i, c in enumerate(states.results)]
    return tuple(ends), tuple(inside)


def _pin_exactly(op: int, side: str, k: int, layout: Layout) -> Force:
    return op, side, k, f"as in training: {layout}", lambda other: other == layout


def _forward_ops_by_kind(program: Program) -> dict[Hashable, list[Operator]]:
    """The operators of the forward pass in trace order, by primitive, shapes, source line and trip count."""
    out: dict[Hashable, list[Operator]] = {}
    for i in program.trace_order or range(len(program.operators)):
        op = program.operators[i]
        if op.kind == "eqn" and not compat.is_backward(op.prefix, op.eqn):
            operands = tuple(_shape_and_dtype(program, a) for a in op.operands)
            results = tuple(_shape_and_dtype(program, r) for r in op.results)
            out.setdefault((op.primitive, operands, results, op.source, op.repeat), []).append(op)
    return out


def _shape_and_dtype(program: Program, atom: Atom) -> Hashable:
    return () if isinstance(atom, Literal) else (program.tensors[atom].shape, program.tensors[atom].dtype)


def _result_aval(program: Program, output: int) -> jax.ShapeDtypeStruct:
    atom = program.operators[output].operands[0]
    t = atom.aval if isinstance(atom, Literal) else program.tensors[atom]
    return jax.ShapeDtypeStruct(t.shape, t.dtype)
