"""A pool of interned cost tables and memoised min-plus operations on them, with the dead-end elimination criterion.

A table is interned by content and named by a number; an operation is memoised by the numbers of its operands, so
equal layers share one computation. That requires equal tables to be equal to the last bit, which sums of floats taken
in different orders are not. So all costs are first rounded to multiples of one quantum (a power of two, about 2**-60
of the network's largest conceivable cost): sums and differences of such numbers are exact, ties are real ties, and a
periodic network has periodic tables.

Example: an edge table [[3, 5], [4, 6]] is normalised to row minima [3, 4], then column minima [0, 2], and nothing is
left: the edge was separable and its table moves into the unary tables.

All tables are nonnegative after normalisation; `inf` is forbidden and never meets `-inf`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jshard._core.arrays import Floats, Ints
from jshard._search.cost_network import ArrayPool, CostNetwork
from jshard._search.exact.min_plus import BOOLEAN_ENTRIES, SPARSE_SHARE, min_plus, min_plus_of_constraints


ALL_PAIRS_STATES = 32  # states up to which dominance compares all pairs of states at once
SPARSE_ENTRIES = 20_000  # of a table below which its share of finite entries does not matter
# What the pool's work counts, in entries of `effort.py`: fitted to the seconds of reductions of small networks.
PER_TABLE = 2000.0
PER_TABLE_ENTRY, PER_JOINT_ENTRY, PER_DIFFERENCE = 0.2, 1 / 64, 0.1
DIFFERENCE_ENTRIES = 130_000  # differences of table rows computed at once: they stay in a core's cache
_FORBIDDEN = 1e300  # in place of inf where tables are subtracted, so that forbidden less forbidden is 0
NONE = -1  # "no table": zero, or nothing to do


def _largest_entries(tables: Sequence[Floats], uses: Ints) -> float:
    """The sum, over the uses of some tables, of their largest finite entries."""
    largest = np.array([float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables] or [0.0])
    return float(largest[uses].sum()) if len(uses) else 0.0


def largest_of_edges(network: CostNetwork) -> float:
    """The sum of every edge's largest finite entry."""
    return _largest_entries(network.pairwise, network.edge_table)


def quantum(network: CostNetwork, of_edges: float | None = None) -> float:
    """The grid on which costs are exact: about 2**-60 of the sum of every table's largest finite entry.

    `of_edges`: what `largest_of_edges` says, where that is known.
    """
    total = _largest_entries(network.unary, network.node_table)
    total += largest_of_edges(network) if of_edges is None else of_edges
    return 2.0 ** (np.ceil(np.log2(total)) - 60) if 0 < total < np.inf else 1.0


class EdgeParts(NamedTuple):
    """A normalised edge table (row and column minima 0), its transpose, and the minima; NONE for a table of zeros."""

    table: int
    transposed: int
    row_minima: int
    column_minima: int


class TablePool:
    """The pool and its memos. Methods take and return table numbers; a subset is the number of an index array."""

    def __init__(self, grid: float) -> None:
        self.grid = grid
        self.pool = ArrayPool()
        self.arrays = self.pool.arrays
        self.subsets = ArrayPool()  # index arrays: which states are left, or a map of states
        self.num_products = 0  # distinct min-plus products computed, for tests and reports
        self.work = 0.0  # entries that operations went through since `take_work`
        # Memos that the inner loops of `reduce` look up themselves.
        self.known_unary_sums: dict[tuple[int, int], tuple[int, float]] = {}
        self.known_feasible: dict[int, int] = {}
        self.known_eliminations: dict[tuple[int, int, int, int], EdgeParts] = {}
        self.known_restricted_edges: dict[tuple[int, int], EdgeParts] = {}
        self.not_functional: set[int] = set()  # edges that are known not to be a function either way
        self._quantized: tuple[tuple[Floats, ...], list[int]] = (
            (),
            [],
        )  # tables seen last, and their numbers
        self._transpose: dict[int, int] = {}
        self._pairwise_sum: dict[tuple[int, int], int] = {}
        self._normal: dict[int, tuple[int, int, int]] = {}
        self._normal_sum: dict[tuple[int, int], EdgeParts] = {}
        self._restricted_unary: dict[tuple[int, int], tuple[int, float]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._composition: dict[tuple[int, int], int] = {}
        self._hard_constraint: dict[int, bool] = {}
        self._positions: dict[int, dict[int, int]] = {}
        self._functional: dict[int, int] = {}
        self._decides: dict[int, bool] = {}
        self._projection: dict[tuple[int, int], int] = {}
        self._product: dict[tuple[int, int, int], int] = {}
        self._undominated: dict[tuple, int] = {}
        self._largest_excess: dict[int, Floats] = {}
        self._margin: dict[tuple[int, ...], Floats] = {}

    def table_id(self, table: Floats) -> int:
        """Intern a table that is not changed any more, without negative zeros (sums and minima of such have none)."""
        self.work += PER_TABLE + PER_TABLE_ENTRY * table.size
        return self.pool(np.ascontiguousarray(table))

    def quantized_table_id(self, table: Floats) -> int:
        """Intern a table after rounding it to the grid."""
        return self.table_id(np.round(table / self.grid) * self.grid + 0.0)

    def quantized_table_ids(self, tables: tuple[Floats, ...]) -> list[int]:
        """Intern a network's tables after rounding; networks under different prices have their edges' tables in common."""
        if self._quantized[0] is not tables:
            self._quantized = tables, [self.quantized_table_id(t) for t in tables]
        return self._quantized[1]

    def take_work(self) -> float:
        """The entries that operations went through since the last call."""
        work, self.work = self.work, 0.0
        return work

    def transpose(self, e: int) -> int:
        """A pairwise table with rows and columns exchanged."""
        known = self._transpose.get(e)
        if known is None:
            known = self.table_id(self.arrays[e].T)
            self._transpose[e] = known
            self._transpose[known] = e
        return known

    def add_pairwise(self, a: int, b: int) -> int:
        """The sum of two pairwise tables of one orientation."""
        key = (a, b) if a <= b else (b, a)
        known = self._pairwise_sum.get(key)
        if known is None:
            known = self._pairwise_sum[key] = self.table_id(self.arrays[a] + self.arrays[b])
        return known

    def add_unaries(self, u: int, v: int) -> tuple[int, float]:
        """The sum of two unary tables with its minimum taken out: (table, minimum). Infeasible: minimum inf."""
        key = (u, v) if u <= v else (v, u)
        known = self.known_unary_sums.get(key)
        if known is None:
            total = self.arrays[u] + self.arrays[v]
            least = float(total.min())
            known = (u, least) if np.isinf(least) else (self.table_id(total - least), least)
            self.known_unary_sums[key] = known
        return known

    def normalize(self, e: int) -> tuple[int, int, int]:
        """(edge table with row and column minima 0, row minima, column minima), NONE for a table of zeros."""
        known = self._normal.get(e)
        if known is None:
            table = self.arrays[e]
            rows = table.min(axis=1)
            forbidden = np.isinf(rows)
            table = table - np.where(forbidden, 0.0, rows)[:, None]
            table[forbidden] = 0.0  # the unary table forbids them from now on
            columns = table.min(axis=0)
            forbidden = np.isinf(columns)
            table -= np.where(forbidden, 0.0, columns)
            table[:, forbidden] = 0.0
            known = (
                self.table_id(table) if table.any() else NONE,
                self.table_id(rows) if rows.any() else NONE,
                self.table_id(columns) if columns.any() else NONE,
            )
            self._normal[e] = known
        return known

    def normalize_sum(self, e: int, other: int) -> EdgeParts:
        """The sum of an edge table and another one between the same variables (or NONE), normalised."""
        known = self._normal_sum.get((e, other))
        if known is None:
            table, rows, columns = self.normalize(e if other == NONE else self.add_pairwise(other, e))
            transposed = NONE if table == NONE else self.transpose(table)
            known = self._normal_sum[e, other] = EdgeParts(table, transposed, rows, columns)
        return known

    def eliminate_middle(self, left: int, u: int, right: int, other: int) -> EdgeParts:
        """The edge that eliminating a variable between two others leaves, added to theirs (or NONE)."""
        key = (left, u, right, other)
        known = self.known_eliminations.get(key)
        if known is None:
            product = self.min_plus_product(left, u, right)
            known = self.known_eliminations[key] = self.normalize_sum(product, other)
        return known

    def restrict_edge(self, e: int, subset: int) -> EdgeParts:
        """A subset of an edge table's rows, normalised."""
        known = self.known_restricted_edges.get((e, subset))
        if known is None:
            parts = self.normalize_sum(self.take_rows(e, subset), NONE)
            known = self.known_restricted_edges[e, subset] = parts
        return known

    def restrict_unary(self, u: int, subset: int) -> tuple[int, float]:
        """A subset of a unary table's states with the minimum taken out: (table, minimum)."""
        known = self._restricted_unary.get((u, subset))
        if known is None:
            zero = self.table_id(np.zeros(len(self.subsets.arrays[subset])))
            known = self._restricted_unary[u, subset] = self.add_unaries(self.take_rows(u, subset), zero)
        return known

    def feasible_states(self, u: int) -> int:
        """The subset of finite states, or NONE when all are."""
        known = self.known_feasible.get(u)
        if known is None:
            finite = np.isfinite(self.arrays[u])
            known = NONE if finite.all() else self.subsets(np.flatnonzero(finite))
            self.known_feasible[u] = known
        return known

    def take_rows(self, t: int, subset: int) -> int:
        """A unary table's states, or an edge table's rows, selected or rearranged by an index array."""
        key = (t, subset)
        known = self._rows.get(key)
        if known is None:
            known = self.table_id(self.arrays[t][self.subsets.arrays[subset]])
            self._rows[key] = known
        return known

    def compose_subsets(self, outer: int, inner: int) -> int:
        """The subset `outer[inner]`."""
        key = (outer, inner)
        known = self._composition.get(key)
        if known is None:
            selected: Ints = self.subsets.arrays[outer][self.subsets.arrays[inner]]
            known = self._composition[key] = self.subsets(selected)
        return known

    def subset_positions(self, subset: int) -> dict[int, int]:
        """Original state -> position within the subset."""
        known = self._positions.get(subset)
        if known is None:
            known = {int(s): p for p, s in enumerate(self.subsets.arrays[subset])}
            self._positions[subset] = known
        return known

    def functional_map(self, e: int) -> int:
        """The one allowed column of each row (a subset number); NONE where a row allows several, or rows outnumber
        columns."""
        known = self._functional.get(e)
        if known is None:
            finite = np.isfinite(self.arrays[e])
            known = NONE
            if len(finite) <= finite.shape[1] and (finite.sum(axis=1) == 1).all():
                known = self.subsets(finite.argmax(axis=1))
            self._functional[e] = known
        return known

    def project(self, e: int, u: int) -> int:
        """Eliminate the column variable of an edge: min over j of e[i, j] + u[j]."""
        key = (e, u)
        known = self._projection.get(key)
        if known is None:
            self.num_products += 1
            known = self.table_id((self.arrays[e] + self.arrays[u]).min(axis=1))
            self._projection[key] = known
        return known

    def min_plus_product(self, left: int, u: int, right: int) -> int:
        """Eliminate the variable between two edges: min over x of left[i, x] + u[x] + right[x, j]."""
        key = (left, u, right)
        known = self._product.get(key)
        if known is None:
            self.num_products += 1
            a, costs, b = self.arrays[left], self.arrays[u], self.arrays[right]
            joint = a.size * b.shape[1]
            self.work += PER_JOINT_ENTRY * joint
            if joint > BOOLEAN_ENTRIES and self._is_hard_constraint(left) and self._is_hard_constraint(right):
                product = min_plus_of_constraints(a, costs, b)
            else:
                product = min_plus(a + costs, b, self.grid)
            known = self._product[key] = self.table_id(product)
        return known

    def _is_hard_constraint(self, t: int) -> bool:
        """Whether a table is a hard constraint: its entries are 0 or inf."""
        known = self._hard_constraint.get(t)
        if known is None:
            table = self.arrays[t]
            known = self._hard_constraint[t] = bool(((table == 0) | (table == np.inf)).all())
        return known

    def decides(self, e: int) -> bool:
        """Whether each column of an edge table allows few of its rows: products over the rows are then cheap.

        Small tables are not asked, whose products cost little in any order.
        """
        known = self._decides.get(e)
        if known is None:
            table = self.arrays[e]
            most = SPARSE_SHARE * len(table)
            known = table.size > SPARSE_ENTRIES and int(np.isfinite(table).sum(axis=0).max()) <= most
            self._decides[e] = known
        return known

    def memory_guard(self, amounts: Floats) -> int:
        """A pseudo edge table for `undominated_states` that orders states by bytes; NONE when all hold as much.

        Column c is inf for the states that hold more than the c-th distinct amount, so that a state never dominates
        one that holds less.
        """
        distinct = np.unique(amounts)
        if len(distinct) == 1:
            return NONE
        return self.table_id(np.where(amounts[:, None] > distinct[None, :], np.inf, 0.0))

    def restrict_guards(self, guards: tuple[int, ...], subset: int) -> tuple[int, ...]:
        """Guards for a subset (or rearrangement) of the states, without those that no longer tell states apart."""
        restricted = {self.take_rows(g, subset) for g in guards}
        return tuple(sorted(g for g in restricted if not self._rows_are_equal(g)))

    def _rows_are_equal(self, guard: int) -> bool:
        table = self.arrays[guard]
        return bool((np.isinf(table) == np.isinf(table[0])).all())

    def copy(self) -> TablePool:
        """An independent pool with the same contents; what is added to it does not stay in this one."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | set | ArrayPool):
                setattr(other, name, value.copy())
        other.arrays, other.work = other.pool.arrays, 0.0
        return other

    def undominated_states(self, u: int, edges: tuple[int, ...]) -> int:
        """The states that no other state dominates (dead-end elimination), or NONE for all.

        State b is dominated when some a has u[a] + sum over edges of max_j(e[a, j] - e[b, j]) <= u[b] (Goldstein
        1994): replacing b by a never costs more, whatever the neighbours' states. The relation is transitive, so all
        such b are removed at once.

        Arguments:

        - `u`: the variable's unary table.
        - `edges`: its edges' tables, its states as rows; sorted and normalised (row minima 0, which makes every term
            nonnegative).
        """
        key = (u, edges)
        known = self._undominated.get(key)
        if known is None:
            k = len(self.arrays[u])
            dominates = self._compare_all(u, edges) if k <= ALL_PAIRS_STATES else self._compare_some(u, edges)
            known = NONE if dominates is None else self._without_dominated(dominates)
            self._undominated[key] = known
        return known

    def dominance_margin(self, edges: tuple[int, ...]) -> Floats:
        """[a, b]: the sum over the edges of max_j(e[a, j] - e[b, j])."""
        known = self._margin.get(edges)
        if known is None:
            terms = []
            for e in edges:
                excess = self._largest_excess.get(e)
                if excess is None:
                    table = _with_finite_entries(self.arrays[e])
                    excess = self._largest_excess[e] = (table[:, None] - table[None]).max(axis=2)
                terms.append(excess)
            known = self._margin[edges] = sum(terms, np.zeros(()))
        return known

    def _compare_all(self, u: int, edges: tuple[int, ...]) -> NDArray[np.bool_]:
        """[a, b]: whether a dominates b. The margin is memoised apart from the unary table, which changes more."""
        unary = self.arrays[u]
        dominates = unary[None, :] - unary[:, None] >= self.dominance_margin(edges)
        np.fill_diagonal(dominates, False)
        return dominates

    def _compare_some(self, u: int, edges: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """The same for many states: the full criterion only for pairs that pass a cheap necessary test; None for no
        pair."""
        unary = self.arrays[u]
        self.work += PER_DIFFERENCE * len(unary) ** 2 * (1 + len(edges))
        slack = unary[None, :] - unary[:, None]  # [a, b]
        np.fill_diagonal(slack, -1.0)
        if not (slack >= 0).any():
            return None
        multiplicity: dict[int, int] = {}
        for e in edges:
            multiplicity[e] = multiplicity.get(e, 0) + 1
        for e, times in multiplicity.items():
            # At the column where b costs least (0) a costs e[a, that column].
            table = self.arrays[e]
            slack -= times * table[:, table.argmin(axis=1)]
            if not (slack >= 0).any():
                return None
        a, b = np.nonzero(slack >= 0)
        left = unary[b] - unary[a]
        for e, times in multiplicity.items():
            self.work += PER_DIFFERENCE * len(a) * self.arrays[e].shape[1]
            left = left - times * self._excess_of_pairs(self.arrays[e], a, b)
            passes = left >= 0
            a, b, left = a[passes], b[passes], left[passes]
            if not len(a):
                return None
        dominates = np.zeros((len(unary), len(unary)), dtype=bool)
        dominates[a, b] = True
        return dominates

    @staticmethod
    def _excess_of_pairs(table: Floats, a: Ints, b: Ints) -> Floats:
        """max_j(table[a, j] - table[b, j]) of each pair of rows."""
        excess, table = np.empty(len(a)), _with_finite_entries(table)
        step = max(1, DIFFERENCE_ENTRIES // table.shape[1])
        for at in range(0, len(a), step):
            part = slice(at, at + step)
            np.maximum.reduce(table[a[part]] - table[b[part]], axis=1, out=excess[part])
        return excess

    def _without_dominated(self, dominates: NDArray[np.bool_]) -> int:
        """The subset of states that are not dominated, or NONE for all; of equal states the first is kept."""
        if not dominates.any():
            return NONE
        earlier = np.tri(len(dominates), k=-1, dtype=bool).T
        return self.subsets(np.flatnonzero(~(dominates & (~dominates.T | earlier)).any(axis=0)))


def _with_finite_entries(table: Floats) -> Floats:
    """A normalised table for differences of its rows, whose maxima are 0 or more: what is forbidden in both adds nothing."""
    return np.where(np.isinf(table), _FORBIDDEN, table)
