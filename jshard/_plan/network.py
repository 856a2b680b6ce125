"""The cost network of a program: one variable an operator, one more for a tensor that several operators read.

A variable's states are the operator's candidates; its table is what the operator costs by itself. An edge
joins the maker of a tensor to its reader and costs the resharding between the layout made and the layout
read. A tensor with several readers gets a *relay*: a variable for the layout in which it is kept for them, so
that one gather serves all, and is paid once (`reshard_edges.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jshard._cost.memory import Lifetimes, lifetimes
from jshard._cost.residency import Residency, residency
from jshard._numbers import numbered, packed
from jshard._plan.combined import SUMS, combined, on_the_way
from jshard._plan.cost_tables import CostTables
from jshard._plan.forms import forms, owned, special, states_of, times_of
from jshard._plan.replication import REPLICATION_PRICE, priced_products
from jshard._plan.reshard_edges import Relay, ReshardEdges, reshard_edges
from jshard._plan.states import Choices, Interner, Pinned, States
from jshard._plan.times import Times
from jshard._program.graph import Program
from jshard._search import CostNetwork
from jshard._topology import Topology


MOST_AXES = 2  # of a mesh for whose tensors the pairs of layouts are few enough to be told apart

Pins = Mapping[int, Sequence[tuple[str, int, Any, Pinned]]]  # operator -> its pins


@dataclasses.dataclass(frozen=True, eq=False)
class Carry:
    """What an edge of the network carries: a tensor, from its maker or relay to a reader (-1: to its relay)."""

    edge: int
    tensor: int
    source: Choices
    target: Choices
    reader: int
    times: float
    returned: bool
    together: int = 1
    twins: tuple[Choices, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A program as a cost network, and what each variable of it means."""

    program: Program
    topology: Topology
    level: int
    states: tuple[States, ...]
    relays: Mapping[int, Relay]
    relay_variable: Mapping[int, int]
    life: Lifetimes
    network: CostNetwork
    edges: ReshardEdges
    tables: CostTables
    returned: frozenset[int]  # sums that go to results whose layout nobody fixed
    together: Mapping[int, int]  # how many sums go together with a tensor's, where it is more than one
    single_copies: bool  # whether the network's cost is one of plans with a single shared copy a tensor
    donated: tuple[int, ...]

    @property
    def times(self) -> Mapping[int, Times]:
        """Times of one run of an operator, by number of its own table."""
        return self.tables.times

    @property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs for which it is moved."""
        return self.edges.readings

    @functools.cached_property
    def carries(self) -> tuple[Carry, ...]:
        """What the edges carry, as objects; only memory needs them."""
        e = self.edges
        return tuple(
            Carry(
                k, t, e.choices[source], e.choices[target], reader, repeat, t in self.returned,
                self.together.get(t, 1), e.twin_choices[twins],
            )
            for k, (t, source, target, reader, repeat, twins) in enumerate(
                zip(*(x.tolist() for x in (e.tensor, e.source, e.target, e.reader, e.repeat, e.twins)),
                    strict=True)
            )
        )  # fmt: skip

    @functools.cached_property
    def residency(self) -> Residency:
        """What a compiled program holds in memory, and until when."""
        return residency(self.program, self.donated)


def problem(
    program: Program,
    topology: Topology,
    pins: Pins,
    *,
    forced: Pins | None = None,
    pinned_results: Collection[int] | None = None,
    level: int = 0,
    ties: Sequence[tuple[int, int]] = (),
    donated: Collection[int] = (),
    replication_price: float = REPLICATION_PRICE,
    second_copies: bool = True,
    price_of_scattering: bool = True,
) -> Problem:
    """Build the network of a program under a level.

    Arguments:

    - `forced`: pins that a what-if adds to the user's: they leave the price of repeated products as it was.
    - `pinned_results`: the output operators that the user pinned, where `pins` has others.
    - `ties`: (output operator, input operator) pairs that must have one layout.
    - `donated`: flat indices of donated arguments.
    - `replication_price`: what a second of repeated product work counts (`replication.py`); nothing at level 1.
    - `second_copies`: whether copies that several operators share are counted once (`reshard_edges.py`), on a mesh of
        at most two axes.
    - `price_of_scattering`: whether sums that the caller gets in pieces pay for what it takes to gather them; not at
        level 1.

    The network is without memory, which `limited.py` adds where a level or a budget asks for it.
    """
    interner = Interner(program, topology.mesh)
    life = lifetimes(program, donated)
    form = forms(program)
    priced = priced_products(program, interner, form) if replication_price and level != 1 else frozenset()
    # State may lie in any order of axes; what it becomes lies in the same.
    ends = {out: [("operand", 0, k, test) for _, _, k, test in pins.get(inp, ())] for out, inp in ties}
    # Operators that are alike are asked once; those with pins by themselves.
    n, forced = len(program.operators), forced or {}
    pinned = {*pins, *forced, *(out for out, asked in ends.items() if asked)}
    alike, some = numbered(packed(form, special(n, pinned)))
    each = [
        interner.states(op, [*pins.get(i, ()), *forced.get(i, ())] or ends.get(i, ()))
        for i, op in ((i, program.operators[i]) for i in some)
    ]
    states = tuple([each[k] for k in alike.tolist()])
    number, distinct = states_of(alike, each)
    tables = CostTables(topology, level, life, states)
    may = np.zeros(n, dtype=np.int64)
    may[list(priced)] = 1
    alike, some = numbered(packed(owned(program, number, life), may, special(n, forced)))
    wished = {i: interner.states(program.operators[i], pins.get(i, ())) for i in forced if i in priced}
    own = [
        tables.own(program.operators[i], replication_price if i in priced else 0.0, wished.get(i))
        for i in some
    ]
    pairs = second_copies and sum(n > 1 for n in topology.mesh.sizes) <= MOST_AXES
    edges, relays = reshard_edges(program, number, distinct, times_of(program), pairs)
    kept = [tables.free(len(c.index)) for c in relays.values()]
    if pinned_results is None:
        pinned_results = {
            op for op, some in pins.items() if any(not isinstance(key, str) for _, _, key, _ in some)
        }
    price_sums = price_of_scattering and level != 1
    returned = _returned(program, ties, frozenset(pinned_results)) if price_sums else frozenset()
    together = combined(program, topology)
    heads, tails, numbers = (
        edges.head.tolist(),
        edges.tail.tolist(),
        _edge_tables(program, edges, tables, returned, together),
    )
    for out, inp in ties:
        heads.append(out)
        tails.append(inp)
        numbers.append(tables.equal(states[out].operands[0], states[inp].results[0]))
    network = CostNetwork(
        unary=tuple(tables.unary),
        pairwise=tuple(tables.pairwise),
        node_table=np.concatenate([np.array(own, dtype=np.int64)[alike], np.array(kept, dtype=np.int64)]),
        edges=np.array([heads, tails], dtype=np.int64).T.copy(),
        edge_table=np.array(numbers, dtype=np.int64),
    )
    variable = dict(zip(relays, range(n, n + len(relays)), strict=True))
    return Problem(
        program, topology, level, states, relays, variable, life, network, edges, tables, returned, together,
        not pairs and max(map(len, edges.readings), default=0) > 2, tuple(donated),
    )  # fmt: skip


def _edge_tables(
    program: Program,
    e: ReshardEdges,
    tables: CostTables,
    returned: frozenset[int],
    together: Mapping[int, int],
) -> list[int]:
    """The table of each edge; one of each kind is built."""
    a = program.arrays
    sums = np.ones(len(a.maker), dtype=np.int64)
    sums[np.fromiter(together, np.int64, len(together))] = list(together.values())
    free = np.zeros(len(a.maker), dtype=np.int64)
    free[list(returned)] = 1
    rate = np.unique(e.repeat, return_inverse=True)[1]
    alike, some = numbered(
        packed(
            e.source,
            e.target,
            a.kind[e.tensor],
            rate,
            free[e.tensor],
            sums[e.tensor],
            e.bit + 1,
            e.sharers,
            e.mates,
            e.sharing,
            e.twins,
        )
    )
    made = [
        tables.reshard(
            e.choices[e.source[k]], e.choices[e.target[k]], program.tensors[t], float(e.repeat[k]),
            returned=t in returned, together=together.get(t, 1),
            sharing=e.sharing_scopes[e.sharing[k]], bit=int(e.bit[k]), sharers=int(e.sharers[k]), mates=int(e.mates[k]),
            twins=e.twin_choices[e.twins[k]],
        )
        for k, t in zip(some, e.tensor[some].tolist(), strict=True)
    ]  # fmt: skip
    return np.array(made, dtype=np.int64)[alike].tolist()


def _returned(program: Program, ties: Sequence[tuple[int, int]], asked: frozenset[int]) -> frozenset[int]:
    """Sums that go, through light operators only, to results whose layout nobody fixed.

    A reduce-scatter there would only leave the second half of an all-reduce to the caller, so it costs that as well
    (`scatter_price`). Where a result is pinned, or tied to an argument (the new parameters of a training step), or
    something heavy reads the sum, scattering is what it is.
    """
    free = {i for i in program.outputs if i not in asked} - {o for o, _ in ties}
    ending = on_the_way(program, free, asked)
    sums = np.flatnonzero(program.arrays.which(frozenset(SUMS))).tolist()
    return frozenset(r for i in sums for r in program.operators[i].results if r in ending)
