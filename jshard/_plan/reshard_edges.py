"""The edges of a cost network that carry tensors: from the maker of a tensor, or its relay, to each reader.

Problem.  A tensor that several operators read is kept in one layout (its *relay*), and whatever other layout an
operator wants is made from there, once in each scope (`_program/scopes.py`): the second reader of the same copy in
the same body pays nothing. A network of pairwise costs cannot say "once": it charges each reader.

Idea.  Charge as much as no plan can go below, and count exactly afterwards (`exact_cost`). Let `c(K, X)` be the
seconds from the kept layout K to a copy X. If X can be cut back to K for nothing (`c(X, K) = 0`: X is a gathered K),
then two readers that share X are served as well by keeping X at once: `c(made, X) <= c(made, K) + c(K, X)`, and
`c(X, Y) <= c(X, K) + c(K, Y) = c(K, Y)` for every other reader. So charging each of them in full excludes no plan
that could be cheapest. Only copies that cannot be cut back (an all-to-all) may rightly be made beside K and shared;
among n readers in one scope each pays a share 1/n of those. With two readers in all, keeping what they share, or
what is made, is as good: both pay in full. `tests/test_one_cost.py` compares the charge with the exact cost over all
layouts, and plans with their schedules.

An operator that reads a tensor twice (`x @ x.T`) has two edges; the second costs nothing in the states in which both
operands have one layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jshard._layout import Layout
from jshard._numbers import Ints
from jshard._plan.states import Choices, States
from jshard._program.arrays import Arrays, Bools, Floats
from jshard._program.graph import Program


@dataclasses.dataclass(frozen=True, eq=False)
class ReshardEdges:
    """The first edges of a network, tensor by tensor: to the relay, if there is one, then to each reader."""

    head: Ints  # (edges,) variable of the maker or relay
    tail: Ints  # (edges,) variable of the relay or reader
    tensor: Ints  # (edges,)
    source: Ints  # (edges,) layouts at the head, as a number among `choices`
    target: Ints  # (edges,) layouts at the tail
    reader: Ints  # (edges,) the operator that reads, -1 for a relay
    operand: Ints  # (edges,) which of its operands, -1 for a relay
    repeat: Floats  # (edges,) how often in one call of the program
    scope: Ints  # (edges,) the scope of the reader; of a relay that of its tensor
    at_hand: Bools  # (edges,) whether the tensor as it was made is there for the reader
    sharers: Ints  # (edges,) readers in one scope that may share a copy which cannot be cut back to the relay
    twins: Ints  # (edges,) number of the operands before of this reader that read the same tensor
    choices: tuple[Choices, ...]
    twin_choices: tuple[tuple[Choices, ...], ...]

    def __len__(self) -> int:
        return len(self.head)

    @functools.cached_property
    def readings(self) -> list[list[tuple[int, int]]]:
        """For each tensor the (operator, operand) pairs for which it is moved."""
        count = 1 + int(self.tensor.max(initial=-1))
        out: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for e in np.flatnonzero(self.reader >= 0).tolist():
            out[self.tensor[e]].append((int(self.reader[e]), int(self.operand[e])))
        return out


def reshard_edges(
    program: Program, number: Ints, distinct: Sequence[States], repeats: Floats
) -> tuple[ReshardEdges, dict[int, Choices]]:
    """The edges of a program and its relays.

    Arguments:

    - `number`: (operators,) which of the `distinct` states each operator has.
    - `repeats`: (reads,) how often each operand is moved to its reader.
    """
    a, scopes = program.arrays, program.scopes
    numbering, made, read = _numbered(a, number, distinct)
    listed = [c for _, c in numbering.values()]
    order, _ = a.by_tensor
    keep, twin_of = _twins(a.read[order], a.reader[order], scopes.read[order], read[order], listed)
    order = order[keep]
    count = np.bincount(a.read[order], minlength=len(a.maker))
    begin = np.concatenate([[0], np.cumsum(count)])
    shared = np.flatnonzero(count > 1)
    relays = _relays(shared, made, read[order], begin, listed, scopes.enters_rule)
    for c in relays.values():
        numbering.setdefault(id(c), (len(numbering), c))
    relayed = np.full(len(a.maker), -1)
    relayed[shared] = [numbering[id(c)][0] for c in relays.values()]
    variable = np.full(len(a.maker), -1)
    variable[shared] = len(program.operators) + np.arange(len(shared))
    tensor, reader = a.read[order], a.reader[order]
    whose = np.concatenate([shared, tensor])
    place = np.lexsort((np.concatenate([np.zeros(len(shared)), 1 + np.arange(len(order))]), whose))

    def both(relay: np.ndarray, reading: np.ndarray) -> np.ndarray:
        return np.concatenate([relay, reading])[place]

    none = np.full(len(shared), -1)
    at = scopes.read[order]
    twins: dict[tuple[int, ...], int] = {(): 0}
    twin = np.array([twins.setdefault(t, len(twins)) for t in twin_of], dtype=np.int64)
    edges = ReshardEdges(
        head=both(a.maker[shared], np.where(variable[tensor] >= 0, variable[tensor], a.maker[tensor])),
        tail=both(variable[shared], reader),
        tensor=whose[place],
        source=both(made[shared], np.where(variable[tensor] >= 0, relayed[tensor], made[tensor])),
        target=both(relayed[shared], read[order]),
        reader=both(none, reader),
        operand=both(none, a.operand[order]),
        repeat=both(a.result_repeat[shared], repeats[order]),
        scope=both(scopes.made[shared], at),
        at_hand=both(none < 0, (at == scopes.made[tensor]) | scopes.everywhere[tensor]),
        sharers=both(np.ones_like(shared), _sharers(tensor, at, count)),
        twins=both(np.zeros_like(shared), twin),
        choices=tuple(c for _, c in numbering.values()),
        twin_choices=tuple(tuple(listed[c] for c in t) for t in twins),
    )
    return edges, relays


_Numbering = dict[int, tuple[int, Choices]]  # by identity


def _numbered(a: Arrays, number: Ints, distinct: Sequence[States]) -> tuple[_Numbering, Ints, Ints]:
    """Numbers for choices: of every tensor as it is made, and of every reading. `number` is that of the states."""
    numbering: _Numbering = {}
    listed: tuple[list[int], list[int]] = ([], [])
    begins: tuple[list[int], list[int]] = ([], [])
    for s in distinct:
        for out, begin, choices in zip(listed, begins, (s.results, s.operands), strict=True):
            begin.append(len(out))
            out += [numbering.setdefault(id(c), (len(numbering), c))[0] for c in choices]
    results, operands = (np.array(x, dtype=np.int64) for x in listed)
    first, second = (np.array(x, dtype=np.int64)[number] for x in begins)
    return numbering, results[first[a.maker] + a.place], operands[second[a.reader] + a.operand]


def _twins(
    tensor: Ints, reader: Ints, scope: Ints, read: Ints, listed: Sequence[Choices]
) -> tuple[Bools, list[tuple[int, ...]]]:
    """For reads tensor by tensor: which need an edge, and the choices of the reader's operands before in that scope.

    An operand that always has the layout of one before (`x * x`) needs none.
    """
    keep = np.ones(len(tensor), dtype=bool)
    twins: list[tuple[int, ...]] = [()] * len(tensor)
    same = (np.diff(tensor) == 0) & (np.diff(reader) == 0)
    for k in (1 + np.flatnonzero(same)).tolist():
        before: list[int] = []
        j = k - 1
        while j >= 0 and reader[j] == reader[k] and tensor[j] == tensor[k]:
            if scope[j] == scope[k]:
                c, d = listed[read[j]], listed[read[k]]
                if c is d or (c.layouts == d.layouts and np.array_equal(c.index, d.index)):
                    keep[k] = False
                    break
                before.append(int(read[j]))
            j -= 1
        twins[k] = tuple(sorted(set(before)))
    return keep, [t for t, kept in zip(twins, keep.tolist(), strict=True) if kept]


def _sharers(tensor: Ints, scope: Ints, count: Ints) -> Ints:
    """For each read the number of those of its tensor in its scope, where sharing may pay beside a relay; else 1."""
    _, group, sizes = np.unique(
        tensor * (1 + int(scope.max(initial=0))) + scope, return_inverse=True, return_counts=True
    )
    return np.where(count[tensor] > 2, sizes[group], 1)


def _relays(
    shared: Ints, made: Ints, read: Ints, begin: Ints, listed: Sequence[Choices], whole: frozenset[int]
) -> dict[int, Choices]:
    """The layouts in which each shared tensor may be kept: one object for all that have the same.

    `whole` are the tensors that enter a rule of derivatives: those are never kept as partial sums.
    """
    known: dict[tuple[int, ...], Choices] = {}
    alike: dict[tuple[Layout, ...], Choices] = {}
    relays: dict[int, Choices] = {}
    readings, begins, makers = read.tolist(), begin.tolist(), made.tolist()
    for t in shared.tolist():
        key = (makers[t], *readings[begins[t] : begins[t + 1]], t in whole)
        found = known.get(key)
        if found is None:
            relay = _relay(listed[key[0]], [listed[c] for c in key[1:-1]], key[-1])
            found = known[key] = alike.setdefault(relay.layouts, relay)
        relays[t] = found
    return relays


def _relay(made: Choices, read: Sequence[Choices], whole: bool) -> Choices:
    seen: dict[Layout, None] = {}
    for lay in made.layouts:
        seen.setdefault(lay.without_partial())
    for c in read:
        for lay in c.layouts:
            if not (whole and lay.partial):
                seen.setdefault(lay)
    return Choices(tuple(seen), np.arange(len(seen)))
