"""A cast that some readers recompute and another one reads: whether its source is in memory, in the lower bound.

Problem.  `logits.astype("float32")` is written for the gather of the targets' logits; the maxima and exponentials of the
loss recompute it from the half-wide logits, which are in memory until then. But a reader that needs the cast in another
layout has a copy of it, and then the source is dead: which of the two it is depends on three variables, and a bound that
counts neither is a third too low for a language model.

Idea.  The copy variable of the first reader that recomputes the cast stands not between the stored cast and its reader,
but between the copy variable of the store, that of the one reader before it, if there is one, and its reader. Its kinds are

    FROM_SOURCE   the cast is stored as it is made, and read so: the source is in memory until the reader has run
    FROM_STORED   it is stored resharded, and read so: that copy is
    SHARED        the reader before has a copy in the same layout, which is read
    FRESH         a copy is made here: the stored cast, at least an even share of it, is in memory beside it

so it holds, together with the reshards of the other two, no more than the schedule. The kinds exclude each other.

Worked case.  16 GiB of logits on 16 devices: 1 GiB of the cast beside 0.5 GiB of its source while targets are gathered;
2 GiB where the cast is resharded instead.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Floats
from jshard._core.layout import MeshAxes
from jshard._network.build import PlanningNetwork, ReshardEdge
from jshard._network.copy_variables import CopyVariable
from jshard._network.layout_pairs import equal_layouts
from jshard._program.memory.live_intervals import LiveIntervals


class CastState(enum.IntEnum):
    """Where the first reader that recomputes a cast reads it."""

    FROM_SOURCE = 0
    FROM_STORED = 1
    SHARED = 2
    FRESH = 3


class RecomputedCast(NamedTuple):
    """A cast with a stored source, readers that recompute it, and at most one before these that needs it in memory.

    `stored_edge`, `before_edge`, `reader_edge`: to the relay, to the reader that needs it (None: there is none before),
    to the first that does not; `later_edges`: to the others that do not. `is_read_later`: a later one needs it in memory.
    """

    tensor: int
    source: int
    stored_edge: ReshardEdge
    before_edge: ReshardEdge | None
    reader_edge: ReshardEdge
    later_edges: tuple[ReshardEdge, ...]
    is_read_later: bool


def recomputed_cast(
    network: PlanningNetwork, live: LiveIntervals, edges: Sequence[ReshardEdge]
) -> RecomputedCast | None:
    """The pattern among the readers of one tensor, whose `edges` are in the order of the table; None where it is not.

    All reads are of the cast as it is stored, in the block that makes it, and nothing but the cast reads its source.
    """
    program, tensor = network.program, edges[0].tensor
    if not live.liveness.duplicated_cast[tensor] or live.counted_elsewhere(tensor):
        return None
    if not live.liveness.materialized[tensor] or tensor not in network.relays:
        return None
    maker = program.operators[program.defs()[tensor][0]]
    (source,) = maker.operands if len(maker.operands) == 1 else (None,)
    if not isinstance(source, int) or not _has_its_own_memory(live, source):
        return None
    if {u for u, _ in program.uses()[source]} != {maker.id}:
        return None
    uses, scopes = live.uses[tensor], program.scopes
    if not (scopes.use_scope[program.use_def.use_tensor == tensor] == scopes.def_scope[tensor]).all():
        return None
    by_reader = {e.reader: e for e in edges if not e.duplicates}
    if len(edges) != 1 + len(uses) or len(by_reader) != len(edges):
        return None
    recomputing = [live.recomputes_cast(tensor, u.reader) for u in uses]
    if True not in recomputing[:2] or any(program.operators[u.reader].kind != "eqn" for u in uses[:2]):
        return None
    first = recomputing.index(True)
    before = by_reader[uses[0].reader] if first else None
    stored, reader = by_reader[-1], by_reader[uses[first].reader]
    if any(e.source is not stored.target for e in edges if e is not stored):
        return None
    if not np.array_equal(stored.target.of_state, np.arange(len(stored.target.layouts))):
        return None  # its states say more than the layout
    later = [by_reader[u.reader] for u, again in zip(uses, recomputing, strict=True) if again]
    return RecomputedCast(
        tensor, source, stored, before, reader, tuple(later[1:]), not all(recomputing[first:])
    )


def _has_its_own_memory(live: LiveIntervals, tensor: int) -> bool:
    return live.liveness.materialized[tensor] and not live.counted_elsewhere(tensor)


def cast_tables(cast: RecomputedCast, network: PlanningNetwork) -> tuple[Floats, Floats | None, Floats]:
    """Seconds by the state of the store, of the reader before and of the reader, each against the cast variable's.

    The states of the first two are those of their `CopyVariable`; the third's are the reader's own.
    """
    edge = cast.reader_edge
    charges = tuple([one.charge for one in network.epilogue_charges.get(edge.edge, ())])
    copy = CopyVariable(edge, False, False, charges)
    same, resharded = copy.seconds_by_kind(network)
    same = same + copy.fused_seconds(network)
    never = np.full_like(same, np.inf)
    if_made = np.hstack([same, never, resharded, resharded])
    if_resharded = np.hstack([never, same, resharded, resharded])
    targets = edge.target.layouts
    own = np.where(edge.target.of_state[:, None] == np.arange(len(targets))[None, :], 0.0, np.inf)
    own = np.hstack([own] * len(CastState))
    if cast.before_edge is None:
        own[:, CastState.SHARED * len(targets) : CastState.FRESH * len(targets)] = np.inf
        of_before = None
    else:
        equal = equal_layouts(cast.before_edge.target.layouts, targets)
        free, forbidden = np.zeros(equal.shape), np.full(equal.shape, np.inf)
        shared, fresh = np.where(equal, 0.0, np.inf), np.where(equal, np.inf, 0.0)
        of_before = np.vstack(
            [np.hstack([free, free, forbidden, free]), np.hstack([free, free, shared, fresh])]
        )
    return np.vstack([if_made, if_resharded]), of_before, np.ascontiguousarray(own.T)


def cast_bytes(
    cast: RecomputedCast, live: LiveIntervals, mesh: MeshAxes, flows: float
) -> list[tuple[int, int, Floats]]:
    """What the variable of a recomputed cast holds by state: (from, until, (states,) bytes).

    A cast that is read later counts in its stored layout until then, and so do copies of it.

    Arguments:

    - `flows`: bytes a device of the source that count already.
    """
    program, clock = live.program, live.clock
    use = next(u for u in live.uses[cast.tensor] if u.reader == cast.reader_edge.reader)
    nbytes = float(program.tensors[cast.tensor].nbytes)
    pieces = np.array([layout.pieces(mesh) for layout in cast.reader_edge.target.layouts], dtype=np.float64)
    source = np.maximum(program.tensors[cast.source].nbytes / pieces - flows, 0.0)
    copy, none = nbytes / pieces, np.zeros(len(pieces))
    lasting = none if cast.is_read_later else copy
    stored = 0.0 if cast.is_read_later else nbytes / mesh.total
    made = max(u.live_until for u in live.uses[cast.source])
    at, end = use.resharded_at, clock.begin[use.reader + 1]
    return [
        (made, at, np.concatenate([source, none, none, none])),
        (at, at + 1, np.concatenate([source, lasting, lasting, copy + stored])),
        (at + 1, end, np.concatenate([source, lasting, lasting, lasting])),
    ]
