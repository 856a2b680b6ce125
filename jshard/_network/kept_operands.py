"""What a fused value that the backward pass reads keeps in memory from the forward pass, by the layout it is stored in.

Problem.  `mul` reads `x` in the forward pass, and a product of the backward pass reads its result: compilers compute `mul`
again there, so `x`, in the layout in which `mul` reads it, is in memory until then. Or another value on the way is: one
that was resharded, or the result itself. The flows of `remat_flow.py` count the least block of all these. The stored
layout of the result says more.

Idea.  A *path* leads from a materialized value, the root, through recomputed operators to a fused value r that an operator
u reads much later. As long as r is read, or resharded, as it is made, some value on the path is in memory, in the layout in
which the next operator reads it: the operands of these operators have, in all their candidates, no more pieces than the
result (other operators end a path). So where r is stored as it is made, or as a slice of that, at least a block in the
stored layout, of as many bytes as the smallest tensor of the path, is in memory until r is resharded for u. In that window
it counts instead of all copies of the values on the path; what flows through them counts already and is subtracted. Paths
do not share values, so nothing counts twice. As everywhere in the network, several readers share one copy of a tensor, the
one that is stored.

Worked case.  `x` (cut 8 ways) is gathered for `mul`, whose result two products read whole, one in the backward pass.
If that is stored whole, the gathered copy of `x` is in memory in between; if it is stored in 8 pieces and gathered for each
product, an eighth is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from jshard._core.arrays import Floats
from jshard._network.build import PlanningNetwork
from jshard._network.candidates import CandidateSet
from jshard._program.graph import Literal, calls_of
from jshard._program.memory.live_intervals import LiveIntervals, Use
from jshard._program.memory.remat_flow import Flow
from jshard._program.memory.unfusible import is_unfusible


# The share of a tensor's bytes that all tensors of its path have: a root may be of a type half as wide.
_NARROWEST = 0.5


@dataclasses.dataclass(frozen=True)
class KeptOperands:
    """What is in memory for a fused value from one time point to before another.

    Each device holds its block of `nbytes` in the layout in which the value is stored, of which `counted` bytes a device
    count as flows.
    """

    start: int
    end: int
    nbytes: float
    counted: float


@dataclasses.dataclass(frozen=True)
class KeptPaths:
    """`kept`: by the fused value at the end of each path; `windows`: by every fused value on a path."""

    kept: Mapping[int, KeptOperands]
    windows: Mapping[int, tuple[int, int]]

    def outside(self, tensor: int, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of an interval in which copies of a value count for themselves.

        >>> KeptPaths({}, {7: (10, 20)}).outside(7, 5, 30)
        [(5, 10), (20, 30)]
        """
        if tensor not in self.windows:
            return [(start, end)]
        begin, until = self.windows[tensor]
        parts = ((start, min(end, begin)), (max(start, until), end))
        return [(a, b) for a, b in parts if a < b]

    def inside(self, tensor: int, intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of some intervals in which what is kept for a value counts instead of copies of it.

        >>> KeptPaths({}, {7: (10, 20)}).inside(7, [(5, 12), (30, 40)])
        [(10, 12)]
        """
        begin, until = self.windows.get(tensor, (0, 0))
        parts = ((max(start, begin), min(end, until)) for start, end in intervals)
        return [(a, b) for a, b in parts if a < b]


NO_PATHS = KeptPaths({}, {})


def kept_operands(
    network: PlanningNetwork,
    live: LiveIntervals,
    stored: Collection[int],
    flows: Mapping[int, Sequence[Flow]],
    through: Floats,
    least: float,
) -> KeptPaths:
    """The paths of a program, each with what is in memory for it.

    Arguments:

    - `stored`: materialized tensors that are not counted elsewhere.
    - `flows`, `through`: those of `remat_flow` from `stored`.
    - `least`: bytes; smaller values are left out.
    """
    paths = _Paths(network, live, frozenset(stored), least)
    found = [path for r in range(len(through)) if (path := paths.to(r)) is not None]
    kept: dict[int, KeptOperands] = {}
    windows: dict[int, tuple[int, int]] = {}
    taken: set[int] = set()
    for path in sorted(found, key=lambda p: (not p.for_product, -p.nbytes * (p.end - p.start))):
        if taken.isdisjoint(path.tensors):
            taken.update(path.tensors)
            root, *fused = path.tensors
            counted = [sum(f.nbytes for f in flows.get(root, ())), *through[fused].tolist()]
            kept[fused[-1]] = KeptOperands(path.start, path.end, path.nbytes, max(counted))
            windows |= dict.fromkeys(fused, (path.start, path.end))
    return KeptPaths(kept, windows)


@dataclasses.dataclass(frozen=True)
class _Path:
    """Tensors from the root to a fused value, and the window in which one of them is in memory."""

    tensors: tuple[int, ...]
    start: int
    end: int
    nbytes: float  # of the smallest tensor
    for_product: bool  # whether the last reader is one that is not fused


class _Paths:
    """The paths to each fused value of a program."""

    def __init__(
        self, network: PlanningNetwork, live: LiveIntervals, stored: frozenset[int], least: float
    ) -> None:
        self.network, self.live, self.stored, self.least = network, live, stored, least
        self.program = network.program
        self.inside = {i for call in calls_of(self.program.body) for i in call.inner_operators}
        self.divided: dict[tuple[int, int, int], bool] = {}
        # By tensor, the one before it on its path, -1 for a root; absent where no path leads there.
        self.before: dict[int, int] = {}
        self.smallest: dict[int, float] = {}
        for op in self.program.operators:
            for k, r in enumerate(op.results):
                self._extend(r, op.id, k)

    def _extend(self, tensor: int, op: int, result: int) -> None:
        """Find the path to a tensor whose operands' paths are known: through the operand whose path is widest."""
        nbytes = float(self.program.tensors[tensor].nbytes)
        if nbytes < self.least or op in self.inside:
            return
        if not self.live.is_rematerialized(op):
            if tensor in self.stored and not self.live.liveness.duplicated_cast[tensor]:
                self.before[tensor], self.smallest[tensor] = -1, nbytes
            return
        candidates = self.network.candidates[op]
        widest, before = 0.0, -1
        for k, a in enumerate(self.program.operators[op].operands):
            if isinstance(a, Literal) or a not in self.before or self.smallest[a] <= widest:
                continue
            if self._no_more_pieces(candidates, k, result):
                widest, before = self.smallest[a], a
        if widest >= _NARROWEST * nbytes:
            self.before[tensor], self.smallest[tensor] = before, min(nbytes, widest)

    def _no_more_pieces(self, candidates: CandidateSet, operand: int, result: int) -> bool:
        """Whether an operand has in no candidate more pieces than a result."""
        key = (id(candidates), operand, result)
        if key not in self.divided:
            mesh = self.network.topology.mesh
            pieces = candidates.operands[operand].num_shards(mesh) <= candidates.results[result].num_shards(
                mesh
            )
            self.divided[key] = bool(np.all(pieces))
        return self.divided[key]

    def to(self, tensor: int) -> _Path | None:
        """The path to a fused value and its window; None where there is none."""
        if self.before.get(tensor, -1) < 0:
            return None
        uses = self._lasting_uses(tensor)
        if not uses:
            return None
        last = max(uses, key=lambda use: use.resharded_at)
        tensors = [tensor]
        while (before := self.before[tensors[-1]]) >= 0:
            tensors.append(before)
        root = tensors[-1]
        made = self.live.clock.begin[self.program.defs()[tensor][0] + 1]
        start = max(made, max(use.live_until for use in self.live.uses[root]))
        if last.resharded_at <= start:
            return None
        for_product = is_unfusible(self.program.operators[last.reader])
        return _Path(tuple(reversed(tensors)), start, last.resharded_at, self.smallest[tensor], for_product)

    def _lasting_uses(self, tensor: int) -> list[Use]:
        """The uses by operators that read the tensor itself as they run, outside of loops and calls."""
        operators = self.program.operators
        return [
            use
            for use in self.live.uses[tensor]
            if operators[use.reader].kind == "eqn"
            and use.reader not in self.inside
            and not self.live.recomputes_cast(tensor, use.reader)
        ]
