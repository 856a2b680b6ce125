"""Repeated layers: a short core solved first, its answer and messages a start for the whole.

Problem.  A core of 126 layers is 126 times the same dozen tables, and messages need as many passes there as
in six layers, each twenty times as dear.

Idea.  Find the layers by colours: variables that look alike three edges far have one colour, and the colours
that repeat are numbered along the depth.  Cut out the middle, join the two ends (layer a - 1 meets layer b as it
met layer a), solve that, and give every layer cut out what its like at the seam answered and heard.  Nothing is
forced to be equal: the whole core then goes the ordinary way, from a better start, and its proof is its own.

Worked case.  A chain of forty equal variables: three rounds of colours tell the outermost three of each end
apart, the 34 others are one colour.  Two of them are kept on one side and one on the other, 31 cut out.

>>> import numpy as np
>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.reduce import graph_of
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> net = build([[0.0, 1.0]] * 40, [(i, i + 1, step) for i in range(39)])
>>> folded = fold(graph_of(net))
>>> len(folded.short.core), dict(folded.image.tolist())[20]
(9, 4)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jshard._search.cost_network import Ints
from jshard._search.dual.message_layout import LayerPositions, MessageLayout, peripheral_order
from jshard._search.dual.warm_start import SavedMessages, align_states
from jshard._search.exact.reduce import WorkingNetwork
from jshard._search.exact.table_pool import NONE


LAYERS = 12  # a core of fewer equal layers is not worth folding
REACH = 4  # edges join layers at most so far apart


@dataclass(frozen=True)
class FoldedNetwork:
    """A short core, and for each variable cut out the one that stands for it there."""

    short: WorkingNetwork
    representative: Ints  # (n, 2): a variable that is cut out, the one like it
    seam_edges: Ints  # (n, 4): both ends of an edge of the whole core that is cut, both of the like one kept
    layers: LayerPositions  # of the variables that repeat


def fold_layers(graph: WorkingNetwork) -> FoldedNetwork | None:
    """The short core of a graph whose layers repeat; None when they do not."""
    edges, owner = _edges(graph)
    for rounds in (3, 4, 5, 6, 8):
        layers = _layers(graph, edges, _colours(graph, edges, owner, rounds))
        if layers is not None:
            return _cut(graph, edges, *layers)
    return None


def unfold_messages(
    graph: WorkingNetwork, chain: MessageLayout, folded: FoldedNetwork, heard: SavedMessages
) -> None:
    """Start a chain of the whole core from the messages of the short one (in place)."""
    n = len(graph.unary)
    image = np.arange(n)
    image[folded.representative[:, 0]] = folded.representative[:, 1]
    ends = np.array(chain.variables, dtype=np.int64)[chain.edge_ends]
    hearer, teller = ends.T.ravel(), ends[:, ::-1].T.ravel()
    place = chain.message_offsets.T.ravel()
    # An edge by one number. What is in both cores is its own like.
    own, like = hearer * n + teller, image[hearer] * n + image[teller]
    seam = folded.seam_edges[np.argsort(folded.seam_edges[:, 0] * n + folded.seam_edges[:, 1])]
    if len(seam):
        cut = seam[:, 0] * n + seam[:, 1]
        at = np.minimum(np.searchsorted(cut, own), len(cut) - 1)
        like = np.where(cut[at] == own, seam[at, 2] * n + seam[at, 3], like)
    known = np.array([v * n + w for v, w in heard], dtype=np.int64)
    like = np.where(np.isin(own, known), own, like)
    states = np.array(graph.states, dtype=np.int64)[hearer]
    order = np.lexsort((states, like))
    like, states, place = like[order], states[order], place[order]
    first = np.flatnonzero(np.diff(like, prepend=-1) | np.diff(states, prepend=-1))
    for a, b in zip(first.tolist(), [*first[1:].tolist(), len(like)], strict=True):
        told = heard.get(divmod(int(like[a]), n))
        if told is not None:
            message = align_states(*told, graph.tables.subsets.arrays[states[a]])
            chain.messages[place[a:b, None] + np.arange(len(message))] = message


def _edges(graph: WorkingNetwork) -> tuple[Ints, Ints]:
    """Directed edges (place of v, place of w, table), sorted by v, and where each v's begin."""
    core = graph.core
    place = {v: i for i, v in enumerate(core)}
    edges = [(i, place[w], t) for i, v in enumerate(core) for w, t in graph.adj[v].items()]
    array = np.array(edges, dtype=np.int64).reshape(-1, 3)
    return array, np.searchsorted(array[:, 0], np.arange(len(core)))


def _mix(x: np.ndarray) -> np.ndarray:
    """Scatter 64-bit numbers (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _colours(graph: WorkingNetwork, edges: Ints, owner: Ints, rounds: int) -> Ints:
    """For each place a number that is the same for those that look alike so many edges far."""
    core = graph.core
    own = np.array([(graph.unary[v], graph.states[v]) for v in core], dtype=np.int64).reshape(-1, 2)
    colour = _mix(_mix(own[:, 0] + 1) + _mix(own[:, 1] + 1_000_003))
    alone = np.append(owner[1:], len(edges)) == owner
    for _ in range(rounds):
        told = _mix(_mix(edges[:, 2] + 7) + colour[edges[:, 1]])
        total = np.add.reduceat(np.append(told, np.uint64(0)), owner)
        colour = _mix(colour * np.uint64(3) + np.where(alone, np.uint64(0), total))
    return np.unique(colour, return_inverse=True)[1]


def _layers(graph: WorkingNetwork, edges: Ints, colour: Ints) -> tuple[Ints, Ints, int, int] | None:
    """(colour, layer) of each place, colour -1 for what does not repeat, and the layers that all colours have."""
    count = np.bincount(colour)
    if not len(count) or count.max() < LAYERS:
        return None
    usual = int(np.bincount(count, weights=count).argmax())  # the number of layers most variables have
    # Twins in a layer (keys and values) have one colour: those of a layer are neighbours in the order of variables.
    fold_of = np.clip(np.round(count / max(usual, 1)), 1, 4).astype(np.int64)
    colour = colour * 4
    for c in np.flatnonzero((fold_of > 1) & (count >= LAYERS)).tolist():
        twins = np.flatnonzero(colour == 4 * c)
        colour[twins] += np.arange(len(twins)) % fold_of[c]
    count = np.bincount(colour)
    repeats = np.abs(count - usual) <= 8
    if usual < LAYERS or count[repeats].sum() < 0.5 * len(colour) or (count > usual + 8).any():
        return None
    colour = np.where(repeats[colour], colour, -1)
    members = {int(c): np.flatnonzero(colour == c) for c in np.flatnonzero(repeats)}
    rank = np.zeros(len(colour), dtype=np.int64)
    for places in members.values():
        rank[places] = np.arange(len(places))
    # Of the edges between two colours the ranks that the first and the last one join.
    here, there = colour[edges[:, 0]], colour[edges[:, 1]]
    inner = edges[(here >= 0) & (there >= 0) & (here != there)]
    both = colour[inner[:, 0]] * (int(colour.max()) + 1) + colour[inner[:, 1]]
    first = np.unique(both, return_index=True)[1]
    last = len(both) - 1 - np.unique(both[::-1], return_index=True)[1]
    pairs: dict[tuple[int, int], Ints] = {}
    near: dict[int, list[int]] = {}
    for k in np.argsort(first).tolist():
        ends = inner[[first[k], last[k]], :2]
        a, b = colour[ends[0]].tolist()
        pairs[a, b] = rank[ends]
        near.setdefault(a, []).append(b)
    layer = np.zeros(len(colour), dtype=np.int64)
    begin = max(members, key=lambda c: (len(members[c]), -c))
    direction = {begin: 1}
    layer[members[begin]] = np.arange(len(members[begin]))
    todo = [begin]
    while todo:
        a = todo.pop()
        for b in near.get(a, ()):
            if b in direction:
                continue
            (i, j), (k, m) = pairs[a, b].tolist()
            if (i, j) == (k, m):
                continue
            s = direction[a] * (1 if (k - i) * (m - j) >= 0 else -1)
            at = int(layer[members[a][i]])
            layer[members[b]] = at + s * (np.arange(len(members[b])) - j)
            direction[b] = s
            todo.append(b)
    if len(direction) < len(members):
        keep = np.array([c >= 0 and int(c) in direction for c in colour])
        colour = np.where(keep, colour, -1)
        if keep.sum() < 0.5 * len(colour):
            return None
    low = max(int(layer[p].min()) for c, p in members.items() if c in direction)
    high = min(int(layer[p].max()) for c, p in members.items() if c in direction) + 1
    return (colour, layer, low, high) if high - low >= LAYERS else None


def _cut(
    graph: WorkingNetwork, edges: Ints, colour: Ints, layer: Ints, low: int, high: int
) -> FoldedNetwork | None:
    """Take out the middle layers and join the ends."""
    core = graph.core
    both = (colour[edges[:, 0]] >= 0) & (colour[edges[:, 1]] >= 0)
    reach = max(1, int(np.abs(layer[edges[both, 0]] - layer[edges[both, 1]]).max(initial=0)))
    if reach > REACH or high - low < 2 * reach + 3:
        return None
    # Every edge over the seam has both its ends then. One layer more: the last one before the seam, whose messages
    # all others begin with, is a good deal more like those in the middle.
    a, b = low + reach + 1, high - reach
    gone = (colour >= 0) & (layer >= a) & (layer < b)
    name = np.array(core, dtype=np.int64)
    where = np.flatnonzero(colour >= 0)
    bottom, height = int(layer[where].min()), int(layer[where].max() - layer[where].min()) + 1
    at = np.full((int(colour.max()) + 1, height), -1)  # the place of each colour's variable in each layer
    at[colour[where], layer[where] - bottom] = where
    short = graph.fork()
    for i in np.flatnonzero(gone).tolist():
        v = core[i]
        for w in short.adj[v]:
            del short.adj[w][v]
        short.adj[v], short.unary[v] = {}, NONE

    def moved(places: Ints, shift: Ints) -> Ints:
        """The likes of places some layers further in the short core's count; -1 where there is none."""
        x = layer[places] + shift
        x = np.where(x < a, x, x + b - a) - bottom
        there = np.where((x >= 0) & (x < height), at[colour[places], np.clip(x, 0, height - 1)], -1)
        return np.where(colour[places] < 0, places, there)

    cut = edges[gone[edges[:, 0]] | gone[edges[:, 1]]]
    left, right = cut[:, 0], cut[:, 1]
    joined = cut[~gone[left] & (colour[left] >= 0) & (layer[left] < a)]
    others = moved(joined[:, 1], np.zeros(len(joined), dtype=np.int64)).tolist()
    for (i, _, table), other in zip(joined.tolist(), others, strict=True):
        if other < 0 or core[other] in short.adj[core[i]]:
            return None
        short.adj[core[i]][core[other]] = table
        short.adj[core[other]][core[i]] = graph.tables.transpose(table)
    # An edge seen from layer a - 1 is the like of the one seen from any layer cut out.
    shift = a - 1 - layer[np.where(gone[left], left, right)]
    like = moved(left, shift), moved(right, shift)
    found = (like[0] >= 0) & (like[1] >= 0)
    lost = np.flatnonzero(gone)
    # The same order in every layer: the one in which a walk of the short core comes by at the seam.
    turn = {v: r for r, v in enumerate(peripheral_order(short, True))}
    middle = at[:, a - 1 - bottom]
    order = sorted(
        np.unique(colour[where]).tolist(), key=lambda c: (turn[core[middle[c]]] if middle[c] >= 0 else -1, c)
    )
    place = {c: p for p, c in enumerate(order)}
    same = both & (colour[edges[:, 0]] == colour[edges[:, 1]])
    turns = 1 + int(np.abs(layer[edges[same, 0]] - layer[edges[same, 1]]).max(initial=0))
    numbers = zip(where.tolist(), colour[where].tolist(), (layer[where] - bottom).tolist(), strict=True)
    layers = {core[i]: (place[c], x % turns, x) for i, c, x in numbers}
    return FoldedNetwork(
        short,
        np.stack([name[lost], name[at[colour[lost], a - 1 - bottom]]], axis=1),
        name[np.stack([left, right, *like], axis=1)[found]],
        layers,
    )
