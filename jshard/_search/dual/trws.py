"""TRW-S: sequential tree-reweighted message passing (Kolmogorov 2006), lower bounds and first answers.

Moving cost between unary and pairwise tables (reparametrisation) changes no assignment's cost, and the sum of all
tables' minima is a lower bound: the dual of the local-polytope relaxation. TRW-S ascends it block by block. It walks
the variables forwards and backwards; each collects its messages, and every edge to a later variable gets an equal
share of the total. The bound never decreases.

When a variable has collected all messages, bound + (total of state a - least total) is a lower bound on every
assignment that uses a: the state's *reduced cost* (its min-marginal less the bound) on top of the bound. States whose
bound is above a known answer's cost can be removed.

Near the end the messages move by nearly the same step in each round. As any messages are valid, they are extrapolated
along it.

Example: on a tree one pass forwards and one back give the exact minimum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jshard._core.arrays import Floats
from jshard._search.dual.message_layout import MessageLayout
from jshard._search.effort import Effort
from jshard._search.exact.working_network import WorkingNetwork


# Of a round's step, by which the messages move on. 0.6 to 0.8 save half of the rounds or more, 0.9 oscillates.
EXTRAPOLATION = 0.7


def trws_pass(
    layout: MessageLayout,
    *,
    backwards: bool,
    reduced_costs: Floats | None = None,
    single_precision: bool = False,
) -> float:
    """One pass over all variables; returns the bound that it proves, without the network's offset.

    Arguments:

    - `layout`: the messages, which are replaced.
    - `backwards`: the direction.
    - `reduced_costs`: (states,) filled with the states' reduced costs.
    - `single_precision`: use tables in single precision, in half the time: the messages are as good a start for the
        next pass, but the result is a bound only up to rounding.
    """
    direction = 1 if backwards else 0
    messages, first = layout.messages, layout.state_offsets
    kept = layout.kept_shares[direction]
    batches = (layout.single_precision_batches if single_precision else layout.batches)[direction]
    share = np.zeros(len(layout.unary) + 1)  # the last for padding states
    bound = 0.0
    waves = range(len(layout.waves))
    for wave in reversed(waves) if backwards else waves:
        a, b = layout.waves[wave]
        i, j = int(first[a]), int(first[b])
        state, entry = layout.incoming[wave]
        total = layout.unary[i:j] + np.bincount(state, messages[entry], j - i)
        least = np.minimum.reduceat(total, first[a:b] - i)
        bound += float(kept[a:b] @ least)
        if reduced_costs is not None:
            reduced_costs[i:j] = total - np.repeat(least, np.diff(first[a : b + 1]))
        share[i:j] = total * layout.share[i:j]
        for batch in batches[wave]:
            bound += batch.send(share, messages)
    return bound


def round_primal(layout: MessageLayout) -> list[int]:
    """States by position: each variable in order takes its best state beside the states of earlier variables and the
    messages from later ones."""
    first, inputs = layout.state_offsets, layout.rounding_inputs
    states = np.zeros(len(layout.variables), dtype=np.int64)
    for (a, b), (state, entry), rows in zip(layout.waves, inputs.later, inputs.earlier, strict=True):
        i, j = int(first[a]), int(first[b])
        total = layout.unary[i:j] + np.bincount(state, layout.messages[entry], j - i)
        selected = inputs.pool[rows.base + states[rows.other] * rows.step]
        total += np.bincount(rows.target, selected, j - i)
        starts = first[a:b] - i
        least = np.repeat(np.minimum.reduceat(total, starts), np.diff(first[a : b + 1]))
        hits = np.flatnonzero(total == least)  # the first hit of each variable is its argmin
        states[a:b] = hits[np.searchsorted(hits, starts)] - starts
    return states.tolist()


@dataclass(frozen=True)
class DualBound:
    """The best bound of the passes so far."""

    bound: float  # with the network's offset
    # (states,) end to end: reduced_cost_bound + reduced_costs[a] is a lower bound on assignments that use state a.
    reduced_costs: Floats
    reduced_cost_bound: float
    rounds: int

    def reduced_costs_by_variable(self, layout: MessageLayout) -> dict[int, Floats]:
        """The reduced costs of each of the working network's variables."""
        first = layout.state_offsets.tolist()
        ranges = zip(layout.variables, first[:-1], first[1:], strict=True)
        return {v: self.reduced_costs[a:b] for v, a, b in ranges}


def extrapolate(messages: Floats, previous: Floats | None) -> Floats:
    """Move the messages on by most of their last step (in place); returns what they were."""
    now = messages.copy()
    if previous is not None:
        with np.errstate(invalid="ignore"):  # inf - inf: stays forbidden
            step = np.subtract(now, previous, out=previous)
        step[~np.isfinite(step)] = 0.0
        step *= EXTRAPOLATION
        messages += step
    return now


def trws(
    graph: WorkingNetwork,
    layout: MessageLayout,
    *,
    target: float,
    deadline: float,
    effort: Effort | None = None,
    max_rounds: int = 400,
    patience: float = 2e-3,
    on_round: Callable[[DualBound, bool], tuple[float, bool]] | None = None,
) -> DualBound:
    """Passes forwards and backwards until the bound reaches `target`, stalls, or time is up.

    Stalled: ten rounds gained less than `patience` of the remaining gap although a primal step was made with more
    effort; far from the end such effort is not worth the time.

    Arguments:

    - `graph`: the working network, for its offset.
    - `layout`: its messages, which are replaced.
    - `target`: the bound that suffices.
    - `deadline`: on the monotonic clock, in seconds.
    - `effort`: ends the passes when it is spent.
    - `max_rounds`: rounds of two passes at most.
    - `patience`: share of the gap.
    - `on_round`: called every few rounds with the bound and whether it has stalled; may find a better answer, and
        returns the new target and whether to stop.
    """
    dual = DualBound(-np.inf, np.zeros(len(layout.unary)), -np.inf, 0)
    history: list[float] = []
    rounds = 0
    in_single = layout.has_many_entries
    previous: Floats | None = None  # the messages a round ago
    highest = -np.inf
    # From zero messages an answer takes more rounds.
    first_step = 10 if in_single and not layout.messages.any() else 2
    while rounds < max_rounds:
        rounds += 1
        step_due = rounds >= first_step and (rounds == 2 or rounds % 5 == 0)
        if effort is not None:
            effort.spend(2.0 * layout.num_entries, len(layout.variables))
        late = time.monotonic() > deadline or (effort is not None and effort.exhausted)
        single = in_single and not step_due and not late
        if rounds > 1:  # the first round adapts the start's messages: its step is no direction
            previous = extrapolate(layout.messages, previous)
        forward_bound = trws_pass(layout, backwards=False, single_precision=single) + graph.offset
        reduced_costs = None if single else np.zeros(len(layout.unary))
        bound = graph.offset + trws_pass(
            layout, backwards=True, reduced_costs=reduced_costs, single_precision=single
        )
        if bound < highest:
            previous = None  # extrapolated too far: not in the next round
        highest = max(highest, bound)
        if reduced_costs is not None and bound > dual.bound:
            # The backward pass starts from the forward pass's bound and does not decrease it, so each variable's
            # reduced costs come on top of at least that.
            dual = DualBound(bound, reduced_costs, forward_bound, rounds)
        elif reduced_costs is not None:
            dual = replace(dual, rounds=rounds)
        best, stop = dual.bound, False
        history.append(best)
        if reduced_costs is None:
            continue
        if on_round is not None and step_due:
            target, stop = on_round(dual, False)
        if stop or best >= target or late or time.monotonic() > deadline:
            break
        if rounds >= 20 and best - history[-11] < patience * (target - best):
            if in_single:  # the rounding may be what stalls
                in_single = False
                continue
            if on_round is not None:
                target, stop = on_round(dual, True)
            if stop or best >= target or best - history[-11] < patience * (target - best):
                break
    return dual
