"""Copy variables: whether a tensor is resharded for a reader, as a variable of the cost network.

A reader that needs another layout than the one a tensor has makes a copy, and whether there is one depends on two
variables at once. Where a copy can be large beside its source, a *copy variable* stands between the two. Its states are
the pairs (`CopyState`, L) for each layout L of one end of the edge. The edge to that end says which L it is; the edge
to the other end lets SAME pass equal layouts only and charges the reshard to RESHARDED. So every assignment of the
network without memory is exactly one assignment of the network with copy variables, at the same cost.

What a copy variable holds, by the kind of edge ("stored" and "reader's" layout, see `_program/memory/live_intervals.py`):

    source                         edge            live interval                                held in states
    -----------------------------  --------------  -------------------------------------------  ------------------
    product fused with epilogue    any             [t, t + 1) while it is resharded             RESHARDED: + even
    other fused value              any             [t, t + 1): an even share is materialized    RESHARDED
    materialized                   to relay        [stored, stored + 1)                         RESHARDED
    materialized                   to reader       [resharded, live until)                      RESHARDED; the last
                                                     reader's also SAME, once the source is dead
    fused, or counted elsewhere:
      estimate                     to reader       [resharded, live until)                      RESHARDED
      lower bound                  to reader       where `disjoint_intervals` gives the reader  RESHARDED
    fused partial sum, lower bound to relay        [stored, last reshard) but those             RESHARDED
    other, or counted elsewhere    to relay        [stored, last live until)                    RESHARDED

t is the time point of the reshard. FUSED_SLICE never holds anything. GATHERED is a kind of RESHARDED that some variables
tell apart: what such a copy holds beyond its source is known (`CopyVariable.beyond_source`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Bools, Floats
from jshard._core.layout import Layout, MeshAxes
from jshard._network.build import PlanningNetwork, ReshardEdge
from jshard._network.epilogue_charges import ChargeSeconds, EpilogueCharge
from jshard._network.layout_pairs import equal_layouts, slices
from jshard._network.made_of_constants import without_gathers
from jshard._program.graph import Program
from jshard._program.memory.live_intervals import (
    LiveIntervals,
    LowerBoundIntervals,
    Use,
    disjoint_intervals,
)


class CopyState(enum.IntEnum):
    """What happens to the tensor on an edge."""

    SAME = 0  # the reader takes the source as it is: equal layouts, no copy
    RESHARDED = 1  # a copy is made
    FUSED_SLICE = 2  # of a fused value, each device computes the slice that it needs: no copy is materialized
    GATHERED = 3  # a copy is made whose shards have twice the bytes of the source's or more


@dataclasses.dataclass(frozen=True)
class CopyStates:
    """The states of a copy variable: state `kind * len(layouts) + layout` for each kind and layout."""

    layouts: tuple[Layout, ...]
    kinds: tuple[CopyState, ...]

    def __len__(self) -> int:
        return len(self.kinds) * len(self.layouts)

    def bytes_by_state(self, blocks: Floats, held_in: Collection[CopyState]) -> Floats:
        """(states,) bytes that a copy variable holds in states of some kinds; `blocks`: (layouts,) those of the copy.

        What RESHARDED holds, GATHERED does.
        """
        assert blocks.shape == (len(self.layouts),)
        held = {*held_in, *((CopyState.GATHERED,) if CopyState.RESHARDED in held_in else ())}
        return np.concatenate([blocks * (kind in held) for kind in self.kinds])


@dataclasses.dataclass(frozen=True)
class CopyVariable:
    """The copy variable of an edge.

    `fused`: the source is not materialized. `by_source`: its layouts are those of the source, else of the target; the
    source of such an edge is a product that is fused with its epilogue and so is materialized only to be resharded, in
    its own layout, as a partial sum too. `charges`: of epilogues on the edge. `tells_gathers`:
    whether GATHERED is a kind of state.
    """

    edge: ReshardEdge
    fused: bool
    by_source: bool
    charges: tuple[EpilogueCharge, ...] = ()
    tells_gathers: bool = False

    @property
    def is_sliced_in_readers(self) -> bool:
        """Whether a reader of a slice computes that alone: the kernel of an unfusible source writes it whole."""
        return self.fused and not self.by_source

    @property
    def states(self) -> CopyStates:
        """Its states."""
        side = self.edge.source if self.by_source else self.edge.target
        kinds = [CopyState.SAME, CopyState.RESHARDED]
        kinds += [CopyState.FUSED_SLICE] * self.is_sliced_in_readers + [
            CopyState.GATHERED
        ] * self.tells_gathers
        return CopyStates(tuple(side.layouts), tuple(kinds))

    def beyond_source(self, nbytes: float, of_source: float, counted: float, mesh: MeshAxes) -> Floats:
        """(layouts,) bytes of a gathered copy of `nbytes` on all devices that its largest possible source has not.

        Arguments:

        - `of_source`: bytes of the source on all devices.
        - `counted`: bytes a device that count for the source in any case.
        """
        assert self.tells_gathers and not self.by_source
        pieces = np.array([layout.pieces(mesh) for layout in self.edge.target.layouts], dtype=np.float64)
        fewest = np.where(self._gathers(mesh), self._source_pieces(mesh)[:, None], np.inf).min(axis=0)
        beyond = nbytes / pieces - np.maximum(of_source / fewest, counted)
        return np.where(np.isfinite(fewest), np.maximum(beyond, 0.0), 0.0)

    def _source_pieces(self, mesh: MeshAxes) -> Floats:
        return np.array([layout.pieces(mesh) for layout in self.edge.source.layouts], dtype=np.float64)

    def _gathers(self, mesh: MeshAxes) -> Bools:
        """(sources, targets): whether a shard of the target has at least twice the bytes of one of the source."""
        targets = np.array([layout.pieces(mesh) for layout in self.edge.target.layouts])
        return self._source_pieces(mesh)[:, None] >= 2 * targets[None, :]

    def tables(self, network: PlanningNetwork) -> tuple[Floats, Floats]:
        """Seconds by (source's state, copy's state) and by (copy's state, target's state); inf: impossible.

        One of the two says which layout the copy's state is, the other one which kind, and charges the reshard.
        """
        edge = self.edge
        sources, targets = edge.source, edge.target
        by_kind = self.seconds_by_kind(network)
        side = sources if self.by_source else targets
        fixes_layout = np.where(side.of_state[:, None] == np.arange(len(side.layouts))[None, :], 0.0, np.inf)
        fixes_layout = np.hstack([fixes_layout] * len(by_kind))
        if self.by_source:  # a row of the copy: a kind and a layout of the source
            first, second = fixes_layout, np.ascontiguousarray(np.vstack(by_kind)[:, targets.of_state])
        else:
            first, second = np.hstack(by_kind)[sources.of_state], np.ascontiguousarray(fixes_layout.T)
        first = np.ascontiguousarray(first)
        first[:, : len(side.layouts)] += self.fused_seconds(network)  # the states of kind SAME
        return first, second

    def fused_seconds(self, network: PlanningNetwork) -> Floats:
        """By (source's state, copy's layout) the seconds of the epilogues that are computed as the source is made."""
        edge = self.edge
        side = edge.source if self.by_source else edge.target
        complete = np.array([not layout.partial for layout in side.layouts])
        total = np.zeros((len(edge.source.of_state), len(complete)))
        for costs in self._charge_seconds(network):
            total += np.where(complete, costs.fused_objective(network.level)[:, None], 0.0)
        return total

    def _charge_seconds(self, network: PlanningNetwork) -> list[ChargeSeconds]:
        edge, tables = self.edge, network.cost_tables
        return [tables.charge_seconds(c, edge.source, edge.target) for c in self.charges]

    def seconds_by_kind(self, network: PlanningNetwork) -> list[Floats]:
        """For each kind the seconds by (layout of the source, layout of the target)."""
        edge, tensor = self.edge, network.program.tensors[self.edge.tensor]
        seconds = network.cost_tables.seconds(
            edge.source, edge.target, tensor, edge.returned_sum, edge.combined_with
        )
        resharded = edge.repeats * seconds
        resharded = without_gathers(resharded) if edge.is_constant else resharded
        for costs in self._charge_seconds(network):
            resharded = resharded + costs.alone_objective(network.level)
        sources, targets = edge.source.layouts, edge.target.layouts
        same = equal_layouts(sources, targets)
        slice_ = ~same & slices(sources, targets)
        sliced = slice_ if self.is_sliced_in_readers else np.zeros_like(same)
        gathered = (
            self._gathers(network.topology.mesh) & ~same & ~sliced
            if self.tells_gathers
            else np.zeros_like(same)
        )
        of_kind = {
            CopyState.SAME: np.where(same, 0.0, np.inf),
            CopyState.RESHARDED: np.where(same | sliced | gathered, np.inf, resharded),
            CopyState.FUSED_SLICE: np.where(sliced, resharded, np.inf),
            CopyState.GATHERED: np.where(gathered, resharded, np.inf),
        }
        return [of_kind[kind] for kind in self.states.kinds]


class CopyInterval(NamedTuple):
    """Bytes of a copy from one time point to before another.

    Each device holds its block of `nbytes` in the copy's layout, and `extra` bytes beside it, in states of the kinds
    `held_in`.
    """

    start: int
    end: int
    nbytes: float
    extra: float = 0.0
    held_in: tuple[CopyState, ...] = (CopyState.RESHARDED,)


class CopiedTensor:
    """What the copies of a tensor have in common: when its readers need it, on a clock."""

    def __init__(self, tensor: int, program: Program, live: LiveIntervals):
        self.tensor, self.live, self.uses = tensor, live, live.uses[tensor]
        self.nbytes = program.tensors[tensor].nbytes
        self.stored_at = min(use.stored_at for use in self.uses)
        self.by_reader = {use.reader: use for use in self.uses}
        self.counted_elsewhere = live.counted_elsewhere(tensor)

    @functools.cached_property
    def disjoint(self) -> dict[int, list[tuple[int, int]]]:
        """Reader -> when its block is surely in memory, by `disjoint_intervals`."""
        found: dict[int, list[tuple[int, int]]] = {}
        for reader, start, end in disjoint_intervals(self.uses, self.live.clock.begin):
            found.setdefault(reader, []).append((start, end))
        return found

    @functools.cached_property
    def longest(self) -> Use:
        """The use for which the tensor itself is read that needs it longest."""
        return max(self._reading, key=lambda use: (use.live_until, use.resharded_at))

    @functools.cached_property
    def last_reshard(self) -> int:
        """When the last copy is made for a reader of the tensor itself."""
        return max(use.resharded_at for use in self._reading)

    @functools.cached_property
    def _reading(self) -> list[Use]:
        return [u for u in self.uses if not self.live.recomputes_cast(self.tensor, u.reader)] or self.uses


def copy_intervals(
    edge: ReshardEdge, fused: bool, by_source: bool, copied: CopiedTensor, has_relay: bool, devices: int
) -> list[CopyInterval]:
    """What the copy variable of an edge holds and when: the table of this module, row by row.

    Arguments:

    - `fused`, `by_source`: those of its `CopyVariable`.
    - `copied`: the tensor of the edge.
    - `has_relay`: whether the tensor has one.
    - `devices`: in the mesh.
    """
    nbytes, live, to_relay = copied.nbytes, copied.live, edge.reader < 0
    own = None if to_relay else copied.by_reader[edge.reader]
    at = copied.stored_at if own is None else own.resharded_at
    # A value that is not stored is materialized to be resharded: at least an even share of it, at that time point.
    # With a relay that is at the edge to the relay.
    even_share = nbytes / devices if fused and (to_relay or not has_relay) else 0.0
    if by_source:
        return [CopyInterval(at, at + 1, nbytes, even_share)]
    intervals = [CopyInterval(at, at + 1, 0.0, even_share)] if even_share else []
    if not fused and not copied.counted_elsewhere:
        return intervals + _of_stored_value(own, copied)
    is_lower_bound = isinstance(live, LowerBoundIntervals)
    if own is not None and not is_lower_bound:
        return [*intervals, CopyInterval(own.resharded_at, own.live_until, nbytes)]
    if own is not None:
        return intervals + [CopyInterval(*span, nbytes) for span in copied.disjoint.get(own.reader, ())]
    if fused and is_lower_bound and any(layout.partial for layout in edge.source.layouts):
        return intervals + _of_finished_sum(copied)
    return [
        *intervals,
        CopyInterval(copied.stored_at, max(use.live_until for use in copied.uses), nbytes),
    ]


def _of_stored_value(own: Use | None, copied: CopiedTensor) -> list[CopyInterval]:
    """The copy of a materialized value, which is itself live until the last copy of it is made.

    The reader that needs the value longest holds it from then on, resharded or as it is. `own`: None for the relay.
    """
    nbytes = copied.nbytes
    if own is None:
        return [CopyInterval(copied.stored_at, copied.stored_at + 1, nbytes)]
    source_dies = copied.last_reshard + 1 if own is copied.longest else own.live_until
    source_dies = max(own.resharded_at, source_dies)
    return [
        CopyInterval(own.resharded_at, source_dies, nbytes),
        CopyInterval(source_dies, own.live_until, nbytes, held_in=(CopyState.SAME, CopyState.RESHARDED)),
    ]


def _of_finished_sum(copied: CopiedTensor) -> list[CopyInterval]:
    """The stored copy of a fused partial sum, between the uses of its readers, in the lower bound.

    A reader that needs the finished sum has it resharded from the stored copy or from the sum itself, and its block is
    counted there. In most plans readers take the stored copy as it is, which the estimate counts: none of them then
    holds a block of its own.
    """
    uses, at = copied.uses, copied.stored_at
    last_reshard = max(use.resharded_at for use in uses)
    intervals = []
    for _, start, end in disjoint_intervals(uses, copied.live.clock.begin):
        intervals.append(CopyInterval(at, min(start, last_reshard), copied.nbytes))
        at = max(at, end)
    return intervals
