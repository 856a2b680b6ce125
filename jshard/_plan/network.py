"""The cost network of a program: one variable an operator, one more for a tensor that several operators read.

A variable's states are the operator's candidates; its table is what the operator costs by itself. An edge
joins the maker of a tensor to its reader and costs the redistribution between the layout made and the layout
read. A tensor with several readers gets a *relay*: a variable for the layout in which it is kept for them, so
that one gather serves all, and is paid once.

Tables depend only on the forms of the two operators and the shape between them. They are built once for each
distinct combination; a network of thousands of edges has a few hundred tables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jshard._cost import redistribute
from jshard._cost.memory import Lifetimes, lifetimes, traffic
from jshard._cost.residency import Residency, residency
from jshard._layout import Layout
from jshard._numbers import Ints, numbered, packed
from jshard._plan.combined import SUMS, combined, on_the_way
from jshard._plan.forms import forms, owned, special, states_of, times_of
from jshard._plan.spread import finest, never_repeated
from jshard._plan.states import Choices, Interner, Pinned, States
from jshard._plan.times import Times, operator_times
from jshard._program.arrays import Arrays
from jshard._program.graph import Operator, Program, Tensor
from jshard._search import CostNetwork
from jshard._topology import Topology


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
    whole: bool
    together: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A program as a cost network, and what each variable of it means."""

    program: Program
    topology: Topology
    level: int
    states: tuple[States, ...]
    relays: Mapping[int, Choices]
    relay_variable: Mapping[int, int]
    life: Lifetimes
    network: CostNetwork
    whole: frozenset[int]  # sums that must be all-reduced
    together: Mapping[int, int]  # how many sums go together with a tensor's, where it is more than one
    donated: tuple[int, ...]
    times: Mapping[int, Times]  # of one run of an operator, by number of its own table

    @functools.cached_property
    def readers(self) -> list[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs for which it is moved."""
        return [c if len(c) < 2 else _distinct(self.states, c) for c in self.program.consumers()]

    @functools.cached_property
    def carries(self) -> tuple[Carry, ...]:
        """What the edges carry, as far as they carry tensors; only memory asks for it."""
        edges = _edges(self.program, self.states, self.relays, self.relay_variable, self.readers)
        return tuple(
            Carry(e, t, made, read, reader, times, t in self.whole, self.together.get(t, 1))
            for e, (_, _, t, made, read, reader, times) in enumerate(edges)
        )

    @functools.cached_property
    def residency(self) -> Residency:
        """What a compiled program holds in memory, and until when."""
        return residency(self.program, self.donated)


def problem(
    program: Program,
    topology: Topology,
    pins: Pins,
    *,
    level: int = 0,
    ties: Sequence[tuple[int, int]] = (),
    donated: Collection[int] = (),
    whole_sums: bool = True,
    spread: bool = True,
) -> Problem:
    """Build the network of a program under a level.

    `ties` are (output operator, input operator) pairs that must have one layout; `donated` the flat indices of
    donated arguments; `whole_sums` whether sums that only go to free results must be all-reduced; `spread`
    whether products are cut over all devices (`spread.py`; never at level 1). The network is without memory, which
    `limited.py` adds where a level or a budget asks for it.
    """
    interner = Interner(program, topology.mesh)
    life = lifetimes(program, donated)
    form = forms(program)
    cut = never_repeated(program, interner, form) if spread and level != 1 else frozenset()
    # State may lie in any order of axes; what it becomes lies in the same.
    ends = {out: [("operand", 0, k, test) for _, _, k, test in pins.get(inp, ())] for out, inp in ties}
    # Operators that are alike are asked once; those with pins, or that may not be repeated, by themselves.
    a, n = program.arrays, len(program.operators)
    pinned = {*pins, *(out for out, asked in ends.items() if asked)}
    may = np.zeros(n, dtype=np.int64)
    may[list(cut)] = 1
    alike, some = numbered(packed(form, may, special(n, pinned)))
    each = [
        interner.states(op, pins.get(i) or ends.get(i, ()), finest if i in cut else None)
        for i, op in ((i, program.operators[i]) for i in some)
    ]
    states = tuple([each[k] for k in alike.tolist()])
    number, distinct = states_of(alike, each)
    build = _Tables(program, topology, level, life, states)
    handed = _handed_over(program, ties, pins) if whole_sums and level != 1 else frozenset()
    together = combined(program, topology)
    alike, some = numbered(owned(program, number, life))
    own = np.array([build.own(program.operators[i]) for i in some], dtype=np.int64)
    # What is made and read, by number; who reads it, tensor by tensor, the same reading by one operator once.
    choices, made, read = _choices(a, number, distinct)
    order, begin = a.by_tensor
    order = order[_once(a, order, read, choices)]
    count = np.bincount(a.read[order], minlength=len(a.maker))
    begin = np.concatenate([[0], np.cumsum(count)])
    shared = np.flatnonzero(count > 1)
    relays, kind = _relays(build, shared, made, read[order], begin, choices)
    variable = dict(zip(shared.tolist(), range(n, n + len(shared)), strict=True))
    nodes = np.concatenate([own[alike], kind])
    # Edges tensor by tensor: from the maker to the relay, and from that, or the maker, to each reader.
    whose = np.concatenate([shared, a.read[order]])
    late = np.concatenate([np.zeros(len(shared), dtype=np.int64), 1 + np.arange(len(order))])
    place = np.lexsort((late, whose))
    at = np.full(len(a.maker), -1)
    at[shared] = n + np.arange(len(shared))
    heads = np.concatenate([a.maker[shared], np.where(at >= 0, at, a.maker)[a.read[order]]])[place]
    tails = np.concatenate([at[shared], a.reader[order]])[place]
    relayed = np.full(len(a.maker), -1)
    for c in relays.values():
        choices.setdefault(id(c), (len(choices), c))
    relayed[shared] = [choices[id(c)][0] for c in relays.values()]
    source = np.concatenate([made[shared], np.where(at >= 0, relayed, made)[a.read[order]]])[place]
    target = np.concatenate([relayed[shared], read[order]])[place]
    times = np.concatenate([a.repeat[a.maker[shared]], times_of(program)[order]])[place]
    whose = whose[place]
    sums = np.ones(len(a.maker), dtype=np.int64)
    sums[np.fromiter(together, np.int64, len(together))] = list(together.values())
    whole = np.zeros(len(a.maker), dtype=np.int64)
    whole[list(handed)] = 1
    rate = np.unique(times, return_inverse=True)[1]
    alike, some = numbered(packed(source, target, a.kind[whose], rate, whole[whose], sums[whose]))
    listed = [c for _, c in choices.values()]
    moves = [
        build.move(
            listed[source[e]],
            listed[target[e]],
            program.tensors[t],
            float(times[e]),
            t in handed,
            together.get(t, 1),
        )
        for e, t in zip(some, whose[some].tolist(), strict=True)
    ]
    heads, tails = heads.tolist(), tails.tolist()
    tables = np.array(moves, dtype=np.int64)[alike].tolist()
    for out, inp in ties:
        heads.append(out)
        tails.append(inp)
        tables.append(build.equal(states[out].operands[0], states[inp].results[0]))
    network = CostNetwork(
        unary=tuple(build.unary),
        pairwise=tuple(build.pairwise),
        node_table=nodes,
        edges=np.array([heads, tails], dtype=np.int64).T.copy(),
        edge_table=np.array(tables, dtype=np.int64),
    )
    return Problem(
        program, topology, level, states, relays, variable, life, network, handed, together, tuple(donated),
        build.times,
    )  # fmt: skip


_Numbered = dict[int, tuple[int, Choices]]  # by identity


def _choices(a: Arrays, number: Ints, distinct: Sequence[States]) -> tuple[_Numbered, Ints, Ints]:
    """Numbers for choices: of every tensor as it is made, and of every reading. `number` is that of the states."""
    known: _Numbered = {}
    listed: tuple[list[int], list[int]] = ([], [])
    begins: tuple[list[int], list[int]] = ([], [])
    for s in distinct:
        for out, begin, choices in zip(listed, begins, (s.results, s.operands), strict=True):
            begin.append(len(out))
            out += [known.setdefault(id(c), (len(known), c))[0] for c in choices]
    results, operands = (np.array(x, dtype=np.int64) for x in listed)
    first, second = (np.array(x, dtype=np.int64)[number] for x in begins)
    return known, results[first[a.maker] + a.place], operands[second[a.reader] + a.operand]


def _once(a: Arrays, order: Ints, read: Ints, choices: _Numbered) -> np.ndarray:
    """Which of the readings in order are kept: an operator that reads a tensor twice in one way moves it once."""
    keep = np.ones(len(order), dtype=bool)
    listed = [c for _, c in choices.values()]
    same = (np.diff(a.read[order]) == 0) & (np.diff(a.reader[order]) == 0)
    for k in (1 + np.flatnonzero(same)).tolist():
        j = k - 1
        while j >= 0 and a.reader[order[j]] == a.reader[order[k]] and a.read[order[j]] == a.read[order[k]]:
            c, d = listed[read[order[j]]], listed[read[order[k]]]
            if c is d or (c.layouts == d.layouts and np.array_equal(c.index, d.index)):
                keep[k] = False
                break
            j -= 1
    return keep


def _relays(
    build: _Tables, shared: Ints, made: Ints, read: Ints, begin: Ints, choices: _Numbered
) -> tuple[dict[int, Choices], Ints]:
    """The relays of tensors that several read, and the tables of their variables."""
    listed = [c for _, c in choices.values()]
    known: dict[tuple[int, ...], tuple[Choices, int]] = {}
    relays: dict[int, Choices] = {}
    kinds, readings, begins, makers = [], read.tolist(), begin.tolist(), made.tolist()
    for t in shared.tolist():
        key = (makers[t], *readings[begins[t] : begins[t + 1]])
        found = known.get(key)
        if found is None:
            relay = build.relay(listed[key[0]], [listed[c] for c in key[1:]])
            found = known[key] = relay, build.free(len(relay.index))
        relays[t] = found[0]
        kinds.append(found[1])
    return relays, np.array(kinds, dtype=np.int64)


def _edges(
    program: Program,
    states: Sequence[States],
    relays: Mapping[int, Choices],
    variable: Mapping[int, int],
    readers: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[tuple[int, int, int, Choices, Choices, int, float]]:
    """(variable, variable, tensor, made, read, reader, times) of every redistribution, in the order of edges."""
    ops = program.operators
    for t, (maker, k) in enumerate(program.producers()):
        source, where = states[maker].results[k], maker
        if t in relays:
            yield maker, variable[t], t, source, relays[t], -1, ops[maker].repeat
            source, where = relays[t], variable[t]
        for u, i in readers[t]:
            yield where, u, t, source, states[u].operands[i], u, ops[u].operand_repeat[i]


def _handed_over(program: Program, ties: Sequence[tuple[int, int]], pins: Pins) -> frozenset[int]:
    """Sums that go, through light operators only, to results whose layout nobody asked for.

    A reduce-scatter there would only leave the second half of an all-reduce to the caller, so such a sum is
    all-reduced, as a person would write it. Where a result is pinned, or tied to an argument (the new
    parameters of a training step), or something heavy reads the sum, the search is free.
    """
    asked = {op for op, entries in pins.items() if any(not isinstance(key, str) for _, _, key, _ in entries)}
    free = {i for i in program.outputs if i not in asked} - {o for o, _ in ties}
    ending = on_the_way(program, free, frozenset(asked))
    sums = np.flatnonzero(program.arrays.which(frozenset(SUMS))).tolist()
    return frozenset(r for i in sums for r in program.operators[i].results if r in ending)


def _distinct(states: Sequence[States], users: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Readers of a tensor; an operator that reads it twice in the same way (`x * x`) moves it once."""
    if len({u for u, _ in users}) == len(users):
        return users
    out: list[tuple[int, int]] = []
    for u, i in users:
        same = [j for v, j in out if v == u]
        c = states[u].operands
        if any(c[i].layouts == c[j].layouts and np.array_equal(c[i].index, c[j].index) for j in same):
            continue
        out.append((u, i))
    return out


def _relay(made: Choices, read: Sequence[Choices]) -> Choices:
    seen: dict[Layout, None] = {}
    for lay in made.layouts:
        seen.setdefault(lay.without_partial())
    for c in read:
        for lay in c.layouts:
            seen.setdefault(lay)
    return Choices(tuple(seen), np.arange(len(seen)))


class _Tables:
    """Tables by what they depend on; each is built once."""

    def __init__(
        self, program: Program, topology: Topology, level: int, life: Lifetimes, states: Sequence[States]
    ):
        self.program, self.topology, self.level = program, topology, level
        self.life, self.states = life, states
        self.unary: list[np.ndarray] = []
        self.times: dict[int, Times] = {}  # of one run, by number of the operator's own table
        self.pairwise: list[np.ndarray] = []
        self._ids: dict[Any, int] = {}
        self._moves: dict[Any, np.ndarray] = {}
        self._numbers: dict[int, int] = {}
        self._lists: dict[tuple[Layout, ...], int] = {}
        self._relays: dict[Any, Choices] = {}
        self._like: dict[tuple[Layout, ...], Choices] = {}

    def _node(self, key: Any, table: np.ndarray) -> int:
        self._ids[key] = len(self.unary)
        self.unary.append(table)
        return self._ids[key]

    def relay(self, made: Choices, read: Sequence[Choices]) -> Choices:
        """The relay between a maker and its readers: one for each set of layouts, so that tables are shared."""
        key = (id(made), *dict.fromkeys(map(id, read)))
        found = self._relays.get(key)
        if found is None:
            found = _relay(made, read)
            found = self._relays[key] = self._like.setdefault(found.layouts, found)
        return found

    def free(self, n: int) -> int:
        key = ("free", n)
        return self._ids[key] if key in self._ids else self._node(key, np.zeros(n))

    def own(self, op: Operator) -> int:
        """What the operator costs by itself under each candidate, `repeat` times."""
        s = self.states[op.id]
        if s.op is None or op.kind != "eqn":
            return self.free(len(s))
        reads, writes = traffic(op, self.life)
        key = ("own", id(s), reads, writes, op.repeat)
        if key not in self._ids:
            times = operator_times(s, reads, writes, self.topology)
            made = self._node(key, times.objective(self.level) * op.repeat)
            self.times[made] = times
        return self._ids[key]

    def move(
        self,
        source: Choices,
        target: Choices,
        tensor: Tensor,
        times: float,
        whole: bool = False,
        together: int = 1,
    ) -> int:
        """Redistribution from each state of the maker to each state of the reader.

        `whole` forbids to scatter sums; so many sums as `together` says share a latency.
        """
        key = ("move", id(source), id(target), tensor.shape, tensor.dtype, times, whole, together)
        if key not in self._ids:
            ends = self._listed(source), self._listed(target)
            small_key = (*ends, tensor.shape, tensor.itemsize, together)
            if small_key not in self._moves:
                self._moves[small_key] = redistribute.table(
                    source.layouts, target.layouts, tensor.shape, tensor.itemsize, self.topology, together
                )
            small = self._moves[small_key]
            if whole:
                cut = [{a for d in lay.dims for a in d} for lay in target.layouts]
                scatters = np.array([[not c.isdisjoint(lay.partial) for c in cut] for lay in source.layouts])
                small = np.where(scatters, np.inf, small)
            table = small[np.ix_(source.index, target.index)] * times
            self._ids[key] = len(self.pairwise)
            self.pairwise.append(table)
        return self._ids[key]

    def _listed(self, choices: Choices) -> int:
        """A number for the layouts of some choices: comparing them takes as long as making a table."""
        if id(choices) not in self._numbers:
            self._numbers[id(choices)] = self._lists.setdefault(choices.layouts, len(self._lists))
        return self._numbers[id(choices)]

    def equal(self, a: Choices, b: Choices) -> int:
        """Zero where two layouts are the same, forbidden elsewhere."""
        key = ("equal", id(a), id(b))
        if key not in self._ids:
            same = np.array([[0.0 if p == q else np.inf for q in b.layouts] for p in a.layouts])
            self._ids[key] = len(self.pairwise)
            self.pairwise.append(same[np.ix_(a.index, b.index)])
        return self._ids[key]
