"""`microbatches=` of `shard`: the batch of a call's arguments, its program in pieces, the least number that fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax

from jshard._api.plan import Plan
from jshard._batch.batch_class import SHARED, BatchClass, no_batch, per_example
from jshard._batch.batch_report import BatchReport, batch_report
from jshard._batch.microbatches import in_microbatches
from jshard._batch.pipelines import LoopsOverLayers, with_loops_over_layers
from jshard._config.recipes.structure import Structure
from jshard._core import jaxcompat as compat
from jshard._core.errors import MemoryBudgetError, ShardError
from jshard._core.jax_types import ClosedJaxpr
from jshard._core.messages import count_of
from jshard._plan.memory_refusal import MemoryRefusal
from jshard._program.trace import build
from jshard._report.format_units import format_bytes, format_percent
from jshard._schedule.peak_profile import INTERMEDIATE


_BINDING = 0.8  # share of the budget from which on a plan may have been made slower by it
_INTERRUPTED = ": interrupted, other numbers were not planned"

Call = TypeVar("Call")


@dataclasses.dataclass(frozen=True, eq=False)
class BatchOfCall:
    """The batch of a traced call.

    - `examples`: how many; 0 if no argument has a batch.
    - `inputs`: the class of every input of the jaxpr, captured values first.
    """

    closed: ClosedJaxpr
    names: tuple[str, ...]
    examples: int
    inputs: tuple[BatchClass, ...]

    def in_microbatches(self, count: int, name: str) -> ClosedJaxpr:
        """The program in a loop over `count` pieces; raises `ShardError`."""
        where = f"microbatches={count} of {name}"
        if not self.examples:
            raise no_batch(compat.open_jaxpr(self.closed)[0], where, "no microbatches=")
        if self.examples % count:
            allowed = ", ".join(map(str, self.counts))
            raise ShardError(
                f"{count} does not divide the batch of {self.examples}, {self.places}",
                where=where,
                fix=f"microbatches= one of {allowed}",
            )
        return in_microbatches(self.closed, self.inputs, self.examples, count)

    @functools.cached_property
    def in_loops(self) -> LoopsOverLayers:
        """The program with its layers in loops; raises `ShardError` if it has no layers that pass on the batch."""
        pieces = next((k for k in self.counts if k > 1), 1)
        return with_loops_over_layers(self.closed, self.inputs, self.examples, pieces)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of pieces that divide the batch."""
        return tuple(k for k in range(1, self.examples + 1) if self.examples % k == 0)

    @property
    def places(self) -> str:
        """The arguments with the batch, and where."""
        by_dim: dict[int, list[str]] = {}
        for name, c in zip(self.names, self.inputs[len(self.inputs) - len(self.names) :], strict=True):
            if c.is_example:
                by_dim.setdefault(c.dim, []).append(name)
        return " and ".join(f"dimension {d} of {', '.join(names)}" for d, names in by_dim.items())

    def report(self, name: str, count: int) -> BatchReport:
        """What every value of the program is; `count`: of pieces."""
        return batch_report(self.closed, self.inputs, self.examples, name, self.names, self.places, count)


def batch_of_call(
    closed: ClosedJaxpr,
    name: str,
    captured: Sequence[jax.Array],
    names: Sequence[str],
    results: Sequence[str],
) -> BatchOfCall:
    """The batch, from the structure of the program: the dimension that most products keep.

    `names`, `results`: the paths of arguments and results.
    """
    program = build(closed, name=name, input_names=names, output_names=results, captured=captured)
    structure = Structure(program)
    inputs = [SHARED] * (len(captured) + len(names))
    place = structure.batch_place
    examples = 0
    if place is not None:
        examples = program.tensors[structure.argument(place[0])].shape[place[1]]
        for number in sorted(structure.data):
            t = structure.argument(number)
            shape, classes = program.tensors[t].shape, structure.classes.of(t)
            dims = [d for d, c in enumerate(classes) if c == structure.batch and shape[d] == examples]
            if dims and number < len(names):
                inputs[len(captured) + number] = per_example(dims[0])
    return BatchOfCall(closed, tuple(names), examples, tuple(inputs))


def fewest_microbatches(
    batch: BatchOfCall, plan_in: Callable[[int], Call], plan_of: Callable[[Call], Plan]
) -> tuple[Call, tuple[str, ...]]:
    """The call in the fewest pieces that fit the memory budget, or in more where that is cheaper; and the plan's steps.

    After a refusal the number is next that would fit if the values of a step shrank with a piece, then the one before
    the least that fits, until one is refused: with more pieces a device holds less. The steps say of each number that was
    tried by how many bytes it exceeds the budget, or what it costs more.

    An interruption (Ctrl-C) ends it once a plan that fits is known.

    Raises the refusal of least memory if none fits.
    """
    counts = batch.counts or (1,)
    refused: dict[int, MemoryBudgetError] = {}
    calls: dict[int, Call] = {}
    why_not = ""

    def fits(k: int) -> bool:
        if k not in calls and k not in refused:
            try:
                calls[k] = plan_in(counts[k])
                if plan_of(calls[k]).interrupted:
                    raise KeyboardInterrupt
            except MemoryBudgetError as error:
                refused[k] = error
        return k in calls

    last = len(counts)  # the position from which on no number can be planned
    k: int | None = 0
    while k is not None:
        try:
            if fits(k):
                k = k - 1 if k - 1 >= 0 and k - 1 not in refused else None
            elif calls:
                break
            else:
                k = _next_position(
                    counts, k, _excess(refused[k]), [n for n in range(last) if n not in refused]
                )
        except KeyboardInterrupt:
            if not calls:
                raise
            last, why_not = 0, _INTERRUPTED  # nor are more pieces tried below
            break
        except ShardError as error:
            if counts[k] == 1:
                raise
            last, why_not = k, f": {error.what} ({error.where})"
            k = max((n for n in range(last) if n not in refused), default=None) if not calls else None
    tried = ", ".join(str(counts[k]) for k in sorted(refused))
    if not calls:
        raise _refusal(
            [refused[k] for k in sorted(refused)], f"microbatches={tried} exceed the budget too{why_not}"
        )
    k = least = min(calls)
    while k + 1 < last:
        plan = plan_of(calls[k])
        if plan.memory_budget is None or plan.cost.peak_bytes < _BINDING * plan.memory_budget:
            break
        try:
            if not fits(k + 1) or plan_of(calls[k + 1]).cost.objective >= plan.cost.objective:
                break
        except KeyboardInterrupt:
            why_not = _INTERRUPTED
            break
        except ShardError as error:
            why_not = f": {error.what} ({error.where})"
            break
        k += 1
    step = f"microbatches: {count_of(counts[k], 'piece')} of {count_of(max(1, batch.examples // counts[k]), 'example')}"
    step += (
        f", at less cost than {counts[least]}, the least number that was found to fit" if k != least else ""
    )
    exceed = "exceeds" if len(refused) == 1 else "exceed"
    step += (f", since {tried} {exceed} the budget" if tried else "") + why_not
    others = {counts[n]: plan_of(calls[n]) for n in calls if n != k}
    return calls[k], (step, *_tried({counts[n]: refused[n] for n in refused}, others, plan_of(calls[k])))


def _tried(
    refused: Mapping[int, MemoryBudgetError], fitting: Mapping[int, Plan], chosen: Plan
) -> tuple[str, ...]:
    """A line for every other number of pieces that was tried: by how much it is refused, or that it is dearer."""
    lines = {}
    for count, error in refused.items():
        if not isinstance(error.refusal, MemoryRefusal):
            continue
        limit, over = error.refusal.limit, error.refusal.peak - error.refusal.limit
        line = f"refused, the least peak found is {format_bytes(over)} above {format_bytes(limit)}"
        if error.refusal.bound > limit:
            line += f", none is less than {format_bytes(error.refusal.bound - limit)} above it"
        lines[count] = line
    for count, plan in fitting.items():
        by = plan.cost.objective / chosen.cost.objective - 1 if chosen.cost.objective else 0.0
        lines[count] = f"fit, peak {format_bytes(plan.cost.peak_bytes)}, at {format_percent(by)} more cost"
    return tuple(f"microbatches: {count_of(count, 'piece')} {lines[count]}" for count in sorted(lines))


def _next_position(counts: Sequence[int], k: int, excess: float, left: Sequence[int]) -> int | None:
    """The position to try after a refused one whose values take `excess` times their room: where they would fit.

    Of the positions left the largest where none is that far; None if none is left.

    >>> [_next_position((1, 2, 4, 8, 16, 32), *at) for at in ((0, 14.0, [1, 2, 3, 4, 5]), (5, 1.5, [1, 2, 3]))]
    [4, 3]
    """
    above = [n for n in left if n > k]
    if not above:
        return max(left, default=None)
    return next((n for n in above if counts[n] >= excess * counts[k]), above[-1])


def _excess(error: MemoryBudgetError) -> float:
    """What the values of a step hold, over the room that the rest leaves them; 0 where that is not known, or no room."""
    refusal = error.refusal
    if not isinstance(refusal, MemoryRefusal):
        return 0.0
    held = sum(h.nbytes for h in refusal.holders if h.kind == INTERMEDIATE)
    room = refusal.limit - (refusal.peak - held)
    return held / room if room > 0 else 0.0


def _refusal(errors: Sequence[MemoryBudgetError], tried: str) -> MemoryBudgetError:
    """The refusal of least memory, with what was tried."""
    least = min(errors, key=lambda e: e.least_found)
    return MemoryBudgetError(
        f"{least.what} ({tried})", where=least.where, fix=least.fix, refusal=least.refusal,
        remedies=least.remedies, least_found=least.least_found, proved_least=least.proved_least,
    )  # fmt: skip
