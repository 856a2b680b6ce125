"""Forward and backward priced together: the layouts of a function that is differentiated.

The cheapest plan of a forward pass may be a bad one for training: cutting the batch costs a forward pass nothing,
but its gradients are summed over all devices. So when JAX differentiates a sharded function, its program and the
pull-back of the arguments that are differentiated are planned as one program, under the same pins; a gradient
lies as its argument does, a cotangent as its result. The forward pass takes its layouts and strategies from that
plan, and the transposes of its collectives are the backward pass.

Operators of the forward pass are found again in the joint program by what they do and where they are written, in
order; where their number differs (a rule was replaced by its derivative) they stay free and follow the others.

>>> import jax, jax.numpy as jnp, jshard
>>> from jshard._api.prepare import prepare
>>> f = jshard.shard(lambda w, x: jnp.sum((x @ w) ** 2))
>>> p = prepare(f._request, (jnp.ones((8, 8)), jnp.ones((64, 8))), {})
>>> layouts = [plan_for_gradient(p, (0,)).schedule.assignment.result_layout(t).dims for t in (0, 1)]
>>> p.plan.inputs[0].layout.dims, len(layouts)
(((), ()), 2)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jshard import _jaxcompat as compat
from jshard._api.call_pins import program_pins
from jshard._api.prepare import PlannedCall
from jshard._core.errors import SearchError
from jshard._core.layout import Layout
from jshard._plan.planner import make_plan
from jshard._plan.request import PlanRequest
from jshard._program.graph import Literal, Operator, Program
from jshard._program.trace import build
from jshard._schedule.schedule import Assignment, Schedule


NOTE_PREFIX = "differentiated from outside"
"""How the steps of a plan begin that say what became of the backward pass."""


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardSchedule:
    """The schedule of a forward pass that is differentiated; `said`: why the backward pass was not planned with it."""

    schedule: Schedule
    note: str = ""


def plan_for_gradient(prepared: PlannedCall, differentiated: Sequence[int]) -> ForwardSchedule:
    """The schedule of the forward pass when the flat arguments `moving` are differentiated."""
    again, program = prepared.plan.search_again, prepared.schedule.assignment.program
    paths = [program.operators[i].name for i in program.inputs]
    of = (
        f" ({', '.join(paths[i] for i in differentiated[:3])}{', ...' if len(differentiated) > 3 else ''})"
        if differentiated
        else ""
    )

    def as_it_is(why: str) -> ForwardSchedule:
        return ForwardSchedule(prepared.schedule, planned_alone_note(of, why))

    differentiated = [i for i in differentiated if i < len(prepared.in_avals)]
    if prepared.request.plan is not None or again is None:
        return as_it_is("plan= gives the forward pass")
    if again.request.search != "optimal":
        return as_it_is(f"search={again.request.search!r} plans a program as it stands")
    if any(compat.is_tracer(c) for c in program.constants):
        return as_it_is("the function closes over values that are being traced")
    if not differentiated:
        return as_it_is("only what the function closes over is differentiated")
    try:
        joint = _joint_program(program, prepared.in_avals, differentiated)
    except Exception as e:  # no pull-back, as of a `while`: JAX itself says so where one is asked for
        return as_it_is(f"JAX gives no pull-back of it: {type(e).__name__}: {_first_line(e)}")
    if joint is None:
        return as_it_is("no result is real")
    whole, live = joint
    try:
        chosen = make_plan(whole, again.topology, _joint_request(prepared, whole, differentiated, live))[
            1
        ].assignment
        ends, inside = _match_forward(program, whole, chosen)
    except SearchError as e:
        return as_it_is(f"no plan of both together: {_first_line(e)}")
    why = ""
    for forced in ((*ends, *inside), ends):
        try:
            made = make_plan(program, again.topology, dataclasses.replace(again.request, forced=forced))[1]
        except SearchError as e:  # a rule's own derivative allowed what its body does not
            why = why or _first_line(e)
            continue
        some = f"{NOTE_PREFIX}{of}: of the plan of both passes only arguments and results are kept: {why}"
        return ForwardSchedule(made, some if why else "")
    return as_it_is(f"the forward pass cannot lie as in the plan of both: {why}")


def planned_alone_note(of: str, why: str) -> str:
    """What a plan says of a backward pass that was not planned."""
    return f"{NOTE_PREFIX}{of}: the forward pass was planned alone, and the backward pass follows it: {why}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _joint_program(
    program: Program, avals: Sequence[Any], differentiated: Sequence[int]
) -> tuple[Program, list[int]] | None:
    """The program followed by its pull-back, and which results have cotangents."""
    n = len(avals)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding) for a in avals
    ]
    run = compat.as_function(program.jaxpr)
    results = [_result_aval(program, i) for i in program.outputs]
    live = [k for k, r in enumerate(results) if jax.numpy.issubdtype(r.dtype, np.inexact)]
    if not live:
        return None

    def both(*values: Any) -> Any:
        arguments, given = list(values[:n]), iter(values[n:])

        def forward(*moved: Any) -> Any:
            for i, x in zip(differentiated, moved, strict=True):
                arguments[i] = x
            return list(run(*arguments))

        out, pull = jax.vjp(forward, *(arguments[i] for i in differentiated))
        cotangents = [
            next(given) if k in live else np.zeros(r.shape, jax.dtypes.float0) for k, r in enumerate(results)
        ]
        return [*out, *pull(cotangents)]

    with compat.context_of_trace(program.explicit_mesh):
        closed = jax.make_jaxpr(both)(*shapes, *(results[k] for k in live))
    names = [program.operators[i].name for i in program.inputs[:n]]
    names += [f"cotangent of {program.operators[program.outputs[k]].name}" for k in live]
    outs = [program.operators[i].name for i in program.outputs] + [
        f"gradient of {names[i]}" for i in differentiated
    ]
    whole = build(closed, name=program.name, input_names=names, output_names=outs)
    return dataclasses.replace(whole, explicit_mesh=program.explicit_mesh), live


def _joint_request(
    prepared: PlannedCall, whole: Program, differentiated: Sequence[int], live: Sequence[int]
) -> PlanRequest:
    """The user's wish, said of the joint program."""
    again, program = prepared.plan.search_again, prepared.schedule.assignment.program
    assert again is not None
    n, m = len(prepared.in_avals), len(program.outputs)
    place = dict(zip(program.inputs[:n], whole.inputs, strict=False))
    place |= dict(zip(program.outputs, whole.outputs, strict=False))
    pins = [(place[op], side, k, pin) for op, side, k, pin in again.request.pins if op in place]
    pins += program_pins(whole, prepared.chosen, again.topology)
    ties = [(place[o], place[i]) for o, i in again.request.ties]
    ties += [(whole.outputs[m + k], whole.inputs[i]) for k, i in enumerate(differentiated)]
    ties += [(whole.outputs[k], whole.inputs[n + j]) for j, k in enumerate(live)]
    return dataclasses.replace(again.request, pins=tuple(pins), ties=tuple(ties), donated=())


def _match_forward(program: Program, whole: Program, chosen: Assignment) -> tuple[tuple, tuple]:
    """What the joint plan says of the forward program: its ends, and the operators inside."""
    n, ends, inside = len(program.inputs), [], []
    arguments = [i for i in program.inputs if program.operators[i].kind == "input"]
    for i, j in zip(arguments, whole.inputs[:n], strict=False):
        ends.append(_pin_exactly(i, "result", 0, chosen.result_layout(whole.operators[j].results[0])))
    for i, j in zip(program.outputs, whole.outputs, strict=False):
        ends.append(_pin_exactly(i, "operand", 0, chosen.operand_layout(j, 0)))
    mine, theirs = _forward_ops_by_kind(program), _forward_ops_by_kind(whole)
    for key, ops in mine.items():
        others = theirs.get(key, [])
        if len(ops) != len(others):
            continue
        for op, other in zip(ops, others, strict=True):
            states, k = chosen.states[other.id], chosen.state[other.id]
            inside += [_pin_exactly(op.id, "operand", i, c.layout(k)) for i, c in enumerate(states.operands)]
            inside += [_pin_exactly(op.id, "result", i, c.layout(k)) for i, c in enumerate(states.results)]
    return tuple(ends), tuple(inside)


def _pin_exactly(op: int, side: str, k: int, layout: Layout) -> tuple:
    return op, side, k, f"as in training: {layout}", lambda have: have == layout


def _forward_ops_by_kind(program: Program) -> dict[Any, list[Operator]]:
    """The operators of the forward pass in order, by what they do and where they are written."""
    out: dict[Any, list[Operator]] = {}
    for i in program.trace_order or range(len(program.operators)):
        op = program.operators[i]
        if op.kind == "eqn" and not compat.is_backward(op.prefix, op.eqn):
            operands = tuple(_shape_and_dtype(program, a) for a in op.operands)
            results = tuple(_shape_and_dtype(program, r) for r in op.results)
            out.setdefault((op.primitive, operands, results, op.source, op.repeat), []).append(op)
    return out


def _shape_and_dtype(program: Program, atom: Any) -> Any:
    return () if isinstance(atom, Literal) else (program.tensors[atom].shape, program.tensors[atom].dtype)


def _result_aval(program: Program, output: int) -> Any:
    a = program.operators[output].operands[0]
    t: Any = a.aval if isinstance(a, Literal) else program.tensors[a]
    return jax.ShapeDtypeStruct(t.shape, t.dtype)
