"""The tables of a cost network: what an operator costs in each state, and what resharding costs between two.

Tables depend only on the forms of the operators and the shape between them. They are built once for each distinct
combination; a network of thousands of edges has a few hundred tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._cost import resharding
from jshard._memory.hbm_traffic import HbmTraffic, memory_accesses
from jshard._network.candidates import CandidateSet, TensorLayouts
from jshard._network.operator_cost import OperatorCost, operator_cost
from jshard._network.reshard_edges import Relay, SharingScopes, is_local_slice_of
from jshard._program.graph import Operator, Tensor


class CostTables:
    """Tables by what they depend on; each is built once."""

    def __init__(
        self, topology: Topology, level: int, hbm_traffic: HbmTraffic, candidates: Sequence[CandidateSet]
    ):
        self.topology, self.level = topology, level
        self.life, self.states = hbm_traffic, candidates
        self.unary: list[np.ndarray] = []
        self.operator_costs: dict[int, OperatorCost] = {}  # of one run, by number of the operator's own table
        self.pairwise: list[np.ndarray] = []
        self.divided: dict[
            int, np.ndarray
        ] = {}  # by number of a table, the entries of which a reader pays a share
        self._ids: dict[Any, int] = {}
        self._seconds: dict[Any, np.ndarray] = {}
        self._id_of_object: dict[int, int] = {}
        self._id_of_layouts: dict[tuple[Layout, ...], int] = {}

    def _add_unary(self, key: Any, table: np.ndarray) -> int:
        self._ids[key] = len(self.unary)
        self.unary.append(table)
        return self._ids[key]

    def zero_table(self, n: int) -> int:
        """A table of zeros for `n` states."""
        key = ("free", n)
        return self._ids[key] if key in self._ids else self._add_unary(key, np.zeros(n))

    def operator_table(self, op: Operator, price: float = 0.0, unforced: CandidateSet | None = None) -> int:
        """What the operator costs by itself under each candidate, `repeat` times; see `operator_times`."""
        s = self.states[op.id]
        if s.op is None or op.kind != "eqn":
            return self.zero_table(len(s))
        reads, writes = memory_accesses(op, self.life)
        key = ("own", id(s), reads, writes, op.repeat, price, id(unforced))
        if key not in self._ids:
            times = operator_cost(s, reads, writes, self.topology, price, unforced)
            made = self._add_unary(key, times.objective(self.level) * op.repeat)
            self.operator_costs[made] = times
        return self._ids[key]

    def reshard_table(
        self, source: TensorLayouts, target: TensorLayouts, tensor: Tensor, repeat: float, *, returned: bool = False,
        together: int = 1, sharing: SharingScopes = (), bit: int = -1, sharers: int = 0, mates: int = 1,
        twins: tuple[TensorLayouts, ...] = (),
    ) -> int:  # fmt: skip
        """Seconds of resharding from each state of the maker or relay to each state of the relay or reader.

        Arguments:

        - `repeat`: how often in one call of the program.
        - `returned`: a sum that the caller gets wherever it lies: scattering it costs what gathering it takes as well.
        - `together`: so many sums share a latency.
        - `sharing`, `bit`, `sharers`, `mates`: who may share the second copy of a relay (`ReshardEdges`).
        - `twins`: operands before of the same reader; in states in which one has the same layout, nothing is moved.
        """
        key = (
            "reshard", id(source), id(target), tensor.shape, tensor.dtype, repeat, returned, together, sharing,
            bit, sharers, mates, *map(id, twins),
        )  # fmt: skip
        if key not in self._ids:
            reshard_seconds = self.seconds(source, target, tensor, returned, together)
            table = reshard_seconds[np.ix_(source.of_state, target.of_state)]
            if isinstance(target, Relay) and target.has_second_copies:
                table = table + self._second_copy_seconds(source, target, tensor, returned, together, sharing)
            if isinstance(source, Relay) and sharers:
                table = _split_among_sharers(table, source, target, bit, sharers, mates)
            table = zero_duplicate_reads(table * repeat, target, twins)
            self._ids[key] = len(self.pairwise)
            self.pairwise.append(table)
        return self._ids[key]

    def _second_copy_seconds(
        self, made: TensorLayouts, relay: Relay, tensor: Tensor, returned: bool, together: int, sharing: SharingScopes
    ) -> np.ndarray:  # fmt: skip
        """Seconds of making the second copies of a relay from what is kept; none where the tensor lies there so."""
        within = self.seconds(relay, relay, tensor, returned, together)
        paired = relay.second_copy >= 0
        once = np.where(paired, within[relay.of_state, relay.second_copy], 0.0)
        lies = np.array([[a == b for b in relay.layouts] for a in made.layouts])
        lies = paired & lies[np.ix_(made.of_state, relay.second_copy)]
        out = np.zeros(lies.shape)
        for k, (ratio, at_hand) in enumerate(sharing):
            here = (relay.second_copy_scopes >> k & 1) * once * ratio
            out += np.where(lies, 0.0, here) if at_hand else here
        return out

    def seconds(
        self, source: TensorLayouts, target: TensorLayouts, tensor: Tensor, returned: bool, together: int
    ) -> np.ndarray:
        """Between the layouts themselves: `(layouts of the source, layouts of the target)`."""
        key = (
            self._layouts_id(source),
            self._layouts_id(target),
            tensor.shape,
            tensor.itemsize,
            together,
            returned,
        )
        if key not in self._seconds:
            found = resharding.seconds_table(
                source.layouts,
                target.layouts,
                tensor.shape,
                tensor.itemsize,
                self.topology,
                together,
            )
            if returned:
                found = found + deferred_gather_seconds(
                    source.layouts,
                    target.layouts,
                    tensor.shape,
                    tensor.itemsize,
                    self.topology,
                )
            self._seconds[key] = found
        return self._seconds[key]

    def _layouts_id(self, choices: TensorLayouts) -> int:
        """A number for the layouts of some choices: comparing them takes as long as making a table."""
        if id(choices) not in self._id_of_object:
            self._id_of_object[id(choices)] = self._id_of_layouts.setdefault(
                choices.layouts, len(self._id_of_layouts)
            )
        return self._id_of_object[id(choices)]

    def equality_table(self, a: TensorLayouts, b: TensorLayouts) -> int:
        """Zero where two layouts are the same, forbidden elsewhere."""
        key = ("equal", id(a), id(b))
        if key not in self._ids:
            same = np.array([[0.0 if p == q else np.inf for q in b.layouts] for p in a.layouts])
            self._ids[key] = len(self.pairwise)
            self.pairwise.append(same[np.ix_(a.of_state, b.of_state)])
        return self._ids[key]


def zero_duplicate_reads(
    table: np.ndarray, target: TensorLayouts, twins: Sequence[TensorLayouts]
) -> np.ndarray:
    """A table of moves to a reader, zero in the states in which an operand before has the same layout."""
    out = table.copy() if twins else table
    for twin in twins:
        same = [
            twin.layouts[a] == target.layouts[b] for a, b in zip(twin.of_state, target.of_state, strict=True)
        ]
        out[:, np.array(same)] = 0.0
    return out


def _split_among_sharers(
    table: np.ndarray, relay: Relay, target: TensorLayouts, bit: int, sharers: int, mates: int
) -> np.ndarray:
    """What a reader pays beside a relay with a second copy: nothing for that one, a share of any other.

    Only of copies that cannot be cut back to what is kept: others are paid in full.
    """
    beside = np.array([[not is_local_slice_of(k, x) for x in target.layouts] for k in relay.layouts])
    beside = beside[np.ix_(relay.of_state, target.of_state)]
    if bit < 0:  # one of more scopes than are told apart
        return np.where(beside, table / mates, table)
    same = np.array([[p == x for x in target.layouts] for p in relay.layouts])
    paired, here = (relay.second_copy >= 0)[:, None], (relay.second_copy_scopes >> bit & 1 > 0)[:, None]
    out = np.where(beside & paired, table / np.where(here, max(1, sharers - 2), mates), table)
    return np.where(here & same[np.ix_(relay.second_copy, target.of_state)], 0.0, out)


def deferred_gather_seconds(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    itemsize: float,
    topology: Topology,
) -> np.ndarray:
    """What it would take to gather a sum that was reduce-scattered: the half of an all-reduce that is left to the caller.

    Zero where a partial sum ends in an all-reduce, or there is none. Seconds, `(len(sources), len(targets))`.
    """
    out = np.zeros((len(sources), len(targets)))
    for i, a in enumerate(sources):
        if not a.partial:
            continue
        for j, b in enumerate(targets):
            scattered = set(a.partial) & {x for d in b.dims for x in d}
            if scattered:
                whole = Layout(tuple(tuple(x for x in d if x not in scattered) for d in b.dims))
                out[i, j] = resharding.seconds_table([Layout(b.dims)], [whole], shape, itemsize, topology)[
                    0, 0
                ]
    return out
