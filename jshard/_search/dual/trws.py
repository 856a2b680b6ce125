"""Lower bounds and first answers: sequential dual message passing (TRW-S).

Problem.  A core too wide for exact elimination needs a proof of how good an answer is.

Idea.  Any way of moving cost between unaries and pairwise tables ("reparametrisation") leaves every
assignment's total alone, and the sum of all tables' minima is then a lower bound.  Kolmogorov's
sequential scheme walks the variables forwards and backwards; at each it collects what its neighbours
sent, and passes an equal share on to every edge ahead.  The bound never falls.  At the moment when a
variable has collected everything, bound + (its cost of state a - its least cost) bounds every
assignment that uses a, so states above a known answer's cost can be dropped (``slack``).  Near the end the
messages creep, round by round in nearly one direction; since any messages will do, they run ahead of it (``leap``).

Worked case.  A tree: one pass forwards and one back give the exact minimum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jshard._search.cost_network import Floats
from jshard._search.dual.message_layout import ALONE, ROOM, MessageLayout, batch_shape, expand_indices
from jshard._search.exact.reduce import WorkingNetwork


EXTRAPOLATION = (
    0.7  # of the last round's step; 0.6 to 0.8 save half of the rounds or more, 0.9 swings to and fro
)


def trws_pass(
    chain: MessageLayout, backwards: bool, reduced_costs: Floats | None = None, single_precision: bool = False
) -> float:
    """One pass; returns the bound it proves (without the graph's offset).

    A `light` pass works on tables in single precision, in half the time: its messages are as good a start for the
    next one, but what it returns is a bound only up to rounding.
    """
    messages, first = chain.messages, chain.state_offsets
    keep = chain.kept_shares[1 if backwards else 0]
    groups = (
        chain.single_precision_batches()
        if single_precision and chain.single_precision_batches
        else chain.batches
    )[1 if backwards else 0]
    share = np.zeros(len(chain.unary) + 1)  # the last for states that only fill up a group
    bound = 0.0
    order = range(len(chain.waves))
    for at in reversed(order) if backwards else order:
        a, b = chain.waves[at]
        i, j = int(first[a]), int(first[b])
        target, source = chain.incoming[at]
        total = chain.unary[i:j] + np.bincount(target, messages[source], j - i)
        least = np.minimum.reduceat(total, first[a:b] - i)
        bound += float(keep[a:b] @ least)
        if reduced_costs is not None:
            reduced_costs[i:j] = total - np.repeat(least, np.diff(first[a : b + 1]))
        share[i:j] = total * chain.share[i:j]
        for group in groups[at]:
            if group.sender_states.ndim == 1:
                k, m = group.tables[0].shape if isinstance(group.tables, tuple) else batch_shape(group)
                group = expand_indices(group, k, m)
            given = share[group.sender_states] - messages[group.in_messages]
            if single_precision:
                given = given.astype(np.float32)
            if isinstance(group.tables, tuple):
                sent = np.empty(group.out_messages.shape, given.dtype)
                for e, table in enumerate(group.tables):
                    np.minimum.reduce(table + given[:, e, None], axis=0, out=sent[e])
            elif group.tables.shape[1] == 1 and not group.edges_last and group.tables.size >= ALONE:
                sent = min_plus_columns(group.tables[:, 0], given)
            else:
                sent = np.minimum.reduce(
                    group.tables + (given[:, None] if group.edges_last else given[:, :, None]), axis=0
                )
            least = np.minimum.reduce(sent, axis=0 if group.edges_last else 1)
            messages[group.out_messages] = sent - (least if group.edges_last else least[:, None])
            bound += float(least.sum())
    return bound


def min_plus_columns(table: np.ndarray, given: np.ndarray) -> np.ndarray:
    """(n, m): for each column of `given` (k, n) the least of a table (k, m) plus it.

    Layers that repeat give the same again and again, exactly; that is worked out once.
    """
    n, m = given.shape[1], table.shape[1]
    if n >= 8:
        bits = np.uint64 if given.dtype == np.float64 else np.uint32
        odd = np.arange(1, 2 * len(given), 2, dtype=bits) * bits(2654435761)
        _, first, like = np.unique((given.view(bits) * odd[:, None]).sum(axis=0), True, True)
        if 2 * len(first) <= n and np.array_equal(given, given[:, first[like]]):
            return min_plus_columns(table, given[:, first])[like]
    most = max(1, ROOM // table.size)
    sent = np.empty((n, m), given.dtype)
    for a in range(0, n, most):
        part = table[:, None] + given[:, a : a + most, None]
        np.minimum.reduce(part, axis=0, out=sent[a : a + most])
    return sent


def round_primal(chain: MessageLayout) -> list[int]:
    """An assignment (by walk position): each variable in turn takes its best state given the ones
    already chosen and the messages from those still to come."""
    first = chain.state_offsets
    chosen = np.zeros(len(chain.variables), dtype=np.int64)
    ahead, every, pool = chain.rounding_inputs()
    for (a, b), (target, source), rows in zip(chain.waves, ahead, every, strict=True):
        i, j = int(first[a]), int(first[b])
        total = chain.unary[i:j] + np.bincount(target, chain.messages[source], j - i)
        picked = pool[rows.base + chosen[rows.other] * rows.step]
        total += np.bincount(rows.target, picked, j - i)
        starts = first[a:b] - i
        low = np.repeat(np.minimum.reduceat(total, starts), np.diff(first[a : b + 1]))
        hits = np.flatnonzero(total == low)  # the first hit of each variable is its argmin
        chosen[a:b] = hits[np.searchsorted(hits, starts)] - starts
    return chosen.tolist()


@dataclass(frozen=True)
class DualBound:
    bound: float  # with the graph's offset
    reduced_costs: Floats  # all states end to end: slack_bound + slack[a] bounds what uses state a
    reduced_cost_bound: float  # the bound that slack refers to
    rounds: int

    def reduced_costs_by_variable(self, chain: MessageLayout) -> dict[int, Floats]:
        """The slack by variable."""
        first = chain.state_offsets.tolist()
        ends = zip(chain.variables, first[:-1], first[1:], strict=True)
        return {v: self.reduced_costs[a:b] for v, a, b in ends}


def extrapolate(messages: Floats, last: Floats | None) -> Floats:
    """Move the messages on by most of what the last round moved them by (in place); returns what they were."""
    now = messages.copy()
    if last is not None:
        with np.errstate(invalid="ignore"):  # inf - inf: stays forbidden
            gone = np.subtract(now, last, out=last)
        gone[~np.isfinite(gone)] = 0.0
        gone *= EXTRAPOLATION
        messages += gone
    return now


def trws(
    graph: WorkingNetwork,
    chain: MessageLayout,
    *,
    target: float,
    deadline: float,
    max_rounds: int = 400,
    patience: float = 2e-3,
    on_round: Callable[[DualBound, bool], tuple[float, bool]] | None = None,
) -> DualBound:
    """Sweep until the bound reaches ``target``, stalls, or time is up.

    ``on_round(passed, hard)`` is called now and then; it may find a better answer, and returns the target
    and whether to stop. Stalled: ten rounds gained less than ``patience`` of the gap that is left, though
    the answer was looked for ``hard``: far from the end that is not worth the time.
    """
    passed = DualBound(-np.inf, np.zeros(len(chain.unary)), -np.inf, 0)
    history: list[float] = []
    rounds = 0
    light = chain.single_precision_batches is not None
    last: Floats | None = None  # what was heard a round ago
    highest = -np.inf
    soon = 10 if light and not chain.messages.any() else 2  # from nothing to an answer takes more rounds
    while rounds < max_rounds:
        rounds += 1
        told = rounds >= soon and (rounds == 2 or rounds % 5 == 0)
        late = time.monotonic() > deadline
        roughly = light and not told and not late
        if rounds > 1:  # a first round arranges what it starts from; that is no direction
            last = extrapolate(chain.messages, last)
        begun = trws_pass(chain, backwards=False, single_precision=roughly) + graph.offset
        fresh = None if roughly else np.zeros(len(chain.unary))
        bound = trws_pass(chain, backwards=True, reduced_costs=fresh, single_precision=roughly) + graph.offset
        if bound < highest:
            last = None  # that was too far: the next round goes without
        highest = max(highest, bound)
        if fresh is not None and bound > passed.bound:
            # The backward pass starts from the forward pass's bound and only rises, so each
            # variable's slack comes on top of at least that.
            passed = DualBound(bound, fresh, begun, rounds)
        elif fresh is not None:
            passed = replace(passed, rounds=rounds)
        best, stop = passed.bound, False
        history.append(best)
        if fresh is None:
            continue
        if on_round is not None and told:
            target, stop = on_round(passed, False)
        if stop or best >= target or late or time.monotonic() > deadline:
            break
        if rounds >= 20 and best - history[-11] < patience * (target - best):
            if light:  # it may be the rounding that stalls
                light = False
                continue
            if on_round is not None:
                target, stop = on_round(passed, True)
            if stop or best >= target or best - history[-11] < patience * (target - best):
                break
    return passed
