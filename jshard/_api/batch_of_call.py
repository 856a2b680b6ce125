"""`microbatches=` of `shard`: the batch of a call's arguments, its program in pieces, the least number that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jshard._api.plan import Plan
from jshard._batch.batch_class import SHARED, BatchClass, per_example
from jshard._batch.batch_report import BatchReport, batch_report
from jshard._batch.microbatches import in_microbatches
from jshard._core.errors import MemoryBudgetError, ShardError
from jshard._core.jax_types import ClosedJaxpr
from jshard._core.messages import count_of
from jshard._program.trace import build
from jshard._recipes.structure import Structure


_BINDING = 0.8  # share of the budget from which on a plan may have been made slower by it

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
            raise ShardError(
                "no argument has a batch: no product keeps a dimension of an argument",
                where=where,
                fix="no microbatches=, or pass the data as arguments of the function",
            )
        if self.examples % count:
            allowed = ", ".join(map(str, self.counts))
            raise ShardError(
                f"{count} does not divide the batch of {self.examples}, {self.places}",
                where=where,
                fix=f"microbatches= one of {allowed}",
            )
        return in_microbatches(self.closed, self.inputs, self.examples, count)

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
    closed: ClosedJaxpr, name: str, names: Sequence[str], captured: Sequence[jax.Array]
) -> BatchOfCall:
    """The batch, from the structure of the program: the dimension that most products keep."""
    program = build(closed, name=name, input_names=names, captured=captured)
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

    Raises the refusal of least memory if none fits.
    """
    refused: list[tuple[int, MemoryBudgetError]] = []
    best: tuple[int, Call] | None = None
    why_not = ""
    for count in batch.counts or (1,):
        try:
            call = plan_in(count)
        except MemoryBudgetError as error:
            refused.append((count, error))
            continue
        except ShardError as error:
            if count == 1:
                raise
            why_not = f": {error.what} ({error.where})"
            break
        cost = plan_of(call).cost
        if best is not None and cost.objective >= plan_of(best[1]).cost.objective:
            break
        best = count, call
        limit = plan_of(call).memory_budget
        if limit is None or cost.peak_bytes < _BINDING * limit:
            break
    tried = ", ".join(str(k) for k, _ in refused)
    if best is None:
        raise _refusal([e for _, e in refused], f"microbatches={tried} exceed the budget too{why_not}")
    step = f"microbatches: {count_of(best[0], 'piece')} of {max(1, batch.examples // best[0])} examples"
    return best[1], (step + (f", since {tried} exceed the budget" if tried else "") + why_not,)


def _refusal(errors: Sequence[MemoryBudgetError], tried: str) -> MemoryBudgetError:
    """The refusal of least memory, with what was tried."""
    least = min(errors, key=lambda e: e.least_found)
    out = MemoryBudgetError(
        f"{least.what} ({tried})",
        where=least.where,
        fix=least.fix,
        refusal=least.refusal,
        remedies=least.remedies,
    )
    out.least_found, out.proved_least = least.least_found, least.proved_least
    return out
