"""The edges of a cost network that carry tensors: from the producer of a tensor, or its relay, to each reader.

Problem.  A tensor with several readers is stored in one layout (its *relay*), and a copy in any other layout that a
reader needs is made from there, once in each scope (`_program/scopes.py`): a second reader of the same copy in the same
body pays nothing, nor does one that reads the tensor in the layout in which it was produced. A network of pairwise costs
cannot count a copy once: it charges each reader.

Idea.  Let `c(K, X)` be the seconds from the stored layout K to a copy X. If K is a local slice of X, then two readers
that share X lose nothing if X is stored instead: `c(P, X) <= c(P, K) + c(K, X)` for the produced layout P, and
`c(X, Y) <= c(X, K) + c(K, Y) = c(K, Y)` for every other reader's Y. So charging each of them in full excludes no plan that
could be cheapest. Only copies of which K is no slice (an all-to-all) can be worth sharing beside K, and only with three
readers or more. For those the relay has states (K, P, S): stored in K, with a copy P in each of the scopes S for the
readers there, paid once a scope, or nothing where P is the produced layout. In these states, at most n - 2 of n readers
share another such copy, so each pays a share 1 / (n - 2) of it (outside S, one over the readers in the scope): exact for
three readers in one scope, and never more than a plan pays.
`tests/laws/exact_cost.py` counts exactly; `tests/laws/test_one_cost.py` compares both over all layouts, and plans with
their schedules.

On meshes of three and more axes there are too many such pairs, and they are left out: there the bound is one on plans
with a single shared copy a tensor (`Cost.space` says so).

An operator that reads a tensor twice (`x @ x.T`) has two edges; the second costs nothing in the states in which both
operands have one layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._core.layout import Layout
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._network.candidates import CandidateSet, TensorLayouts
from jshard._network.layout_pairs import is_local_slice_of
from jshard._program.graph import Program
from jshard._program.use_def import UseDef


@dataclasses.dataclass(frozen=True, eq=False)
class Relay(TensorLayouts):
    """The layouts in which a tensor with several readers may be stored; some states have a second copy.

    - `second_copy`: (states,) number of the layout of the second copy, -1 for none.
    - `second_copy_scopes`: (states,) the scopes in which it is made, as bits that stand for the scopes with several
        readers of the tensor.
    """

    second_copy: Ints
    second_copy_scopes: Ints

    @property
    def has_second_copies(self) -> bool:
        """Whether there are states with a second copy."""
        return len(self.layouts) < len(self.of_state)


SharingScopes = tuple[tuple[float, bool], ...]
"""Of each scope with several readers: its runs per run of the relay's scope, and whether the produced tensor is there."""

MAX_SHARING_SCOPES = 3  # beyond these, a second copy is for one of these scopes, or for all of these


class Sharing(NamedTuple):
    """How the readers of a tensor share the second copy of its relay.

    - `scopes`: of an edge to a relay, the scopes with several readers.
    - `scope_bit`: which of them is that of the reader; -1 for none.
    - `num_readers`: readers of the tensor, where some may share a second copy; else 0.
    - `readers_in_scope`: readers of the tensor in the scope of this one.
    """

    scopes: SharingScopes = ()
    scope_bit: int = -1
    num_readers: int = 0
    readers_in_scope: int = 1


NOT_SHARED = Sharing()


class ReshardEdge(NamedTuple):
    """One row of the edge table: a tensor from its producer or relay to a reader, or from its producer to its relay.

    - `edge`: row in the table, which is the number of the edge in the cost network.
    - `reader`: the operator that reads; -1 for a relay.
    - `repeats`: how often the tensor is resharded in one call of the program.
    - `returned_sum`: it is a sum that goes to results of free layout.
    - `combined_with`: how many sums share one latency with it.
    - `duplicates`: layouts of earlier operands of the reader that read the same tensor.
    - `is_constant`: it is made of constants, and is not sent (`made_of_constants.py`).
    """

    edge: int
    tensor: int
    reader: int
    source: TensorLayouts
    target: TensorLayouts
    repeats: float
    returned_sum: bool
    combined_with: int
    sharing: Sharing
    duplicates: tuple[TensorLayouts, ...]
    is_constant: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class EdgeTable:
    """The first edges of a network, tensor by tensor: to the relay, if there is one, then to each reader.

    Row e describes edge e of the cost network. Layouts are numbers of entries of `layouts`.
    """

    source_variable: Ints  # (edges,) of the producer or relay
    target_variable: Ints  # (edges,) of the relay or reader
    tensor: Ints  # (edges,)
    source_layouts: Ints  # (edges,)
    target_layouts: Ints  # (edges,)
    reader: Ints  # (edges,) the operator that reads, -1 for a relay
    operand: Ints  # (edges,) which of its operands, -1 for a relay
    repeats: Floats  # (edges,) how often in one call of the program
    scope: Ints  # (edges,) the scope of the reader; of a relay that of its tensor
    # (edges,) whether the tensor as produced is available in the scope of the reader
    original_available: Bools
    scope_bit: Ints  # (edges,) these four: see `Sharing`
    num_sharers: Ints
    readers_in_scope: Ints
    sharing: Ints  # (edges,) a number of an entry of `sharing_scopes`
    duplicates: Ints  # (edges,) a number of an entry of `duplicate_layouts`
    returned_sum: Bools  # (edges,)
    combined_with: Ints  # (edges,)
    is_constant: Bools  # (edges,)
    layouts: tuple[TensorLayouts, ...]
    duplicate_layouts: tuple[tuple[TensorLayouts, ...], ...]
    sharing_scopes: tuple[SharingScopes, ...]
    num_tensors: int

    def __post_init__(self) -> None:
        columns = [x for x in vars(self).values() if isinstance(x, np.ndarray)]
        assert all(len(c) == len(self) for c in columns)
        assert (np.diff(self.tensor) >= 0).all(), "edges are grouped by tensor"
        assert np.array_equal(self.reader < 0, self.operand < 0)

    def __len__(self) -> int:
        return len(self.tensor)

    @functools.cached_property
    def readers_of_tensor(self) -> list[list[tuple[int, int]]]:
        """For each tensor the (operator, operand) pairs for which it is resharded."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(self.num_tensors)]
        for e in np.flatnonzero(self.reader >= 0).tolist():
            out[self.tensor[e]].append((int(self.reader[e]), int(self.operand[e])))
        return out

    def rows(self, edges: Collection[int]) -> list[ReshardEdge]:
        """Some rows as objects."""
        e = np.array(edges, dtype=np.int64)
        columns = (
            e, self.tensor[e], self.reader[e], self.source_layouts[e], self.target_layouts[e], self.repeats[e],
            self.returned_sum[e], self.combined_with[e], self.sharing[e], self.scope_bit[e], self.num_sharers[e],
            self.readers_in_scope[e], self.duplicates[e], self.is_constant[e],
        )  # fmt: skip
        return [
            ReshardEdge(
                edge, tensor, reader, self.layouts[source], self.layouts[target], count, returned, combined,
                Sharing(self.sharing_scopes[scopes], bit, sharers, in_scope), self.duplicate_layouts[duplicates], constant,
            )
            for edge, tensor, reader, source, target, count, returned, combined, scopes, bit, sharers, in_scope,
            duplicates, constant in zip(*(c.tolist() for c in columns), strict=True)
        ]  # fmt: skip

    def classes(self, aval_id: Ints, charges: Ints) -> tuple[Ints, list[int]]:
        """(edges,) equal numbers for edges of equal costs, and one edge of each.

        `aval_id` is that of each tensor, `charges` are numbers of what epilogues cost on each edge.
        """
        return first_occurrence_codes(
            row_codes(
                self.source_layouts,
                self.target_layouts,
                aval_id[self.tensor],
                np.unique(self.repeats, return_inverse=True)[1],
                self.returned_sum.astype(np.int64),
                self.combined_with,
                self.scope_bit + 1,
                self.num_sharers,
                self.readers_in_scope,
                self.sharing,
                self.duplicates,
                charges,
                self.is_constant.astype(np.int64),
            )  # fmt: skip
        )


def build_edge_table(
    program: Program,
    candidate_ids: Ints,
    distinct: Sequence[CandidateSet],
    counts: Floats,
    *,
    second_copies: bool,
    returned_sums: Collection[int] = (),
    combined_with: Mapping[int, int] | None = None,
    constants: Collection[int] = (),
) -> tuple[EdgeTable, dict[int, Relay]]:
    """The edges of a program and the relays of its tensors.

    Arguments:

    - `candidate_ids`: (operators,) which of the `distinct` candidate sets each operator has.
    - `counts`: (uses,) how often each operand is resharded for its reader in one call.
    - `second_copies`: whether relays have states with a second copy.
    - `returned_sums`, `combined_with`, `constants`: tensors, see `ReshardEdge`.
    """
    a, scopes = program.use_def, program.scopes
    num_tensors = len(a.def_op)
    numbering = _LayoutNumbering()
    produced, operand_layouts = numbering.of_uses(a, candidate_ids, distinct)
    reads = _reads_with_edges(program, operand_layouts, counts, numbering)
    available = (reads.scope == scopes.def_scope[reads.tensor]) | scopes.is_captured[reads.tensor]
    num_readers = np.diff(reads.begin)
    shared = np.flatnonzero(num_readers > 1)
    if second_copies:
        bit, in_scope = _sharing_scope_bits(reads.tensor, reads.scope, num_readers)
    else:
        bit, in_scope = np.full_like(reads.tensor, -1), np.ones_like(reads.tensor)
    ratio = reads.repeats / a.result_repeat[reads.tensor]
    sharing_scopes, sharing = _distinct_sharing_scopes(
        shared, reads.begin, bit, ratio, available, num_tensors
    )
    relays = _build_relays(
        shared, produced, reads.layouts, reads.begin, numbering.layouts, bit, scopes.rule_inputs
    )
    relay_layouts, relay_variable = np.full(num_tensors, -1), np.full(num_tensors, -1)
    relay_layouts[shared] = [numbering.number(relay) for relay in relays.values()]
    relay_variable[shared] = len(program.operators) + np.arange(len(shared))
    has_relay = relay_variable[reads.tensor] >= 0
    # Rows of relays first in each tensor, then those of its readers in their order.
    tensor = np.concatenate([shared, reads.tensor])
    order = np.lexsort((np.concatenate([np.zeros(len(shared)), 1 + np.arange(len(reads.tensor))]), tensor))
    none = np.full(len(shared), -1)

    def column(of_relays: np.ndarray, of_reads: np.ndarray) -> np.ndarray:
        return np.concatenate([of_relays, of_reads])[order]

    tensor = tensor[order]
    duplicate_ids: dict[tuple[int, ...], int] = {(): 0}
    duplicates = [duplicate_ids.setdefault(d, len(duplicate_ids)) for d in reads.duplicates]
    edges = EdgeTable(
        source_variable=column(
            a.def_op[shared], np.where(has_relay, relay_variable[reads.tensor], a.def_op[reads.tensor])
        ),
        target_variable=column(relay_variable[shared], reads.reader),
        tensor=tensor,
        source_layouts=column(
            produced[shared], np.where(has_relay, relay_layouts[reads.tensor], produced[reads.tensor])
        ),
        target_layouts=column(relay_layouts[shared], reads.layouts),
        reader=column(none, reads.reader),
        operand=column(none, reads.operand),
        repeats=column(a.result_repeat[shared], reads.repeats),
        scope=column(scopes.def_scope[shared], reads.scope),
        original_available=column(none < 0, available),
        scope_bit=column(none, bit),
        num_sharers=column(
            np.zeros_like(shared), np.where(sharing[reads.tensor] > 0, num_readers[reads.tensor], 0)
        ),
        readers_in_scope=column(np.zeros_like(shared), in_scope),
        sharing=column(sharing[shared], np.zeros_like(reads.tensor)),
        duplicates=column(np.zeros_like(shared), np.array(duplicates, dtype=np.int64)),
        returned_sum=_by_tensor(dict.fromkeys(returned_sums, 1), num_tensors, 0)[tensor] > 0,
        combined_with=_by_tensor(combined_with or {}, num_tensors, 1)[tensor],
        is_constant=np.isin(tensor, list(constants)),
        layouts=tuple(numbering.layouts),
        duplicate_layouts=tuple(tuple(numbering.layouts[c] for c in d) for d in duplicate_ids),
        sharing_scopes=sharing_scopes,
        num_tensors=num_tensors,
    )
    return edges, relays


def _by_tensor(values: Mapping[int, int], num_tensors: int, default: int) -> Ints:
    out = np.full(num_tensors, default, dtype=np.int64)
    out[np.fromiter(values, np.int64, len(values))] = list(values.values())
    return out


class _LayoutNumbering:
    """Numbers for `TensorLayouts`, by identity: equal ones are one object (`CandidateCache`)."""

    def __init__(self) -> None:
        self.layouts: list[TensorLayouts] = []  # by number
        self._numbers: dict[int, int] = {}

    def number(self, layouts: TensorLayouts) -> int:
        """The number of some layouts."""
        n = self._numbers.setdefault(id(layouts), len(self.layouts))
        if n == len(self.layouts):
            self.layouts.append(layouts)
        return n

    def of_uses(self, a: UseDef, candidate_ids: Ints, distinct: Sequence[CandidateSet]) -> tuple[Ints, Ints]:
        """(tensors,) the number of the layouts in which each is produced; (uses,) in which each is read."""
        flat: tuple[list[int], list[int]] = ([], [])
        begins: tuple[list[int], list[int]] = ([], [])
        for s in distinct:
            for out, begin, tensors in zip(flat, begins, (s.results, s.operands), strict=True):
                begin.append(len(out))
                out += [self.number(t) for t in tensors]
        results, operands = (np.array(x, dtype=np.int64) for x in flat)
        first_result, first_operand = (np.array(x, dtype=np.int64)[candidate_ids] for x in begins)
        return (
            results[first_result[a.def_op] + a.def_result],
            operands[first_operand[a.use_op] + a.use_operand],
        )


class _Reads(NamedTuple):
    """The uses that need an edge, tensor by tensor: those of tensor t from `begin[t]` to `begin[t + 1]`."""

    tensor: Ints
    reader: Ints
    operand: Ints
    layouts: Ints
    repeats: Floats
    scope: Ints
    duplicates: list[tuple[int, ...]]
    begin: Ints


def _reads_with_edges(
    program: Program, operand_layouts: Ints, counts: Floats, numbering: _LayoutNumbering
) -> _Reads:
    a = program.use_def
    order, _ = a.uses_by_tensor
    keep, duplicates = _duplicate_reads(
        a.use_tensor[order],
        a.use_op[order],
        program.scopes.use_scope[order],
        operand_layouts[order],
        numbering.layouts,
    )
    order = order[keep]
    tensor = a.use_tensor[order]
    begin = np.concatenate([[0], np.cumsum(np.bincount(tensor, minlength=len(a.def_op)))])
    return _Reads(
        tensor, a.use_op[order], a.use_operand[order], operand_layouts[order], counts[order],
        program.scopes.use_scope[order], duplicates, begin,
    )  # fmt: skip


def _duplicate_reads(
    tensor: Ints, reader: Ints, scope: Ints, layouts: Ints, numbered: Sequence[TensorLayouts]
) -> tuple[Bools, list[tuple[int, ...]]]:
    """For uses tensor by tensor: which need an edge, and the layouts of earlier operands of the reader in that scope.

    An operand that always has the layout of an earlier one (`x * x`) needs no edge.
    """
    keep = np.ones(len(tensor), dtype=bool)
    duplicates: list[tuple[int, ...]] = [()] * len(tensor)
    same = (np.diff(tensor) == 0) & (np.diff(reader) == 0)
    for k in (1 + np.flatnonzero(same)).tolist():
        earlier: list[int] = []
        j = k - 1
        while j >= 0 and reader[j] == reader[k] and tensor[j] == tensor[k]:
            if scope[j] == scope[k]:
                c, d = numbered[layouts[j]], numbered[layouts[k]]
                if c is d or (c.layouts == d.layouts and np.array_equal(c.of_state, d.of_state)):
                    keep[k] = False
                    break
                earlier.append(int(layouts[j]))
            j -= 1
        duplicates[k] = tuple(sorted(set(earlier)))
    return keep, [d for d, kept in zip(duplicates, keep.tolist(), strict=True) if kept]


def _sharing_scope_bits(tensor: Ints, scope: Ints, num_readers: Ints) -> tuple[Ints, Ints]:
    """For each read its scope's number among those with several readers of the tensor (-1), and the readers there.

    Only tensors with three readers or more have such scopes, and each at most `MAX_SHARING_SCOPES`. `num_readers` is
    that of each tensor.
    """
    num_scopes = 1 + int(scope.max(initial=0))
    pairs, pair_of_read, sizes = np.unique(
        tensor * num_scopes + scope, return_inverse=True, return_counts=True
    )
    tensor_of_pair = pairs // num_scopes
    several = (sizes > 1) & (num_readers[tensor_of_pair] > 2)
    rank = np.cumsum(several) - several
    first = np.zeros(len(num_readers), dtype=np.int64)
    first[tensor_of_pair[::-1]] = rank[::-1]  # the last written is the first of each tensor
    bit = rank - first[tensor_of_pair]
    return (
        np.where(several & (bit < MAX_SHARING_SCOPES), bit, -1)[pair_of_read],
        np.where(several, sizes, 1)[pair_of_read],
    )


def _distinct_sharing_scopes(
    shared: Ints, begin: Ints, bit: Ints, ratio: Floats, available: Bools, num_tensors: int
) -> tuple[tuple[SharingScopes, ...], Ints]:
    """The distinct `SharingScopes`, and the number of each tensor's; 0 is the empty one."""
    ids: dict[SharingScopes, int] = {(): 0}
    of_tensor = np.zeros(num_tensors, dtype=np.int64)
    bits, ratios, availables = bit.tolist(), ratio.tolist(), available.tolist()
    for t in shared[np.add.reduceat(bit >= 0, begin[shared]) > 0].tolist() if len(shared) else []:
        by_bit = {bits[k]: (ratios[k], availables[k]) for k in range(begin[t], begin[t + 1]) if bits[k] >= 0}
        scopes = tuple(by_bit[k] for k in sorted(by_bit))
        of_tensor[t] = ids.setdefault(scopes, len(ids))
    return tuple(ids), of_tensor


def _build_relays(
    shared: Ints,
    produced: Ints,
    read: Ints,
    begin: Ints,
    layouts: Sequence[TensorLayouts],
    bit: Ints,
    never_partial: frozenset[int],
) -> dict[int, Relay]:
    """The relay of each tensor with several readers; one object for all that are equal.

    `produced` and `read` are numbers of `layouts`, by tensor and by read. `never_partial` are tensors that enter a rule
    of derivatives: those are never stored as partial sums.
    """
    by_layouts: dict[tuple, Relay] = {}
    interned: dict[tuple, Relay] = {}
    relays: dict[int, Relay] = {}
    reads, begins, makers, bits = read.tolist(), begin.tolist(), produced.tolist(), bit.tolist()
    for t in shared.tolist():
        of_t = slice(begins[t], begins[t + 1])
        key = (makers[t], *reads[of_t], *bits[of_t], t in never_partial)
        relay = by_layouts.get(key)
        if relay is None:
            relay = build_relay(
                layouts[makers[t]], [layouts[c] for c in reads[of_t]], bits[of_t], t in never_partial
            )
            arrays = (x.tobytes() for x in (relay.of_state, relay.second_copy, relay.second_copy_scopes))
            relay = by_layouts[key] = interned.setdefault((relay.layouts, *arrays), relay)
        relays[t] = relay
    return relays


def build_relay(
    produced: TensorLayouts, read: Sequence[TensorLayouts], bits: Sequence[int], no_partial_sums: bool
) -> Relay:
    """The relay of a tensor.

    Arguments:

    - `produced`, `read`: the layouts in which it is produced and read.
    - `bits`: for each reader the number of its scope among those with several readers, -1 for the others.
    - `no_partial_sums`: never store it as a partial sum.
    """
    distinct: dict[Layout, None] = {}
    for layout in produced.layouts:
        distinct.setdefault(layout.without_partial())
    for c in read:
        for layout in c.layouts:
            if not (no_partial_sums and layout.partial):
                distinct.setdefault(layout)
    stored = tuple(distinct)
    states = [(k, -1, 0) for k in range(len(stored))]
    masks = sorted({m for b in set(bits) - {-1} for m in (1 << b, (2 << max(bits)) - 1)})
    for mask in masks:
        sharing = [c for c, b in zip(read, bits, strict=True) if b >= 0 and mask >> b & 1]
        offers = Counter(layout for c in sharing for layout in c.layouts)
        offers.update(produced.layouts)
        copies = [p for p, layout in enumerate(stored) if not layout.partial and offers[layout] > 1]
        states += [
            (k, p, mask) for k, a in enumerate(stored) for p in copies
            if not is_local_slice_of(a, stored[p]) and not is_local_slice_of(stored[p], a)
        ]  # fmt: skip
    return Relay(stored, *np.array(states, dtype=np.int64).T.copy())
