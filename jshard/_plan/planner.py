"""From a traced function and its wishes to a plan and its schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jshard import _jaxcompat as compat
from jshard._api.plan import Plan
from jshard._core.errors import MemoryBudgetError, PlanMismatchError, SearchError
from jshard._core.gc_pause import gc_paused
from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._memory.hbm_traffic import PRODUCTS
from jshard._network.build import Pins, PlanningNetwork, build_network
from jshard._network.candidates import CandidateCache
from jshard._network.memory_network import memory_network
from jshard._network.pin_conflicts import explain_contradiction
from jshard._network.replication_price import REPLICATION_PRICE
from jshard._plan.propagation import propagate
from jshard._plan.replan import Replanner
from jshard._plan.schedule_cost import ScheduleCost, schedule_cost
from jshard._plan.summarize import fingerprint, summarize
from jshard._plan.tie_breaking import break_ties
from jshard._program.graph import Program, rule_boundaries
from jshard._schedule.peak import PeakProfile, peak_profile
from jshard._schedule.schedule import Assignment, Schedule, assignment_of, schedule
from jshard._search import Contradiction, CostNetwork, Solution, solve
from jshard._spec.entry import Pin, satisfies


@dataclasses.dataclass(frozen=True, eq=False)
class PlanRequest:
    """What planning needs beside the program: pins by operator, ties, level, budget, search."""

    pins: tuple[tuple[int, str, int, Pin], ...]  # (operator, side, index, pin)
    ties: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    level: int = 0
    search: str = "optimal"
    memory_limit: float | None = None
    seconds: float = 60.0
    gap: float = 0.0
    replication_price: float = REPLICATION_PRICE
    # Under a budget and for the least peak the effort is counted, so that every machine finds the same plan. The
    # seconds only end what takes far longer than it should.
    memory_seconds: float = 240.0
    memory_gap: float = 0.005
    # (operator, side, index, key, test of layouts): what `Plan.why` forces, beside the user's pins
    forced: tuple[tuple[int, str, int, str, Callable[[Layout], bool]], ...] = ()
    # Output operators that the user pinned, where `pins` has others: what `Plan.what_if` adds changes no price.
    pinned_results: tuple[int, ...] | None = None


@gc_paused()
def make_plan(
    program: Program, topology: Topology, request: PlanRequest, on_progress: Callable[..., None] | None = None
) -> tuple[Plan, Schedule]:
    """Search a plan for a program on a topology; returns the plan and the schedule it stands for."""
    fixed = {
        op: list(pins) for op, pins in network_pins(request.pins, topology, rule_boundaries(program)).items()
    }
    forced: dict[int, list] = {}
    for op, side, k, key, test in request.forced:
        forced.setdefault(op, []).append((side, k, key, test))

    def problem_of(**options: Any) -> PlanningNetwork:
        options = {"replication_price": request.replication_price, **options}
        return build_network(
            program, topology, fixed, forced=forced, pinned_results=request.pinned_results, level=request.level,
            ties=request.ties, donated=request.donated, **options,
        )  # fmt: skip

    built = problem_of(second_copies=request.level != 1)
    if request.search != "propagation":
        try:
            answer = _solve_request(built, request, problem_of, on_progress)
        except Contradiction as e:
            every = {op: [*fixed.get(op, ()), *forced.get(op, ())] for op in {**fixed, **forced}}
            raise explain_contradiction(e, built, every) from None
    else:
        configured = {op for op, *_ in (*request.pins, *request.forced)}
        assignment, steps = propagate(built, configured)
        answer = _schedule_solution(built, request, assignment, 0.0, steps, breaks_ties=False)
    answer = _with_valid_bound(answer)
    plan = summarize(
        answer.schedule,
        request,
        answer.schedule_cost,
        answer.objective,
        answer.bound,
        answer.steps,
        answer.profile,
        answer.unpriced,
        ONE_SHARED_COPY if request.level != 1 and answer.network.one_shared_copy else "",
    )
    if request.memory_limit is not None and plan.cost.peak_bytes > request.memory_limit:
        _raise_over_budget(plan, request.memory_limit, answer.peak_bound)
    # Without the captured arrays: a plan keeps none alive.
    bare = dataclasses.replace(program, constants=(), jaxpr=None)
    again = Replanner(bare, topology, request, lambda w: make_plan(bare, topology, w)[0])
    return dataclasses.replace(plan, search_again=again), answer.schedule


ONE_SHARED_COPY = "plans with a single shared copy a tensor"

_REGATHER_PEAK_RATIO = (
    0.95  # of the peak: for less nothing is moved again, since compilers follow such a plan only so far
)
_RELATIVE_ROUNDING = 1e-9  # relative: the network adds up the same terms in another order


@dataclasses.dataclass(frozen=True, eq=False)
class _ScheduledSolution:
    """A schedule with what it costs and holds, and the bound of the search that found it.

    `least`: no plan needs fewer bytes, where that is known. `unpriced`: as in `Cost`.
    """

    network: PlanningNetwork
    request: PlanRequest
    schedule: Schedule
    schedule_cost: ScheduleCost
    bound: float
    steps: tuple[str, ...]
    profile: PeakProfile
    peak_bound: float = 0.0
    unpriced: float = 0.0

    @property
    def peak(self) -> float:
        return self.profile.peak

    @property
    def cost(self) -> float:
        """Seconds by the schedule; at level 1 those of a whole call, which break ties."""
        return self.schedule_cost.objective(self.request.level)

    @property
    def objective(self) -> float:
        return self.peak if self.request.level == 1 else self.cost

    @property
    def interrupted(self) -> bool:
        return any("interrupted" in s for s in self.steps)

    def after(self, other: _ScheduledSolution) -> _ScheduledSolution:
        """With a word of it if an earlier search was interrupted."""
        if not other.interrupted or self.interrupted:
            return self
        return dataclasses.replace(self, steps=(*self.steps, "an earlier part of the search was interrupted"))


def _with_valid_bound(answer: _ScheduledSolution) -> _ScheduledSolution:
    """The bound as the plan may claim it: equal to the schedule's cost where only rounding lies between them.

    A bound above the cost of a schedule would be no bound; nothing is claimed then, and the steps say so.
    """
    cost, bound = answer.objective, answer.bound
    if abs(cost - bound) <= _RELATIVE_ROUNDING * max(cost, bound):
        return dataclasses.replace(answer, bound=cost)
    if bound > cost:
        said = f"the search's bound {bound:.6g} is above the schedule's cost {cost:.6g}: nothing is proved"
        return dataclasses.replace(answer, bound=0.0, steps=(*answer.steps, said))
    return answer


def _schedule_solution(
    built: PlanningNetwork,
    wish: PlanRequest,
    assignment: Any,
    bound: float,
    steps: Any,
    breaks_ties: bool = True,
) -> _ScheduledSolution:
    """What an assignment stands for; variables of copies at its end only repeat what the others say."""
    assignment = np.asarray(assignment)[: built.cost_network.size]
    made = schedule(assignment_of(built, tuple(assignment.tolist())))
    held, found = peak_profile(made, built.liveness, wish.donated), schedule_cost(made, built)
    if breaks_ties and wish.level == 2:
        other = break_ties(built, assignment, wish.ties)
        if other is not assignment:
            made_so = schedule(assignment_of(built, tuple(other.tolist())))
            held_so, found_so = (
                peak_profile(made_so, built.liveness, wish.donated),
                schedule_cost(made_so, built),
            )
            cheap = found_so.objective(2) <= found.objective(2) * (1 + _RELATIVE_ROUNDING)
            if cheap and held_so.peak <= max(held.peak, wish.memory_limit or 0.0):
                made, held, found = made_so, held_so, found_so
    least = 0.0 if wish.level == 1 else wish.memory_limit
    # XLA on CPU drops what keeps two equal collectives apart. For programs with loops, bodies move for themselves.
    apart = built.topology.chip.name != "cpu" and made.arrays is not None
    if apart and least is not None and held.peak > least:
        made_so = schedule(dataclasses.replace(made.assignment, regather=True))
        held_so = _with_prefetched_gather(made_so, peak_profile(made_so, built.liveness, wish.donated))
        if held_so.peak < _REGATHER_PEAK_RATIO * held.peak:
            made, held, found = made_so, held_so, schedule_cost(made_so, built)
    return _ScheduledSolution(built, wish, made, found, float(bound), tuple(steps), held)


def _with_prefetched_gather(made: Schedule, held: PeakProfile) -> PeakProfile:
    """What is held with the largest copy that is moved again once more: compilers begin a gather a product early."""
    found = made.arrays
    assert found is not None
    sizes = found.assignment.program.use_def.nbytes[found.tensor] / found.num_shards[found.target]
    more = float(sizes[found.regathered & ~found.only_slices].max(initial=0.0))
    return dataclasses.replace(
        held, peak=held.peak + more, by_class=(*held.by_class, ("copies under way", more))
    )


def _solve_request(
    built: PlanningNetwork,
    wish: PlanRequest,
    problem_of: Callable[..., PlanningNetwork],
    on_progress: Callable[..., None] | None,
) -> _ScheduledSolution:
    """Search by level; a budget that the free optimum keeps anyway costs nothing and leaves its proof whole."""
    if wish.level == 1:
        return _solve_peak(built, wish, on_progress)
    answer = _solve_time(built, wish, problem_of, on_progress)
    if wish.memory_limit is None or answer.peak <= wish.memory_limit:
        return _with_unpriced_cost(answer, problem_of)
    built = problem_of(second_copies=False)
    answer = _solve_under_budget(built, wish, answer, on_progress)
    if answer.peak <= wish.memory_limit:
        return answer
    # Plans that fit may have to repeat products: what they pay for it is counted, but not searched by.
    loose = problem_of(replication_price=0.0, price_returned_sums=False, second_copies=False)
    other = _solve_peak(loose, wish, on_progress).after(answer)
    if answer.peak < other.peak:
        other = dataclasses.replace(answer, peak_bound=other.peak_bound)
    return dataclasses.replace(
        other, network=built, schedule_cost=schedule_cost(other.schedule, built), bound=answer.bound
    )


def _solve_time(
    built: PlanningNetwork,
    wish: PlanRequest,
    problem_of: Callable[..., PlanningNetwork],
    on_progress: Callable[..., None] | None,
) -> _ScheduledSolution:
    """The plan of least time without a budget.

    Where a schedule costs more than the network, which lets several readers share more copies than they do, the plan is
    that of the network in which a tensor has a single shared copy, if that costs less.
    """
    s = solve(built.cost_network, gap=wish.gap, seconds=wish.seconds, on_progress=on_progress)
    answer = _schedule_solution(built, wish, s.assignment, s.bound, s.steps)
    if built.one_shared_copy or answer.interrupted or answer.cost <= s.cost * (1 + _RELATIVE_ROUNDING):
        return answer
    single = problem_of(second_copies=False)
    s = solve(single.cost_network, gap=wish.gap, seconds=wish.seconds, on_progress=on_progress)
    other = _schedule_solution(single, wish, s.assignment, s.bound, (*answer.steps, *s.steps))
    if other.cost >= answer.cost:
        return answer
    proved = other.cost <= other.bound * (1 + _RELATIVE_ROUNDING) and other.bound <= other.cost * (
        1 + _RELATIVE_ROUNDING
    )
    return other if proved else dataclasses.replace(other, network=built, bound=answer.bound)


def _with_unpriced_cost(
    answer: _ScheduledSolution, problem_of: Callable[..., PlanningNetwork]
) -> _ScheduledSolution:
    """With what a plan would cost without the price of repeated products, where latency is all that this one pays.

    Only there can repeating all products be quicker than what the plan communicates: elsewhere nothing is searched.
    """
    wish, built, found = answer.request, answer.network, answer.schedule_cost
    products = [
        float(s) for i, s in zip(_equations(built.program), found.seconds, strict=True)
        if built.program.operators[i].primitive in PRODUCTS
    ]  # fmt: skip
    every = sum(products) * (built.topology.mesh.total - 1)
    if not wish.replication_price or answer.interrupted or found.communication <= every:
        return answer
    free = problem_of(replication_price=0.0)
    other = solve(free.cost_network, gap=wish.memory_gap, seconds=wish.seconds)
    quick = _schedule_solution(free, wish, other.assignment, other.bound, ())
    if quick.peak > (wish.memory_limit or math.inf) or quick.cost >= answer.cost - found.price:
        return answer
    return dataclasses.replace(answer, unpriced=quick.cost)


def _equations(program: Program) -> list[int]:
    return np.flatnonzero(program.use_def.has_kind("eqn")).tolist()


def _solve_peak(
    built: PlanningNetwork, wish: PlanRequest, on_progress: Callable[..., None] | None
) -> _ScheduledSolution:
    """The plan of least peak, as counted over the schedules of what several searches find.

    The bound is that of the network that counts only what every plan holds; the other is nearer to the schedules.
    A plan that is as good as least, and faster, is taken instead.
    """
    found: list[_ScheduledSolution] = []

    def search(network: CostNetwork, ties: bool) -> float:
        s = solve(
            network, objective="peak", gap=wish.gap, seconds=wish.memory_seconds, on_progress=on_progress, break_ties_by_cost=ties
        )  # fmt: skip
        found.append(_schedule_solution(built, wish, s.assignment, s.bound, s.steps))
        return s.bound

    sure = memory_network(built, lower_bound=True)
    bound = search(sure, ties=False)
    rough = found[-1]
    if not rough.interrupted:
        search(memory_network(built), ties=True)
    steps = found[-1].steps
    if not any(a.interrupted for a in found):
        # The network does not see every copy; the plan of least time sometimes makes fewer.
        other = solve(built.cost_network, gap=wish.memory_gap, seconds=wish.memory_seconds)
        found.append(_schedule_solution(built, wish, other.assignment, bound, other.steps))
        found.remove(rough)
        if rough.peak < min(a.peak for a in found):
            search(sure, ties=True)
    least = min(a.peak for a in found)
    near = least * (1 + wish.memory_gap)
    if wish.level != 1:  # a budget: all within it are as good
        near = max(near, wish.memory_limit or 0.0)
    best = min((a for a in found if a.peak <= near), key=lambda a: (a.cost, a.peak))
    return dataclasses.replace(best, bound=bound, peak_bound=bound, steps=steps)


def _solve_under_budget(
    built: PlanningNetwork,
    wish: PlanRequest,
    free: _ScheduledSolution,
    on_progress: Callable[..., None] | None,
) -> _ScheduledSolution:
    """The cheapest plan within the budget; the nearest to it where none is found.

    The network that counts only what every plan holds bounds the time within the budget. The plan comes from the
    one that is nearer to the schedules; where its schedule still holds more than the budget, the search is repeated
    with a limit lower by as much.
    """
    limit = wish.memory_limit
    assert limit is not None

    def search(network: CostNetwork, aim: float) -> Solution | None:
        assert network.memory is not None
        capped = dataclasses.replace(network, memory=dataclasses.replace(network.memory, limit=aim))
        try:
            return solve(capped, gap=wish.memory_gap, seconds=wish.memory_seconds, on_progress=on_progress)
        except (MemoryBudgetError, SearchError):
            return None

    nearest, bound, aim = free, free.bound, limit
    sure = search(memory_network(built, lower_bound=True), limit)
    if sure is None:
        return nearest
    bound = max(bound, sure.bound)
    first = nearest = _schedule_solution(built, wish, sure.assignment, bound, sure.steps).after(free)
    if first.interrupted or (first.peak <= limit and first.cost <= bound * (1 + wish.memory_gap)):
        return min((free, first), key=lambda a: (a.peak > limit, a.peak))
    network = memory_network(built)
    for _ in range(4):
        s = search(network, aim)
        if s is None:
            break
        answer = _schedule_solution(built, wish, s.assignment, bound, s.steps).after(nearest)
        nearest = min((nearest, answer), key=lambda a: a.peak)
        if answer.peak <= limit:
            return min((a for a in (first, answer) if a.peak <= limit), key=lambda a: a.cost)
        aim -= 1.05 * (answer.peak - limit)
    return nearest


def network_pins(
    pins: Sequence[tuple[int, str, int, Pin]], topology: Topology, whole: Sequence[tuple[int, str, int]] = ()
) -> Pins:
    """Pins in the form the network takes: a hashable key and a test of layouts; `whole` are never partial sums."""
    out: dict[int, list[tuple[str, int, Any, Callable[[Layout], bool]]]] = {}
    for op, side, k in whole:
        out.setdefault(op, []).append((side, k, "no partial sum", lambda lay: not lay.partial))
    for op, side, k, pin in pins:
        key: Any = (pin.cuts, pin.axes)
        if pin.axes is not None and all(a is not None for a in pin.axes):
            key = Layout(tuple(tuple(a for a in (d or ()) if topology.mesh.size(a) > 1) for d in pin.axes))
        out.setdefault(op, []).append((side, k, key, lambda lay, p=pin: satisfies(p, lay, topology.mesh)))
    return out


def schedule_of_plan(program: Program, topology: Topology, plan: Plan) -> Schedule:
    """The schedule of a saved plan for the same program; anything else is refused with what differs."""
    if plan.mesh != topology.mesh:
        raise PlanMismatchError(
            f"the plan was made for the mesh {plan.mesh}, this call has {topology.mesh}",
            where=f"plan= of {program.name}",
            fix="pass a mesh of the plan's axes and sizes, or plan again",
        )
    if plan.fingerprint != fingerprint(program):
        kinds = sum(op.kind == "eqn" for op in program.operators)
        raise PlanMismatchError(
            f"the plan is of another program: {plan.name} with {len(plan.operators)} operators, "
            f"this one is {program.name} with {kinds}",
            where=f"plan= of {program.name}",
            fix="load the plan of this function, shapes and dtypes, or plan again",
        )
    interner = CandidateCache(program, topology.mesh)
    endpoints, states, state = dict(plan.decision.endpoints), [], []
    for op, axes in zip(program.operators, plan.decision.candidates, strict=True):
        pins = []
        if axes is None:
            layout, side = endpoints[op.id], "operand" if op.kind == "output" else "result"
            pins = [(side, 0, layout, lambda lay, want=layout: lay == want)]
        s = interner.candidates_of(op, pins)
        found = (
            0
            if axes is None
            else next(i for i, c in enumerate(s.candidates) if c is not None and c.axis_codes == axes)
        )
        states.append(s)
        state.append(found)
    choice = Assignment(
        program, topology, tuple(states), tuple(state), dict(plan.decision.relays), plan.decision.regather
    )
    return schedule(choice)


def _raise_over_budget(plan: Plan, limit: float, least: float) -> None:
    held = sorted(plan.inputs, key=lambda r: -int(np.prod(r.shape)) // r.layout.pieces(plan.mesh))[:3]
    found = plan.cost.peak_bytes
    proof = f", and none needs less than {least:,.0f}" if 0 < least < found * 0.999 else ""
    raise MemoryBudgetError(
        f"no plan fits {limit:,.0f} bytes a device; the least found needs {found:,.0f}{proof}",
        where="memory_budget; most is held by "
        + ", ".join(f"{r.path} {r.dtype}{list(r.shape)}" for r in held),
        fix=f"memory_budget={int(found * 1.01)}, more devices, or smaller shapes",
    )


def match_state(
    in_leaves: Sequence[Any],
    out_leaves: Sequence[Any],
    arguments: Sequence[tuple[int, Any]],
    results: Sequence[tuple[int, Any]],
    donated: Collection[int],
    pinned: Collection[int],
) -> list[tuple[int, int]]:
    """(result leaf, argument leaf) pairs that share a layout, so that state can be passed from call to call.

    An argument that is a container, or donated, is tied to the first result of the same structure, shapes and
    dtypes. `arguments` and `results` are (first leaf, tree structure) in order; `pinned` are result leaves that
    the user pinned, which stay free to differ.
    """
    ties, used = [], set()
    for start, tree in arguments:
        n = tree.num_leaves
        if n == 0 or (jax.tree_util.treedef_is_leaf(tree) and start not in donated):
            continue
        avals = [(a.shape, a.dtype) for a in in_leaves[start : start + n]]
        for k, (first, out_tree) in enumerate(results):
            if k in used or out_tree != tree:
                continue
            if [(a.shape, a.dtype) for a in out_leaves[first : first + n]] == avals:
                used.add(k)
                ties += [(first + i, start + i) for i in range(n) if first + i not in pinned]
                break
    return ties


def operator_context(program: Program, op: int) -> str:
    """Module path and source line of an operator, for messages."""
    operator = program.operators[op]
    return f"{compat.module_path(operator.prefix, operator.eqn)} {operator.source}".strip()
