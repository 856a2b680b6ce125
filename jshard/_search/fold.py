"""Repeated layers: a short core solved first, its answer and messages a start for the whole.

Problem.  A core of 126 layers is 126 times the same dozen tables, and messages need as many passes there as
in six layers, each twenty times as dear.

Idea.  Find the layers by colours: variables that look alike three edges far have one colour, and the colours
that repeat are numbered along the depth.  Cut out the middle, join the two ends (layer a - 1 meets layer b as it
met layer a), solve that, and give every layer cut out what its like at the seam answered and heard.  Nothing is
forced to be equal: the whole core then goes the ordinary way, from a better start, and its proof is its own.

Worked case.  A chain of forty equal variables: three rounds of colours tell the outermost three of each end
apart, the 34 others are one colour.  One of them is kept on each side, 32 cut out.

>>> import numpy as np
>>> from jshard._search.network import build
>>> from jshard._search.reduce import graph_of
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> net = build([[0.0, 1.0]] * 40, [(i, i + 1, step) for i in range(39)])
>>> folded = fold(graph_of(net))
>>> len(folded.short.core), folded.image[20]
(8, 3)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jshard._search.bound import Heard
from jshard._search.network import Ints
from jshard._search.reduce import Graph
from jshard._search.tables import NONE


LAYERS = 12  # a core of fewer equal layers is not worth folding
REACH = 4  # edges join layers at most so far apart


@dataclass(frozen=True)
class Folded:
    """A short core, and for each variable cut out the one that stands for it there."""

    short: Graph
    image: dict[int, int]
    seam: dict[tuple[int, int], tuple[int, int]]  # an edge of the whole core that is cut -> the like one kept


def fold(graph: Graph) -> Folded | None:
    """The short core of a graph whose layers repeat; None when they do not."""
    edges, owner = _edges(graph)
    for rounds in (3, 4, 5, 6, 8):
        layers = _layers(graph, edges, _colours(graph, edges, owner, rounds))
        if layers is not None:
            return _cut(graph, edges, *layers)
    return None


def lift(folded: Folded, graph: Graph, heard: Heard) -> Heard:
    """Messages for the whole core from those of the short one."""
    out = dict(heard)
    for v in graph.core:
        for w in graph.adj[v]:
            if (v, w) not in out:
                like = folded.seam.get((v, w)) or (folded.image.get(v, v), folded.image.get(w, w))
                if like in heard:
                    out[v, w] = heard[like]
    return out


def _edges(graph: Graph) -> tuple[Ints, Ints]:
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


def _colours(graph: Graph, edges: Ints, owner: Ints, rounds: int) -> Ints:
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


def _layers(graph: Graph, edges: Ints, colour: Ints) -> tuple[Ints, Ints, int, int] | None:
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
    inner = edges[(colour[edges[:, 0]] >= 0) & (colour[edges[:, 1]] >= 0)]
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for v, w, _ in inner.tolist():
        if colour[v] != colour[w]:
            pairs.setdefault((int(colour[v]), int(colour[w])), []).append((int(rank[v]), int(rank[w])))
    near: dict[int, list[int]] = {}
    for a, b in pairs:
        near.setdefault(a, []).append(b)
    layer = np.zeros(len(colour), dtype=np.int64)
    first = max(members, key=lambda c: (len(members[c]), -c))
    direction = {first: 1}
    layer[members[first]] = np.arange(len(members[first]))
    todo = [first]
    while todo:
        a = todo.pop()
        for b in near.get(a, ()):
            if b in direction:
                continue
            met = pairs[a, b]
            if len(met) < 2:
                continue
            (i, j), (k, m) = met[0], met[-1]
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


def _cut(graph: Graph, edges: Ints, colour: Ints, layer: Ints, low: int, high: int) -> Folded | None:
    """Take out the middle layers and join the ends."""
    core = graph.core
    both = (colour[edges[:, 0]] >= 0) & (colour[edges[:, 1]] >= 0)
    reach = max(1, int(np.abs(layer[edges[both, 0]] - layer[edges[both, 1]]).max(initial=0)))
    if reach > REACH or high - low < 2 * reach + 2:
        return None
    a, b = low + reach, high - reach  # every edge over the seam then has both its ends
    gone = (colour >= 0) & (layer >= a) & (layer < b)
    at = {(int(c), int(x)): i for i, (c, x) in enumerate(zip(colour, layer, strict=True)) if c >= 0}
    short = graph.fork()
    for i in np.flatnonzero(gone).tolist():
        v = core[i]
        for w in short.adj[v]:
            del short.adj[w][v]
        short.adj[v], short.unary[v] = {}, NONE
    image = {core[i]: core[at[int(colour[i]), a - 1]] for i in np.flatnonzero(gone).tolist()}
    seam: dict[tuple[int, int], tuple[int, int]] = {}

    def moved(i: int, shift: int) -> int | None:
        """The like of a place some layers further in the short core's count."""
        if colour[i] < 0:
            return i
        x = int(layer[i]) + shift
        return at.get((int(colour[i]), x if x < a else x + b - a))

    for i, j, table in edges.tolist():
        if gone[i] or gone[j]:
            if not gone[i] and colour[i] >= 0 and layer[i] < a:
                other = moved(j, 0)
                if other is None or core[other] in short.adj[core[i]]:
                    return None
                short.adj[core[i]][core[other]] = table
                short.adj[core[other]][core[i]] = graph.tables.transpose(table)
            # An edge seen from layer a - 1 is the like of the one seen from any layer cut out.
            which = i if gone[i] else j
            shift = a - 1 - int(layer[which])
            like = moved(i, shift), moved(j, shift)
            if like[0] is not None and like[1] is not None:
                seam[core[i], core[j]] = core[like[0]], core[like[1]]
    return Folded(short, image, seam)
