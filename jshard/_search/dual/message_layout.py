"""The data layout of TRW-S messages (Kolmogorov 2006): variable order, waves, batches of edges, index arrays.

TRW-S sends along every edge in turn, and numpy costs time per call. The variable order is free, and only edges of a
common variable depend on each other, so the core is cut into segments that are walked side by side. The variables at
one depth of all segments form a wave; its edges are processed in batches (`edge_batches`). 126 layers then cost
little more than one.

Example: a path of 128 variables is two segments of 64, hence 64 waves of two variables each.

>>> import numpy as np
>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.working_network import working_network
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> net = build([[0.0, 1.0]] * 128, [(i, i + 1, step) for i in range(127)])
>>> layout = build_message_layout(working_network(net))
>>> len(layout.waves), layout.waves[5]
(64, (10, 12))
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.row_codes import concat_ranges
from jshard._search.dual.edge_batches import (
    LAZY_INDEX_FROM,
    DirectedEdges,
    EdgeBatch,
    batch_edges,
    single_precision,
)
from jshard._search.exact.working_network import WorkingNetwork


SEGMENT = 64
"""Variables of a segment: a longer one propagates further in a pass, shorter ones are more in parallel."""

LARGE_TABLES = 2000
"""Mean entries of a table above which fewer passes count for more than more parallel waves."""

SINGLE_PRECISION_FROM = 2_000_000
"""Entries of all edges' tables from which on most passes are in single precision."""

Waves = list[tuple[int, int]]
# Variable -> (place within its layer, turn, layer): a wave holds the variables at one place of all layers, except that
# neighbours among them take turns.
LayerPositions = Mapping[int, tuple[int, int, int]]


@dataclass(frozen=True)
class OrderedEdges:
    """The edges of a core whose variables are numbered by their position in the variable order."""

    low: Ints  # (E,) the end that comes first
    high: Ints  # (E,)
    table: Ints  # (E,) table number, the states of `low` as rows
    num_states: Ints  # (n,) of each variable
    state_offsets: Ints  # (n + 1,) where each variable's states begin
    to_low: Ints  # (E,) where the message to `low` begins
    to_high: Ints  # (E,)
    num_messages: int  # message entries of all edges in both directions


@dataclass(frozen=True)
class SelectedRows:
    """Table rows that the states of earlier variables select, for rounding a wave."""

    target: Ints  # state within the wave
    base: Ints  # index into the pool of tables of its entry for state 0 of the other variable
    step: Ints  # row length
    other: Ints  # the other variable


@dataclass(frozen=True)
class RoundingInputs:
    """What rounding adds to a variable's unary costs, by wave."""

    later: list[tuple[Ints, Ints]]  # (state within the wave, message entry) of messages from later variables
    earlier: list[SelectedRows]
    pool: Floats  # all tables end to end


@dataclass
class MessageLayout:
    """A core made ready for TRW-S. Variables are numbered by their position in the variable order."""

    graph: WorkingNetwork
    variables: list[int]  # the working network's variable at each position
    edges: OrderedEdges
    unary: Floats  # all states end to end
    waves: Waves  # positions [a, b) of each
    incoming: list[tuple[Ints, Ints]]  # per wave: (state within the wave, message entry that is added to it)
    batches: tuple[list[list[EdgeBatch]], list[list[EdgeBatch]]]  # forwards and backwards, per wave
    share: Floats  # per state: the part of its total that each edge to later variables gets
    kept_shares: tuple[Floats, Floats]  # per variable: the part that stays, forwards and backwards
    messages: Floats  # all entries; then one that is always zero and one that is never read, for padding

    @property
    def state_offsets(self) -> Ints:
        """(n + 1,) where each variable's states begin."""
        return self.edges.state_offsets

    @functools.cached_property
    def num_entries(self) -> int:
        """The entries of all edges' tables."""
        arrays = self.graph.tables.arrays
        return sum(arrays[t].size for t in self.edges.table.tolist())

    @property
    def has_many_entries(self) -> bool:
        """Whether the tables are so large that single precision saves time."""
        return self.num_entries > SINGLE_PRECISION_FROM

    @functools.cached_property
    def single_precision_batches(self) -> tuple[list[list[EdgeBatch]], list[list[EdgeBatch]]]:
        """`batches` with tables in single precision."""
        forwards, backwards = self.batches
        return single_precision(forwards), single_precision(backwards)

    @functools.cached_property
    def rounding_inputs(self) -> RoundingInputs:
        """The index arrays of `trws.round_primal`."""
        return _rounding_inputs(self.edges, self.waves, self.graph.tables.arrays)


def peripheral_order(graph: WorkingNetwork, depth_first: bool) -> list[int]:
    """The core from a peripheral vertex of each component: in breadth-first order, or depth-first, which propagates
    messages further in a pass and leaves less to do in parallel."""
    adj, out, seen = graph.adj, [], set()
    for root in graph.core:
        if root in seen:
            continue
        reached, order = {root}, [root]
        for v in order:
            for w in adj[v]:
                if w not in reached:
                    reached.add(w)
                    order.append(w)
        queue = deque([order[-1]])
        while queue:
            v = queue.pop() if depth_first else queue.popleft()
            if v not in seen:
                seen.add(v)
                out.append(v)
                queue.extend([w for w in adj[v] if w not in seen])
    return out


def variable_order(
    graph: WorkingNetwork, layers: LayerPositions | None = None
) -> tuple[list[int], list[int]]:
    """The core in the order of passes, and the wave of each; where layers repeat, a layer is a segment."""
    arrays = graph.tables.arrays
    entries = [arrays[t].size for edges in graph.adj for t in edges.values()]
    core = peripheral_order(graph, sum(entries) > LARGE_TABLES * len(entries))
    count = len(core)
    length = -(-count // max(1, count // SEGMENT)) if count else 1
    place = {v: (r % length, 0, r // length) for r, v in enumerate(core)}
    if layers:
        segments = -(-count // length)
        place |= {v: (p, turn, segments + layer) for v, (p, turn, layer) in layers.items() if v in place}
    order = sorted(core, key=place.__getitem__)
    rank = {v: i for i, v in enumerate(order)}
    wave: dict[int, int] = {}
    for v in order:
        earlier = [wave[w] for w in graph.adj[v] if rank[w] < rank[v]]
        wave[v] = 1 + max(earlier) if earlier else 0
    variables = sorted(core, key=lambda v: (wave[v], rank[v]))
    return variables, [wave[v] for v in variables]


def build_message_layout(graph: WorkingNetwork, layers: LayerPositions | None = None) -> MessageLayout:
    """The layout of a core's messages, all zero.

    Arguments:

    - `graph`: the working network.
    - `layers`: the positions of variables in repeated layers, where there are any.
    """
    variables, wave_of = variable_order(graph, layers)
    edges = _order_edges(graph, variables)
    wave = np.array(wave_of, dtype=np.int64)
    bounds = np.searchsorted(wave, np.arange(wave[-1] + 2 if len(wave) else 0)).tolist()
    waves = list(zip(bounds[:-1], bounds[1:], strict=True))
    unary = [graph.tables.arrays[graph.unary[v]] for v in variables]
    later = np.bincount(edges.low, minlength=len(variables))
    earlier = np.bincount(edges.high, minlength=len(variables))
    most = np.maximum(np.maximum(later, earlier), 1)
    return MessageLayout(
        graph,
        variables,
        edges,
        np.concatenate(unary) if unary else np.zeros(0),
        waves,
        _incoming(
            edges,
            waves,
            np.concatenate([edges.low, edges.high]),
            np.concatenate([edges.to_low, edges.to_high]),
        ),
        (
            _batches(graph, edges, wave, len(waves), forwards=True),
            _batches(graph, edges, wave, len(waves), forwards=False),
        ),
        np.repeat(1.0 / most, edges.num_states),
        (1.0 - later / most, 1.0 - earlier / most),
        np.zeros(edges.num_messages + 2),
    )


def _order_edges(graph: WorkingNetwork, variables: list[int]) -> OrderedEdges:
    """The edges between variables in the given order, and where their messages are."""
    rank = {v: r for r, v in enumerate(variables)}
    num_states = np.array([len(graph.tables.arrays[graph.unary[v]]) for v in variables], dtype=np.int64)
    state_offsets = np.zeros(len(variables) + 1, dtype=np.int64)
    np.cumsum(num_states, out=state_offsets[1:])
    triples = [
        (r, rank[w], t) for r, v in enumerate(variables) for w, t in graph.adj[v].items() if r < rank[w]
    ]
    low, high, table = np.array(triples, dtype=np.int64).reshape(-1, 3).T
    # An edge's message to its lower end comes before the one to its higher end.
    begin = np.zeros(len(low) + 1, dtype=np.int64)
    np.cumsum(num_states[low] + num_states[high], out=begin[1:])
    return OrderedEdges(
        low,
        high,
        table,
        num_states,
        state_offsets,
        to_low=begin[:-1],
        to_high=begin[:-1] + num_states[low],
        num_messages=int(begin[-1]),
    )


def _incoming(edges: OrderedEdges, waves: Waves, receivers: Ints, messages: Ints) -> list[tuple[Ints, Ints]]:
    """Per wave: (state within the wave, message entry) of messages, given by receiver and first entry."""
    order = np.argsort(receivers, kind="stable")
    receivers, messages = receivers[order], messages[order]
    offsets = edges.state_offsets
    compact = LAZY_INDEX_FROM < edges.num_messages < 2**31
    out = []
    for a, b in waves:
        part = slice(*np.searchsorted(receivers, [a, b]).tolist())
        v = receivers[part]
        states = concat_ranges(offsets[v], offsets[v + 1]) - offsets[a]
        entries = concat_ranges(messages[part], messages[part] + edges.num_states[v])
        out.append((states, entries.astype(np.int32) if compact else entries))
    return out


def _batches(
    graph: WorkingNetwork, edges: OrderedEdges, wave: Ints, num_waves: int, *, forwards: bool
) -> list[list[EdgeBatch]]:
    """Per wave, the batches of its edges to later variables (forwards) or to earlier ones."""
    sender, receiver = (edges.low, edges.high) if forwards else (edges.high, edges.low)
    received, sent = (edges.to_low, edges.to_high) if forwards else (edges.to_high, edges.to_low)
    tables = edges.table.tolist()
    directed = DirectedEdges(
        wave[sender],
        edges.num_states[sender],
        edges.num_states[receiver],
        tables if forwards else [graph.tables.transpose(t) for t in tables],
        edges.state_offsets[sender],
        received,
        sent,
        num_states=int(edges.state_offsets[-1]),
        num_messages=edges.num_messages,
    )
    return batch_edges(directed, graph.tables.arrays, num_waves)


def _rounding_inputs(edges: OrderedEdges, waves: Waves, arrays: Sequence[Floats]) -> RoundingInputs:
    """See `MessageLayout.rounding_inputs`."""
    used = np.unique(edges.table).tolist()
    starts = np.cumsum([0] + [arrays[t].size for t in used])[:-1].tolist()
    start = dict(zip(used, starts, strict=True))
    pool = np.concatenate([arrays[t].ravel() for t in used]) if used else np.zeros(0)
    order = np.argsort(edges.high, kind="stable")
    offsets = edges.state_offsets
    rows = []
    for a, b in waves:
        e = order[slice(*np.searchsorted(edges.high[order], [a, b]).tolist())]
        high = edges.high[e]
        lengths = edges.num_states[high]
        base = np.array([start[t] for t in edges.table[e].tolist()], dtype=np.int64)
        rows.append(
            SelectedRows(
                concat_ranges(offsets[high], offsets[high + 1]) - offsets[a],
                concat_ranges(base, base + lengths),
                np.repeat(lengths, lengths),
                np.repeat(edges.low[e], lengths),
            )
        )
    return RoundingInputs(_incoming(edges, waves, edges.low, edges.to_low), rows, pool)


def to_original_states(layout: MessageLayout, states: Sequence[int]) -> Ints:
    """The working network's assignment of original states, given states by position (other variables 0)."""
    graph = layout.graph
    assignment = np.zeros(len(graph.unary), dtype=np.int64)
    for v, s in zip(layout.variables, states, strict=True):
        assignment[v] = graph.tables.subsets.arrays[graph.states[v]][s]
    return assignment
