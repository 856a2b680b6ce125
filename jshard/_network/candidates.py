"""What each operator may do: its candidates, and the layouts they mean for operands and results.

Thousands of operators share a handful of forms, so states are interned: two operators with the same primitive,
shapes, parameters and pins have the same `States` object, and every table built from it is built once.
Inputs and outputs have no rule: their states are simply the layouts a tensor can have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jshard._core.errors import SearchError
from jshard._core.layout import Layout, MeshAxes
from jshard._program.graph import Literal, Operator, Program
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView, RuleEntry
from jshard._rules.rule import NONE, Candidate, Rule, candidate_codes, layouts_of_candidates


@dataclasses.dataclass(frozen=True, eq=False)
class TensorLayouts:
    """One tensor of an operator: its distinct layouts, and which of them each state uses."""

    layouts: tuple[Layout, ...]
    of_state: np.ndarray

    def layout(self, state: int) -> Layout:
        """Layout under a state."""
        return self.layouts[int(self.of_state[state])]

    def num_shards(self, mesh: MeshAxes) -> np.ndarray:
        """Number of different blocks under each state."""
        found = self.__dict__.get("_pieces")
        if found is None or found[0] is not mesh:  # one mesh for a planning, which asks again and again
            found = mesh, np.array([lay.pieces(mesh) for lay in self.layouts])[self.of_state]
            self.__dict__["_pieces"] = found
        return found[1]


@dataclasses.dataclass(frozen=True, eq=False)
class CandidateSet:
    """All states of one form of operator."""

    op: OpView | None
    rule: Rule
    entry: RuleEntry | None
    candidates: tuple[Candidate | None, ...]
    axis_codes: np.ndarray  # (states, mesh axes): the candidates as one array
    operands: tuple[TensorLayouts, ...]
    results: tuple[TensorLayouts, ...]

    def __len__(self) -> int:
        return len(self.candidates)

    def index_of(self, axis_codes: tuple[int, ...]) -> int:
        """Number of the candidate with these codes."""
        return next(k for k, c in enumerate(self.candidates) if c is not None and c.axis_codes == axis_codes)


LayoutTest = Callable[[Layout], bool]


class CandidateCache:
    """Builds `States` and keeps one for each distinct form; one interner lives for one planning."""

    def __init__(self, program: Program, mesh: MeshAxes):
        self.program, self.mesh = program, mesh
        self._sets: dict[Any, CandidateSet] = {}
        self._rules: dict[Any, tuple[OpView, Rule, RuleEntry | None]] = {}
        self._by_rule: dict[Rule, tuple] = {}  # candidates, their axes, operands and results by rule
        self._tensor_layouts: dict[Any, TensorLayouts] = {}
        # Shapes with dtypes by number: forms are compared for every operator.
        self._aval_ids: dict[Any, int] = dict(program.use_def.aval_ids)
        self._aval_of_tensor = program.use_def.aval_id.tolist()

    def _interned(self, layouts: tuple[Layout, ...], index: np.ndarray) -> TensorLayouts:
        """One object for all tensors that are cut alike: tables of the network are found by it."""
        return self._tensor_layouts.setdefault((layouts, index.tobytes()), TensorLayouts(layouts, index))

    def _aval_id(self, kind: Any) -> int:
        return self._aval_ids.setdefault(kind, len(self._aval_ids))

    def candidates_of(
        self,
        op: Operator,
        pins: Sequence[tuple[str, int, Any, LayoutTest]] = (),
        only: Callable[[np.ndarray, MeshAxes], np.ndarray] | None = None,
    ) -> CandidateSet:
        """States of an operator; `pins` are (side, index, key, test) with side "operand" or "result".

        `only` says which of the candidates that keep the pins, given by their axes, are offered.
        """
        if op.kind in ("input", "const", "output"):
            return self._endpoint(op, pins)
        form = self._class_key(op)
        key = (form, tuple((side, i, k) for side, i, k, _ in pins), only)
        found = self._sets.get(key)
        if found is None:
            found = self._apply_pins(op, self._unpinned(op, form), pins)
            if only is not None:
                found = _restrict(found, only(found.axis_codes, self.mesh))
            self._sets[key] = found
        return found

    def _class_key(self, op: Operator) -> Any:
        kind = self._aval_of_tensor
        operands = tuple([
            self._aval_id(("literal", a.aval.shape, a.aval.dtype)) if isinstance(a, Literal) else kind[a]
            for a in op.operands
        ])  # fmt: skip
        results = tuple([kind[r] for r in op.results])
        if op.kind != "eqn":
            return (op.kind, operands, results)
        params: Any = tuple(op.eqn.params.items())
        try:
            hash(params)
        except TypeError:
            params = ("equation", id(op.eqn))
        return (op.primitive, operands, results, params)

    def rule_of(self, op: Operator) -> tuple[OpView, Rule, RuleEntry | None]:
        """The operator as its rule sees it, and the rule."""
        form = self._class_key(op)
        if form not in self._rules:
            self._rules[form] = self._look_up_rule(op)
        return self._rules[form]

    def _look_up_rule(self, op: Operator) -> tuple[OpView, Rule, RuleEntry | None]:
        t = self.program.tensors
        view = OpView(
            op.primitive,
            op.eqn.params if op.kind == "eqn" else {},
            tuple(a.aval if isinstance(a, Literal) else t[a] for a in op.operands),
            tuple(t[r] for r in op.results),
            tuple(a.value if isinstance(a, Literal) else None for a in op.operands),
        )
        rule, entry = rules_for(view)
        return view, rule, entry

    def _unpinned(self, op: Operator, form: Any) -> CandidateSet:
        key = (form, (), None)
        if key in self._sets:
            return self._sets[key]
        view, rule, entry = self.rule_of(op)
        meant: Any = self._by_rule.get(rule)
        if meant is None:
            axes = candidate_codes(rule, self.mesh)
            cands = tuple(map(Candidate, map(tuple, axes.tolist())))
            ins, outs = layouts_of_candidates(rule, axes, self.mesh)
            one = {id(c): self._interned(*c) for c in (*ins, *outs)}
            meant = cands, axes, tuple([one[id(c)] for c in ins]), tuple([one[id(c)] for c in outs])
            self._by_rule[rule] = meant
        made = CandidateSet(view, rule, entry, *meant)
        self._sets[key] = made
        return made

    def _apply_pins(
        self, op: Operator, states: CandidateSet, pins: Sequence[tuple[str, int, Any, LayoutTest]]
    ) -> CandidateSet:
        keep = np.ones(len(states), dtype=bool)
        for side, i, key, test in pins:
            choices = (states.operands if side == "operand" else states.results)[i]
            allowed = np.array([test(lay) for lay in choices.layouts])
            if not allowed.any():
                raise SearchError(
                    f"no way to run {op.primitive} has its {side} {i} cut as {describe_pin(key)} asks",
                    where=f"{op.module or op.primitive} {op.source}".strip(),
                    fix="pin a cut that the operator's rule allows: " + _allowed_cuts(choices, self.mesh),
                )
            keep &= allowed[choices.of_state]
        if not keep.any():
            raise SearchError(
                f"the pins of {op.primitive} contradict each other: "
                + " and ".join(f"{side} {i} {describe_pin(key)}" for side, i, key, _ in pins),
                where=f"{op.module or op.primitive} {op.source}".strip(),
                fix="cut a dimension that two operands share equally in both, or leave one of them None",
            )
        return _restrict(states, keep)

    def _endpoint(self, op: Operator, pins: Sequence[tuple[str, int, Any, LayoutTest]]) -> CandidateSet:
        atom = op.operands[0] if op.kind == "output" else op.results[0]
        shape = tuple(atom.aval.shape) if isinstance(atom, Literal) else self.program.tensors[atom].shape
        # An exact spec may order axes as no candidate does; the pin carries that layout itself.
        exact = [k for _, _, k, _ in pins if isinstance(k, Layout)]
        key = ("endpoint", op.kind == "output", shape, tuple((side, i, k) for side, i, k, _ in pins))
        if key in self._sets:
            return self._sets[key]
        # A pinned tuple says how many pieces, not which axis is major: that is the search's choice.
        possible = enumerate_layouts(shape, self.mesh, orders=bool(pins))
        every = exact[:1] or [lay for lay in possible if all(test(lay) for *_, test in pins)]
        if not every:
            raise SearchError(
                f"no layout of shape {shape} is cut as {describe_pin(pins[0][2])} asks on the mesh {self.mesh}",
                where=op.name,
                fix="pin a cut that is a product of mesh axes",
            )
        one = (_distinct_layouts(every),)
        rule = Rule(operands=(), results=(), sizes=())
        made = CandidateSet(
            None,
            rule,
            None,
            (None,) * len(every),
            np.full((len(every), len(self.mesh.names)), NONE),
            one if op.kind == "output" else (),
            () if op.kind == "output" else one,
        )
        self._sets[key] = made
        return made


def _restrict(states: CandidateSet, keep: np.ndarray) -> CandidateSet:
    if keep.all():
        return states
    which = np.flatnonzero(keep)
    return CandidateSet(
        states.op, states.rule, states.entry,
        tuple(states.candidates[k] for k in which),
        states.axis_codes[which],
        tuple(_distinct_layouts([c.layout(int(k)) for k in which]) for c in states.operands),
        tuple(_distinct_layouts([c.layout(int(k)) for k in which]) for c in states.results),
    )  # fmt: skip


def enumerate_layouts(shape: tuple[int, ...], mesh: MeshAxes, orders: bool = False) -> list[Layout]:
    """Every layout without partial sums whose cuts divide `shape`; axes in mesh order, or in all `orders`."""
    out = []
    for where in itertools.product(range(-1, len(shape)), repeat=len(mesh.names)):
        dims = tuple(
            tuple(n for n, d in zip(mesh.names, where, strict=True) if d == k) for k in range(len(shape))
        )
        lay = Layout(dims)
        if all(mesh.size(*d) == 1 or s > 0 for s, d in zip(shape, dims, strict=True)) and lay.divides(
            shape, mesh
        ):
            ways = itertools.product(*(itertools.permutations(d) for d in dims)) if orders else [dims]
            out += [Layout(way) for way in ways]
    return out


def _distinct_layouts(all_layouts: Sequence[Layout]) -> TensorLayouts:
    seen: dict[Layout, int] = {}
    index = np.array([seen.setdefault(lay, len(seen)) for lay in all_layouts], dtype=np.int64)
    return TensorLayouts(tuple(seen), index)


def _allowed_cuts(choices: TensorLayouts, mesh: MeshAxes) -> str:
    cuts = sorted({lay.cuts(mesh) for lay in choices.layouts if not lay.partial})
    return ", ".join(map(str, cuts[:6])) + (" ..." if len(cuts) > 6 else "")


def describe_pin(key: Any) -> str:
    """A pin as the user wrote it: pieces, else axes."""
    if isinstance(key, tuple) and len(key) == 2:
        return str(key[0] if key[1] is None else key[1])
    return str(key)
