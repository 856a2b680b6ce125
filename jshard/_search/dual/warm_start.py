"""Messages kept: a core that has lost states, or one like it, starts from what an earlier one heard.

Problem.  Dropping states lets the reductions bite again, but passes that start anew have to find their way back
to the bound that there was: most of the passes of a search.

Idea.  Any messages are a valid start, so a variable takes what its like heard, for the states that both know.
Reductions also move cost: the minima of what is left of a table go into the unaries.  Where the table of before
and the one of now differ by such a move alone, a(v) + b(w), taking a from what v heard and b from what w heard
gives the very costs of before, and the bound goes on where it stood.

Worked case.  A table [[0, 2], [1, 5]] loses its first column; [[2], [5]] is normalised to [[0], [0]] and v's
unary rises by (2, 5).  The message v heard falls by (2, 5).

>>> moved(np.array([[2.0], [5.0]]), np.array([[0.0], [0.0]]))
(array([0., 3.]), array([2.]))
"""

from __future__ import annotations

import functools

import numpy as np

from jshard._search.cost_network import Floats, Ints
from jshard._search.dual.message_layout import MessageLayout
from jshard._search.exact.reduce import WorkingNetwork


SavedMessages = dict[tuple[int, int], tuple[Ints, Floats]]  # (hearer, neighbour) -> original states, message


def save_messages(graph: WorkingNetwork, chain: MessageLayout) -> SavedMessages:
    """What every variable heard last: a start for the passes on a similar core (any start is valid)."""
    out: SavedMessages = {}
    subsets = graph.tables.subsets.arrays
    names = chain.variables
    size = np.diff(chain.state_offsets).tolist()
    for (i, j), (p, q) in zip(chain.edge_ends.tolist(), chain.message_offsets.tolist(), strict=True):
        v, w = names[i], names[j]
        out[v, w] = subsets[graph.states[v]], chain.messages[p : p + size[i]].copy()
        out[w, v] = subsets[graph.states[w]], chain.messages[q : q + size[j]].copy()
    return out


def restore_messages(
    graph: WorkingNetwork, chain: MessageLayout, heard: SavedMessages, before: WorkingNetwork
) -> None:
    """Start a chain from the messages `heard` in the graph that was `before` (in place); what is new starts from zero."""
    arrays, subsets = graph.tables.arrays, graph.tables.subsets.arrays
    names = chain.variables
    size = np.diff(chain.state_offsets).tolist()

    @functools.cache
    def shift(old: int, new: int, v: tuple[int, int], w: tuple[int, int]) -> tuple[Floats, Floats] | None:
        rows, cols = (_within(subsets[a], subsets[b]) for a, b in (v, w))
        if rows is None or cols is None:
            return None
        return reparametrization_between(arrays[old][np.ix_(rows, cols)], arrays[new])

    @functools.cache
    def among(states: int, mine: int) -> tuple[Ints, np.ndarray]:
        return _among(subsets[states], subsets[mine])

    for (i, j), places in zip(chain.edge_ends.tolist(), chain.message_offsets.tolist(), strict=True):
        v, w = names[i], names[j]
        old = before.adj[v].get(w)
        both = [(before.states[x], graph.states[x]) for x in (v, w)]
        shifts = None
        if old is not None and (old != graph.adj[v][w] or any(a != b for a, b in both)):
            shifts = shift(old, graph.adj[v][w], *both)
        for side, here, there, place in ((0, i, j, places[0]), (1, j, i, places[1])):
            found = heard.get((names[here], names[there]))
            if found is None:
                continue
            message = found[1]
            states, mine = both[side]
            if states != mine:
                at, known = among(states, mine)
                message = np.where(known, message[at], 0.0)
            if shifts is not None:
                message = message - shifts[side]
            chain.messages[place : place + size[here]] = message


def align_states(states: Ints, message: Floats, mine: Ints) -> Floats:
    """A message about some states as one about others; what it does not know is zero."""
    if mine is states:
        return message
    at, there = _among(states, mine)
    return np.where(there, message[at], 0.0)


def _within(states: Ints, mine: Ints) -> Ints | None:
    """Where some states stand among others; None where one is missing."""
    at, there = _among(states, mine)
    return at if there.all() else None


def _among(states: Ints, mine: Ints) -> tuple[Ints, np.ndarray]:
    """A place among some states for each of mine, and whether it is there."""
    at = np.minimum(np.searchsorted(states, mine), len(states) - 1)
    return at, states[at] == mine


def reparametrization_between(old: Floats, new: Floats) -> tuple[Floats, Floats] | None:
    """What rows (k,) and columns (m,) of a table were lowered by; None where more happened to it than that.

    Forbidden pairs tell nothing: parts of the table that only they join are lowered each on its own.
    """
    finite = np.isfinite(old) & np.isfinite(new)
    gone = np.where(finite, old, 0.0) - np.where(finite, new, 0.0)
    rows, cols = np.full(len(old), np.nan), np.full(old.shape[1], np.nan)
    while np.isnan(rows).any():
        rows[np.flatnonzero(np.isnan(rows))[0]] = 0.0
        known = -1
        while known != (known := int(np.isfinite(rows).sum() + np.isfinite(cols).sum())):
            for a, b, ok, d in ((rows, cols, finite, gone), (cols, rows, finite.T, gone.T)):
                use = ok & np.isfinite(a)[:, None]
                new_b = np.isnan(b) & use.any(axis=0)
                at = use.argmax(axis=0)[new_b]
                b[new_b] = d[at, np.flatnonzero(new_b)] - a[at]
    cols = np.where(np.isnan(cols), 0.0, cols)
    if not (np.abs(gone - rows[:, None] - cols)[finite] <= 1e-9 * (1.0 + np.abs(gone[finite]))).all():
        return None
    return rows, cols
