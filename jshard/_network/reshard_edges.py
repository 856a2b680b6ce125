"""The edges of a cost network that carry tensors: from the maker of a tensor, or its relay, to each reader.

Problem.  A tensor that several operators read is kept in one layout (its *relay*), and whatever other layout an
operator wants is made from there, once in each scope (`_program/scopes.py`): the second reader of the same copy in
the same body pays nothing, nor does one that takes the tensor as it was made. A network of pairwise costs cannot say
"once": it charges each reader.

Idea.  Let `c(K, X)` be the seconds from the kept layout K to a copy X. If X can be cut back to K for nothing, then two
readers that share X are served as well by keeping X at once: `c(made, X) <= c(made, K) + c(K, X)`, and
`c(X, Y) <= c(X, K) + c(K, Y) = c(K, Y)` for every other reader. So charging each of them in full excludes no plan that
could be cheapest. Only copies that cannot be cut back (an all-to-all) may rightly be made beside K and shared, and
only where there are three readers or more. For those the relay has states (K, P, S): kept in K, and a copy P beside it
in each of the scopes S for whoever wants it there, paid once a scope, or the tensor as it was made. In these states,
among n readers a further such copy serves n - 2 at most, so each pays a share 1 / (n - 2) of it (outside S, one over
the readers in the scope): exact for three readers in one scope, and never more than a plan pays.
`exact_cost.py` counts exactly; `tests/laws/test_one_cost.py` compares both over all layouts, and plans with their schedules.

On three and more mesh axes such pairs are too many and left out: there the bound is one on plans that have a single
shared copy a tensor (`Cost.space` says so).

An operator that reads a tensor twice (`x @ x.T`) has two edges; the second costs nothing in the states in which both
operands have one layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jshard._core.layout import Layout
from jshard._core.row_codes import Ints
from jshard._network.candidates import CandidateSet, TensorLayouts
from jshard._program.graph import Program
from jshard._program.use_def import Bools, Floats, UseDef


@dataclasses.dataclass(frozen=True, eq=False)
class Relay(TensorLayouts):
    """The layouts in which a shared tensor may be kept; states beyond those of one layout have a second copy.

    `second`: for each state the number of the layout of the second copy, -1 for none; `scopes`: the scopes in which it
    is, as bits that stand for the scopes with several readers of the tensor.
    """

    second_copy: Ints
    second_copy_scopes: Ints

    @property
    def has_second_copies(self) -> bool:
        """Whether there are states with a second copy."""
        return len(self.layouts) < len(self.of_state)


SharingScopes = tuple[tuple[float, bool], ...]
"""Of each scope with several readers: how often it runs beside the relay's, and whether the tensor lies there as made."""

MAX_SHARING_SCOPES = 3  # with more scopes a second copy is for one, or for all of these


@dataclasses.dataclass(frozen=True, eq=False)
class EdgeTable:
    """The first edges of a network, tensor by tensor: to the relay, if there is one, then to each reader."""

    source_variable: Ints  # (edges,) variable of the maker or relay
    target_variable: Ints  # (edges,) variable of the relay or reader
    tensor: Ints  # (edges,)
    source_layouts: Ints  # (edges,) layouts at the head, as a number among `choices`
    target_layouts: Ints  # (edges,) layouts at the tail
    reader: Ints  # (edges,) the operator that reads, -1 for a relay
    operand: Ints  # (edges,) which of its operands, -1 for a relay
    count: Floats  # (edges,) how often in one call of the program
    scope: Ints  # (edges,) the scope of the reader; of a relay that of its tensor
    original_available: Bools  # (edges,) whether the tensor as it was made is there for the reader
    scope_bit: (
        Ints  # (edges,) which of the scopes with several readers is this one's; -1 for none, and of relays
    )
    # (edges,) readers of the tensor in all, where some may share a second copy of the relay; else 0
    num_sharers: Ints
    readers_in_scope: Ints  # (edges,) readers of the tensor in the same scope
    sharing: Ints  # (edges,) of relays: a number among `sharing_scopes`; else 0
    duplicates: Ints  # (edges,) number of the operands before of this reader that read the same tensor
    layouts: tuple[TensorLayouts, ...]
    duplicate_layouts: tuple[tuple[TensorLayouts, ...], ...]
    sharing_scopes: tuple[SharingScopes, ...]
    num_tensors: int  # how many the program has

    def __len__(self) -> int:
        return len(self.source_variable)

    @functools.cached_property
    def readers_of_tensor(self) -> list[list[tuple[int, int]]]:
        """For each tensor the (operator, operand) pairs for which it is moved."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(self.num_tensors)]
        for e in np.flatnonzero(self.reader >= 0).tolist():
            out[self.tensor[e]].append((int(self.reader[e]), int(self.operand[e])))
        return out


def build_edge_table(
    program: Program, number: Ints, distinct: Sequence[CandidateSet], repeats: Floats, second_copies: bool
) -> tuple[EdgeTable, dict[int, Relay]]:
    """The edges of a program and its relays.

    Arguments:

    - `number`: (operators,) which of the `distinct` states each operator has.
    - `repeats`: (reads,) how often each operand is moved to its reader.
    - `pairs`: whether relays have states with a second copy.
    """
    a, scopes = program.use_def, program.scopes
    numbering, made, read = _number_layouts(a, number, distinct)
    listed = [c for _, c in numbering.values()]
    order, _ = a.uses_by_tensor
    keep, twin_of = _duplicate_reads(
        a.use_tensor[order], a.use_op[order], scopes.use_scope[order], read[order], listed
    )
    order = order[keep]
    count = np.bincount(a.use_tensor[order], minlength=len(a.def_op))
    begin = np.concatenate([[0], np.cumsum(count)])
    shared = np.flatnonzero(count > 1)
    at = scopes.use_scope[order]
    tensor, reader = a.use_tensor[order], a.use_op[order]
    at_hand = (at == scopes.def_scope[tensor]) | scopes.is_captured[tensor]
    bit, mates = (
        _sharing_scope_bits(tensor, at, count)
        if second_copies
        else (np.full_like(order, -1), np.ones_like(order))
    )
    ratio = repeats[order] / a.result_repeat[tensor]
    scopes_of, numbers = _distinct_sharing_scopes(shared, begin, bit, ratio, at_hand, len(a.def_op))
    relays = _build_relays(shared, made, read[order], begin, listed, bit, scopes.rule_inputs)
    for c in relays.values():
        numbering.setdefault(id(c), (len(numbering), c))
    relayed = np.full(len(a.def_op), -1)
    relayed[shared] = [numbering[id(c)][0] for c in relays.values()]
    variable = np.full(len(a.def_op), -1)
    variable[shared] = len(program.operators) + np.arange(len(shared))
    whose = np.concatenate([shared, tensor])
    place = np.lexsort((np.concatenate([np.zeros(len(shared)), 1 + np.arange(len(order))]), whose))

    def both(relay: np.ndarray, reading: np.ndarray) -> np.ndarray:
        return np.concatenate([relay, reading])[place]

    none = np.full(len(shared), -1)
    twins: dict[tuple[int, ...], int] = {(): 0}
    twin = np.array([twins.setdefault(t, len(twins)) for t in twin_of], dtype=np.int64)
    edges = EdgeTable(
        source_variable=both(
            a.def_op[shared], np.where(variable[tensor] >= 0, variable[tensor], a.def_op[tensor])
        ),
        target_variable=both(variable[shared], reader),
        tensor=whose[place],
        source_layouts=both(made[shared], np.where(variable[tensor] >= 0, relayed[tensor], made[tensor])),
        target_layouts=both(relayed[shared], read[order]),
        reader=both(none, reader),
        operand=both(none, a.use_operand[order]),
        count=both(a.result_repeat[shared], repeats[order]),
        scope=both(scopes.def_scope[shared], at),
        original_available=both(none < 0, at_hand),
        scope_bit=both(none, bit),
        num_sharers=both(np.zeros_like(shared), np.where(numbers[tensor] > 0, count[tensor], 0)),
        readers_in_scope=both(np.zeros_like(shared), mates),
        sharing=both(numbers[shared], np.zeros_like(order)),
        duplicates=both(np.zeros_like(shared), twin),
        layouts=tuple(c for _, c in numbering.values()),
        duplicate_layouts=tuple(tuple(listed[c] for c in t) for t in twins),
        sharing_scopes=scopes_of,
        num_tensors=len(a.def_op),
    )
    return edges, relays


_LayoutIds = dict[int, tuple[int, TensorLayouts]]  # by identity


def _number_layouts(
    a: UseDef, number: Ints, distinct: Sequence[CandidateSet]
) -> tuple[_LayoutIds, Ints, Ints]:
    """Numbers for choices: of every tensor as it is made, and of every reading. `number` is that of the states."""
    numbering: _LayoutIds = {}
    listed: tuple[list[int], list[int]] = ([], [])
    begins: tuple[list[int], list[int]] = ([], [])
    for s in distinct:
        for out, begin, choices in zip(listed, begins, (s.results, s.operands), strict=True):
            begin.append(len(out))
            out += [numbering.setdefault(id(c), (len(numbering), c))[0] for c in choices]
    results, operands = (np.array(x, dtype=np.int64) for x in listed)
    first, second = (np.array(x, dtype=np.int64)[number] for x in begins)
    return numbering, results[first[a.def_op] + a.def_result], operands[second[a.use_op] + a.use_operand]


def _duplicate_reads(
    tensor: Ints, reader: Ints, scope: Ints, read: Ints, listed: Sequence[TensorLayouts]
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
                if c is d or (c.layouts == d.layouts and np.array_equal(c.of_state, d.of_state)):
                    keep[k] = False
                    break
                before.append(int(read[j]))
            j -= 1
        twins[k] = tuple(sorted(set(before)))
    return keep, [t for t, kept in zip(twins, keep.tolist(), strict=True) if kept]


def _sharing_scope_bits(tensor: Ints, scope: Ints, count: Ints) -> tuple[Ints, Ints]:
    """For each read its scope's number among those with several readers of the tensor (-1), and the readers there.

    Only tensors with three readers or more have such scopes, and each at most `MOST_SCOPES`.
    """
    pair, group, sizes = np.unique(
        tensor * (1 + int(scope.max(initial=0))) + scope, return_inverse=True, return_counts=True
    )
    whose = pair // (1 + int(scope.max(initial=0)))
    several = (sizes > 1) & (count[whose] > 2)
    before = np.cumsum(several) - several
    first = np.zeros(len(count), dtype=np.int64)
    first[whose[::-1]] = before[::-1]  # the last written is the first of each tensor
    place = before - first[whose]
    return np.where(several & (place < MAX_SHARING_SCOPES), place, -1)[group], np.where(several, sizes, 1)[
        group
    ]


def _distinct_sharing_scopes(
    shared: Ints, begin: Ints, bit: Ints, ratio: Floats, at_hand: Bools, tensors: int
) -> tuple[tuple[SharingScopes, ...], Ints]:
    """The different lists of scopes with several readers, and the number of each tensor's; 0 is the empty list."""
    known: dict[SharingScopes, int] = {(): 0}
    numbers = np.zeros(tensors, dtype=np.int64)
    bits, ratios, lies = bit.tolist(), ratio.tolist(), at_hand.tolist()
    for t in shared[np.add.reduceat(bit >= 0, begin[shared]) > 0].tolist() if len(shared) else []:
        found = {bits[k]: (ratios[k], lies[k]) for k in range(begin[t], begin[t + 1]) if bits[k] >= 0}
        scopes = tuple(found[k] for k in sorted(found))
        numbers[t] = known.setdefault(scopes, len(known))
    return tuple(known), numbers


def _build_relays(
    shared: Ints,
    made: Ints,
    read: Ints,
    begin: Ints,
    listed: Sequence[TensorLayouts],
    bit: Ints,
    whole: frozenset[int],
) -> dict[int, Relay]:
    """The layouts in which each shared tensor may be kept: one object for all that have the same.

    `whole` are the tensors that enter a rule of derivatives: those are never kept as partial sums.
    """
    known: dict[tuple, Relay] = {}
    alike: dict[tuple, Relay] = {}
    relays: dict[int, Relay] = {}
    readings, begins, makers, bits = read.tolist(), begin.tolist(), made.tolist(), bit.tolist()
    for t in shared.tolist():
        here = slice(begins[t], begins[t + 1])
        key = (makers[t], *readings[here], *bits[here], t in whole)
        found = known.get(key)
        if found is None:
            relay = build_relay(
                listed[makers[t]], [listed[c] for c in readings[here]], bits[here], t in whole
            )
            arrays = (x.tobytes() for x in (relay.of_state, relay.second_copy, relay.second_copy_scopes))
            found = known[key] = alike.setdefault((relay.layouts, *arrays), relay)
        relays[t] = found
    return relays


def build_relay(
    made: TensorLayouts, read: Sequence[TensorLayouts], bits: Sequence[int], no_partial_sums: bool
) -> Relay:
    """The relay of a tensor.

    Arguments:

    - `made`, `read`: the layouts in which it is made and read.
    - `bits`: for each reader the number of its scope among those with several readers, -1 for the others.
    - `whole`: never keep it as a partial sum.
    """
    seen: dict[Layout, None] = {}
    for lay in made.layouts:
        seen.setdefault(lay.without_partial())
    for c in read:
        for lay in c.layouts:
            if not (no_partial_sums and lay.partial):
                seen.setdefault(lay)
    kept = tuple(seen)
    states = [(k, -1, 0) for k in range(len(kept))]
    masks = sorted({m for b in set(bits) - {-1} for m in (1 << b, (2 << max(bits)) - 1)})
    for mask in masks:
        sharing = [c for c, b in zip(read, bits, strict=True) if b >= 0 and mask >> b & 1]
        offers = Counter(lay for c in sharing for lay in c.layouts)
        offers.update(made.layouts)
        copies = [p for p, lay in enumerate(kept) if not lay.partial and offers[lay] > 1]
        states += [
            (k, p, mask) for k, a in enumerate(kept) for p in copies
            if not is_local_slice_of(a, kept[p]) and not is_local_slice_of(kept[p], a)
        ]  # fmt: skip
    return Relay(kept, *np.array(states, dtype=np.int64).T.copy())


@functools.lru_cache(maxsize=65536)
def is_local_slice_of(a: Layout, b: Layout) -> bool:
    """Whether each device has in layout `b` what it needs for layout `a`: `a` is `b`, cut further or not."""
    return a.partial == b.partial and all(x[: len(y)] == y for x, y in zip(a.dims, b.dims, strict=True))
