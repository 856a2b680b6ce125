"""Folding: equal rows become one line, so that a plan of 126 layers prints as long as one of two.

Paths that differ in one part fold into a pattern; operators that differ only in their place (same primitive, source
line, cut and collectives) become a group; results placed like an argument are summed up in one line.

>>> rows = [(f"params.blocks.{i}.{n}", 0) for i in range(4) for n in ("key", "value")] + [("x", 1)]
>>> [(path, len(numbers)) for path, numbers in fold_paths(rows)]
[('params.blocks.0-3.{key,value}', 8), ('x', 1)]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from jshard._plan.rows import CollectiveRow, OperatorRow, TensorRow
from jshard._report.format_units import format_bytes, format_count, format_seconds
from jshard._report.timeline import events


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


PathParts = tuple[frozenset[str], ...]


def fold_paths(items: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[int]]]:
    """Fold dotted paths, each with a key, to patterns; the numbers of the items that each pattern stands for.

    Only paths of equal key fold, one differing part at a time, numbers first. The first part of a path stays, unless it
    is a number.
    """
    folded: dict[tuple[Hashable, PathParts], list[int]] = {}
    for n, (path, key) in enumerate(items):
        folded.setdefault((key, tuple(frozenset([p]) for p in path.split("."))), []).append(n)
    longest = max((len(parts) for _, parts in folded), default=0)
    for mergeable in (_all_digits, _always):
        for at in range(longest):
            folded = _fold_part(folded, at, mergeable)
    patterns = [(".".join(map(_format_names, parts)), numbers) for (_, parts), numbers in folded.items()]
    return sorted(patterns, key=lambda f: f[1][0])


def _fold_part(
    paths: dict[tuple[Hashable, PathParts], list[int]], at: int, mergeable: Callable[[frozenset[str]], bool]
) -> dict[tuple[Hashable, PathParts], list[int]]:
    """Merge the paths that differ in part `at` alone, where that part is mergeable."""
    merged: dict[Hashable, tuple[Hashable, PathParts, list[int]]] = {}
    for (key, parts), numbers in paths.items():
        if at >= len(parts) or (at == 0 and not _all_digits(parts[0])) or not mergeable(parts[at]):
            merged[key, parts] = (key, parts, numbers)
            continue
        rest = (key, parts[:at], None, parts[at + 1 :], _all_digits(parts[at]))
        if rest in merged:
            _, before, others = merged[rest]
            parts, numbers = (*parts[:at], before[at] | parts[at], *parts[at + 1 :]), others + numbers
        merged[rest] = (key, parts, numbers)
    return {(key, parts): sorted(numbers) for key, parts, numbers in merged.values()}


def _all_digits(part: frozenset[str]) -> bool:
    return all(p.isdigit() for p in part)


def _always(part: frozenset[str]) -> bool:
    return True


def _format_names(names: frozenset[str]) -> str:
    if len(names) == 1:
        return next(iter(names))
    if _all_digits(names):
        n = sorted(map(int, names))
        return f"{n[0]}-{n[-1]}" if n[-1] - n[0] + 1 == len(n) else "*"
    parts = sorted(names)
    return "{" + ",".join(parts if len(parts) <= 4 else [*parts[:3], f"+{len(parts) - 3}"]) + "}"


def fold_tensors(rows: Sequence[TensorRow]) -> list[tuple[str, list[TensorRow]]]:
    """Arguments or results of equal shape, type, layout and pin, by pattern."""
    keys = [(r.path, (r.shape, r.dtype, r.layout, r.pinned)) for r in rows]
    return [(path, [rows[n] for n in numbers]) for path, numbers in fold_paths(keys)]


@dataclasses.dataclass(frozen=True)
class PlacedLikeArgument:
    """A container among the results with the tensors of an argument; `differ` of its `tensors` have another layout."""

    result: str
    argument: str
    tensors: int
    differ: int


def results_placed_like_arguments(plan: PlanRecord) -> tuple[list[PlacedLikeArgument], list[TensorRow]]:
    """Containers among the results that are placed like an argument, and the rows that remain to be listed."""

    def by_container(rows: Sequence[TensorRow]) -> dict[str, dict[str, TensorRow]]:
        out: dict[str, dict[str, TensorRow]] = {}
        for r in rows:
            root, _, rest = r.path.partition(".")
            out.setdefault(root, {})[rest] = r
        return out

    def same_tensors(a: dict[str, TensorRow], b: dict[str, TensorRow]) -> bool:
        return a.keys() == b.keys() and all(a[k].shape == b[k].shape for k in a)

    containers, listed = [], []
    arguments = by_container(plan.inputs)
    for result, rows in by_container(plan.outputs).items():
        like = next((a for a, b in arguments.items() if len(rows) > 2 and same_tensors(rows, b)), None)
        if like is None:
            listed += rows.values()
            continue
        differ = [r for k, r in rows.items() if r.layout != arguments[like][k].layout]
        containers.append(PlacedLikeArgument(result, like, len(rows), len(differ)))
        listed += differ
    return containers, listed


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of equal kind, axes and block, with the sums of their executions, bytes received by a device, seconds.

    `local` is the type of the block; `own`: in the user's own `shard_map`.
    """

    kind: str
    axes: tuple[str, ...]
    local: str
    count: float
    bytes: float
    seconds: float
    ids: tuple[int, ...]
    own: bool = False

    @property
    def name(self) -> str:
        """The kind over the product of its mesh axes, such as `all_reduce[x*y]`."""
        return f"{self.kind}[{'*'.join(self.axes)}]"

    @property
    def figures(self) -> str:
        """Executions, bytes and seconds."""
        return f"{format_count(self.count)} x, {format_bytes(self.bytes)}, {format_seconds(self.seconds)}"


@dataclasses.dataclass(frozen=True)
class OperatorGroup:
    """Operators that differ only in their place, or (without rows) collectives that belong to no operator.

    `label` names the primitive, or the consumers of the collectives; `compute` is in seconds.
    """

    label: str
    module: str
    rows: tuple[OperatorRow, ...]
    compute: float
    collectives: tuple[CollectiveGroup, ...]

    @property
    def seconds(self) -> float:
        """Compute and communication."""
        return self.compute + sum(c.seconds for c in self.collectives)


def operator_groups(plan: PlanRecord) -> list[OperatorGroup]:
    """Every operator and every collective of a plan, each in exactly one group, in program order."""
    rows = {c.id: c for c in plan.collectives}
    claimed = {i for r in plan.operators for i in r.collectives}
    same: dict[Hashable, list[OperatorRow | CollectiveRow]] = {}
    for e in events(plan):
        if isinstance(e, OperatorRow):
            own = tuple((rows[i].kind, rows[i].axes, rows[i].local) for i in e.collectives)
            key: Hashable = (
                e.primitive,
                strip_numbers(e.module),
                e.source,
                e.strategy,
                e.results,
                e.shapes,
                own,
            )
        elif e.id in claimed:
            continue
        else:
            key = (strip_numbers(e.tensor), strip_numbers(e.operator), e.kind, e.axes, e.local)
        same.setdefault(key, []).append(e)
    return [_group(members, rows) for members in same.values()]


def _group(members: Sequence[OperatorRow | CollectiveRow], rows: dict[int, CollectiveRow]) -> OperatorGroup:
    operators = tuple(r for r in members if isinstance(r, OperatorRow))
    alone = [c for c in members if isinstance(c, CollectiveRow)]
    collectives = sum_collectives([rows[i] for r in operators for i in r.collectives] + alone)
    if not operators:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        # As in the IR, % marks a tensor: arguments and mesh axes may have one name.
        shared = alone[0].operator.startswith("readers of")
        label = f"for readers of %{alone[0].tensor}{more}" if shared else f"for {alone[0].operator}{more}"
        return OperatorGroup(label, "", (), 0.0, collectives)
    module = common_pattern([r.module for r in operators])
    compute = sum(r.seconds for r in operators)
    return OperatorGroup(operators[0].primitive, module, operators, compute, collectives)


def sum_collectives(collectives: Iterable[CollectiveRow]) -> tuple[CollectiveGroup, ...]:
    """Collectives of equal kind, axes and block, summed up."""
    by: dict[tuple, list[CollectiveRow]] = {}
    for c in collectives:
        by.setdefault((c.kind, c.axes, c.local, c.own), []).append(c)
    return tuple(
        CollectiveGroup(
            kind, axes, local, sum(c.count for c in cs), sum(c.total for c in cs), sum(c.seconds * c.count for c in cs),
            tuple(c.id for c in cs), own,
        )
        for (kind, axes, local, own), cs in by.items()
    )  # fmt: skip


_NUMBER = re.compile(r"\d+")


def strip_numbers(path: str) -> str:
    """A path with its numbers replaced.

    >>> strip_numbers("Net/blocks_12/attn"), strip_numbers("blocks.3/mlp")
    ('Net/blocks_#/attn', 'blocks.#/mlp')
    """
    return _NUMBER.sub("#", path)


def common_pattern(paths: Sequence[str]) -> str:
    """One name for paths that differ in their numbers only.

    >>> common_pattern(["blocks.0/mlp", "blocks.1/mlp"]), common_pattern(["a1/b2", "a1/b7"]), common_pattern(["x"])
    ('blocks.0-1/mlp', 'a1/b*', 'x')
    """
    numbers = [_NUMBER.findall(p) for p in dict.fromkeys(paths)]
    if len(set(map(len, numbers))) > 1:
        return paths[0]
    ranges = iter([_format_names(frozenset(column)) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(ranges), paths[0])
