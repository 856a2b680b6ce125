"""One plan of both passes in all processes, where JAX differentiates a sharded function from outside.

The plan of `jax.grad(f)` is searched when JAX applies the derivative rule of `f`, after the call of `f` was planned. It
decides which collectives run, so it is exchanged like that of a call (`plan_together.py`): the function and the
differentiated arguments are compared, then the joint program of both passes (its backward part is traced only here, and
may come from a rule of the user), then the plan. All this is done once for each executable and choice of arguments.

In one process it is `plan_for_gradient`:

>>> import jax.numpy as jnp, jshard
>>> from jshard._api.prepare import prepare
>>> f = jshard.shard(lambda w, x: jnp.sum((x @ w) ** 2))
>>> prepared = prepare(f.request, (jnp.ones((8, 8)), jnp.ones((64, 8))), {})
>>> of, forward = gradient_together(prepared, (0,))
>>> of is prepared, forward.note
(True, '')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jshard._api.differentiation import (
    ForwardSchedule,
    TracedGradient,
    argument_list,
    plan_for_gradient,
    plan_traced_gradient,
    trace_gradient,
)
from jshard._api.plan import planned_again
from jshard._api.plan_together import (
    Sent,
    agree,
    compare_facts,
    facts_of_process,
    found_of_text,
    found_text,
    may_end_by_the_clock,
)
from jshard._api.prepare import PlannedCall
from jshard._api.process_group import Exchange, process_group
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Device
from jshard._plan.record import PlanRecord, record_from_json
from jshard._plan.replay import schedule_of_plan
from jshard._program.jaxpr_text import jaxpr_lines


def gradient_together(
    prepared: PlannedCall, differentiated: Sequence[int]
) -> tuple[PlannedCall, ForwardSchedule]:
    """The call as it is differentiated (without padding), and its forward pass; the same in all processes of its mesh.

    `differentiated`: the flat arguments that have tangents, by number.
    """
    devices = _devices_here(prepared)
    name, options = prepared.request.name, prepared.request.options
    group = process_group(devices, name, options.process_seconds)
    if group is None:
        of = prepared if prepared.unpadded is None else prepared.unpadded(None)
        return of, plan_for_gradient(of, differentiated)
    of = argument_list(prepared.schedule.assignment.program, differentiated)
    exchange = group.next_exchange(f"the derivative of {name}")
    compare_facts(exchange, lambda: {**facts_of_process(devices), "function": [f"derivative of {name}{of}"]})
    alone = may_end_by_the_clock(prepared.request, devices[0])
    call = _unpadded_together(exchange, prepared, alone)
    traced: list[TracedGradient] = []

    def facts() -> dict[str, list[str]]:
        traced.append(trace_gradient(call, differentiated))
        jaxpr = None if traced[0].joint is None else traced[0].joint.program.jaxpr
        return {"trace": [traced[0].why] if jaxpr is None else list(jaxpr_lines(jaxpr))}

    compare_facts(exchange, facts, "both passes")

    def take(text: str, notes: Sequence[str]) -> ForwardSchedule:
        if not text:
            return ForwardSchedule(call.schedule, notes[0])
        assignment, record = call.schedule.assignment, record_from_json(PlanRecord, text)
        schedule = schedule_of_plan(assignment.program, assignment.topology, record)
        return ForwardSchedule(schedule, notes[0], record)

    sent = Sent[ForwardSchedule](lambda f: "" if f.record is None else f.record.to_json(), lambda f: [f.note])
    return call, agree(exchange, lambda: plan_traced_gradient(traced[0]), sent, take, alone=alone)


def _unpadded_together(exchange: Exchange, prepared: PlannedCall, alone: bool) -> PlannedCall:
    """The call without padding in the plan of the leader; the call itself where nothing is padded."""
    unpadded = prepared.unpadded
    if unpadded is None:
        return prepared

    def take(text: str, steps: Sequence[str]) -> PlannedCall:
        found = found_of_text(text, steps)
        call = unpadded(found)
        again = call.plan.search_again
        if found_text(call) == text or again is None:
            return call
        program, topology = call.schedule.assignment.program, call.schedule.assignment.topology
        schedule = schedule_of_plan(program, topology, found.plan)
        plan = planned_again(found.plan, program, topology, again.request)
        return dataclasses.replace(call, plan=plan, schedule=schedule, committed=found.committed)

    sent = Sent[PlannedCall](found_text, lambda call: call.plan.steps)
    return agree(exchange, lambda: unpadded(None), sent, take, alone=alone, about="unpadded")


def _devices_here(prepared: PlannedCall) -> list[Device]:
    """The devices of a call that runs in several processes; none for a description, or for a compiler's devices."""
    mesh = prepared.chosen.mesh
    if compat.coordination_client() is None or not isinstance(mesh, Mesh):
        return []
    devices = list(mesh.devices.flat)
    try:
        return devices if devices[0] in jax.devices(devices[0].platform) else []
    except RuntimeError:
        return []
