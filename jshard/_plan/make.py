"""From a traced function and its wishes to a plan and its schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jshard import _jaxcompat as compat
from jshard._cost.memory import PRODUCTS
from jshard._errors import MemoryBudgetError, PlanMismatchError, SearchError
from jshard._layout import Layout
from jshard._plan.again import Again
from jshard._plan.describe import describe, fingerprint
from jshard._plan.limited import limited
from jshard._plan.meeting import named
from jshard._plan.network import Pins, Problem, problem
from jshard._plan.peak import Profile, profile
from jshard._plan.plan import Plan
from jshard._plan.propagate import propagate
from jshard._plan.replication import REPLICATION_PRICE
from jshard._plan.schedule import Choice, Schedule, choice_of, schedule
from jshard._plan.schedule_cost import ScheduleCost, schedule_cost
from jshard._plan.settle import settled
from jshard._plan.states import Interner
from jshard._program.graph import Program, rule_boundaries
from jshard._program.uncollected import uncollected
from jshard._search import Contradiction, CostNetwork, Solution, solve
from jshard._topology import Topology
from jshard._wish.entries import Pin, allows


@dataclasses.dataclass(frozen=True, eq=False)
class Wish:
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
    limited_seconds: float = 240.0
    limited_gap: float = 0.005
    # (operator, side, index, key, test of layouts): what `Plan.why` forces, beside the user's pins
    forced: tuple[tuple[int, str, int, str, Callable[[Layout], bool]], ...] = ()
    # Output operators that the user pinned, where `pins` has others: what `Plan.what_if` adds changes no price.
    pinned_results: tuple[int, ...] | None = None


@uncollected()
def make_plan(
    program: Program, topology: Topology, wish: Wish, on_progress: Callable[..., None] | None = None
) -> tuple[Plan, Schedule]:
    """Search a plan for a program on a topology; returns the plan and the schedule it stands for."""
    fixed = {
        op: list(pins) for op, pins in network_pins(wish.pins, topology, rule_boundaries(program)).items()
    }
    forced: dict[int, list] = {}
    for op, side, k, key, test in wish.forced:
        forced.setdefault(op, []).append((side, k, key, test))

    def problem_of(**options: Any) -> Problem:
        options = {"replication_price": wish.replication_price, **options}
        return problem(
            program, topology, fixed, forced=forced, pinned_results=wish.pinned_results, level=wish.level,
            ties=wish.ties, donated=wish.donated, **options,
        )  # fmt: skip

    built = problem_of(second_copies=wish.level != 1)
    if wish.search != "propagation":
        try:
            answer = _solve(built, wish, problem_of, on_progress)
        except Contradiction as e:
            every = {op: [*fixed.get(op, ()), *forced.get(op, ())] for op in {**fixed, **forced}}
            raise named(e, built, every) from None
    else:
        configured = {op for op, *_ in (*wish.pins, *wish.forced)}
        assignment, steps = propagate(built, configured)
        answer = _answer(built, wish, assignment, 0.0, steps, settle=False)
    answer = _proved(answer)
    plan = describe(
        answer.made,
        wish,
        answer.found,
        answer.objective,
        answer.bound,
        answer.steps,
        answer.held,
        answer.unpriced,
        SINGLE_COPIES if wish.level != 1 and answer.built.single_copies else "",
    )
    if wish.memory_limit is not None and plan.cost.peak_bytes > wish.memory_limit:
        _refuse_budget(plan, wish.memory_limit, answer.least)
    # Without the captured arrays: a plan keeps none alive.
    bare = dataclasses.replace(program, constants=(), jaxpr=None)
    again = Again(bare, topology, wish, lambda w: make_plan(bare, topology, w)[0])
    return dataclasses.replace(plan, search_again=again), answer.made


SINGLE_COPIES = "plans with a single shared copy a tensor"

_WORTH = 0.95  # of the peak: for less nothing is moved again, since compilers follow such a plan only so far
_ROUNDING = 1e-9  # relative: the network adds up the same terms in another order


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """A schedule with what it costs and holds, and the bound of the search that found it.

    `least`: no plan needs fewer bytes, where that is known. `unpriced`: as in `Cost`.
    """

    built: Problem
    wish: Wish
    made: Schedule
    found: ScheduleCost
    bound: float
    steps: tuple[str, ...]
    held: Profile
    least: float = 0.0
    unpriced: float = 0.0

    @property
    def peak(self) -> float:
        return self.held.peak

    @property
    def cost(self) -> float:
        """Seconds by the schedule; at level 1 those of a whole call, which break ties."""
        return self.found.objective(self.wish.level)

    @property
    def objective(self) -> float:
        return self.peak if self.wish.level == 1 else self.cost

    @property
    def interrupted(self) -> bool:
        return any("interrupted" in s for s in self.steps)

    def after(self, other: _Answer) -> _Answer:
        """With a word of it if an earlier search was interrupted."""
        if not other.interrupted or self.interrupted:
            return self
        return dataclasses.replace(self, steps=(*self.steps, "an earlier part of the search was interrupted"))


def _proved(answer: _Answer) -> _Answer:
    """The bound as the plan may claim it: equal to the schedule's cost where only rounding lies between them.

    A bound above the cost of a schedule would be no bound; nothing is claimed then, and the steps say so.
    """
    cost, bound = answer.objective, answer.bound
    if abs(cost - bound) <= _ROUNDING * max(cost, bound):
        return dataclasses.replace(answer, bound=cost)
    if bound > cost:
        said = f"the search's bound {bound:.6g} is above the schedule's cost {cost:.6g}: nothing is proved"
        return dataclasses.replace(answer, bound=0.0, steps=(*answer.steps, said))
    return answer


def _answer(
    built: Problem, wish: Wish, assignment: Any, bound: float, steps: Any, settle: bool = True
) -> _Answer:
    """What an assignment stands for; variables of copies at its end only repeat what the others say."""
    assignment = np.asarray(assignment)[: built.network.size]
    made = schedule(choice_of(built, tuple(assignment.tolist())))
    held, found = profile(made, built.residency, wish.donated), schedule_cost(made, built)
    if settle and wish.level == 2:
        other = settled(built, assignment, wish.ties)
        if other is not assignment:
            made_so = schedule(choice_of(built, tuple(other.tolist())))
            held_so, found_so = profile(made_so, built.residency, wish.donated), schedule_cost(made_so, built)
            cheap = found_so.objective(2) <= found.objective(2) * (1 + _ROUNDING)
            if cheap and held_so.peak <= max(held.peak, wish.memory_limit or 0.0):
                made, held, found = made_so, held_so, found_so
    least = 0.0 if wish.level == 1 else wish.memory_limit
    # XLA on CPU drops what keeps two equal collectives apart. For programs with loops, bodies move for themselves.
    apart = built.topology.chip.name != "cpu" and made.flat is not None
    if apart and least is not None and held.peak > least:
        made_so = schedule(dataclasses.replace(made.choice, regather=True))
        held_so = _under_way(made_so, profile(made_so, built.residency, wish.donated))
        if held_so.peak < _WORTH * held.peak:
            made, held, found = made_so, held_so, schedule_cost(made_so, built)
    return _Answer(built, wish, made, found, float(bound), tuple(steps), held)


def _under_way(made: Schedule, held: Profile) -> Profile:
    """What is held with the largest copy that is moved again once more: compilers begin a gather a product early."""
    found = made.flat
    assert found is not None
    sizes = found.choice.program.arrays.nbytes[found.tensor] / found.pieces[found.target]
    more = float(sizes[found.again & ~found.sliced].max(initial=0.0))
    return dataclasses.replace(held, peak=held.peak + more, held=(*held.held, ("copies under way", more)))


def _solve(
    built: Problem,
    wish: Wish,
    problem_of: Callable[..., Problem],
    on_progress: Callable[..., None] | None,
) -> _Answer:
    """Search by level; a budget that the free optimum keeps anyway costs nothing and leaves its proof whole."""
    if wish.level == 1:
        return _least_peak(built, wish, on_progress)
    answer = _quickest(built, wish, problem_of, on_progress)
    if wish.memory_limit is None or answer.peak <= wish.memory_limit:
        return _with_price_of_cutting(answer, problem_of)
    built = problem_of(second_copies=False)
    answer = _within(built, wish, answer, on_progress)
    if answer.peak <= wish.memory_limit:
        return answer
    # Plans that fit may have to repeat products: what they pay for it is counted, but not searched by.
    loose = problem_of(replication_price=0.0, price_of_scattering=False, second_copies=False)
    other = _least_peak(loose, wish, on_progress).after(answer)
    if answer.peak < other.peak:
        other = dataclasses.replace(answer, least=other.least)
    return dataclasses.replace(other, built=built, found=schedule_cost(other.made, built), bound=answer.bound)


def _quickest(
    built: Problem,
    wish: Wish,
    problem_of: Callable[..., Problem],
    on_progress: Callable[..., None] | None,
) -> _Answer:
    """The plan of least time without a budget.

    Where a schedule costs more than the network, which lets several readers share more copies than they do, the plan is
    that of the network in which a tensor has a single shared copy, if that costs less.
    """
    s = solve(built.network, gap=wish.gap, seconds=wish.seconds, on_progress=on_progress)
    answer = _answer(built, wish, s.assignment, s.bound, s.steps)
    if built.single_copies or answer.interrupted or answer.cost <= s.cost * (1 + _ROUNDING):
        return answer
    single = problem_of(second_copies=False)
    s = solve(single.network, gap=wish.gap, seconds=wish.seconds, on_progress=on_progress)
    other = _answer(single, wish, s.assignment, s.bound, (*answer.steps, *s.steps))
    if other.cost >= answer.cost:
        return answer
    proved = other.cost <= other.bound * (1 + _ROUNDING) and other.bound <= other.cost * (1 + _ROUNDING)
    return other if proved else dataclasses.replace(other, built=built, bound=answer.bound)


def _with_price_of_cutting(answer: _Answer, problem_of: Callable[..., Problem]) -> _Answer:
    """With what a plan would cost without the price of repeated products, where latency is all that this one pays.

    Only there can repeating all products be quicker than what the plan communicates: elsewhere nothing is searched.
    """
    wish, built, found = answer.wish, answer.built, answer.found
    products = [
        float(s) for i, s in zip(_equations(built.program), found.seconds, strict=True)
        if built.program.operators[i].primitive in PRODUCTS
    ]  # fmt: skip
    every = sum(products) * (built.topology.mesh.total - 1)
    if not wish.replication_price or answer.interrupted or found.communication <= every:
        return answer
    free = problem_of(replication_price=0.0)
    other = solve(free.network, gap=wish.limited_gap, seconds=wish.seconds)
    quick = _answer(free, wish, other.assignment, other.bound, ())
    if quick.peak > (wish.memory_limit or math.inf) or quick.cost >= answer.cost - found.price:
        return answer
    return dataclasses.replace(answer, unpriced=quick.cost)


def _equations(program: Program) -> list[int]:
    return np.flatnonzero(program.arrays.of_kind("eqn")).tolist()


def _least_peak(built: Problem, wish: Wish, on_progress: Callable[..., None] | None) -> _Answer:
    """The plan of least peak, as counted over the schedules of what several searches find.

    The bound is that of the network that counts only what every plan holds; the other is nearer to the schedules.
    A plan that is as good as least, and faster, is taken instead.
    """
    found: list[_Answer] = []

    def search(network: CostNetwork, ties: bool) -> float:
        s = solve(
            network, objective="peak", gap=wish.gap, seconds=wish.limited_seconds, on_progress=on_progress, ties=ties
        )  # fmt: skip
        found.append(_answer(built, wish, s.assignment, s.bound, s.steps))
        return s.bound

    sure = limited(built, sure=True)
    bound = search(sure, ties=False)
    rough = found[-1]
    if not rough.interrupted:
        search(limited(built), ties=True)
    steps = found[-1].steps
    if not any(a.interrupted for a in found):
        # The network does not see every copy; the plan of least time sometimes makes fewer.
        other = solve(built.network, gap=wish.limited_gap, seconds=wish.limited_seconds)
        found.append(_answer(built, wish, other.assignment, bound, other.steps))
        found.remove(rough)
        if rough.peak < min(a.peak for a in found):
            search(sure, ties=True)
    least = min(a.peak for a in found)
    near = least * (1 + wish.limited_gap)
    if wish.level != 1:  # a budget: all within it are as good
        near = max(near, wish.memory_limit or 0.0)
    best = min((a for a in found if a.peak <= near), key=lambda a: (a.cost, a.peak))
    return dataclasses.replace(best, bound=bound, least=bound, steps=steps)


def _within(built: Problem, wish: Wish, free: _Answer, on_progress: Callable[..., None] | None) -> _Answer:
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
            return solve(capped, gap=wish.limited_gap, seconds=wish.limited_seconds, on_progress=on_progress)
        except (MemoryBudgetError, SearchError):
            return None

    nearest, bound, aim = free, free.bound, limit
    sure = search(limited(built, sure=True), limit)
    if sure is None:
        return nearest
    bound = max(bound, sure.bound)
    first = nearest = _answer(built, wish, sure.assignment, bound, sure.steps).after(free)
    if first.interrupted or (first.peak <= limit and first.cost <= bound * (1 + wish.limited_gap)):
        return min((free, first), key=lambda a: (a.peak > limit, a.peak))
    network = limited(built)
    for _ in range(4):
        s = search(network, aim)
        if s is None:
            break
        answer = _answer(built, wish, s.assignment, bound, s.steps).after(nearest)
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
        out.setdefault(op, []).append((side, k, key, lambda lay, p=pin: allows(p, lay, topology.mesh)))
    return out


def replay(program: Program, topology: Topology, plan: Plan) -> Schedule:
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
    interner = Interner(program, topology.mesh)
    endpoints, states, state = dict(plan.decision.endpoints), [], []
    for op, axes in zip(program.operators, plan.decision.candidates, strict=True):
        pins = []
        if axes is None:
            layout, side = endpoints[op.id], "operand" if op.kind == "output" else "result"
            pins = [(side, 0, layout, lambda lay, want=layout: lay == want)]
        s = interner.states(op, pins)
        found = (
            0
            if axes is None
            else next(i for i, c in enumerate(s.candidates) if c is not None and c.axes == axes)
        )
        states.append(s)
        state.append(found)
    choice = Choice(
        program, topology, tuple(states), tuple(state), dict(plan.decision.relays), plan.decision.regather
    )
    return schedule(choice)


def _refuse_budget(plan: Plan, limit: float, least: float) -> None:
    held = sorted(plan.inputs, key=lambda r: -int(np.prod(r.shape)) // r.layout.pieces(plan.mesh))[:3]
    found = plan.cost.peak_bytes
    proof = f", and none needs less than {least:,.0f}" if 0 < least < found * 0.999 else ""
    raise MemoryBudgetError(
        f"no plan fits {limit:,.0f} bytes a device; the least found needs {found:,.0f}{proof}",
        where="memory_budget; most is held by "
        + ", ".join(f"{r.path} {r.dtype}{list(r.shape)}" for r in held),
        fix=f"memory_budget={int(found * 1.01)}, more devices, or smaller shapes",
    )


def find_ties(
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
