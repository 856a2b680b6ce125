"""Candidates of every operator, and the layouts they imply for its operands and results.

Thousands of operators share a few hundred classes, so candidate sets are interned: two operators with the same primitive,
shapes, parameters and pins have the same `CandidateSet` object, and every table built from it is built once.
Inputs and outputs have no rule: their candidates are simply the layouts a tensor can have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jshard._core.errors import SearchError
from jshard._core.layout import Layout, MeshAxes
from jshard._program.graph import Literal, Operator, Program
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView, RuleEntry
from jshard._rules.rule import NONE, Candidate, Rule, candidate_codes, layouts_of_candidates


@dataclasses.dataclass(frozen=True, eq=False)
class TensorLayouts:
    """One operand or result of a candidate set: its distinct layouts, and which of them each state has."""

    layouts: tuple[Layout, ...]
    of_state: np.ndarray  # (states,) a number of an entry of `layouts`
    _num_shards: dict[MeshAxes, np.ndarray] = dataclasses.field(
        default_factory=dict, kw_only=True, repr=False
    )

    def layout(self, state: int) -> Layout:
        """The layout in a state."""
        return self.layouts[int(self.of_state[state])]

    def num_shards(self, mesh: MeshAxes) -> np.ndarray:
        """(states,) the number of distinct shards."""
        if mesh not in self._num_shards:
            self._num_shards[mesh] = np.array([layout.pieces(mesh) for layout in self.layouts])[self.of_state]
        return self._num_shards[mesh]


@dataclasses.dataclass(frozen=True, eq=False)
class CandidateSet:
    """The candidates of an operator, which are the states of its variable; shared by all operators of its class."""

    op: OpView | None
    rule: Rule
    entry: RuleEntry | None
    candidates: tuple[Candidate | None, ...]  # None for inputs and outputs
    axis_codes: np.ndarray  # (states, mesh axes) those of the candidates
    operands: tuple[TensorLayouts, ...]
    results: tuple[TensorLayouts, ...]

    def __len__(self) -> int:
        return len(self.candidates)

    def index_of(self, axis_codes: tuple[int, ...]) -> int:
        """Number of the candidate with these codes."""
        return next(k for k, c in enumerate(self.candidates) if c is not None and c.axis_codes == axis_codes)


LayoutTest = Callable[[Layout], bool]

PinOfSide = tuple[str, int, Hashable, LayoutTest]
"""A pin of an operator: ("operand" or "result", index, key that identifies the pin, test of layouts)."""


class _RuleCandidates(NamedTuple):
    """What a rule determines of a candidate set."""

    candidates: tuple[Candidate | None, ...]
    axis_codes: np.ndarray
    operands: tuple[TensorLayouts, ...]
    results: tuple[TensorLayouts, ...]


class CandidateCache:
    """Builds candidate sets, one for each distinct operator class and pins; a cache serves one planning."""

    def __init__(self, program: Program, mesh: MeshAxes):
        self.program, self.mesh = program, mesh
        self._sets: dict[Hashable, CandidateSet] = {}
        self._rules: dict[Hashable, tuple[OpView, Rule, RuleEntry | None]] = {}
        self._by_rule: dict[Rule, _RuleCandidates] = {}
        self._tensor_layouts: dict[Hashable, TensorLayouts] = {}
        # Shapes with dtypes by number: these are compared for every operator.
        self._aval_ids: dict[Hashable, int] = dict(program.use_def.aval_ids.items())
        self._aval_of_tensor = program.use_def.aval_id.tolist()

    def _interned(self, layouts: tuple[Layout, ...], of_state: np.ndarray) -> TensorLayouts:
        """One object for all equal layouts: tables of the network are found by its identity."""
        return self._tensor_layouts.setdefault(
            (layouts, of_state.tobytes()), TensorLayouts(layouts, of_state)
        )

    def _aval_id(self, aval: Hashable) -> int:
        return self._aval_ids.setdefault(aval, len(self._aval_ids))

    def candidates_of(self, op: Operator, pins: Sequence[PinOfSide] = ()) -> CandidateSet:
        """The candidates of an operator that satisfy some pins."""
        if op.kind in ("input", "const", "output"):
            return self._endpoint(op, pins)
        class_key = self._class_key(op)
        key = (class_key, tuple((side, i, k) for side, i, k, _ in pins))
        candidates = self._sets.get(key)
        if candidates is None:
            candidates = self._sets[key] = self._apply_pins(op, self._unpinned(op, class_key), pins)
        return candidates

    def _class_key(self, op: Operator) -> Hashable:
        kind = self._aval_of_tensor
        operands = tuple([
            self._aval_id(("literal", a.aval.shape, a.aval.dtype)) if isinstance(a, Literal) else kind[a]
            for a in op.operands
        ])  # fmt: skip
        results = tuple([kind[r] for r in op.results])
        if op.kind != "eqn":
            return (op.primitive, operands, results)
        params: Any = tuple(op.equation.params.items())
        try:
            hash(params)
        except TypeError:
            params = ("equation", id(op.eqn))
        return (op.primitive, operands, results, params)

    def rule_of(self, op: Operator) -> tuple[OpView, Rule, RuleEntry | None]:
        """The operator as its rule sees it, and the rule."""
        key = self._class_key(op)
        if key not in self._rules:
            self._rules[key] = self._look_up_rule(op)
        return self._rules[key]

    def _look_up_rule(self, op: Operator) -> tuple[OpView, Rule, RuleEntry | None]:
        t = self.program.tensors
        view = OpView(
            op.primitive,
            op.equation.params if op.kind == "eqn" else {},
            tuple(a.aval if isinstance(a, Literal) else t[a] for a in op.operands),
            tuple(t[r] for r in op.results),
            tuple(a.value if isinstance(a, Literal) else None for a in op.operands),
        )
        rule, entry = rules_for(view)
        return view, rule, entry

    def _unpinned(self, op: Operator, class_key: Hashable) -> CandidateSet:
        key = (class_key, ())
        if key not in self._sets:
            view, rule, entry = self.rule_of(op)
            if rule not in self._by_rule:
                self._by_rule[rule] = self._of_rule(rule)
            self._sets[key] = CandidateSet(view, rule, entry, *self._by_rule[rule])
        return self._sets[key]

    def _of_rule(self, rule: Rule) -> _RuleCandidates:
        codes = candidate_codes(rule, self.mesh)
        candidates = tuple(map(Candidate, map(tuple, codes.tolist())))
        operands, results = layouts_of_candidates(rule, codes, self.mesh)
        # Tensors of equal dimensions share one list of layouts: it is hashed once.
        interned = {id(t): self._interned(*t) for t in (*operands, *results)}
        return _RuleCandidates(
            candidates,
            codes,
            tuple([interned[id(t)] for t in operands]),
            tuple([interned[id(t)] for t in results]),
        )

    def _apply_pins(self, op: Operator, candidates: CandidateSet, pins: Sequence[PinOfSide]) -> CandidateSet:
        keep = np.ones(len(candidates), dtype=bool)
        for side, i, key, test in pins:
            tensor = (candidates.operands if side == "operand" else candidates.results)[i]
            allowed = np.array([test(layout) for layout in tensor.layouts])
            if not allowed.any():
                raise SearchError(
                    f"no way to run {op.primitive} has its {side} {i} cut as {describe_pin(key)} asks",
                    where=f"{op.module or op.primitive} {op.source}".strip(),
                    fix="pin a cut that the operator's rule allows: " + _allowed_cuts(tensor, self.mesh),
                )
            keep &= allowed[tensor.of_state]
        if not keep.any():
            raise SearchError(
                f"the pins of {op.primitive} contradict each other: "
                + " and ".join(f"{side} {i} {describe_pin(key)}" for side, i, key, _ in pins),
                where=f"{op.module or op.primitive} {op.source}".strip(),
                fix="cut a dimension that two operands share equally in both, or leave one of them None",
            )
        return _restrict(candidates, keep)

    def _endpoint(self, op: Operator, pins: Sequence[PinOfSide]) -> CandidateSet:
        """The layouts of an input, constant or output."""
        is_output = op.kind == "output"
        atom = op.operands[0] if is_output else op.results[0]
        shape = tuple(atom.aval.shape) if isinstance(atom, Literal) else self.program.tensors[atom].shape
        key = ("endpoint", is_output, shape, tuple((side, i, k) for side, i, k, _ in pins))
        if key in self._sets:
            return self._sets[key]
        # An exact spec may order axes as no enumerated layout does; the pin carries that layout itself.
        exact = [k for _, _, k, _ in pins if isinstance(k, Layout)]
        # A pin of pieces does not say which axis is major: that is the search's choice.
        possible = enumerate_layouts(shape, self.mesh, all_orders=bool(pins))
        layouts = exact[:1] or [layout for layout in possible if all(test(layout) for *_, test in pins)]
        if not layouts:
            raise SearchError(
                f"no layout of shape {shape} is cut as {describe_pin(pins[0][2])} asks on the mesh {self.mesh}",
                where=op.name,
                fix="pin a cut that is a product of mesh axes",
            )
        tensor = (_distinct_layouts(layouts),)
        self._sets[key] = CandidateSet(
            op=None,
            rule=Rule(operands=(), results=(), sizes=()),
            entry=None,
            candidates=(None,) * len(layouts),
            axis_codes=np.full((len(layouts), len(self.mesh.names)), NONE),
            operands=tensor if is_output else (),
            results=() if is_output else tensor,
        )
        return self._sets[key]


def _restrict(candidates: CandidateSet, keep: np.ndarray) -> CandidateSet:
    """The candidates of a boolean mask."""
    if keep.all():
        return candidates
    kept = np.flatnonzero(keep)

    def restricted(tensors: tuple[TensorLayouts, ...]) -> tuple[TensorLayouts, ...]:
        return tuple(_distinct_layouts([t.layout(int(k)) for k in kept]) for t in tensors)

    return CandidateSet(
        candidates.op,
        candidates.rule,
        candidates.entry,
        tuple(candidates.candidates[k] for k in kept),
        candidates.axis_codes[kept],
        restricted(candidates.operands),
        restricted(candidates.results),
    )


def enumerate_layouts(shape: tuple[int, ...], mesh: MeshAxes, all_orders: bool = False) -> list[Layout]:
    """Every layout without partial sums that divides `shape`; axes of a dimension in mesh order, or in all orders."""
    out = []
    for dim_of_axis in itertools.product(range(-1, len(shape)), repeat=len(mesh.names)):
        dims = tuple(
            tuple(n for n, d in zip(mesh.names, dim_of_axis, strict=True) if d == k)
            for k in range(len(shape))
        )
        nonempty = all(mesh.size(*d) == 1 or s > 0 for s, d in zip(shape, dims, strict=True))
        if nonempty and Layout(dims).divides(shape, mesh):
            orders = itertools.product(*(itertools.permutations(d) for d in dims)) if all_orders else [dims]
            out += [Layout(order) for order in orders]
    return out


def _distinct_layouts(by_state: Sequence[Layout]) -> TensorLayouts:
    ids: dict[Layout, int] = {}
    of_state = np.array([ids.setdefault(layout, len(ids)) for layout in by_state], dtype=np.int64)
    return TensorLayouts(tuple(ids), of_state)


def _allowed_cuts(tensor: TensorLayouts, mesh: MeshAxes) -> str:
    """The pieces per dimension that some candidates have, for an error."""
    cuts = sorted({layout.cuts(mesh) for layout in tensor.layouts if not layout.partial})
    return ", ".join(map(str, cuts[:6])) + (" ..." if len(cuts) > 6 else "")


def describe_pin(key: Hashable) -> str:
    """A pin as the user wrote it: pieces, else axes."""
    if isinstance(key, tuple) and len(key) == 2:
        return str(key[0] if key[1] is None else key[1])
    return str(key)
