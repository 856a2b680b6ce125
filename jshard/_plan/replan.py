"""Searching again: the same program with one more thing fixed. What `Plan.why` and `Plan.what_if` stand on.

A plan is data; this is the one thing it carries that can search, and a plan read from a file has none. It holds
the traced program (no arrays), the topology and the wish. Tensors are named as the plan names them.

An argument or result is forced as the user would pin it. An operator is forced by the pieces of its operands and
changes nothing else in the search space, so its forced cost is never below that of the free search.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jshard._core.errors import ShardError
from jshard._core.messages import join_choices, suggest
from jshard._core.topology import Topology
from jshard._network.candidates import CandidateCache, enumerate_layouts
from jshard._plan.records import Alternative, Decision
from jshard._program.graph import Literal, Operator, Program, operator_name
from jshard._spec.entry import Pin, parse_entry
from jshard._spec.mesh_checks import check_axes_divide


Place = tuple[int, str, int]  # operator, "operand" or "result", index


@dataclasses.dataclass(frozen=True, eq=False)
class Replanner:
    """A search that can be repeated: `run(wish)` plans the program."""

    program: Program
    topology: Topology
    request: Any
    plan_request: Callable[[Any], Any]

    def __repr__(self) -> str:
        return f"Again({self.program.name})"

    def replan(self, forced: Mapping[str, Any]) -> Any:
        """The plan with each named tensor or operator as given; None frees what the user pinned."""
        pins, cuts = list(self.request.pins), list(self.request.forced)
        for pattern, entry in forced.items():
            for name in self.names_matching(pattern):
                place, shape = self.place_of(name)
                if shape is None:
                    cuts += self._forced_operands(self.program.operators[place[0]], name, entry)
                    continue
                pins = [p for p in pins if p[:3] != place]
                pin = self._parse_pin(entry, shape, name)
                if pin is not None and not pin.free:
                    pins.append((*place, pin))
        mine = self.request.pinned_results
        if mine is None:
            mine = tuple({op for op, *_ in self.request.pins})
        return self.plan_request(
            dataclasses.replace(self.request, pins=tuple(pins), forced=tuple(cuts), pinned_results=mine)
        )

    def named_places(self) -> dict[str, tuple[Place, tuple[int, ...] | None]]:
        """Everything that can be forced: place, and shape of a tensor or None for an operator."""
        out: dict[str, tuple[Place, tuple[int, ...] | None]] = {}
        tensors = self.program.tensors
        for op in self.program.operators:
            if op.kind == "eqn":
                out.setdefault(operator_name(op), ((op.id, "operand", 0), None))
            for k, r in enumerate(op.results):
                if op.kind != "output":
                    out.setdefault(tensors[r].name, ((op.id, "result", k), tensors[r].shape))
        for i in self.program.outputs:
            op = self.program.operators[i]
            a = op.operands[0]
            shape = tuple(a.aval.shape) if isinstance(a, Literal) else tensors[a].shape
            name = op.name if op.name not in out else f"result.{op.name}"
            out.setdefault(name, ((i, "operand", 0), shape))
        return out

    def names_matching(self, pattern: str) -> list[str]:
        """Names that a name, the end of an argument's path, or a pattern means; `*` stands for one part of a path."""
        every = self.named_places()
        if pattern in every:
            return [pattern]
        ends = self._arguments_with_suffix(pattern)
        if ends:
            return ends
        parts = pattern.split(".")
        if "*" in pattern:
            found = [
                n for n in every
                if len(n.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, n.split("."), parts))
            ]  # fmt: skip
            if found:
                return found
        raise ShardError(
            f"{self.program.name} has no argument, result, tensor or operator {pattern!r}",
            where="Plan.why, Plan.what_if",
            fix=f"a name as plan.ir() shows it, such as {suggest(pattern, list(every))}",
        )

    def _arguments_with_suffix(self, end: str) -> list[str]:
        """The argument whose path ends so, if there is one in its container; a parameter before its optimizer state."""
        by: dict[str, list[str]] = {}
        for i in self.program.inputs:
            name = self.program.operators[i].name
            if name.endswith("." + end):
                by.setdefault(name.split(".")[0], []).append(name)
        alone = sorted((names[0].count("."), names[0]) for names in by.values() if len(names) == 1)
        unique = alone and (len(alone) == 1 or alone[0][0] < alone[1][0])
        return [alone[0][1]] if unique else []

    def place_of(self, name: str) -> tuple[Place, tuple[int, ...] | None]:
        """Place of a name, and its shape; None for an operator."""
        return self.named_places()[self.names_matching(name)[0]]

    def alternatives(self, name: str) -> list[Alternative]:
        """Every way to cut a tensor or operator, without costs; those that cannot be say why."""
        place, shape = self.place_of(name)
        if shape is None:
            return self._operator_alternatives(self.program.operators[place[0]])
        return self._tensor_alternatives(place, shape)

    def current_cuts(self, decision: Decision, name: str) -> tuple:
        """What a decision does with a tensor (pieces per dimension) or operator (those of each operand)."""
        (i, _, k), shape = self.place_of(name)
        mesh, axes = self.topology.mesh, decision.candidates[i]
        if axes is None:
            return dict(decision.endpoints)[i].cuts(mesh)
        s = CandidateCache(self.program, mesh).candidates_of(self.program.operators[i])
        at = next(n for n, c in enumerate(s.candidates) if c is not None and c.axis_codes == axes)
        if shape is None:
            return tuple(c.layout(at).cuts(mesh) for c in s.operands)
        return s.results[k].layout(at).cuts(mesh)

    def _tensor_alternatives(self, place: Place, shape: tuple[int, ...]) -> list[Alternative]:
        mesh = self.topology.mesh
        pin = next((p for *at, p in self.request.pins if tuple(at) == place), None)
        out: dict[Any, Alternative] = {}
        for where in itertools.product(range(-1, len(shape)), repeat=len(mesh.names)):
            cuts = tuple(
                math.prod(n for n, d in zip(mesh.sizes, where, strict=True) if d == k)
                for k in range(len(shape))
            )
            wrong = [
                k for k, (s, c) in enumerate(zip(shape, cuts, strict=True)) if c > 1 and (s % c or not s)
            ]
            reason = ""
            if wrong:
                reason = _does_not_divide(wrong[0], shape[wrong[0]], cuts[wrong[0]])
            elif pin is not None and any(w not in (None, c, 0) for w, c in zip(pin.cuts, cuts, strict=True)):
                reason = f"pinned as {pin}"
            out.setdefault(cuts, Alternative(cuts, reason=reason))
        return list(out.values())

    def _operator_alternatives(self, op: Operator) -> list[Alternative]:
        mesh = self.topology.mesh
        interner = CandidateCache(self.program, mesh)
        free = interner.candidates_of(op)
        pins = [p for p in self.request.pins if p[0] == op.id]
        out: dict[Any, Alternative] = {}
        for k in range(len(free)):
            cuts = tuple(c.layout(k).cuts(mesh) for c in free.operands)
            wanted = {i: p.cuts for _, side, i, p in pins if side == "operand"}
            against = any(
                w not in (None, c, 0)
                for i, want in wanted.items()
                for w, c in zip(want, cuts[i], strict=True)
            )  # fmt: skip
            out.setdefault(
                cuts, Alternative(cuts, reason="pinned by jshard.op or a constraint" if against else "")
            )
        rule = free.rule
        pieces = sorted({
            math.prod(sizes) for n in range(len(mesh.sizes)) for sizes in itertools.combinations(mesh.sizes, n + 1)
        })  # fmt: skip
        for f, size in enumerate(rule.sizes):
            for p in pieces:
                cuts = tuple(tuple(p if f in d else 1 for d in dims) for dims in rule.operands)
                if size <= 1 or cuts in out or not any(p in c for c in cuts):
                    continue
                if f in rule.blocked:
                    why = rule.note or "the operator needs this dimension whole"
                elif size % p:
                    where = next((i, d) for i, c in enumerate(cuts) for d, q in enumerate(c) if q == p)
                    why = f"operand {where[0]}: " + _does_not_divide(where[1], size, p)
                else:
                    continue
                out.setdefault(cuts, Alternative(cuts, reason=why))
        return list(out.values())

    def _forced_operands(self, op: Operator, name: str, entry: Any) -> list[tuple]:
        if entry is None:
            return []
        if not isinstance(entry, tuple) or len(entry) != len(op.operands) or not all(
            e is None or isinstance(e, tuple) for e in entry
        ):  # fmt: skip
            raise ShardError(
                f"{entry!r} is not a strategy of {name}, which has {len(op.operands)} operands",
                where="Plan.what_if",
                fix="one tuple of pieces for each operand, as plan.ir() shows: ((2, 1), (1, 4))",
            )
        mesh = self.topology.mesh
        out = []
        for k, cuts in enumerate(entry):
            if cuts is not None:
                out.append(
                    (op.id, "operand", k, f"cut {cuts}", lambda lay, want=tuple(cuts): lay.cuts(mesh) == want)
                )
        return out

    def _parse_pin(self, entry: Any, shape: Sequence[int], name: str) -> Pin | None:
        mesh = self.topology.mesh
        pin = parse_entry(entry, shape, f"what_if {name}")
        if pin is None or not isinstance(entry, PartitionSpec):
            if pin is not None:
                self._check_cuts(pin, shape)
            return pin
        axes = pin.axes or ()
        unknown = [a for d in axes for a in d or () if a not in mesh.names]
        if unknown:
            raise ShardError(
                f"the plan's mesh {mesh} has no axis {unknown[0]!r}",
                where=f"what_if {name}",
                fix="one of " + ", ".join(map(repr, mesh.names)),
            )
        cuts = tuple(None if d is None else mesh.size(*d) for d in axes)
        check_axes_divide(pin, cuts, shape, dict(zip(mesh.names, mesh.sizes, strict=True)))
        return Pin(cuts, pin.axes, pin.where)

    def _check_cuts(self, pin: Pin, shape: Sequence[int]) -> None:
        """Refuse cuts that no axes of the plan's mesh make; offered are the nearest that some do."""
        mesh = self.topology.mesh
        every = list(dict.fromkeys(lay.cuts(mesh) for lay in enumerate_layouts(tuple(shape), mesh)))
        if any(all(w in (None, c) for w, c in zip(pin.cuts, cuts, strict=True)) for cuts in every):
            return

        def off(cuts: tuple[int, ...]) -> float:
            return sum(abs(math.log2(c / w)) for w, c in zip(pin.cuts, cuts, strict=True) if w)

        wrong = [(d, c, s) for d, (c, s) in enumerate(zip(pin.cuts, shape, strict=True)) if c and s % c]
        what = f"a cut of {wrong[0][1]} does not divide dimension {wrong[0][0]}, of size {wrong[0][2]}" if wrong else (
            f"no axes of the plan's mesh {mesh} make {pin} pieces"
        )  # fmt: skip
        near = join_choices([str(c) for c in sorted(every, key=off)[:4]])
        raise ShardError(
            what, where=pin.where, fix=f"{near}, or None for a dimension to leave it to the search"
        )


def _does_not_divide(dim: int, size: int, cut: int) -> str:
    return f"{cut} does not divide dimension {dim}, of size {size}"
