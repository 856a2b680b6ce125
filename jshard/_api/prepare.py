"""From a call to its plan: trace, pins, mesh, search, schedule. Done once per signature."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax import core
from jax.sharding import AxisType

from jshard._api.call_pins import collect_pins, mesh_of_call, pins_of_arguments, pins_of_results
from jshard._api.machine import auto_meshes, memory_budget, physical_topology
from jshard._api.plan import Plan, planned_again
from jshard._api.plan_on_mesh import PlannedOnMesh, cheapest_mesh, plan_with_committed
from jshard._api.shard_request import ShardRequest, donated_leaves, static_values
from jshard._api.state_matching import find_state_ties
from jshard._api.trace_call import (
    BuiltPrograms,
    TracedArguments,
    TracedProgram,
    abstract_with_shardings,
    build_program,
    result_names,
    trace_on_shapes,
)
from jshard._core import hardware, jaxcompat as compat, topology as device_topology
from jshard._core.errors import MemoryBudgetError, StrategyError
from jshard._core.gc_pause import gc_paused
from jshard._core.hardware import Chip
from jshard._core.jax_types import ClosedJaxpr, JaxMesh, PyTree, PyTreeDef
from jshard._core.layout import MeshAxes
from jshard._plan.replay import schedule_of_plan
from jshard._plan.request import ENOUGH, LEAST_EFFORT, PlanRequest, effort_of_call
from jshard._program.equation_bodies import rewritten
from jshard._program.searchsorted_primitive import with_searches
from jshard._program.shift_patterns import with_shifts
from jshard._program.user_shard_map import check_meshes
from jshard._schedule.schedule import Schedule
from jshard._spec.entry import Pin
from jshard._spec.mesh_selection import ChosenMesh


if TYPE_CHECKING:
    from jshard._api.batch_of_call import BatchOfCall
    from jshard._api.config_pins import CallRules
    from jshard._api.padded_pins import UnevenCut
    from jshard._batch.batch_report import BatchReport
    from jshard._plan.recompute_search import Effort


OnProgress = Callable[..., None] | None


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCall:
    """One signature, planned.

    `in_tree`, `in_avals`: pytree structure and avals of the traced arguments; `out_tree`: of all results.
    `weak_typed`: which results have a weak type. `donated`: numbers of the donated leaves. `pinned`: of the arguments
    that the user pinned. `committed`: of the unpinned arguments that are planned in their committed sharding.
    `unpadded`: the call as it is differentiated from outside, where the program of this one pads dimensions; it may take
    the plan of another process. `uneven`: cuts of pins that do not divide, which a plan as traced leaves open.
    """

    request: ShardRequest
    plan: Plan
    schedule: Schedule
    chosen: ChosenMesh
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    in_avals: tuple[core.ShapedArray, ...]
    weak_typed: tuple[bool, ...]
    donated: tuple[int, ...]
    statics: tuple[object, ...]
    pinned: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()
    unpadded: Callable[[FoundPlan | None], PlannedCall] | None = None
    uneven: tuple[UnevenCut, ...] = ()

    def with_plan(self, **changes: object) -> PlannedCall:
        """The call with fields of its plan replaced."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **changes))


def prepare(
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    on_progress: OnProgress = None,
    programs: BuiltPrograms | None = None,
) -> PlannedCall:
    """Trace and plan a call; raises `ShardError` for what cannot be planned.

    `programs`: built for the same function and shapes, on other meshes say; this call takes them, and adds its own.
    """
    traced = trace_call(request, args, kwargs, on_progress)
    return plan_traced(traced if programs is None else dataclasses.replace(traced, programs=programs))


def trace_call(
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    on_progress: OnProgress = None,
) -> TracedCall:
    """A call, traced, with what the user says of its arguments."""
    call = TracedArguments.of(request, args, kwargs)
    in_pins = pins_of_arguments(request, call, len(args))
    traced, explicit_mesh = trace_on_shapes(request, args, kwargs)
    if explicit_mesh is not None:
        call = dataclasses.replace(call, shapes=abstract_with_shardings((call.args, call.kwargs)))
    elif (context := compat.context_mesh()) is not None and AxisType.Explicit in context.axis_types:
        explicit_mesh = context
    statics = static_values(request, args, kwargs)
    effort = effort_of_call(request.options.search_seconds)
    return TracedCall(request, call, traced, explicit_mesh, in_pins, statics, on_progress, effort)


def check_pins(request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
    """Raise `StrategyError` for a wrong pin of an argument, without tracing the function."""
    pins_of_arguments(request, TracedArguments.of(request, args, kwargs), len(args))


@dataclasses.dataclass(frozen=True, eq=False)
class FoundPlan:
    """A plan of the same call that another process found: its axes with those of size one, what stays as it lies."""

    plan: Plan
    axes: MeshAxes
    committed: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """What all plans of one call share: its arguments, its trace, and what the user says of them.

    `explicit_mesh`: the mesh with Explicit axes of the trace, if any. `in_pins`: of the arguments. `effort`: of all
    searches. `found`: the plan to take instead of a search. `in_pieces`: the program in loops over pieces of the batch.
    `most`: the cost of a plan that is known; `ends_above`: the objective above which plans are of no use. `programs`: those
    built so far of jaxprs of this trace.
    """

    request: ShardRequest
    call: TracedArguments
    jax_traced: jax.stages.Traced
    explicit_mesh: JaxMesh | None
    in_pins: Sequence[Pin | None]
    statics: tuple[object, ...]
    on_progress: OnProgress
    effort: Effort
    found: FoundPlan | None = None
    in_pieces: ClosedJaxpr | None = None
    most: float = math.inf
    ends_above: float = math.inf
    programs: BuiltPrograms = dataclasses.field(default_factory=dict, repr=False)

    @property
    def given_plan(self) -> Plan | None:
        """The plan that the user gave, or that another process found."""
        return self.request.plan if self.found is None else self.found.plan

    @functools.cached_property
    def donated(self) -> tuple[int, ...]:
        """The flat indices of the donated arguments."""
        return donated_leaves(self.request, self.call.args, self.call.kwargs, self.call.names)

    @functools.cached_property
    def rules(self) -> CallRules | None:
        """The rules of the configuration; None without one."""
        if self.request.config is None:
            return None
        from jshard._api.config_pins import call_rules  # here, so that `import jshard` stays light

        return call_rules(self.request, self.request.config, self.call, self.jax_traced)

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The traced function, the named scopes of the configuration's rules marked, searches and shifts as operators."""
        if self.in_pieces is not None:
            return self.in_pieces
        return rewritten(rewritten((self.rules or self.jax_traced).jaxpr, with_searches), with_shifts)

    def program_of(self, jaxpr: ClosedJaxpr | None, recomputed: bool) -> TracedProgram:
        """The program of the traced function, or of another jaxpr for it, which may compute values again."""
        closed = self.jaxpr if jaxpr is None else jaxpr
        key = id(closed), recomputed, self.donated
        if key not in self.programs:
            pin_of_name = self.rules and self.rules.pin_of_name
            facts = self.call, self.jax_traced, self.explicit_mesh, self.donated, pin_of_name
            self.programs[key] = closed, build_program(self.request, *facts, closed, recomputed=recomputed)
        return self.programs[key][1]

    @functools.cached_property
    def read_batch(self) -> Callable[[], BatchOfCall]:
        """Finds the batch of the call's arguments; holds no argument, since plans keep it."""
        captured = tuple(compat.captured_tracers(self.jax_traced))
        names = [leaf.path for leaf in self.call.leaves], result_names(self.request, self.jax_traced)
        return functools.partial(_batch_of_call, self.jaxpr, self.request.name, captured, *names)


@gc_paused()
def plan_traced(traced: TracedCall) -> PlannedCall:
    """The planned call of a traced function, in pieces of its batch or in a pipeline if the request says so."""
    request, given = traced.request, traced.given_plan
    if (request.options.pipeline if given is None else given.pipeline) is not None:
        return _in_pipeline(traced)
    count = request.options.microbatches if given is None else given.microbatches
    batch = functools.lru_cache(traced.read_batch)

    def plan_in(pieces: int) -> PlannedCall:
        if pieces == 1:
            planned = _plan_with_remat(traced)
        else:
            looped = batch().in_microbatches(pieces, request.name)
            planned = _plan_with_remat(dataclasses.replace(traced, in_pieces=looped))
        report = functools.partial(_batch_report, traced.read_batch, request.name, pieces)
        return planned.with_plan(microbatches=pieces, batch_of=report)

    if count is None or isinstance(count, int):
        return plan_in(count or 1)
    from jshard._api.batch_of_call import fewest_microbatches  # here, so that `import jshard` stays light

    planned, steps = fewest_microbatches(batch(), plan_in, lambda planned: planned.plan)
    return planned.with_plan(steps=(*planned.plan.steps, *steps))


def _in_pipeline(traced: TracedCall) -> PlannedCall:
    """The planned call of a traced function in the pipeline of its request, or of the plan that it was given."""
    from jshard._api.pipeline_of_call import PipelinedCall  # here, so that `import jshard` stays light

    planned = PipelinedCall(
        traced.request,
        traced.call.placement.mesh,
        functools.lru_cache(traced.read_batch),
        lambda jaxpr, most: _plan_with_remat(dataclasses.replace(traced, in_pieces=jaxpr, most=most)),
        lambda call: call.plan,
        lambda call, plan: dataclasses.replace(call, plan=plan),
    ).planned(None if traced.given_plan is None else traced.given_plan.pipeline)
    report = functools.partial(_batch_report, traced.read_batch, traced.request.name, 1)
    return planned.with_plan(batch_of=report)


def _batch_of_call(
    jaxpr: ClosedJaxpr, name: str, captured: tuple[jax.Array, ...], arguments: list[str], results: list[str]
) -> BatchOfCall:
    from jshard._api.batch_of_call import batch_of_call  # here, so that `import jshard` stays light

    return batch_of_call(jaxpr, name, captured, arguments, results)


def _batch_report(read_batch: Callable[[], BatchOfCall], name: str, pieces: int) -> BatchReport:
    return read_batch().report(name, pieces)


def _plan_with_remat(traced: TracedCall) -> PlannedCall:
    """The planned call of a traced function whose values may be computed again."""
    request, given = traced.request, traced.given_plan

    def chip_of(planned: PlannedCall) -> Chip:
        return physical_topology(planned.request, planned.chosen).chip

    if given is not None:
        return _plan_again(traced, given)
    with_remat = request.options.remat is not None
    planned, jaxpr = _plan_with_padding(traced, limited=not with_remat)
    if not with_remat:
        return planned
    from jshard._api import plan_recomputed as again  # here, so that `import jshard` stays light

    closed, limit = traced.jaxpr if jaxpr is None else jaxpr, planned.plan.memory_budget

    def plan_jaxpr(recomputed: ClosedJaxpr | None, limited: bool, most: float, effort: Effort) -> PlannedCall:
        of = traced if most >= traced.most else dataclasses.replace(traced, most=most)
        program = jaxpr if recomputed is None else recomputed
        return _plan_jaxpr(of, program, limited, recomputed is not None, effort)

    if limit is not None and planned.plan.cost.peak_bytes > limit:
        if again.least_argument_bytes(planned.in_avals, planned.chosen.axes.total) > limit:
            return _plan_jaxpr(traced)  # which refuses: no choice of what is kept makes the arguments smaller
        padding, unpadded = planned.plan.padding, planned.unpadded
        planned, kept, steps, bound = again.plan_recomputed(
            closed, plan_jaxpr, lambda p: p.plan, chip_of(planned), limit, planned.donated, planned,
            request.options.search_seconds, request.options.traced_is_refused,
        )  # fmt: skip
        plan = again.with_recomputation(planned.plan, kept, steps, bound)
        plan = dataclasses.replace(plan, padding=padding)
        planned = dataclasses.replace(planned, plan=plan, unpadded=unpadded)
    if request.options.remat == "policy":
        policy = again.equivalent_policy(closed, planned.plan, chip_of(planned))
        planned = planned.with_plan(steps=(*planned.plan.steps, *policy))
    return planned


def _plan_again(traced: TracedCall, plan: Plan) -> PlannedCall:
    """The call of a plan that the user gave: its program pads and computes again what the plan's did."""
    jaxpr: ClosedJaxpr | None = None
    if plan.padding:
        from jshard._api.plan_padded import padded_as_planned  # here, so that `import jshard` stays light

        jaxpr = padded_as_planned(traced.jaxpr, plan)
    if plan.kept is not None:
        from jshard._api.plan_recomputed import replayed

        closed = traced.jaxpr if jaxpr is None else jaxpr
        jaxpr = replayed(closed, plan, hardware.get(plan.chip), traced.request.name)
    planned = _plan_jaxpr(traced, jaxpr, recomputed=plan.kept is not None)
    if not plan.padding:
        return planned
    afresh = dataclasses.replace(traced, request=traced.request.without_plan(planned.chosen.mesh))
    context = compat.context_mesh()  # of this call: JAX differentiates in that of the planned program

    def unpadded(found: FoundPlan | None) -> PlannedCall:
        with compat.context_of_trace(context):
            return _plan_jaxpr(dataclasses.replace(afresh, found=found))

    return dataclasses.replace(planned, unpadded=unpadded)


def _plan_with_padding(traced: TracedCall, limited: bool) -> tuple[PlannedCall, ClosedJaxpr | None]:
    """The better of the plans with and without padding; with the padded jaxpr, if that is the one."""
    planned, refusal, options = None, None, traced.request.options
    try:
        reference = planned = _plan_jaxpr(traced, limited=limited)
    except MemoryBudgetError as error:
        if options.pad is not True:  # a refusal comes at once: no second search unless the user asks for it
            raise
        refusal = error
        reference = _plan_jaxpr(traced, limited=False)
    from jshard._api.padded_pins import (  # here, so that `import jshard` stays light
        refuse_uneven,
        required_sizes,
    )

    if not _can_pad(traced):
        refuse_uneven(reference.uneven)
        return _or_raise(planned, refusal), None
    from jshard._api.padded_trace import sizes_at_rest
    from jshard._api.plan_padded import plan_padded, with_padding, with_trials

    def plan_jaxpr(jaxpr: ClosedJaxpr, ends_above: float) -> PlannedCall:
        return _plan_jaxpr(dataclasses.replace(traced, ends_above=ends_above), jaxpr, limited)

    at_rest = sizes_at_rest(traced.jaxpr, (traced.call.args, traced.call.kwargs))
    required = {**required_sizes(traced.jaxpr, reference.uneven, reference.chosen.axes), **at_rest}
    original = None if planned is None or required else planned.plan
    best, bound, trials = plan_padded(
        traced.jaxpr, reference.schedule.assignment, original, plan_jaxpr, options.pad is True, required
    )
    if best is None:
        planned = _or_raise(planned, refusal)
        plan = with_trials(planned.plan, trials, bound)
        return dataclasses.replace(planned, plan=plan), None
    plan = with_trials(with_padding(best.planned.plan, best.sizes), trials, bound)
    chosen, context = best.planned.chosen, compat.context_mesh()

    def unpadded(_: FoundPlan | None) -> PlannedCall:
        if reference.chosen.axes == chosen.axes:
            return reference
        # Of "auto" meshes the program as traced was cheapest on another: the two programs run in one.
        request = dataclasses.replace(traced.request, mesh=chosen.mesh)
        with compat.context_of_trace(context):
            return _plan_jaxpr(dataclasses.replace(traced, request=request), limited=limited)

    return dataclasses.replace(best.planned, plan=plan, unpadded=unpadded), best.jaxpr


def _or_raise(planned: PlannedCall | None, refusal: MemoryBudgetError | None) -> PlannedCall:
    if planned is None:
        assert refusal is not None
        raise refusal
    return planned


def check_padding(of: TracedCall) -> None:
    """Raise `StrategyError` where the pins of a call cannot pad what they do not divide; nothing is searched."""
    for refusal in padding_refusals(of).values():
        raise refusal


def padding_refusals(of: TracedCall) -> dict[tuple[str, int], StrategyError]:
    """Why cuts of a call's pins that do not divide cannot be padded, by where the pin is written and the dimension."""
    from jshard._api.padded_pins import refuse_uneven, required_sizes, uneven_cuts  # as below

    request = of.request
    traced, in_pins, out_pins = _pinned_program(of, None, recomputed=False)
    pins = collect_pins(request, of.call, traced, in_pins, out_pins)
    meshes = auto_meshes(request, pins.pins, pins.shapes, pins.joint) if request.tries_meshes else ()
    chosen = next((mesh for mesh, _ in meshes), None) or mesh_of_call(request, of.call, pins)
    cuts = uneven_cuts(of.jaxpr, traced.program, pins.resolve(chosen, physical_topology(request, chosen))[0])
    can_pad, found = _can_pad(of), dict[tuple[str, int], StrategyError]()
    for cut in cuts:
        try:
            required_sizes(of.jaxpr, [cut], chosen.axes)
            if not can_pad:
                refuse_uneven([cut])
        except StrategyError as refusal:
            found.setdefault((cut.where, cut.dim), refusal)
    return found


def _can_pad(of: TracedCall) -> bool:
    """Whether dimensions of a call's program may be padded."""
    options = of.request.options
    unsuited = of.explicit_mesh is not None or options.search != "optimal" or compat.has_effects(of.jaxpr)
    return options.pad is not False and not unsuited


def _pinned_program(
    of: TracedCall, jaxpr: ClosedJaxpr | None, recomputed: bool
) -> tuple[TracedProgram, Sequence[Pin | None], Sequence[Pin | None]]:
    """The program of a traced function, or of another jaxpr for it; the pins of its arguments, and of its results."""
    request, call, rules, in_pins = of.request, of.call, of.rules, of.in_pins
    traced = of.program_of(jaxpr, recomputed)
    out_pins: Sequence[Pin | None] = pins_of_results(request, call, traced)
    if rules is not None:
        found = rules.resolution(traced.program)
        in_pins, out_pins = rules.complete(request, call, found, in_pins, out_pins)
        inner = rules.inner_pins(traced.program, found)
        if inner:
            program = dataclasses.replace(traced.program, pins=(*traced.program.pins, *inner))
            traced = dataclasses.replace(traced, program=program)
    return traced, in_pins, out_pins


def _plan_jaxpr(
    of: TracedCall,
    jaxpr: ClosedJaxpr | None = None,
    limited: bool = True,
    recomputed: bool = False,
    effort: Effort | None = None,
) -> PlannedCall:
    """The planned call of a traced function, or of another jaxpr for it.

    `limited`: within the memory budget. `recomputed`: whether the other jaxpr computes values again. `effort`: as in
    `PlanRequest`.
    """
    from jshard._api.padded_pins import pins_in_padded, uneven_cuts  # here: `import jshard` stays light

    request, call, donated = of.request, of.call, of.donated
    traced, in_pins, out_pins = _pinned_program(of, jaxpr, recomputed)
    program = traced.program
    in_tree, out_tree = jax.tree.structure(call.user_view), jax.tree.structure(traced.result)
    in_leaves = jax.tree.leaves(call.shapes)
    ties = find_state_ties(program, in_leaves, in_tree, traced.avals, out_tree, donated, out_pins)
    pins = collect_pins(request, call, traced, in_pins, out_pins)

    def plan_on(chosen: ChosenMesh, request: ShardRequest = request, share: float = 1.0) -> PlannedOnMesh:
        check_meshes(program, chosen.axes)
        topology = device_topology.without_unit_axes(physical_topology(request, chosen))
        pinned, committed = pins.resolve(chosen, topology)
        pinned = pins_in_padded(program, pinned, jaxpr is not None)
        if request.plan is not None:
            return PlannedOnMesh(request.plan, schedule_of_plan(program, topology, request.plan))
        found = of.found
        options, limit = request.options, memory_budget(request, topology)
        plan_request = PlanRequest(
            tuple(pinned), ties, donated, options.level, options.search, limit if limited else None,
            gap=options.gap, replication_price=options.replication_price, search_seconds=options.search_seconds,
            search_in_budget=options.search_in_budget, estimate=options.estimate, memory_slack=options.memory_slack,
            names_least_peak=not recomputed, effort_again=1 if recomputed or options.effort_share < 1.0 else ENOUGH,
            most=of.most, overlap=options.overlap,
            ends_above=of.ends_above, effort=(effort or of.effort).next_part(share * options.effort_share, LEAST_EFFORT),
        )  # fmt: skip
        if found is not None:
            kept = [c for c in committed if program.inputs.index(c[0]) in found.committed]
            plan = planned_again(found.plan, program, topology, plan_request.with_pins(kept))
            return PlannedOnMesh(plan, schedule_of_plan(program, topology, plan), found.committed)
        planned = plan_with_committed(program, topology, plan_request, committed, of.on_progress)
        return planned if limited else planned.with_budget(limit)

    if request.tries_meshes:
        meshes = auto_meshes(request, pins.pins, pins.shapes, pins.joint)
        if of.found is not None:
            meshes = [m for m in meshes if m[0].axes == of.found.axes]
        chosen, planned = cheapest_mesh(meshes, plan_on)
    else:
        chosen = mesh_of_call(request, call, pins)
        planned = plan_on(chosen)
    uneven: tuple[UnevenCut, ...] = ()
    if jaxpr is None and request.options.pad is True and of.given_plan is None:
        uneven = uneven_cuts(of.jaxpr, program, pins.resolve(chosen, physical_topology(request, chosen))[0])
    return PlannedCall(
        request,
        dataclasses.replace(planned.plan, jax_mesh=chosen.mesh, in_tree=in_tree, out_tree=out_tree),
        planned.schedule,
        chosen,
        jax.tree.structure(call.shapes),
        traced.tree,
        tuple(in_leaves),
        traced.weak_typed,
        donated,
        of.statics,
        frozenset(i for i, p in enumerate(in_pins) if p is not None and not p.free),
        planned.committed,
        uneven=uneven,
    )
