"""A memory limit by prices on few times: cutting planes on the Lagrangian dual of a network whose layers repeat.

For prices l_t >= 0 per byte at the times of a set A, and no price at any other time,

    min over x of cost(x) + sum over t in A of l_t (bytes_t(x) - limit)

is a lower bound on the least cost within the limit, and the inner problem is a cost network without memory: prices are
in the unary tables. While A is small, equal layers have equal tables, so that reductions are shared, layers are folded
and the whole network is solved as fast as without a limit. An answer x bounds this concave function of the prices from
above by a plane that touches it where x was found. So the prices come from a linear program over the answers so far
(Kelley 1960). A time joins A where an answer exceeds the limit. Between answers of nearly equal priced cost the limit
decides: `answer_fusion` combines them after every round. A plane is one for every limit, and so is the bound of a priced
network with the bytes charged for: a search with another limit begins with both.

Example: states (cost 0, 8 bytes) and (cost 6, 2 bytes), limit 5: the answers are the lines 3 l and 6 - 3 l, which
meet at the price 1 and the bound 3.

>>> from jshard._search.cost_network import build
>>> net = build([[0.0, 6.0]], [], intervals=[[0, 1]], usages=[[8.0, 2.0]], limit=5.0)
>>> cuts = [Cut(0.0, np.array([8.0]), np.array([0])), Cut(6.0, np.array([2.0]), np.array([1]))]
>>> best_prices(cuts, np.array([0]), 5.0, 100.0)
(array([1.]), 3.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import (
    LARGE_NETWORK,
    CostNetwork,
    Prices,
    evaluate,
    interval_bytes,
    live_bytes,
)
from jshard._search.dual.warm_start import CoreMessages
from jshard._search.effort import ENTRIES_PER_SECOND
from jshard._search.exact.reduce_batched import starting_network
from jshard._search.exact.table_pool import TablePool, largest_of_edges, quantum
from jshard._search.exact.working_network import WorkingNetwork
from jshard._search.memory.key_times import first_time, fullest_time
from jshard._search.search_state import GapProgress, SearchState


ROUNDS = 16  # priced networks solved
TIE_BREAK_ROUNDS = 6  # where the costs only break ties
TIE_BREAK_ROUNDS_IF_LARGE = 2  # ... of a large network, whose answers are not combined then
MESSAGE_ROUNDS = 200  # of message passing for each
INNER_GAP = 0.2  # of the gap that suffices: how near its optimum a priced network is solved
# Of the gap that suffices: what better prices can add to the bound when they are not looked for.
CONVERGED = 0.25
FIRST_SPEND = 0.65  # bytes at the limit cost so many times the network's cost, at first
MOST_SPENT = 4.0  # times what the bytes at the limit cost before: the most that they cost in the next round
LARGEST_SPEND = 1e5
JOINING = 4  # times that join at once
FUSED_ANSWERS = 4
KNOWN_ANSWERS = 8  # that the search of a similar network begins with
_SHRINKS = 0.95  # of the gap before, to which it has to shrink
# Rounds in which it does not, after which those of a large network end, and those of a smaller one for the bound alone.
_PATIENCE, _PATIENCE_FOR_BOUND = 3, 5
# Rounds in which the bound does not rise by that share, after which those of a small network end though no answer is known.
_PATIENCE_WITHOUT_ANSWER, _RISES = 5, 0.02
# Rounds of a network of few variables after the effort was spent, while no answer is known.
OVERDUE = 6
# Table entries of a round while no answer is known, though the effort is spent: prices under which networks are hardly
# solved found none in 32 rounds, where such rounds found one in 4 (a vision transformer's training step on 2 x 2 x 2).
# Large networks are solved to the end: Llama-70B's took 34 s so in place of 229.
EFFORT_WITHOUT_ANSWER = 1.0 * ENTRIES_PER_SECOND
SHORT_INTERVAL = 0.01  # of the whole time: what is held no longer is held within a layer, or little more
DEARER = 2.0  # times the cost of the cheapest answer, that a bound above it makes a limit doubtful
FEASIBLE_GAP = 0.005  # of the peak's bound, that proves of a limit that nothing keeps it
COARSER = 16.0  # the tables' grid over the one that costs alone need


@dataclass(frozen=True)
class Cut:
    """An answer: its cost, the bytes live at every time from the first start on, and its states."""

    cost: float
    profile: Floats
    assignment: Ints


def cut_of(network: CostNetwork, assignment: Ints) -> Cut:
    """The cut of an assignment of a network with memory."""
    memory = network.memory
    assert memory is not None
    return Cut(
        evaluate(network, assignment), live_bytes(memory, interval_bytes(memory, assignment)), assignment
    )


def prices_while_held(network: CostNetwork, prices: Prices) -> tuple[Ints, Floats]:
    """The times of some prices at which the network holds something, and the prices there."""
    memory = network.memory
    assert memory is not None
    kept = (first_time(memory) <= prices.times) & (prices.times < int(memory.intervals[:, 1].max()))
    return prices.times[kept], prices.per_byte[kept]


Fuse = Callable[[Sequence[Ints]], Ints | None]  # from answers to one within the limit
Repair = Callable[[Ints], Ints | None]  # from an answer to one near it that is within the limit


def priced_network(
    network: CostNetwork, times: Ints, prices: Floats, at_any_time: float = 0.0
) -> CostNetwork:
    """The network without memory in which a byte has a price at each of some ascending times of its memory.

    `at_any_time`: the price of a byte in an interval of `SHORT_INTERVAL` of the whole time, wherever that is; shorter ones
    pay in proportion. Equal layers are still equal: what is held for longer than that pays nothing.
    """
    memory = network.memory
    assert memory is not None
    total = np.concatenate([[0.0], np.cumsum(prices)])
    start, end = np.searchsorted(times, memory.intervals.T)
    per_byte = total[np.maximum(start, end)] - total[start]
    if at_any_time:
        lengths = np.maximum(0, memory.intervals[:, 1] - memory.intervals[:, 0])
        longest = SHORT_INTERVAL * float(memory.intervals[:, 1].max() - memory.intervals[:, 0].min())
        per_byte += np.where(lengths <= longest, at_any_time / longest * lengths, 0.0)
    charged: dict[int, list[tuple[int, float]]] = {}
    lasting = np.flatnonzero(per_byte)
    columns = memory.interval_variable[lasting], memory.interval_table[lasting], per_byte[lasting]
    for v, table, price in zip(*[c.tolist() for c in columns], strict=True):
        charged.setdefault(v, []).append((table, price))
    unary, node_table = list(network.unary), network.node_table.copy()
    known: dict[tuple, int] = {}
    for v, usages in charged.items():
        key = (int(node_table[v]), tuple(sorted(usages)))
        if key not in known:
            known[key] = len(unary)
            unary.append(unary[key[0]] + sum(price * memory.usage_tables[table] for table, price in key[1]))
        node_table[v] = known[key]
    return replace(network, unary=tuple(unary), node_table=node_table, memory=None)


def without_costs(network: CostNetwork) -> CostNetwork:
    """The same states and prohibitions, everything else free."""
    return replace(
        network,
        unary=tuple(np.where(np.isinf(t), np.inf, 0.0) for t in network.unary),
        pairwise=tuple(np.where(np.isinf(t), np.inf, 0.0) for t in network.pairwise),
    )


def best_prices(cuts: Sequence[Cut], times: Ints, limit: float, spend: float) -> tuple[Floats, float]:
    """The prices at some times that maximise the least priced cost of the answers, and that cost.

    Arguments:

    - `cuts`: the answers.
    - `times`: indices into their profiles.
    - `limit`: bytes.
    - `spend`: the most that the limit's bytes may cost at these prices in all.
    """
    costs = np.array([c.cost for c in cuts])
    excess = np.array([c.profile[times] / limit - 1.0 for c in cuts])  # (answers, times)
    if len(times) == 1:
        # The least of some lines is greatest at an end or where two of them meet.
        slope = excess[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            meet = (costs[:, None] - costs[None, :]) / (slope[None, :] - slope[:, None])
        at = np.unique(np.append(meet[np.isfinite(meet) & (meet > 0) & (meet < spend)], [0.0, spend]))
        values = (costs[:, None] + slope[:, None] * at[None, :]).min(axis=0)
        k = int(values.argmax())
        return at[k : k + 1] / limit, float(values[k])
    from scipy.optimize import linprog  # here, so that `import jshard` stays light

    n, scale = len(times), max(1e-300, float(np.abs(costs).max()))
    # maximise z with z <= cost + spend_t * excess_t for every answer, sum of spend_t <= spend
    result = linprog(
        np.append(np.zeros(n), -1.0),
        A_ub=np.vstack([np.hstack([-excess, np.ones((len(cuts), 1))]), np.append(np.ones(n), 0.0)[None]]),
        b_ub=np.append(costs / scale, spend / scale),
        bounds=[(0, None)] * n + [(None, None)],
        method="highs",
    )
    if result.x is None:
        return np.zeros(n), float(costs.min())
    return np.maximum(result.x[:n], 0.0) * scale / limit, float(result.x[-1]) * scale


class PricedNetworks:
    """Solves a network under prices; tables and messages are shared from one solution to the next.

    `moves_forests`: whether forests of an answer's variables are solved again where the bound stalls.
    `begun`: of a network whose first variables are the same, that was solved under such prices: it begins with its tables
    and messages. Llama-8B at 1.02 of its least peak on 4 x 4 x 2 is planned in 30 s in place of 37 so (under load).
    """

    def __init__(
        self, network: CostNetwork, moves_forests: bool = True, begun: PricedNetworks | None = None
    ) -> None:
        self.network, self.moves_forests = network, moves_forests
        # That of bytes alone, where nothing costs anything, is known with the first prices.
        costs = any(np.any(t[np.isfinite(t)]) for t in (*network.unary, *network.pairwise))
        self.of_edges = largest_of_edges(network)
        self.grid = COARSER * quantum(network, self.of_edges) if costs else 0.0
        self.tables = TablePool(self.grid)
        self.similar: CoreMessages | None = None
        if begun is not None and begun.grid >= self.grid:
            self.grid, self.tables, self.similar = begun.grid, begun.tables, begun.similar

    def _graph(self, priced: CostNetwork) -> WorkingNetwork:
        if (exact := quantum(priced, self.of_edges)) > self.grid:
            self.grid = COARSER * exact
            self.tables, self.similar = TablePool(self.grid), None
        return starting_network(priced, self.tables)

    def solve(
        self, times: Ints, prices: Floats, search: SearchState, gap: float, at_any_time: float = 0.0
    ) -> tuple[Ints | None, float]:
        """The best assignment found and the bound, both with bytes charged for; `at_any_time`: as in `priced_network`."""
        graph = self._graph(priced_network(self.network, times, prices, at_any_time))
        to_the_end = self.network.is_large(search.effort) and search.known_cost == np.inf
        least = np.inf if to_the_end or self.network.size >= LARGE_NETWORK else EFFORT_WITHOUT_ANSWER
        inner = SearchState(
            search.deadline,
            gap,
            lambda _: None,
            self.network.size,
            keeps_messages=True,
            similar=self.similar,
            effort=search.effort if search.has_answer else search.effort.at_least(least),
        )
        if not self.moves_forests:
            inner.forest_moves = 0
        branch_and_bound(inner, graph, max_rounds=MESSAGE_ROUNDS, may_branch=False)
        self.similar = inner.saved or self.similar
        return inner.assignment, inner.bound


class PriceCuts:
    """Cutting planes for one network and limit; answers and bounds go to `search`.

    `fuse` combines answers, `repair` changes one that exceeds the limit; both give an answer within it, or None.
    `bound_only`: an answer is known, and rounds end once the gap hardly shrinks, as those of a large network do.
    """

    def __init__(
        self,
        network: CostNetwork,
        search: SearchState,
        limit: float,
        fuse: Fuse,
        rounds: int = ROUNDS,
        repair: Repair = lambda _: None,
        bound_only: bool = False,
    ) -> None:
        assert network.memory is not None
        self.network, self.memory, self.search, self.limit = network, network.memory, search, limit
        self.fuse, self.repair, self.solver, self.rounds = fuse, repair, PricedNetworks(network), rounds
        self.bound_only = bound_only
        self.bytes_alone = PricedNetworks(without_costs(network))
        self.first_time = first_time(self.memory)
        self.cuts: list[Cut] = []
        # An answer that is known by its cost and peak alone; the peak is taken for the bytes at every time.
        self.guessed = [
            Cut(
                cost,
                np.full(int(self.memory.intervals[:, 1].max()) - self.first_time, peak),
                np.zeros(0, dtype=np.int64),
            )
            for cost, peak in ((search.unlimited,) if search.unlimited else ())
            if peak > limit
        ]
        self.seen = 0  # of the answers, whose times have been looked at
        self.fused: set[tuple[bytes, ...]] = set()  # answers that were combined
        self.best: Cut | None = None  # within the limit
        self.prices: Prices | None = None  # of the best bound, times counted from the first
        self.proved = -np.inf

    def run(self) -> None:
        """Ascend until the gap is closed or better prices would add nothing.

        Known answers come first, combined where a bound is known, then `search.prices`: those of this network bring a
        bound with them, and are what the answers are combined by.
        """
        for assignment in self.search.known:
            self._keep(assignment)
        given = self.search.prices
        if self.search.bound > -np.inf and (given is None or given.bound == -np.inf):
            self._fuse()
        if not self.search.gap_closed(self.search.bound):
            self._ascend()
        distinct = {c.assignment.tobytes(): c.assignment for c in self.cuts}
        self.search.known = tuple(distinct.values())[-KNOWN_ANSWERS:]

    def _ascend(self) -> None:
        search = self.search
        gap = max(search.gap, 1e-6)
        large = self.network.is_large(search.effort)
        at, progress = self._begin(), GapProgress(_SHRINKS, _PATIENCE if large else _PATIENCE_FOR_BOUND)
        last_rise, proved = 0, -np.inf  # the round in which the bound rose, and to what
        overdue = 0  # rounds after the effort was spent
        given = search.prices
        if given is not None and given.bound > -np.inf:
            times, prices, _ = at
            self._prove(given.bound, times, prices)
            if self.cuts:  # else these prices' own answer comes first
                at = self._next(*at, gap)
        for count in range(1, self.rounds + 1):
            if at is None:
                return
            times, prices, _ = at
            cut = self._solve(times, prices)
            if (
                cut is None
                or search.useless
                or search.is_late
                or (search.out_of_time and self.best is not None)
            ):
                self._fuse(last=not search.useless)
                return
            if cut.profile.max() > self.limit and (repaired := self.repair(cut.assignment)) is not None:
                self._keep(repaired)
            if self.best is None and prices.any():
                self._price_short_intervals(times, prices)
                if self.best is None and self._nothing_fits(times, prices):
                    return
            search.report(f"prices on {len(times)} times, round {count}")
            if self.proved > proved + _RISES * abs(self.proved):
                last_rise, proved = count, self.proved
            overdue += search.effort.exhausted
            if self.best is None and self.network.size < LARGE_NETWORK:
                if count - last_rise >= _PATIENCE_WITHOUT_ANSWER or overdue >= OVERDUE:
                    return
            stalled = progress.stalled(search.incumbent_cost - search.bound)
            if stalled and self.best is not None and (large or self.bound_only):
                self._fuse(last=True)
                return
            at = self._next(*at, gap)

    def _next(
        self, times: Ints, prices: Floats, spend: float, gap: float
    ) -> tuple[Ints, Floats, float] | None:
        """The next times and prices, and the most that is spent; None where the gap is closed or they add nothing."""
        self._fuse()
        return (
            None if self.search.gap_closed(self.search.bound) else self._following(times, prices, spend, gap)
        )

    def _following(
        self, times: Ints, prices: Floats, spend: float, gap: float
    ) -> tuple[Ints, Floats, float] | None:
        """The next times and prices, and the most that is spent; None where they would add nothing."""
        for cut in self.cuts[self.seen :]:
            times = self._joined(times, cut.profile)
        last, self.seen = self.cuts[-1], len(self.cuts)
        if not spend or self.best is None and (last.profile[times] > self.limit).any():
            spend = max(spend, MOST_SPENT * self.limit * float(prices.sum()), FIRST_SPEND * self._scale())
            if spend > LARGEST_SPEND * self._scale():
                return None
        answers = [*self.guessed, *self.cuts]
        prices, model = best_prices(answers, times, self.limit, spend)
        if model - self.proved <= CONVERGED * gap * abs(self.proved):
            spend *= MOST_SPENT
            if self.best is not None:  # better prices than these may be higher ones alone
                prices, model = best_prices(answers, times, self.limit, spend)
                if model - self.proved <= CONVERGED * gap * abs(self.proved):
                    return None
        return times, prices, spend

    def _scale(self) -> float:
        return max(min((c.cost for c in (*self.guessed, *self.cuts)), default=0.0), 1e-300)

    def _begin(self) -> tuple[Ints, Floats, float]:
        """The first times and prices, and the most that is spent on the limit's bytes.

        Where the cost of good answers is known, as much is spent on the time that needs most memory in any case; else
        the first answer is one without prices.
        """
        first, spend = self.search.prices, sum(FIRST_SPEND * c.cost for c in self.guessed)
        if first is not None:
            times, prices = prices_while_held(self.network, first)
            return (
                times - self.first_time,
                prices,
                max(spend, MOST_SPENT * self.limit * float(prices.sum())),
            )
        if spend:
            fullest = fullest_time(self.memory) - self.first_time
            return np.array([fullest]), np.array([spend / self.limit]), MOST_SPENT * spend
        return np.zeros(0, dtype=np.int64), np.zeros(0), 0.0

    def _solve(self, times: Ints, prices: Floats) -> Cut | None:
        """Solve under prices; the answer is the incumbent where it fits and costs less."""
        search = self.search
        assignment, bound = self.solver.solve(
            times + self.first_time, prices, search, INNER_GAP * max(search.gap, 1e-6)
        )
        self._prove(bound, times, prices)
        return None if assignment is None else self._keep(assignment)

    def _price_short_intervals(self, times: Ints, prices: Floats) -> None:
        """Keep the answer in which bytes that are held briefly have a price at any time too.

        Where equal layers exceed the limit, it lowers all at once, and not those whose times have a price, a few a round.
        """
        gap = INNER_GAP * max(self.search.gap, 1e-6)
        at = times + self.first_time
        assignment, _ = self.solver.solve(at, prices, self.search, gap, float(prices.sum()))
        if assignment is not None:
            self._keep(assignment)

    def _nothing_fits(self, times: Ints, prices: Floats) -> bool:
        """Whether the prices prove that every assignment exceeds the limit: by bytes alone (a Farkas certificate).

        Looked at once the bound is far above the answers' costs: prices rise for a dozen rounds where nothing fits.
        """
        if self.proved <= DEARER * self._scale():
            return False
        total = float(prices.sum())
        gap = INNER_GAP * FEASIBLE_GAP
        bound = self.bytes_alone.solve(times + self.first_time, prices / total, self.search, gap)[1]
        return bound > self.limit

    def _prove(self, bound: float, times: Ints, prices: Floats) -> None:
        """Note that no assignment costs less than a bound, with its bytes charged for at some prices."""
        search = self.search
        charged = Prices(times + self.first_time, prices, bound)
        proved = charged.proved_cost(self.limit)
        if proved > self.proved:
            self.proved, self.prices = proved, Prices(times, prices)
            search.prices = charged
            search.bound = min(max(search.bound, proved), search.incumbent_cost)

    def _keep(self, assignment: Ints) -> Cut:
        """An answer as a cut; the incumbent where it fits and costs less."""
        search = self.search
        cut = cut_of(self.network, assignment)
        self.cuts.append(cut)
        if cut.profile.max() <= self.limit and cut.cost < search.incumbent_cost:
            self.best, search.incumbent_cost, search.assignment = cut, cut.cost, assignment
            search.bound = min(search.bound, cut.cost)
            if search.on_answer is not None:
                search.on_answer(assignment)
        return cut

    def _joined(self, times: Ints, profile: Floats) -> Ints:
        """The times and the fullest new ones of the stretches in which a profile exceeds the limit."""
        over = profile > self.limit
        begins = np.flatnonzero(np.diff(over, prepend=False) & over)
        if not len(begins):
            return times
        ends = [*begins[1:].tolist(), len(over)]
        fullest = [int(a + profile[a:b].argmax()) for a, b in zip(begins.tolist(), ends, strict=True)]
        fullest.sort(key=lambda t: -profile[t])
        if fullest[0] in times:  # the prices at known times come first
            return times
        return np.union1d(times, fullest[:JOINING])

    def _fuse(self, last: bool = False) -> None:
        """Combine the answers of least priced cost, unless that was done.

        `last`: though the effort is spent; so while none is known.
        """
        search = self.search
        late = search.is_late if last or self.best is None else search.out_of_time
        if len(self.cuts) < 2 or late or search.gap_closed(search.bound):
            return
        prices = self.prices or Prices(np.zeros(0, dtype=np.int64), np.zeros(0))

        def priced_cost(cut: Cut) -> float:
            return cut.cost + float(prices.per_byte @ (cut.profile[prices.times] - self.limit))

        distinct = {c.assignment.tobytes(): c for c in self.cuts}
        nearest = sorted(distinct.values(), key=priced_cost)[:FUSED_ANSWERS]
        if self.best is not None and all(c is not self.best for c in nearest):
            nearest.append(self.best)
        key = tuple(sorted(c.assignment.tobytes() for c in nearest))
        if len(nearest) < 2 or key in self.fused:
            return
        self.fused.add(key)
        assignment = self.fuse([c.assignment for c in nearest])
        if assignment is not None:
            self._keep(assignment)
        search.report("answers combined")
