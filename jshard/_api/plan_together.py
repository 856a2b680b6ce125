"""One plan in all processes of a program.

Processes that run one program must compile the same one, or they wait for each other in different collectives. When a
call has to be planned and the mesh has devices of several processes, these

1. compare what they are about to plan: versions, function, arguments, options, the traced jaxpr, and the values of
    arguments on the host, which JAX takes to be equal everywhere. What differs is an error in all of them, with the
    first difference;
2. plan. Searches without memory do the same work everywhere, and their plans are compared; on a difference all take that
    of the first process. Searches under a memory budget may end by the clock: there the first process plans, and the
    others get its plan.

A process that fails says so, and the others raise a `ProcessError` that quotes it. All this is done once a signature:
later calls exchange nothing. `f.plan(...)` exchanges nothing either, so one process may call it alone; what it found is
compared when the function is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import jax
from jax.sharding import Mesh

from jshard._api.machine import planned_devices
from jshard._api.plan import Plan
from jshard._api.prepare import (
    FoundPlan,
    OnProgress,
    PlannedCall,
    TracedCall,
    plan_traced,
    prepare,
    trace_call,
)
from jshard._api.process_group import Exchange, ProcessGroup, process_group
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._core import hardware, jaxcompat as compat
from jshard._core.errors import ProcessError
from jshard._core.jax_types import Device, PyTree
from jshard._core.layout import MeshAxes
from jshard._core.saved_chip import named_chip
from jshard._core.version import VERSION
from jshard._program.jaxpr_text import array_text, jaxpr_lines
from jshard._spec.committed_shardings import describe_sharding, placement


_log = logging.getLogger("jshard")
T = TypeVar("T")

_ADVICE = {
    "versions": "the same versions of Python, JAX and jshard in every process",
    "devices": "the same mesh in every process, and jax.distributed.initialize before anything else",
    "function": "the same calls in the same order in every process",
    "arguments": "the same shapes and dtypes in every process: the whole batch, or batches of one size with "
    'config={"local_batch": ["batch"]}',
    "options": "the same options of shard in every process",
    "trace": "the same function and Python values in every process: what differs between processes (process_index, "
    "time, random numbers, environment variables) is no part of a program of several processes, or an argument",
    "host values": "the same values in every process; data of one process as config={'local_batch': [...]} or by "
    "jax.make_array_from_process_local_data; config={'check_host_arrays': False} switches the check off",
}
"""What must be equal, in the order in which it is compared, and what to write where it is not."""
_ROWS_HERE = "rows here, with those of the others "
_SAME_ROWS = (
    "as many rows in every process: drop the last batch where it is smaller, or add rows that count nothing"
)


def plan_together(
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    on_progress: OnProgress = None,
    known: PlannedCall | None = None,
) -> PlannedCall:
    """`prepare` with one result in all processes whose devices the call is planned for.

    `known`: this process's plan of the call, where it has one already.
    """
    devices, group = group_of(request, args, kwargs)
    if group is None:
        if known is not None:
            return known
        return prepare(request, args, kwargs, on_progress)
    exchange = group.next_exchange(request.name)
    traced: list[TracedCall] = []

    def facts() -> dict[str, list[str]]:
        traced.append(trace_call(request, args, kwargs, on_progress))
        return _facts(traced[0], devices)

    compare_facts(exchange, facts)
    return agree(
        exchange,
        functools.partial(plan_traced, traced[0]),
        Sent(found_text, lambda planned: planned.plan.steps),
        functools.partial(_taken_from_leader, traced[0], exchange),
        alone=may_end_by_the_clock(request, devices[0]),
        known=known,
    )


def report_failure(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], error: Exception
) -> None:
    """Tell the other processes that this one refuses a call that they are about to plan."""
    _, group = group_of(request, args, kwargs)
    if group is not None:
        _report(group.next_exchange(request.name), "facts", f"{type(error).__name__}: {error}")


def _report(exchange: Exchange, topic: str, error: str) -> None:
    """Give the others the error of this process: as the verdict where it decides."""
    group = exchange.group
    exchange.report(topic, json.dumps({"errors": {group.me: error}} if group.is_leader else {"error": error}))


def common_plan(plan: Plan, about: str) -> Plan:
    """A plan that arrays are placed by: that of the first process, where the processes of its mesh found different ones.

    `about`: the function that places arrays, for messages.
    """
    mesh = plan.jax_mesh
    if compat.coordination_client() is None or not isinstance(mesh, Mesh):
        return plan
    group = process_group(list(mesh.devices.flat), about, None)
    if group is None:
        return plan
    text = plan.to_json()

    def decide(texts: Mapping[int, str]) -> str:
        return "" if len(set(texts.values())) == 1 else text

    verdict = group.next_exchange(about).collect("plan", _digest([text]), decide, seconds=group.seconds)
    if not verdict or verdict == text:
        return plan
    other = Plan.from_json(verdict)
    if (other.fingerprint, other.mesh) != (plan.fingerprint, plan.mesh):
        raise ProcessError(
            f"processes {group.leader} and {group.me} give {about} plans of different programs or meshes: "
            f"{other.name} on {other.mesh}, {plan.name} on {plan.mesh}",
            where=about,
            fix="the plan of one function, on one mesh, in every process",
        )
    return dataclasses.replace(
        other, jax_mesh=mesh, in_tree=plan.in_tree, out_tree=plan.out_tree, search_again=plan.search_again
    )


def group_of(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[list[Device], ProcessGroup | None]:
    """The devices of a call, and the processes that they belong to; None for this process alone."""
    if compat.coordination_client() is None:
        return [], None
    no_mesh = request.mesh is None and compat.context_mesh() is None
    leaves = jax.tree.leaves(traced_arguments(request, args, kwargs))
    devices = planned_devices(request, placement(leaves, use_argument_mesh=no_mesh))
    return devices, process_group(devices, request.name, request.options.process_seconds)


def _facts(traced: TracedCall, devices: Sequence[Device]) -> dict[str, list[str]]:
    """What must be equal in all processes, as lines by topic."""
    request, call = traced.request, traced.call
    leaves = jax.tree.leaves((call.args, call.kwargs))
    sharded = dict(call.placement.sharded)
    arguments, values = [], []
    for i, (leaf, x, aval) in enumerate(zip(call.leaves, leaves, jax.tree.leaves(call.shapes), strict=True)):
        lies = f", {describe_sharding(sharded[i])}" if i in sharded else ""
        rows = _rows_here(request, leaf.path, x, devices)
        arguments.append(f"{leaf.path}: {rows}{aval.dtype}[{','.join(map(str, aval.shape))}]{lies}")
        if request.options.check_host_arrays and (text := _host_value(x)) is not None:
            values.append(f"{leaf.path}: {text}")
    return {
        **facts_of_process(devices),
        "function": [request.name],
        "arguments": arguments,
        "options": [
            f"{f.name}={getattr(request.options, f.name)}"
            for f in dataclasses.fields(request.options)
            if f.name != "process_seconds"
        ],
        "trace": list(jaxpr_lines(traced.jaxpr)),
        "host values": values,
    }


def _rows_here(request: ShardRequest, path: str, x: PyTree, devices: Sequence[Device]) -> str:
    """What an argument of a local batch has in this process; "" for others. A type stands for the whole batch."""
    is_batch = (
        isinstance(x, jax.ShapeDtypeStruct) and re.split(r"[.\[]", path)[0] in request.options.local_batch
    )
    return f"{x.shape[0] // len({d.process_index for d in devices})} {_ROWS_HERE}" if is_batch else ""


def facts_of_process(devices: Sequence[Device]) -> dict[str, list[str]]:
    """The versions and the devices of a mesh, which must be equal in all its processes, as lines by topic."""
    numbers = [n for d in devices for n in (d.process_index, d.id)]
    return {
        "versions": [f"Python {platform.python_version()}", f"jax {jax.__version__}", f"jshard {VERSION}"],
        "devices": [
            f"{jax.device_count()} devices in {jax.process_count()} processes",
            f"mesh of {len(devices)} devices {hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]}",
        ],
    }


def _host_value(x: PyTree) -> str | None:
    """The value of an argument that is not committed to devices, as text with a hash; None for others and for types."""
    if isinstance(x, jax.ShapeDtypeStruct) or compat.is_tracer(x):
        return None
    if isinstance(x, jax.Array):
        if getattr(x, "committed", True) or not x.is_fully_addressable:
            return None
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
    return array_text(x)


def compare_facts(
    exchange: Exchange, facts: Callable[[], dict[str, list[str]]], about: str = "facts"
) -> None:
    """Raise where the facts of the processes differ, in all of them, or where one of them has an error.

    `about`: the key of this comparison, one of its exchange.
    """
    group = exchange.group
    lines: dict[str, list[str]] = {}
    own: BaseException | None = None
    try:
        lines = facts()
        mine = {topic: _digest(text) for topic, text in lines.items()}
    except BaseException as error:
        own, mine = error, {"error": f"{type(error).__name__}: {error}"}

    def decide(texts: Mapping[int, str]) -> str:
        given, failed = _given_and_failed(texts)
        if failed:
            return json.dumps({"errors": failed})
        first = given[group.leader]
        for topic in _ADVICE:
            other = [p for p in group.others if given[p].get(topic) != first.get(topic)]
            if other:
                return json.dumps({"topic": topic, "process": other[0]})
        return json.dumps({})

    if own is not None:
        _report(exchange, about, mine["error"])
        raise own
    try:
        verdict = json.loads(exchange.collect(about, json.dumps(mine), decide, seconds=group.seconds))
    except ProcessError as late:  # those that come later shall not wait for this one
        with contextlib.suppress(ProcessError):
            _report(exchange, about, f"ProcessError: {late}")
        raise
    if "errors" in verdict:
        raise _failure(exchange, verdict["errors"])
    if verdict:
        raise _difference(exchange, verdict["topic"], verdict["process"], lines[verdict["topic"]])


def _given_and_failed(texts: Mapping[int, str]) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
    """What each process gave, and the errors of those that failed."""
    given = {process: json.loads(text) for process, text in texts.items()}
    return given, {process: g["error"] for process, g in given.items() if "error" in g}


def _failure(exchange: Exchange, errors: Mapping[str, str]) -> ProcessError:
    process, text = next(iter(errors.items()))
    quoted = "\n    ".join(text.splitlines())
    return ProcessError(
        f"process {process} raised an error where {exchange.about} is planned",
        where=f"process {process}: {quoted}",
        fix=f"what the error of process {process} says; all processes stop here",
    )


def _difference(exchange: Exchange, topic: str, process: int, lines: Sequence[str]) -> ProcessError:
    """The error for a topic in which a process differs from the leader, with the first line that does."""
    group = exchange.group

    def first_difference(texts: Mapping[int, str]) -> str:
        one, other = json.loads(texts[group.leader]), json.loads(texts[process])
        n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        at = min(len(one), len(other)) if n is None else n
        ends = [text[at] if at < len(text) else "nothing more" for text in (one, other)]
        return json.dumps([at, *ends])

    at, one, other = json.loads(exchange.collect("lines", json.dumps(list(lines)), first_difference))
    what = {
        "versions": f"processes {group.leader} and {process} run different versions",
        "function": f"processes {group.leader} and {process} call different functions",
        "trace": f"processes {group.leader} and {process} traced different programs for {exchange.about}",
    }.get(topic, f"processes {group.leader} and {process} call {exchange.about} with different {topic}")
    return ProcessError(
        f"{what}\n    process {group.leader}: {one.strip()}\n    process {process}: {other.strip()}",
        where=f"call of {exchange.about}, plan {exchange.number}, {topic}, line {at + 1}",
        fix=_SAME_ROWS if topic == "arguments" and _ROWS_HERE in one + other else _ADVICE[topic],
    )


@dataclasses.dataclass(frozen=True)
class Sent(Generic[T]):
    """What processes tell each other of a result: a text, equal for equal results, and remarks, which are not compared."""

    text: Callable[[T], str]
    remarks: Callable[[T], Sequence[str]]


def agree(
    exchange: Exchange,
    find: Callable[[], T],
    sent: Sent[T],
    take: Callable[[str, Sequence[str]], T],
    *,
    alone: bool,
    known: T | None = None,
    about: str = "plan",
) -> T:
    """The leader's result of a search in all processes.

    `take`: the leader's result, from its text and remarks. `alone`: the leader alone searches; otherwise each finds its
    own first, and takes the leader's where they differ. `known`: this process's result, where it has one already.
    `about`: the key of this agreement, one of its exchange.
    """
    group = exchange.group
    own: BaseException | None = None
    result, mine = known, {}
    try:
        if result is None and (group.is_leader or not alone):
            result = find()
        if result is not None:
            mine = {"plan": _digest([sent.text(result)])}
    except BaseException as error:
        own, mine = error, {"error": f"{type(error).__name__}: {error}"}

    def decide(texts: Mapping[int, str]) -> str:
        given, failed = _given_and_failed(texts)
        if failed or result is None:
            return json.dumps({"errors": failed})
        other = [p for p in group.others if given[p] != mine]
        return json.dumps({"text": sent.text(result), "remarks": list(sent.remarks(result))} if other else {})

    if own is not None:
        _report(exchange, about, mine["error"])
        raise own
    verdict = json.loads(exchange.collect(about, json.dumps(mine), decide))
    if "errors" in verdict:
        raise _failure(exchange, verdict["errors"])
    if result is not None and (not verdict or sent.text(result) == verdict["text"]):
        return result
    if result is not None:
        _log.warning(
            "process %d found another plan of %s than process %d, and takes that of process %d",
            group.me, exchange.about, group.leader, group.leader,
        )  # fmt: skip
    return take(verdict["text"], verdict["remarks"])


def _taken_from_leader(
    traced: TracedCall, exchange: Exchange, text: str, steps: Sequence[str]
) -> PlannedCall:
    found = found_of_text(text, (*steps, f"searched by process {exchange.group.leader}"))
    return plan_traced(dataclasses.replace(traced, found=found))


def may_end_by_the_clock(request: ShardRequest, device: Device) -> bool:
    """Whether a search has memory to keep to or to minimise: its integer programs end after some seconds."""
    if request.options.level == 1 or request.options.memory_budget is not None:
        return True
    chip = request.options.hardware
    chip = named_chip(chip) if isinstance(chip, str) else chip or hardware.for_device(device)
    return chip.hbm_bytes is not None


def found_text(planned: PlannedCall) -> str:
    """A plan as text that is equal for equal plans: JSON, with what else is needed to run it."""
    axes = planned.chosen.axes
    return json.dumps([list(axes.names), list(axes.sizes), sorted(planned.committed), planned.plan.to_json()])


def found_of_text(text: str, steps: Sequence[str]) -> FoundPlan:
    """The plan of `found_text`, with its steps."""
    names, sizes, committed, plan = json.loads(text)
    record = dataclasses.replace(Plan.from_json(plan), steps=tuple(steps))
    return FoundPlan(record, MeshAxes(tuple(names), tuple(sizes)), frozenset(committed))


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
