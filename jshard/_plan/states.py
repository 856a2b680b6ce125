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

from jshard._errors import SearchError
from jshard._layout import Layout, MeshAxes
from jshard._program.graph import Literal, Operator, Program
from jshard._rules.lookup import rules_for
from jshard._rules.registry import Entry, Op
from jshard._rules.rule import NONE, Candidate, Rule, candidate_axes, layout_lists


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """One tensor of an operator: its distinct layouts, and which of them each state uses."""

    layouts: tuple[Layout, ...]
    index: np.ndarray

    def of(self, state: int) -> Layout:
        """Layout under a state."""
        return self.layouts[int(self.index[state])]

    def pieces(self, mesh: MeshAxes) -> np.ndarray:
        """Number of different blocks under each state."""
        found = self.__dict__.get("_pieces")
        if found is None or found[0] is not mesh:  # one mesh for a planning, which asks again and again
            found = mesh, np.array([lay.pieces(mesh) for lay in self.layouts])[self.index]
            self.__dict__["_pieces"] = found
        return found[1]


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """All states of one form of operator."""

    op: Op | None
    rule: Rule
    entry: Entry | None
    candidates: tuple[Candidate | None, ...]
    axes: np.ndarray  # (states, mesh axes): the candidates as one array
    operands: tuple[Choices, ...]
    results: tuple[Choices, ...]

    def __len__(self) -> int:
        return len(self.candidates)


Pinned = Callable[[Layout], bool]


class Interner:
    """Builds `States` and keeps one for each distinct form; one interner lives for one planning."""

    def __init__(self, program: Program, mesh: MeshAxes):
        self.program, self.mesh = program, mesh
        self._forms: dict[Any, States] = {}
        self._rules: dict[Any, tuple[Op, Rule, Entry | None]] = {}
        self._meant: dict[Rule, tuple] = {}  # candidates, their axes, operands and results by rule
        self._alike: dict[Any, Choices] = {}
        # Shapes with dtypes by number: forms are compared for every operator.
        self._kinds: dict[Any, int] = dict(program.arrays.kinds)
        self._kind = program.arrays.kind.tolist()

    def _shared(self, layouts: tuple[Layout, ...], index: np.ndarray) -> Choices:
        """One object for all tensors that are cut alike: tables of the network are found by it."""
        return self._alike.setdefault((layouts, index.tobytes()), Choices(layouts, index))

    def _number(self, kind: Any) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def states(
        self,
        op: Operator,
        pins: Sequence[tuple[str, int, Any, Pinned]] = (),
        only: Callable[[np.ndarray, MeshAxes], np.ndarray] | None = None,
    ) -> States:
        """States of an operator; `pins` are (side, index, key, test) with side "operand" or "result".

        `only` says which of the candidates that keep the pins, given by their axes, are offered.
        """
        if op.kind in ("input", "const", "output"):
            return self._endpoint(op, pins)
        form = self._form(op)
        key = (form, tuple((side, i, k) for side, i, k, _ in pins), only)
        found = self._forms.get(key)
        if found is None:
            found = self._filter(op, self._unpinned(op, form), pins)
            if only is not None:
                found = _those(found, only(found.axes, self.mesh))
            self._forms[key] = found
        return found

    def _form(self, op: Operator) -> Any:
        kind = self._kind
        operands = tuple([
            self._number(("literal", a.aval.shape, a.aval.dtype)) if isinstance(a, Literal) else kind[a]
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

    def rule(self, op: Operator) -> tuple[Op, Rule, Entry | None]:
        """The operator as its rule sees it, and the rule."""
        form = self._form(op)
        if form not in self._rules:
            self._rules[form] = self._rule(op)
        return self._rules[form]

    def _rule(self, op: Operator) -> tuple[Op, Rule, Entry | None]:
        t = self.program.tensors
        view = Op(
            op.primitive,
            op.eqn.params if op.kind == "eqn" else {},
            tuple(a.aval if isinstance(a, Literal) else t[a] for a in op.operands),
            tuple(t[r] for r in op.results),
            tuple(a.value if isinstance(a, Literal) else None for a in op.operands),
        )
        rule, entry = rules_for(view)
        return view, rule, entry

    def _unpinned(self, op: Operator, form: Any) -> States:
        key = (form, (), None)
        if key in self._forms:
            return self._forms[key]
        view, rule, entry = self.rule(op)
        meant: Any = self._meant.get(rule)
        if meant is None:
            axes = candidate_axes(rule, self.mesh)
            cands = tuple(map(Candidate, map(tuple, axes.tolist())))
            ins, outs = layout_lists(rule, axes, self.mesh)
            one = {id(c): self._shared(*c) for c in (*ins, *outs)}
            meant = cands, axes, tuple([one[id(c)] for c in ins]), tuple([one[id(c)] for c in outs])
            self._meant[rule] = meant
        made = States(view, rule, entry, *meant)
        self._forms[key] = made
        return made

    def _filter(self, op: Operator, states: States, pins: Sequence[tuple[str, int, Any, Pinned]]) -> States:
        keep = np.ones(len(states), dtype=bool)
        for side, i, key, test in pins:
            choices = (states.operands if side == "operand" else states.results)[i]
            allowed = np.array([test(lay) for lay in choices.layouts])
            if not allowed.any():
                raise SearchError(
                    f"no way to run {op.primitive} has its {side} {i} cut as {asked(key)} asks",
                    where=f"{op.module or op.primitive} {op.source}".strip(),
                    fix="pin a cut that the operator's rule allows: " + _offer(choices, self.mesh),
                )
            keep &= allowed[choices.index]
        if not keep.any():
            raise SearchError(
                f"the pins of {op.primitive} contradict each other: "
                + " and ".join(f"{side} {i} {asked(key)}" for side, i, key, _ in pins),
                where=f"{op.module or op.primitive} {op.source}".strip(),
                fix="cut a dimension that two operands share equally in both, or leave one of them None",
            )
        return _those(states, keep)

    def _endpoint(self, op: Operator, pins: Sequence[tuple[str, int, Any, Pinned]]) -> States:
        atom = op.operands[0] if op.kind == "output" else op.results[0]
        shape = tuple(atom.aval.shape) if isinstance(atom, Literal) else self.program.tensors[atom].shape
        # An exact spec may order axes as no candidate does; the pin carries that layout itself.
        exact = [k for _, _, k, _ in pins if isinstance(k, Layout)]
        key = ("endpoint", op.kind == "output", shape, tuple((side, i, k) for side, i, k, _ in pins))
        if key in self._forms:
            return self._forms[key]
        # A pinned tuple says how many pieces, not which axis is major: that is the search's choice.
        possible = layouts(shape, self.mesh, orders=bool(pins))
        every = exact[:1] or [lay for lay in possible if all(test(lay) for *_, test in pins)]
        if not every:
            raise SearchError(
                f"no layout of shape {shape} is cut as {asked(pins[0][2])} asks on the mesh {self.mesh}",
                where=op.name,
                fix="pin a cut that is a product of mesh axes",
            )
        one = (_choices(every),)
        rule = Rule(operands=(), results=(), sizes=())
        made = States(
            None,
            rule,
            None,
            (None,) * len(every),
            np.full((len(every), len(self.mesh.names)), NONE),
            one if op.kind == "output" else (),
            () if op.kind == "output" else one,
        )
        self._forms[key] = made
        return made


def _those(states: States, keep: np.ndarray) -> States:
    if keep.all():
        return states
    which = np.flatnonzero(keep)
    return States(
        states.op, states.rule, states.entry,
        tuple(states.candidates[k] for k in which),
        states.axes[which],
        tuple(_choices([c.of(int(k)) for k in which]) for c in states.operands),
        tuple(_choices([c.of(int(k)) for k in which]) for c in states.results),
    )  # fmt: skip


def layouts(shape: tuple[int, ...], mesh: MeshAxes, orders: bool = False) -> list[Layout]:
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


def _choices(all_layouts: Sequence[Layout]) -> Choices:
    seen: dict[Layout, int] = {}
    index = np.array([seen.setdefault(lay, len(seen)) for lay in all_layouts], dtype=np.int64)
    return Choices(tuple(seen), index)


def _offer(choices: Choices, mesh: MeshAxes) -> str:
    cuts = sorted({lay.cuts(mesh) for lay in choices.layouts if not lay.partial})
    return ", ".join(map(str, cuts[:6])) + (" ..." if len(cuts) > 6 else "")


def asked(key: Any) -> str:
    """A pin as the user wrote it: pieces, else axes."""
    if isinstance(key, tuple) and len(key) == 2:
        return str(key[0] if key[1] is None else key[1])
    return str(key)
