"""Which values a program may compute again, and the choices among them that are worth planning.

Problem.  A program of n values between its parts has 2^n choices of what is kept, each another program with a search of
its own. Few of them can be best: of two choices the one with more bytes kept and more seconds run again is worse,
however both are laid out, as long as all values and equations are partitioned alike.

Idea.  Bytes and seconds are counted for an even share of all devices, elementwise work as fused into its readers. The
minimum cuts of `recompute_cut.py` give the choices on the lower convex hull, from all kept to least kept; between two of
them lie those that keep some of the values in which they differ, last layers first, whose values wait least long.
Programs with few values have all their choices listed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.hardware import Chip
from jshard._core.jax_types import ClosedJaxpr, JaxprAtom, JaxprEqn
from jshard._cost import roofline
from jshard._program.equation_bodies import bodies_of
from jshard._program.memory.fusion_traits import NEVER_DUPLICATED, REDUCTION_PREFIXES
from jshard._program.memory.list_scheduling import live_bytes_curve
from jshard._program.memory.liveness import liveness
from jshard._program.memory.unfusible import ATTENTION, UNFUSIBLE
from jshard._program.operators import PRODUCTS
from jshard._program.recompute import recomputing
from jshard._program.residuals import (
    Region,
    Site,
    find_sites,
    may_run_again,
    nbytes,
    repetitions,
    variables,
)
from jshard._program.sunk_constants import with_constants_sunk
from jshard._program.trace import build
from jshard._search.exact.recompute_cut import RecomputeGraph, recompute_hull


_MAX_COMPARED = 64  # values of a pair of scans, of which the best to keep next is looked for
_MAX_SITES_ALONE = 4  # sites of a program, each of which may keep everything while the others do not
_LOWER = 0.99  # of the bytes or the peak of each choice with fewer seconds: else it is not worth planning
MAX_LISTED_VALUES = 5
"""Programs with at most as many values between their parts have all choices of what to keep planned."""


Kept = tuple[frozenset[JaxprAtom], ...]
"""Of each site the variables that are kept."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a program keeps: of each site the variables.

    `bytes` and `seconds` are those of values kept and equations run again, without any partitioning.
    """

    kept: Kept
    bytes: float
    seconds: float


class Recomputation:
    """The choices of one traced function.

    `closed` is its jaxpr, `chip` the one whose times are taken, `donated` the flat indices of donated arguments.
    """

    def __init__(self, closed: ClosedJaxpr, chip: Chip, donated: Collection[int] = ()):
        opened, _ = compat.open_jaxpr(closed)
        sunk = with_constants_sunk(opened, is_cheap)
        self.rewrites_loops = sunk is not opened
        """Whether every choice differs from the program as it was traced: its loops make large constants themselves."""
        self.closed = closed.replace(jaxpr=sunk) if self.rewrites_loops else closed
        self.chip, self.donated = chip, donated
        self.region: Region = find_sites(self.closed)
        self.sites: list[Site] = self.region.all_sites
        self.graphs = [_graph(site, chip) for site in self.sites]
        self._peaks: dict[Choice, float] = {}

    @property
    def can_recompute(self) -> bool:
        """Whether any value could be computed again."""
        return self.rewrites_loops or any(len(values) for values in self.needed)

    @property
    def needed(self) -> list[list[JaxprAtom]]:
        """Of each site the values that the late part reads and that may be computed again."""
        return [
            [v for v in site.needed if (k := graph.index.get(v)) is not None and graph.is_recomputable(k)]
            for site, graph in zip(self.sites, self.graphs, strict=True)
        ]  # fmt: skip

    def program(self, choice: Choice) -> ClosedJaxpr:
        """The closed jaxpr of a choice."""
        keeps_all = all(set(s.needed) <= kept for s, kept in zip(self.sites, choice.kept, strict=True))
        if keeps_all and not self.rewrites_loops:
            return self.closed
        return recomputing(self.closed, self.region, dict(enumerate(choice.kept)), recompute_weight)

    def choice(self, kept: Sequence[frozenset[JaxprAtom]]) -> Choice:
        """The choice that keeps some values, with its bytes and seconds."""
        size, seconds = 0.0, 0.0
        for values, graph in zip(kept, self.graphs, strict=True):
            late, _ = graph.needed_late(values)
            size += float(graph.cut.bytes[late].sum())
            seconds += graph.seconds_of(values)
        return Choice(tuple(kept), size, seconds)

    def hull(self, most_bytes: float = math.inf) -> list[Choice]:
        """The choices on the lower convex hull of bytes and seconds, from the least seconds to the least bytes.

        What is computed again is in memory while it is read, which the hull does not count. So the hulls in which one
        site keeps all that is needed are there as well. Left out are choices for which there is one of fewer seconds
        with as few bytes kept and as low a peak, as traced; so the one of least bytes stays. Left out are those above
        `most_bytes` as well.
        """
        sites = range(len(self.sites))
        choices = self._hull_of(sites)
        if 1 < len(sites) <= _MAX_SITES_ALONE:
            # What is read soon after it is made, as the logits are, had better stay while the rest is computed again.
            for k in sites:
                choices += self._hull_of([j for j in sites if j != k])
        choices = sorted((c for c in choices if c.bytes <= most_bytes), key=lambda c: (c.seconds, c.bytes))
        out: list[Choice] = []
        for choice in choices:
            fewer = [
                c for c in out if c.bytes <= choice.bytes / _LOWER
            ]  # mostly none: peaks as traced take time
            if not fewer or min(map(self.traced_peak, fewer)) > self.traced_peak(choice) / _LOWER:
                out.append(choice)
        return out

    def _hull_of(self, sites: Sequence[int]) -> list[Choice]:
        """The hull of some sites; the others keep all that is needed."""
        out = []
        for found in recompute_hull([self.graphs[k].cut for k in sites]):
            kept = [frozenset(site.needed) for site in self.sites]
            for k, values in zip(sites, found.kept, strict=True):
                kept[k] = frozenset(self.graphs[k].values[v] for v in values)
            out.append(self.choice(kept))
        return out

    def everything(self) -> Choice:
        """The choice that keeps all that is needed: the program as it was traced."""
        return self.choice([frozenset(site.needed) for site in self.sites])

    def traced_peak(self, choice: Choice) -> float:
        """The largest sum of live bytes of a choice's program in traced order, nothing partitioned."""
        if choice not in self._peaks:
            program = build(self.program(choice), name="a choice", input_names=[])
            curve = live_bytes_curve(program, liveness(program, self.donated))
            self._peaks[choice] = float(curve.max(initial=0.0))
        return self._peaks[choice]

    def every_choice(self) -> list[Choice] | None:
        """All choices among the values that the late part reads, the most kept first; None if they are many."""
        needed = [(k, v) for k, values in enumerate(self.needed) for v in values]
        if len(needed) > MAX_LISTED_VALUES:
            return None
        fixed = [
            frozenset(site.needed) - frozenset(values)
            for site, values in zip(self.sites, self.needed, strict=True)
        ]
        out = []
        for size in range(len(needed), -1, -1):
            for chosen in itertools.combinations(needed, size):
                kept = [values | {v for site, v in chosen if site == k} for k, values in enumerate(fixed)]
                out.append(self.choice(kept))
        return out

    def between(self, more: Choice, less: Choice) -> list[Kept]:
        """What is kept by choices from `less` to `more`, each one more value of those in which they differ.

        Of a body the values made last come first, since they wait least long; of a pair of scans those that save most
        seconds a byte, given what is kept before. What is in memory in any case is no difference.
        """
        kept, out = list(less.kept), []
        for k, graph in enumerate(self.graphs):
            different = more.kept[k] - less.kept[k] - self.sites[k].free
            left = sorted(different, key=lambda v: -graph.index[v])
            while left:
                v = left[0]
                if self.sites[k].kind == "scan" and len(left) <= _MAX_COMPARED:
                    v = min(left, key=lambda v: graph.seconds_a_byte(kept[k], v))
                left.remove(v)
                kept[k] = kept[k] | {v}
                out.append(tuple(kept))
        return out[:-1]

    def numbers(self, choice: Choice) -> tuple[tuple[int, ...], ...]:
        """A choice as numbers that are the same whenever the function is traced; `from_numbers` reads them."""
        return tuple(
            tuple(sorted(graph.index[v] for v in values if v in graph.index))
            for values, graph in zip(choice.kept, self.graphs, strict=True)
        )

    def from_numbers(self, numbers: Sequence[Sequence[int]]) -> Choice | None:
        """The choice of some numbers; None if they are of another program."""
        if len(numbers) != len(self.graphs) or any(
            not 0 <= k < len(graph.values) for ks, graph in zip(numbers, self.graphs, strict=True) for k in ks
        ):
            return None
        kept = [
            frozenset(graph.values[k] for k in ks) for ks, graph in zip(numbers, self.graphs, strict=True)
        ]
        return self.choice(kept)

    def stays(self) -> list[str]:
        """Names of the equations that are needed late and are never run again: effects, callbacks, loops without end."""
        names: dict[str, None] = {}
        for site, graph in zip(self.sites, self.graphs, strict=True):
            for v in site.needed:
                maker = graph.makers.get(v)
                if maker is not None and not may_run_again(maker):
                    names[f"{maker.primitive.name} {compat.source_line(maker)}".strip()] = None
        return list(names)

    def names_of(self, choice: Choice) -> list[str]:
        """What is computed again, as "primitive dtype[shape] file:line", the most bytes first."""
        size: dict[str, float] = {}
        for site, graph, values in zip(self.sites, self.graphs, choice.kept, strict=True):
            for v in site.needed:
                if v not in values and v in graph.makers and v not in site.free:
                    text = describe(v, graph.makers[v])
                    size[text] = size.get(text, 0.0) + nbytes(v) * site.copies
        return sorted(size, key=lambda text: -size[text])


def describe(v: JaxprAtom, eqn: JaxprEqn) -> str:
    """A value in one line: its equation, type and source line."""
    line = compat.source_line(eqn).partition(" (")[0]
    return f"{eqn.primitive.name} {v.aval.str_short(short_dtypes=True)} {line}".strip()


@dataclasses.dataclass(frozen=True, eq=False)
class _SiteGraph:
    """A site as arrays, its values in the order in which they are made, and the equations that make them."""

    cut: RecomputeGraph
    values: list[JaxprAtom]
    index: dict[JaxprAtom, int]
    makers: dict[JaxprAtom, JaxprEqn]

    @functools.cached_property
    def reads(self) -> dict[int, list[int]]:
        """The values that each equation reads, as numbers."""
        out: dict[int, list[int]] = {}
        for e, v in self.cut.reads.tolist():
            out.setdefault(e, []).append(v)
        return out

    def seconds_a_byte(self, kept: frozenset[JaxprAtom], value: JaxprAtom) -> float:
        """Seconds run again, added by keeping one more value, over its bytes: negative where that saves time."""

        more = self.seconds_of(kept | {value}) - self.seconds_of(kept)
        return more / max(1.0, float(self.cut.bytes[self.index[value]]))

    def seconds_of(self, kept: frozenset[JaxprAtom]) -> float:
        """Seconds of what is run again and of what is written and read because it is kept."""
        late, again = self.needed_late(kept)
        return float(self.cut.seconds[again].sum() + self.cut.keep_seconds[late].sum())

    def is_recomputable(self, value: int) -> bool:
        """Whether a value may be computed again."""
        maker = int(self.cut.maker[value])
        return maker >= 0 and math.isfinite(self.cut.seconds[maker])

    def needed_late(self, kept: frozenset[JaxprAtom]) -> tuple[np.ndarray, np.ndarray]:
        """Values that are kept and needed late, and equations that are run again, as numbers."""
        late: set[int] = set()
        again: set[int] = set()
        stack = self.cut.needed.tolist()
        seen = set()
        while stack:
            k = stack.pop()
            if k in seen:
                continue
            seen.add(k)
            e = int(self.cut.maker[k])
            if self.values[k] in kept or e < 0 or not math.isfinite(self.cut.seconds[e]):
                late.add(k)
            elif e not in again:
                again.add(e)
                stack += self.reads.get(e, ())
        return np.array(sorted(late), dtype=np.int64), np.array(sorted(again), dtype=np.int64)


def _graph(site: Site, chip: Chip) -> _SiteGraph:
    """The values that the late part may need, with what keeping each and running each equation again costs."""
    makers = {v: eqn for eqn in site.eqns for v in eqn.outvars}
    order = {v: k for k, v in enumerate(makers)}
    reached: dict[JaxprAtom, None] = {}
    stack = list(site.needed)
    while stack:
        v = stack.pop()
        if v in reached or v in site.free:
            continue
        reached[v] = None
        if v in makers and may_run_again(makers[v]):
            stack += variables(makers[v].invars)
    values = sorted(reached, key=lambda v: order.get(v, -1))
    index = {v: k for k, v in enumerate(values)}
    eqn_number: dict[int, int] = {}
    maker, seconds, reads = [], [], []
    for v in values:
        eqn = makers.get(v)
        key = id(eqn) if eqn is not None else id(v)
        if key not in eqn_number:
            eqn_number[key] = len(seconds)
            seconds.append(math.inf)
            if eqn is not None and may_run_again(eqn):
                seconds[-1] = equation_seconds(eqn, chip) * site.runs
                reads += [(eqn_number[key], index[u]) for u in variables(eqn.invars) if u in index]
        maker.append(eqn_number[key])
    size = np.array([float(nbytes(v)) * site.copies for v in values])
    # A fused value that is kept is written; that of a body is not, since compilers make it again where it is read.
    fused = np.array([v in makers and not recompute_weight(makers[v]) for v in values], dtype=bool)
    traffic = np.where(fused & (site.kind == "scan"), site.runs / site.copies / chip.hbm_bandwidth, 0.0)
    cut = RecomputeGraph(
        size,
        traffic * size,
        np.array(seconds, dtype=np.float64),
        np.array(maker, dtype=np.int64),
        np.array(reads, dtype=np.int64).reshape(-1, 2),
        np.array([index[v] for v in site.needed if v in index], dtype=np.int64),
    )
    return _SiteGraph(cut, values, index, makers)


def recompute_weight(eqn: JaxprEqn) -> int:
    """0 for elementwise work that compilers fuse into its readers, 1 for reductions, 2 for all else."""
    name = eqn.primitive.name
    if name.startswith(REDUCTION_PREFIXES):
        return 1
    if (
        name in UNFUSIBLE
        or name in ATTENTION
        or name in ("scan", "while")
        or name.startswith(("scatter", "jshard_fused"))
    ):
        return 2
    return max((recompute_weight(e) for body in bodies_of(eqn) for e in body.eqns), default=0)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation fuses into all its readers and costs next to nothing there."""
    name = eqn.primitive.name
    return not (
        recompute_weight(eqn) or name.startswith(NEVER_DUPLICATED) or any(True for _ in bodies_of(eqn))
    )


def equation_seconds(eqn: JaxprEqn, chip: Chip) -> float:
    """Seconds of one run of an equation on one device, with elementwise work fused: only its arithmetic counts."""
    inner = [sum(equation_seconds(e, chip) for e in body.eqns) for body in bodies_of(eqn)]
    if inner:
        return (repetitions(eqn) or 1) * (max(inner) if eqn.primitive.name == "cond" else sum(inner))
    if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "dtype"):
        return 0.0
    results = sum(nbytes(v) for v in eqn.outvars)
    size = float(math.prod(eqn.outvars[0].aval.shape))
    rate = roofline.peak_flops(eqn.outvars[0].aval.dtype, chip)
    weight = recompute_weight(eqn)
    if not weight:
        return size / rate
    moved = results + sum(nbytes(v) for v in variables(eqn.invars))
    return max(_operations(eqn, size) / rate, moved / chip.hbm_bandwidth)


def _operations(eqn: JaxprEqn, size: float) -> float:
    """Arithmetic operations of an equation with results of `size` elements."""
    if eqn.primitive.name in ATTENTION:
        return eqn.params["spec"].flops(
            *(v.aval.shape for v in eqn.invars[:3]), backward=eqn.primitive.name.endswith("backward")
        )
    if eqn.primitive.name not in PRODUCTS:
        return size
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * size * math.prod(lhs.shape[d] for d in contracted)
    if eqn.primitive.name.startswith("ragged_dot"):
        return 2.0 * size * lhs.shape[-1]
    features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * size * math.prod(rhs.shape) / max(1, features)
