"""Cost tables by number, with every operation on them remembered.

Problem.  126 equal layers ask for the same small table computations 126 times.

Idea.  A table is interned by content; an operation's key is the numbers of its operands, so equal
layers share one computation.  That only works if equal things are equal to the last bit, and sums of
floats taken in different orders are not.  So all costs are first rounded to multiples of one quantum
(a power of two, about 2**-60 of the network's largest conceivable cost): sums and differences of such
numbers are exact, ties are real ties, and a periodic chain really becomes periodic.

Worked case.  An edge table [[3, 5], [4, 6]] is normalised to rows' minima [3, 4], then columns' minima
[0, 2], and nothing is left: the edge was separable and disappears into the unaries.

All tables are nonnegative after normalisation; ``inf`` is forbidden and never meets ``-inf``.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from jshard._search.cost_network import ArrayPool, CostNetwork, Floats, Ints


SMALL = 32  # states up to which all pairs of states are compared at once
NONE = -1  # "no table": zero, or nothing to do


def quantum(network: CostNetwork) -> float:
    """The grid on which costs are exact: 2**-60 of the sum of the largest finite entries."""

    def largest(table: Floats) -> float:
        finite = np.abs(table[np.isfinite(table)])
        return float(finite.max(initial=0.0))

    unary = np.array([largest(t) for t in network.unary] or [0.0])
    pairwise = np.array([largest(t) for t in network.pairwise] or [0.0])
    total = float(unary[network.node_table].sum()) if network.size else 0.0
    total += float(pairwise[network.edge_table].sum()) if len(network.edge_table) else 0.0
    return 2.0 ** (np.ceil(np.log2(total)) - 60) if 0 < total < np.inf else 1.0


class TablePool:
    """The pool and its memos.  Methods take and give table numbers."""

    def __init__(self, grid: float) -> None:
        self.grid = grid
        self.pool = ArrayPool()
        self.arrays = self.pool.arrays
        self.subsets = ArrayPool()  # index arrays: which states are still there
        self.num_products = 0  # distinct min-plus products computed, for tests and reports
        self._transpose: dict[int, int] = {}
        self._add: dict[tuple[int, int], int] = {}
        self.known_unary_sums: dict[tuple[int, int], tuple[int, float]] = {}
        self._normal: dict[int, tuple[int, int, int]] = {}
        self.known_feasible: dict[int, int] = {}
        self._rows: dict[tuple[int, int], int] = {}
        # Whole steps of the reductions, in one look.
        self._joined: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self.known_eliminations: dict[tuple[int, int, int, int], tuple[int, int, int, int]] = {}
        self.known_restricted_edges: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self._cut: dict[tuple[int, int], tuple[int, float]] = {}
        self._compose: dict[tuple[int, int], int] = {}
        self._inverse: dict[int, dict[int, int]] = {}
        self._function: dict[int, int] = {}
        self._project: dict[tuple[int, int], int] = {}
        self._product: dict[tuple[int, int, int], int] = {}
        self._dominated: dict[tuple, int] = {}
        self._worst: dict[int, Floats] = {}
        self._objection: dict[tuple[int, ...], Floats] = {}
        self.not_functional: set[int] = set()  # edges known not to decide either end

    def table_id(self, table: Floats) -> int:
        """Intern a table that nobody changes any more, without negative zeros (as sums and minima of such are)."""
        return self.pool(np.ascontiguousarray(table))

    def quantized_table_id(self, table: Floats) -> int:
        """Intern a table after rounding to the grid (exact when it is on the grid already)."""
        return self.table_id(np.round(table / self.grid) * self.grid + 0.0)

    def transpose(self, e: int) -> int:
        found = self._transpose.get(e)
        if found is None:
            found = self.table_id(self.arrays[e].T)
            self._transpose[e] = found
            self._transpose[found] = e
        return found

    def add_pairwise(self, a: int, b: int) -> int:
        """Sum of two pairwise tables of one orientation."""
        key = (a, b) if a <= b else (b, a)
        found = self._add.get(key)
        if found is None:
            found = self._add[key] = self.table_id(self.arrays[a] + self.arrays[b])
        return found

    def add_unaries(self, u: int, v: int) -> tuple[int, float]:
        """Sum of two unaries with its minimum taken out: (table, minimum); minimum inf = infeasible."""
        key = (u, v) if u <= v else (v, u)
        found = self.known_unary_sums.get(key)
        if found is None:
            total = self.arrays[u] + self.arrays[v]
            least = float(total.min())
            found = (u, least) if np.isinf(least) else (self.table_id(total - least), least)
            self.known_unary_sums[key] = found
        return found

    def normalize(self, e: int) -> tuple[int, int, int]:
        """(edge, row minima, column minima), each a table or NONE when zero."""
        found = self._normal.get(e)
        if found is None:
            table = self.arrays[e]
            take_rows = table.min(axis=1)
            dead = np.isinf(take_rows)
            table = table - np.where(dead, 0.0, take_rows)[:, None]
            table[dead] = 0.0  # the unary forbids them from now on
            cols = table.min(axis=0)
            gone = np.isinf(cols)
            table -= np.where(gone, 0.0, cols)
            table[:, gone] = 0.0
            found = (
                self.table_id(table) if table.any() else NONE,
                self.table_id(take_rows) if take_rows.any() else NONE,
                self.table_id(cols) if cols.any() else NONE,
            )
            self._normal[e] = found
        return found

    def normalize_sum(self, e: int, old: int) -> tuple[int, int, int, int]:
        """An edge put beside an old one (or NONE): what is left of it, its transpose, row and column minima."""
        found = self._joined.get((e, old))
        if found is None:
            table, rows, cols = self.normalize(e if old == NONE else self.add_pairwise(old, e))
            back = NONE if table == NONE else self.transpose(table)
            found = self._joined[e, old] = table, back, rows, cols
        return found

    def eliminate_middle(self, left: int, u: int, right: int, old: int) -> tuple[int, int, int, int]:
        """The edge that a variable between two others leaves, put beside the old one between them."""
        key = (left, u, right, old)
        found = self.known_eliminations.get(key)
        if found is None:
            found = self.known_eliminations[key] = self.normalize_sum(
                self.min_plus_product(left, u, right), old
            )
        return found

    def restrict_edge(self, e: int, subset: int) -> tuple[int, int, int, int]:
        """An edge with only some of its rows."""
        found = self.known_restricted_edges.get((e, subset))
        if found is None:
            found = self.known_restricted_edges[e, subset] = self.normalize_sum(self.rows(e, subset), NONE)
        return found

    def restrict_unary(self, u: int, subset: int) -> tuple[int, float]:
        """A unary with only some of its states, and its minimum, taken out."""
        found = self._cut.get((u, subset))
        if found is None:
            zero = self.table_id(np.zeros(len(self.subsets.arrays[subset])))
            found = self._cut[u, subset] = self.add_unaries(self.rows(u, subset), zero)
        return found

    def feasible_states(self, u: int) -> int:
        """The subset of finite states, or NONE when all are."""
        found = self.known_feasible.get(u)
        if found is None:
            finite = np.isfinite(self.arrays[u])
            found = NONE if finite.all() else self.subsets(np.flatnonzero(finite))
            self.known_feasible[u] = found
        return found

    def rows(self, t: int, subset: int) -> int:
        """A unary's states, or an edge's rows, cut down to a subset (or rearranged by any index array)."""
        key = (t, subset)
        found = self._rows.get(key)
        if found is None:
            found = self.table_id(self.arrays[t][self.subsets.arrays[subset]])
            self._rows[key] = found
        return found

    def compose_subsets(self, outer: int, inner: int) -> int:
        key = (outer, inner)
        found = self._compose.get(key)
        if found is None:
            chosen: Ints = self.subsets.arrays[outer][self.subsets.arrays[inner]]
            found = self._compose[key] = self.subsets(chosen)
        return found

    def subset_positions(self, subset: int) -> dict[int, int]:
        """Original state -> position within the subset."""
        found = self._inverse.get(subset)
        if found is None:
            found = {int(s): p for p, s in enumerate(self.subsets.arrays[subset])}
            self._inverse[subset] = found
        return found

    def functional_map(self, e: int) -> int:
        """The one allowed column per row (a subset number) when every row allows just one, and the
        rows are not more than the columns; else NONE."""
        found = self._function.get(e)
        if found is None:
            finite = np.isfinite(self.arrays[e])
            found = NONE
            if len(finite) <= finite.shape[1] and (finite.sum(axis=1) == 1).all():
                found = self.subsets(finite.argmax(axis=1))
            self._function[e] = found
        return found

    def project(self, e: int, u: int) -> int:
        """Eliminate the column variable of an edge: min over j of e[i, j] + u[j]."""
        key = (e, u)
        found = self._project.get(key)
        if found is None:
            self.num_products += 1
            found = self.table_id((self.arrays[e] + self.arrays[u]).min(axis=1))
            self._project[key] = found
        return found

    def min_plus_product(self, left: int, u: int, right: int) -> int:
        """Eliminate the middle variable: min over x of left[i, x] + u[x] + right[x, j]."""
        key = (left, u, right)
        found = self._product.get(key)
        if found is None:
            self.num_products += 1
            a = self.arrays[left] + self.arrays[u]
            b = self.arrays[right]
            if a.size * b.shape[1] <= 20_000:
                out = (a[:, :, None] + b[None]).min(axis=1)
            else:
                out = a[:, 0, None] + b[0]
                work = np.empty_like(out)
                for x in range(1, len(b)):
                    np.add(a[:, x, None], b[x], out=work)
                    np.minimum(out, work, out=out)
            found = self._product[key] = self.table_id(out)
        return found

    def memory_guard(self, held: Floats) -> int:
        """A pseudo edge for :meth:`dominated` that says who holds more: column c is inf for the states
        that hold more than the c-th distinct amount, so a state that holds more never dominates."""
        amounts = np.unique(held)
        if len(amounts) == 1:
            return NONE
        return self.table_id(np.where(held[:, None] > amounts[None, :], np.inf, 0.0))

    def restrict_guards(self, marks: tuple[int, ...], subset: int) -> tuple[int, ...]:
        """Marks for a subset (or rearrangement) of states; those that no longer tell anything go."""
        cut = {self.rows(m, subset) for m in marks}
        return tuple(sorted(m for m in cut if not self._flat(m)))

    def _flat(self, m: int) -> bool:
        table = self.arrays[m]
        return bool((np.isinf(table) == np.isinf(table[0])).all())

    def copy(self) -> TablePool:
        """An independent pool with the same contents, to be thrown away with what it will gather."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, value.copy())
            elif isinstance(value, set | ArrayPool):
                setattr(other, name, value.copy())
        other.arrays = other.pool.arrays
        return other

    def undominated_states(self, u: int, edges: tuple[int, ...]) -> int:
        """The states worth keeping given all incident tables (rows = this variable), or NONE for all.

        b is dropped when some a has u[a] + sum max_j(e[a, j] - e[b, j]) <= u[b]: swapping b for a never
        costs more, whatever the neighbours do.  The relation is transitive, so all such b go at once.
        ``edges`` must be sorted and normalised (row minima 0, which makes every term nonnegative).
        """
        key = (u, edges)
        found = self._dominated.get(key)
        if found is None:
            found = self._dominated[key] = self._dominate(u, edges)
        return found

    def dominance_margin(self, edges: tuple[int, ...]) -> Floats:
        """[a, b]: the sum over the edges of max_j(e[a, j] - e[b, j])."""
        found = self._objection.get(edges)
        if found is None:
            terms = []
            for e in edges:
                worst = self._worst.get(e)
                if worst is None:
                    table = self.arrays[e]
                    with np.errstate(invalid="ignore"):  # inf - inf: forbidden for both, no objection
                        worst = np.fmax.reduce(table[:, None] - table[None], axis=2)
                    self._worst[e] = worst
                terms.append(worst)
            with np.errstate(invalid="ignore"):
                found = self._objection[edges] = sum(terms, np.zeros(()))
        return found

    def _dominate(self, u: int, edges: tuple[int, ...]) -> int:
        unary = self.arrays[u]
        k = len(unary)
        if k <= SMALL:  # the sum over the edges is remembered apart from the unary, which changes more
            over = unary[None, :] - unary[:, None] >= self.dominance_margin(edges)
            np.fill_diagonal(over, False)
            return self._undominated(over)
        slack = unary[None, :] - unary[:, None]  # [a, b]
        np.fill_diagonal(slack, -1.0)
        if not (slack >= 0).any():
            return NONE
        counted: dict[int, int] = {}
        for e in edges:
            counted[e] = counted.get(e, 0) + 1
        for e, times in counted.items():
            # A cheap necessary test: at the column where b is best (0), a costs e[a, that column].
            table = self.arrays[e]
            slack -= times * table[:, table.argmin(axis=1)]
            if not (slack >= 0).any():
                return NONE
        a, b = np.nonzero(slack >= 0)
        left = unary[b] - unary[a]
        for e, times in counted.items():
            table = self.arrays[e]
            worst = np.empty(len(a))
            step = max(1, 1_000_000 // table.shape[1])
            with np.errstate(invalid="ignore"):  # inf - inf: both forbidden there, no objection
                for at in range(0, len(a), step):
                    part = slice(at, at + step)
                    np.fmax.reduce(table[a[part]] - table[b[part]], axis=1, out=worst[part])
            left = left - times * worst
            fine = left >= 0
            a, b, left = a[fine], b[fine], left[fine]
            if not len(a):
                return NONE
        over = np.zeros((k, k), dtype=bool)
        over[a, b] = True
        return self._undominated(over)

    def _undominated(self, over: NDArray[np.bool_]) -> int:
        if not over.any():
            return NONE
        # Equals dominate each other: keep the one with the smaller number.
        earlier = np.tri(len(over), k=-1, dtype=bool).T
        return self.subsets(np.flatnonzero(~(over & (~over.T | earlier)).any(axis=0)))
