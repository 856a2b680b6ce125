"""Replanning: the same program with more pins, as `Plan.why` and `Plan.what_if` need it.

A plan is data; its replanner is the one part that can search, and a plan read from a file has none. It holds the
traced program without its arrays, the topology and the request. Tensors are named as in the plan.

An argument or result is forced as the user would pin it. An operator is forced by the pieces of its operands, which
changes nothing else in the search space: its forced cost is never below that of the free search.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jshard._core.errors import ShardError
from jshard._core.layout import Layout
from jshard._core.messages import join_choices, short_source, suggest
from jshard._core.topology import Topology
from jshard._network.candidates import CandidateCache, CandidateSet, enumerate_layouts
from jshard._plan.padding_trials import PaddingTrials
from jshard._plan.record import PlanRecord
from jshard._plan.request import Force, Place, PlanRequest
from jshard._plan.rows import Alternative, Decision
from jshard._program.graph import Literal, Operator, Program, operator_name
from jshard._program.memory.least_traffic import product_flops
from jshard._rules.rule import unmet_blocks
from jshard._spec.entry import Pin, parse_entry
from jshard._spec.mesh_checks import check_axes_divide


NOTHING_TRIED = PaddingTrials(
    skipped='with config={"pad": False}, host callbacks, Explicit axes or search="propagation" nothing is'
)
PADDING_NOTE = "; padding: "
"""Stands between the reason why a cut is impossible and what is known of padding."""

_SOURCE_LINE = re.compile(r".+\.\w+:\d+")


@dataclasses.dataclass(frozen=True, eq=False)
class Replanner:
    """A request for a program that can be changed and planned again."""

    program: Program
    topology: Topology
    request: PlanRequest
    padding: PaddingTrials = NOTHING_TRIED

    def __repr__(self) -> str:
        return f"Replanner({self.program.name})"

    def run(self) -> PlanRecord:
        """Plan the request."""
        from jshard._plan.planner import make_plan  # at the first plan: it imports every search

        return make_plan(self.program, self.topology, self.request)[0]

    def replan(self, forced: Mapping[str, Any]) -> PlanRecord:
        """The plan with each named tensor or operator as given; see `with_pins`."""
        return self.with_pins(forced).run()

    def with_pins(self, forced: Mapping[str, Any]) -> Replanner:
        """The replanner with each named tensor or operator pinned to an entry; None frees what the user pinned."""
        pins, forces = list(self.request.pins), list(self.request.forced)
        for pattern, entry in forced.items():
            for name in self.names_matching(pattern):
                place, shape = self.place_of(name)
                if shape is None:
                    forces += self._forced_operands(self.program.operators[place[0]], name, entry)
                    continue
                pins = [p for p in pins if p[:3] != place]
                pin = self._parse_pin(entry, shape, name)
                if pin is not None and not pin.free:
                    pins.append((*place, pin))
        pinned_results = self.request.pinned_results
        if pinned_results is None:
            pinned_results = tuple({op for op, *_ in self.request.pins})
        request = dataclasses.replace(
            self.request, pins=tuple(pins), forced=tuple(forces), pinned_results=pinned_results
        )
        return dataclasses.replace(self, request=request)

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
        """Names that equal a pattern, or end in it (one argument only), or match it; `*` stands for one part of a path.

        A file and line such as `"model.py:26"` is the operator written there with the most FLOPs, or the largest result.
        """
        every = self.named_places()
        if pattern in every:
            return [pattern]
        by_suffix = self._arguments_with_suffix(pattern)
        if by_suffix:
            return by_suffix
        parts = pattern.split(".")
        if "*" in pattern:
            matches = [
                n for n in every
                if len(n.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, n.split("."), parts))
            ]  # fmt: skip
            if matches:
                return matches
        if _SOURCE_LINE.fullmatch(pattern) and (written_there := self._operators_at(pattern)):
            return written_there[:1]
        raise ShardError(
            f"{self.program.name} has no argument, result, tensor or operator {pattern!r}",
            where="Plan.why, Plan.what_if",
            fix=f"a name as plan.ir() shows it, such as {suggest(pattern, list(every))}",
        )

    def _arguments_with_suffix(self, suffix: str) -> list[str]:
        """The one argument whose path ends in `suffix`, [] if several do.

        Of those that are the only one in their argument of the function, the one with the shortest path: a parameter
        rather than its optimizer state.
        """
        by_argument: dict[str, list[str]] = {}
        for i in self.program.inputs:
            name = self.program.operators[i].name
            if name.endswith("." + suffix):
                by_argument.setdefault(name.split(".")[0], []).append(name)
        single = sorted((names[0].count("."), names[0]) for names in by_argument.values() if len(names) == 1)
        unique = single and (len(single) == 1 or single[0][0] < single[1][0])
        return [single[0][1]] if unique else []

    def _operators_at(self, line: str) -> list[str]:
        """Names of the operators written at a line, `"model.py:26"`: most FLOPs first, then largest results."""
        flops = product_flops(self.program)
        there = [
            op for op in self.program.operators
            if op.kind == "eqn" and short_source(op.source) == line.rsplit("/", 1)[-1]
        ]  # fmt: skip
        size = [sum(self.program.tensors[r].nbytes for r in op.results) for op in there]
        order = sorted(range(len(there)), key=lambda k: (-flops.get(there[k].id, 0.0), -size[k]))
        return [operator_name(there[k]) for k in order]

    def place_of(self, name: str) -> tuple[Place, tuple[int, ...] | None]:
        """Place of a name, and its shape; None for an operator."""
        return self.named_places()[self.names_matching(name)[0]]

    def alternatives(self, name: str) -> list[Alternative]:
        """Every way to partition a tensor or operator, without costs; impossible ones have a reason."""
        place, shape = self.place_of(name)
        if shape is None:
            return self._operator_alternatives(self.program.operators[place[0]])
        return self._tensor_alternatives(place, shape)

    def current_cuts(self, decision: Decision, name: str) -> tuple:
        """Pieces per dimension of a tensor under a decision, or those of each operand of an operator."""
        (i, _, k), shape = self.place_of(name)
        mesh, codes = self.topology.mesh, decision.candidates[i]
        if codes is None:
            return dict(decision.endpoints)[i].cuts(mesh)
        candidates = CandidateCache(self.program, mesh).candidates_of(self.program.operators[i])
        state = candidates.index_of(codes)
        if shape is None:
            return tuple(c.layout(state).cuts(mesh) for c in candidates.operands)
        return candidates.results[k].layout(state).cuts(mesh)

    def _tensor_alternatives(self, place: Place, shape: tuple[int, ...]) -> list[Alternative]:
        mesh = self.topology.mesh
        pin = next((p for *at, p in self.request.pins if tuple(at) == place), None)
        out: dict[Hashable, Alternative] = {}
        for dim_of_axis in itertools.product(range(-1, len(shape)), repeat=len(mesh.names)):
            cuts = tuple(
                math.prod(n for n, d in zip(mesh.sizes, dim_of_axis, strict=True) if d == k)
                for k in range(len(shape))
            )
            undivided = [
                k for k, (s, c) in enumerate(zip(shape, cuts, strict=True)) if c > 1 and (s % c or not s)
            ]
            reason = ""
            if undivided:
                reason = self._does_not_divide(undivided[0], shape[undivided[0]], cuts[undivided[0]])
            elif pin is not None and _contradicts(pin.cuts, cuts):
                reason = f"pinned as {pin}"
            out.setdefault(cuts, Alternative(cuts, reason=reason))
        return list(out.values())

    def _operator_alternatives(self, op: Operator) -> list[Alternative]:
        """The candidates of an operator by the pieces of its operands; then those that its rule excludes."""
        mesh = self.topology.mesh
        candidates = CandidateCache(self.program, mesh).candidates_of(op)
        pinned = {i: pin.cuts for at, side, i, pin in self.request.pins if at == op.id and side == "operand"}
        out: dict[Hashable, Alternative] = {}
        for k in range(len(candidates)):
            cuts = tuple(c.layout(k).cuts(mesh) for c in candidates.operands)
            excluded = any(_contradicts(pin, cuts[i]) for i, pin in pinned.items())
            reason = "pinned by jshard.op or a constraint" if excluded else ""
            out.setdefault(cuts, Alternative(cuts, reason=reason, how=_exchanges(candidates, k)))
        rule = candidates.rule
        for f, size in enumerate(rule.sizes):
            for p in mesh.piece_counts:
                cuts = tuple(tuple(p if f in d else 1 for d in dims) for dims in rule.operands)
                if size <= 1 or cuts in out or not any(p in c for c in cuts):
                    continue
                exchanges = [cut.name for cut in rule.joint if f in cut.factors]
                if f in rule.blocked and not (exchanges and size % p):
                    reason = rule.note or "the operator needs this dimension whole"
                    if exchanges:
                        unmet = unmet_blocks(rule, f, p)
                        reason += f"; {unmet or f'{exchanges[0]}: not in {p} blocks of {size // p}'}"
                elif size % p:
                    operand, dim = next((i, d) for i, c in enumerate(cuts) for d, q in enumerate(c) if q == p)
                    reason = f"operand {operand}: " + self._does_not_divide(dim, size, p)
                else:
                    continue
                out.setdefault(cuts, Alternative(cuts, reason=reason))
        return list(out.values())

    def _does_not_divide(self, dim: int, size: int, cut: int) -> str:
        nbytes = max((t.nbytes for t in self.program.tensors if size in t.shape), default=0)
        note = self.padding.note(size, nbytes, self.topology.mesh)
        return f"{cut} does not divide dimension {dim}, of size {size}{PADDING_NOTE}{note}"

    def _forced_operands(self, op: Operator, name: str, entry: Any) -> list[Force]:
        """What forces the operands of an operator into the pieces of a strategy; nothing for None."""
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

        def has(layout: Layout, cuts: tuple[int, ...]) -> bool:
            return layout.cuts(mesh) == cuts

        return [
            (op.id, "operand", k, f"cut {cuts}", lambda layout, cuts=tuple(cuts): has(layout, cuts))
            for k, cuts in enumerate(entry)
            if cuts is not None
        ]

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
        check_axes_divide(pin, cuts, shape, dict(zip(mesh.names, mesh.sizes, strict=True)), can_pad=False)
        return Pin(cuts, pin.axes, pin.where)

    def _check_cuts(self, pin: Pin, shape: Sequence[int]) -> None:
        """Raise where no axes of the plan's mesh make the pieces of a pin, with the nearest that some do."""
        mesh = self.topology.mesh
        possible = list(dict.fromkeys(layout.cuts(mesh) for layout in enumerate_layouts(tuple(shape), mesh)))
        if any(all(w in (None, c) for w, c in zip(pin.cuts, cuts, strict=True)) for cuts in possible):
            return

        def distance(cuts: tuple[int, ...]) -> float:
            return sum(abs(math.log2(c / w)) for w, c in zip(pin.cuts, cuts, strict=True) if w)

        what = f"no axes of the plan's mesh {mesh} make {pin} pieces"
        for dim, (cut, size) in enumerate(zip(pin.cuts, shape, strict=True)):
            if cut and size % cut:
                what = f"a cut of {cut} does not divide dimension {dim}, of size {size}"
                break
        nearest = join_choices([str(cuts) for cuts in sorted(possible, key=distance)[:4]])
        raise ShardError(
            what, where=pin.where, fix=f"{nearest}, or None for a dimension to leave it to the search"
        )


def _contradicts(pin: Sequence[int | None], cuts: Sequence[int]) -> bool:
    """Whether pinned pieces differ from those of a layout; None leaves a dimension free, 0 takes every device."""
    return any(p not in (None, c, 0) for p, c in zip(pin, cuts, strict=True))


def _exchanges(candidates: CandidateSet, state: int) -> str:
    """The names of the joint cuts of a state, such as "halo"."""
    c, rule = candidates.candidates[state], candidates.rule
    if c is None:
        return ""
    return ", ".join(
        dict.fromkeys(rule.joint[k - len(rule.sizes)].name for k in c.axis_codes if k >= len(rule.sizes))
    )
