"""Warm start of TRW-S: messages of an earlier core, reparametrised for one that has lost states.

Removing states lets the reductions work again, but passes that start from zero messages need most of their rounds to
return to the bound there was. Any messages are a valid start, so an edge starts from the messages of the same edge
before, on the states that both have. Reductions also move cost: the row and column minima of what is left of a table
go into the unary tables. Where an edge's old and new table differ by such a reparametrisation a(v) + b(w) alone,
subtracting a from the message to v and b from the message to w restores the old costs, and the bound continues where
it stood.

Example: a table [[0, 2], [1, 5]] loses its first column; [[2], [5]] is normalised to [[0], [0]] and v's unary table
rises by (2, 5). The message to v falls by (2, 5).

>>> reparametrization_between(np.array([[2.0], [5.0]]), np.array([[0.0], [0.0]]))
(array([0., 3.]), array([2.]))
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.dual.message_layout import MessageLayout
from jshard._search.exact.working_network import WorkingNetwork


SavedMessages = dict[tuple[int, int], tuple[Ints, Floats]]  # (receiver, sender) -> original states, message


@dataclass(frozen=True)
class CoreMessages:
    """The messages of a core, from which those of a similar one begin."""

    core: WorkingNetwork
    messages: SavedMessages

    def restore(self, graph: WorkingNetwork, layout: MessageLayout) -> None:
        """Set the messages of a layout of another core, in whose table pool this core's tables are (in place)."""
        restore_messages(graph, layout, self.messages, self.core)


def save_messages(graph: WorkingNetwork, layout: MessageLayout) -> SavedMessages:
    """The messages of all edges in both directions, by the working network's variables."""
    subsets = graph.tables.subsets.arrays
    saved: SavedMessages = {}
    for (v, to_v), (w, to_w) in _edge_messages(layout):
        saved[v, w] = subsets[graph.states[v]], layout.messages[to_v].copy()
        saved[w, v] = subsets[graph.states[w]], layout.messages[to_w].copy()
    return saved


def restore_messages(
    graph: WorkingNetwork, layout: MessageLayout, saved: SavedMessages, before: WorkingNetwork
) -> None:
    """Set the messages of a layout to saved ones (in place); those of new edges stay zero.

    Arguments:

    - `graph`: the network of the layout.
    - `layout`: its messages are replaced.
    - `saved`: messages of an earlier network.
    - `before`: that network.
    """
    arrays, subsets = graph.tables.arrays, graph.tables.subsets.arrays

    @functools.cache
    def moved_cost(
        old: int, new: int, v: tuple[int, int], w: tuple[int, int]
    ) -> tuple[Floats, Floats] | None:
        rows, columns = (_positions_if_all(subsets[a], subsets[b]) for a, b in (v, w))
        if rows is None or columns is None:
            return None
        return reparametrization_between(arrays[old][np.ix_(rows, columns)], arrays[new])

    @functools.cache
    def positions(states: int, wanted: int) -> tuple[Ints, np.ndarray]:
        return _positions(subsets[states], subsets[wanted])

    for (v, to_v), (w, to_w) in _edge_messages(layout):
        if max(v, w) >= len(before.adj):
            continue  # a variable that the other network lacks
        old, new = before.adj[v].get(w), graph.adj[v][w]
        states = [(before.states[x], graph.states[x]) for x in (v, w)]
        moved = None
        if old is not None and (old != new or any(a != b for a, b in states)):
            moved = moved_cost(old, new, *states)
        for end, (receiver, sender, entries) in enumerate(((v, w, to_v), (w, v, to_w))):
            if (receiver, sender) not in saved:
                continue
            message = saved[receiver, sender][1]
            if states[end][0] != states[end][1]:
                at, known = positions(*states[end])
                message = np.where(known, message[at], 0.0)
            if moved is not None:
                message = message - moved[end]
            layout.messages[entries] = message


def _edge_messages(layout: MessageLayout) -> Iterator[tuple[tuple[int, slice], tuple[int, slice]]]:
    """(variable, entries of the message to it) of both ends of each edge."""
    edges, names = layout.edges, layout.variables
    size = edges.num_states.tolist()
    ends = zip(
        edges.low.tolist(), edges.high.tolist(), edges.to_low.tolist(), edges.to_high.tolist(), strict=True
    )
    for i, j, p, q in ends:
        yield (names[i], slice(p, p + size[i])), (names[j], slice(q, q + size[j]))


def align_states(states: Ints, message: Floats, wanted: Ints) -> Floats:
    """A message about `states` as one about `wanted` states; zero for states that it lacks."""
    if wanted is states:
        return message
    at, known = _positions(states, wanted)
    return np.where(known, message[at], 0.0)


def _positions_if_all(states: Ints, wanted: Ints) -> Ints | None:
    """Positions of wanted states among ascending states; None where one is missing."""
    at, known = _positions(states, wanted)
    return at if known.all() else None


def _positions(states: Ints, wanted: Ints) -> tuple[Ints, np.ndarray]:
    """A position among ascending states for each of the wanted ones, and whether it is there."""
    at = np.minimum(np.searchsorted(states, wanted), len(states) - 1)
    return at, states[at] == wanted


def reparametrization_between(old: Floats, new: Floats) -> tuple[Floats, Floats] | None:
    """What was taken from the rows (k,) and columns (m,) of a table; None where more changed than that.

    Forbidden pairs tell nothing: parts of the table that are connected through them alone are treated separately.
    """
    finite = np.isfinite(old) & np.isfinite(new)
    taken = np.where(finite, old, 0.0) - np.where(finite, new, 0.0)
    rows, columns = np.full(len(old), np.nan), np.full(old.shape[1], np.nan)
    while np.isnan(rows).any():
        rows[np.flatnonzero(np.isnan(rows))[0]] = 0.0
        known = -1
        while known != (known := int(np.isfinite(rows).sum() + np.isfinite(columns).sum())):
            for a, b, ok, d in ((rows, columns, finite, taken), (columns, rows, finite.T, taken.T)):
                use = ok & np.isfinite(a)[:, None]
                new_b = np.isnan(b) & use.any(axis=0)
                at = use.argmax(axis=0)[new_b]
                b[new_b] = d[at, np.flatnonzero(new_b)] - a[at]
    columns = np.where(np.isnan(columns), 0.0, columns)
    error = np.abs(taken - rows[:, None] - columns)[finite]
    return (rows, columns) if (error <= 1e-9 * (1.0 + np.abs(taken[finite]))).all() else None
