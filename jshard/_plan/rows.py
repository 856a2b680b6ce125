"""The rows of a plan: tensors, operators, collectives, cost, memory and the decision, as plain frozen data.

>>> moved = CollectiveRow(0, "all_reduce", ("y",), 320.0, 4e-5, 2.0, "add.5", "dot_general.3", "8x10 -> 8x10")
>>> moved.total
640.0
>>> Cost(2.0, 1.0, 1.0, 0.0, 1.0, 64.0).gap, Cost(2.0, 2.0, 1.0, 0.0, 1.0, 64.0).optimal
(1.0, True)
"""

from __future__ import annotations

import dataclasses

from jshard._core.layout import Layout


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """An argument or result: dotted path, shape, dtype, layout, whether the user pinned it, name of the tensor."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    pinned: bool = False
    tensor: str = ""


@dataclasses.dataclass(frozen=True)
class PipelineRow:
    """A plan's pipeline: the mesh axis of its stages, their number, microbatches, rounds; layers of each of its loops.

    `uneven`: whether the layers need not divide into stages and rounds. `unrolled`: whether the program has no loop over
    the layers, so that what each has of its own is stacked for the pipeline. `outside`: where a backward pass through the
    layers runs outside the pipeline, its first operator and the reason.

    >>> PipelineRow("stage", stages=4, microbatches=8, rounds=2, layers=(24, 24)).ticks
    19
    """

    axis: str
    stages: int
    microbatches: int
    rounds: int = 1
    uneven: bool = False
    layers: tuple[int, ...] = ()
    unrolled: bool = False
    outside: str = ""

    @property
    def ticks(self) -> int:
        """Ticks of each loop: `rounds * microbatches + stages - 1`."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a device works on nothing of use."""
        return (self.stages - 1) / self.ticks


@dataclasses.dataclass(frozen=True)
class EntryRow:
    """An argument that is moved before a call: where it lies, where the plan has it, bytes that a device receives.

    Such moves are no part of the program, nor of its cost: they happen while arguments come as they were given here.
    """

    path: str
    lies: str
    planned: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """An operator: how its operands and results are laid out, what it moves, how long it takes.

    `strategy` has the pieces per dimension of each operand; `collectives` the numbers of the collectives that
    bring its operands into place or finish its result; `seconds` one device's compute in all its `repeat` runs;
    `reads` and `writes` the names of its operands ("" for a literal) and results. `turn`: it is in a loop whose trip
    count is not known before it runs, and is counted for one turn. `backward`: differentiation made it by transposition.
    `redundant` is the part of `seconds` beyond an even share; `calls` are the user's functions that were running when it was
    traced, the outermost first, each with the line of its call, `"block:115"`; `kernel` is what computes it on an
    accelerator, where there is a choice, and after a colon what keeps the accelerator's kernel from it. `limit`: why its
    rule has no cut into more pieces than these, where devices repeat work; "" where it has.
    """

    name: str
    primitive: str
    module: str
    source: str
    strategy: tuple[tuple[int, ...], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    dtype: str
    collectives: tuple[int, ...]
    repeat: float
    seconds: float
    note: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    operand_dtypes: tuple[str, ...] = ()
    result_dtypes: tuple[str, ...] = ()
    turn: bool = False
    backward: bool = False
    redundant: float = 0.0
    calls: tuple[str, ...] = ()
    kernel: str = ""
    limit: str = ""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """A collective: bytes received by each device and seconds of one execution, and how many there are.

    `turn`: it is in a loop whose trip count is not known before it runs, and `count` is that of one turn. `dtype` is the
    tensor's. `own`: the user wrote it, in a `jax.shard_map`; the plan counts it and changes nothing about it. `hidden` are
    the seconds of one execution for which products run beside it and nothing waits.
    """

    id: int
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    count: float
    operator: str
    tensor: str
    local: str
    turn: bool = False
    dtype: str = ""
    own: bool = False
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Bytes received per device in all executions."""
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class LocalRow:
    """One line of what a device does: `kind` is "operator", a collective or a slice, a boundary of a loop, or its frame.

    `operator` is who runs, or for whom a step moves. `reads` and `writes` are names of values ("" for a literal), each
    with its block's shape and element type. `id` is the number of a collective, -1 for others; `count` how often it
    happens, of which `turn` counts one; `depth` how many bodies it stands in. A collective that an operator writes
    itself reads and writes nothing: `bytes` is what a device gives to it.
    """

    kind: str
    operator: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    result_shapes: tuple[tuple[int, ...], ...] = ()
    result_dtypes: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    id: int = -1
    count: float = 1.0
    turn: bool = False
    depth: int = 0
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a plan costs: seconds a call by kind, peak bytes a device, and the search's proof.

    `objective` is what the level minimised (seconds, or bytes at level 1), `bound` the proved lower bound on it
    over all plans in the search space. `compute` are the seconds of one device, `redundant` the part of it
    beyond an even share, `communication` all collectives. `price` is what the objective counts beside them: for
    products that are repeated and sums that are handed to the caller in pieces. `unpriced` is what a plan costs that
    may repeat products for nothing but their time, where that was searched and is less; else 0. `space` says what plans
    the bound is about, where it is not all of them. `hidden` is the part of `communication` beside which products run, so
    that nothing waits for it.
    """

    objective: float
    bound: float
    compute: float
    redundant: float
    communication: float
    peak_bytes: float
    unit: str = "s"
    price: float = 0.0
    unpriced: float = 0.0
    space: str = ""
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds for which a device waits for collectives."""
        return self.communication - self.hidden

    @property
    def gap(self) -> float:
        """(objective - bound) / bound; 0 when the plan is proved optimal."""
        if self.objective <= self.bound:
            return 0.0
        return (self.objective - self.bound) / self.bound if self.bound > 0 else float("inf")

    @property
    def optimal(self) -> bool:
        """Whether the plan is proved to be the best of the search space."""
        return self.objective <= self.bound


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes a device holds: `curve` while each operator runs, `held` at the peak as (class, bytes), most first.

    `stage`: in a pipeline the peak once more, on a device of any stage, as `stage_memory.py` divides it.
    `tiled`: at the peak with the arrays of convolutions in a TPU's tiles; 0 where that is no more.
    """

    curve: tuple[float, ...] = ()
    held: tuple[tuple[str, float], ...] = ()
    stage: tuple[tuple[str, float], ...] = ()
    tiled: float = 0.0


@dataclasses.dataclass(frozen=True)
class LiveRow:
    """A tensor in the memory of a device: bytes, class as in `Memory.held`, and the operators that run meanwhile.

    `first` and `last` are numbers of operators, indices into `Memory.curve`.
    """

    tensor: str
    kind: str
    bytes: float
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class ProductBound:
    """The least bytes that a device receives for one matrix product, `count` times a call; `regime` of its bound."""

    operator: str
    regime: str
    bytes: float
    count: float


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """FLOPs of the matrix products and convolutions of one call, over all devices; a multiply-add is two.

    `flops` are those of the model, `recomputed` those that `jax.checkpoint` or `remat="auto"` runs again. `peak_seconds`
    is what `flops` take when every device does an even share of them at the chip's peak for their element types: over
    the seconds of a step it is the model FLOPs utilization. `complete`: none is in a branch, in a loop of unknown trip
    count or in an operator whose work is not known; if not, the figures are at least so large.
    """

    flops: float = 0.0
    recomputed: float = 0.0
    peak_seconds: float = 0.0
    complete: bool = True


@dataclasses.dataclass(frozen=True)
class StepLowerBound:
    """What no program with this plan's placements avoids: seconds a call, bytes received, by product.

    `limit` is which of the three takes so long: the "products" at the chip's peak, the "memory" that arguments and results
    pass once, or the "network" over which the products must receive something. Programs may do all three at once.
    `space_gap` of a step that takes so many seconds is how far it is from there.

    >>> StepLowerBound(seconds=2.0, bytes=1e6).space_gap(2.5)
    0.25
    """

    seconds: float = 0.0
    bytes: float = 0.0
    products: tuple[ProductBound, ...] = ()
    limit: str = ""

    def space_gap(self, step: float) -> float:
        """(step - seconds) / seconds."""
        return max(0.0, step - self.seconds) / self.seconds if self.seconds > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The states themselves: per operator the factor each mesh axis cuts, or a layout for inputs and outputs.

    `regather`: (tensor, operator) pairs: there a tensor is moved again, instead of being held since an earlier reader.
    `regather_after`: with a third number, the tensor that must be there before: the result of the product before.
    """

    candidates: tuple[tuple[int, ...] | None, ...]
    endpoints: tuple[tuple[int, Layout], ...]
    relays: tuple[tuple[int, Layout], ...]
    regather: tuple[tuple[int, int], ...] = ()
    regather_after: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One way to cut a tensor (pieces per dimension) or an operator (the same for each operand).

    `cost` is that of the whole plan when this is forced, in the plan's own unit; None with a `reason` where it
    cannot be. `chosen` is what the plan does; `worse` says what a forced plan spends more on. `how` names the cuts that take
    an exchange: "halo", "roll", "prefix", "merge" and others.
    """

    cuts: tuple
    cost: float | None = None
    chosen: bool = False
    reason: str = ""
    worse: str = ""
    how: str = ""
