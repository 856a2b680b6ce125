"""What every value of a program is with respect to the batch, as a table: `plan.batch`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jshard._batch.batch_class import BatchClass, described
from jshard._batch.body_classes import class_in
from jshard._batch.microbatches import finished_early, staged
from jshard._core.jax_types import ClosedJaxpr
from jshard._core.text_width import wrapped


_MAX_LISTED = 12  # results and coupled operators that are printed


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """A value: its name (path, or primitive), its type, its class, and the source line of an operator."""

    name: str
    type: str
    batch_class: BatchClass
    source: str = ""


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """The classes of all values of a program.

    - `examples`, `places`: the size of the batch, and the arguments with it.
    - `arguments`, `values`, `results`: of the program, calls written out; bodies of loops count as one operator.
    - `coupled`: the operators with no result for a part of the batch alone, with source line and reason.
    - `microbatches`, `loops`: the number of pieces, and of loops over them: more than one where finished sums are read
        by values per example (batch statistics).
    - `finished`: those sums, with source lines: they are of the whole batch, as without microbatches.
    """

    name: str
    examples: int
    places: str
    arguments: tuple[BatchRow, ...]
    values: tuple[BatchRow, ...]
    results: tuple[BatchRow, ...]
    coupled: tuple[str, ...]
    microbatches: int
    loops: int
    finished: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.examples:
            return f"batch of {self.name}: no argument has one"
        lines = [f"batch of {self.name}: {self.examples} examples, {self.places}"]
        if self.microbatches > 1:
            size = self.examples // self.microbatches
            loops = "one loop" if self.loops == 1 else f"{self.loops} loops"
            lines.append(f"  in {self.microbatches} microbatches of {size} examples, in {loops}")
        lines.append(f"  arguments: {_counts(self.arguments, ('per example', 'shared'))}; "
                     f"values: {_counts(self.values, ('per example', 'shared', 'sum'))}")  # fmt: skip
        for text in self.finished[:_MAX_LISTED]:
            lines.append(f"  of the whole batch before values per example read it: {text}")
        if len(self.finished) > _MAX_LISTED:
            lines.append(f"  and {len(self.finished) - _MAX_LISTED} more such sums")
        if not self.coupled:
            lines.append("  coupled: none")
        lines += [f"  coupled: {text}" for text in self.coupled[:_MAX_LISTED]]
        if len(self.coupled) > _MAX_LISTED:
            lines.append(f"  and {len(self.coupled) - _MAX_LISTED} more coupled operators")
        lines.append("  results")
        for row in self.results[:_MAX_LISTED]:
            lines.append(f"    {row.name:<13} {row.type:<10} {row.batch_class}")
        if len(self.results) > _MAX_LISTED:
            rest = _counts(self.results[_MAX_LISTED:], ("per example", "shared", "sum"))
            lines.append(f"    and {len(self.results) - _MAX_LISTED} more: {rest}")
        return wrapped(lines)


def _counts(rows: Sequence[BatchRow], kinds: Sequence[str]) -> str:
    count = collections.Counter(row.batch_class.kind for row in rows)
    return ", ".join(f"{count[k]} {'sum over examples' if k == 'sum' else k}" for k in kinds)


def batch_report(
    closed: ClosedJaxpr, inputs: Sequence[BatchClass], examples: int, name: str, names: Sequence[str], places: str,
    count: int,
) -> BatchReport:  # fmt: skip
    """The report of a traced program whose inputs have these classes; the last inputs are the arguments `names`."""
    if not examples:
        return BatchReport(name, 0, "", (), (), (), (), 1, 0)
    pieces = (
        count
        if count > 1
        else next(k for k in range(2, examples + 1) if examples % k == 0)
        if examples > 1
        else 1
    )
    plan, *_ = staged(closed, inputs, examples, pieces)
    arguments = plan.jaxpr.invars[len(plan.jaxpr.invars) - len(names) :]
    rows = [
        BatchRow(n, v.aval.str_short(short_dtypes=True), plan.classes[v])
        for n, v in zip(names, arguments, strict=True)
    ]
    values = [
        BatchRow(eqn.primitive.name, v.aval.str_short(short_dtypes=True), plan.classes[v], described(eqn))
        for eqn in plan.jaxpr.eqns
        for v in eqn.outvars
    ]
    many = len(plan.jaxpr.outvars) > 1
    results = [
        BatchRow(
            f"result {k}" if many else "result",
            v.aval.str_short(short_dtypes=True),
            class_in(plan.classes, v),
        )
        for k, v in enumerate(plan.jaxpr.outvars)
    ]
    coupled = tuple(str(error) for error in plan.coupled.values())
    return BatchReport(
        name, examples, places, tuple(rows), tuple(values), tuple(results), coupled, count, plan.loops,
        tuple(finished_early(plan)),
    )  # fmt: skip
