"""Folding: what looks alike becomes one line, so that a plan of 126 layers is as long as one of two.

Paths that differ in one part fold into a pattern; operators that differ only in their place (the same
primitive, line, cut and collectives) become a group; results that lie as an argument does are said to.

>>> rows = [(f"params.blocks.{i}.{n}", 0) for i in range(4) for n in ("key", "value")] + [("x", 1)]
>>> [(pattern, len(same)) for pattern, same in fold_paths(rows)]
[('params.blocks.0-3.{key,value}', 8), ('x', 1)]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jshard._plan.records import CollectiveRow, OperatorRow, TensorRow
from jshard._report.timeline import events


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


PathParts = tuple[frozenset[str], ...]


def fold_paths(items: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[int]]]:
    """Dotted paths with a key each, folded to patterns; the numbers of the items that each pattern stands for.

    Only paths of equal key fold, one differing part at a time, numbers first; the first part stays unless a number.
    """
    found: dict[tuple[Hashable, PathParts], list[int]] = {}
    for n, (path, key) in enumerate(items):
        found.setdefault((key, tuple(frozenset([p]) for p in path.split("."))), []).append(n)
    longest = max((len(parts) for _, parts in found), default=0)
    for mergeable in (_all_digits, _always):
        for at in range(longest):
            merged: dict[Any, tuple[Hashable, PathParts, list[int]]] = {}
            for (key, parts), numbers in found.items():
                if at >= len(parts) or (at == 0 and not _all_digits(parts[0])) or not mergeable(parts[at]):
                    merged[key, parts] = (key, parts, numbers)
                    continue
                k = (key, parts[:at], None, parts[at + 1 :], _all_digits(parts[at]))
                if k in merged:
                    _, old, ns = merged[k]
                    parts, numbers = (*parts[:at], old[at] | parts[at], *parts[at + 1 :]), ns + numbers
                merged[k] = (key, parts, numbers)
            found = {(key, parts): sorted(numbers) for key, parts, numbers in merged.values()}
    folded = [(".".join(map(_format_names, parts)), numbers) for (_, parts), numbers in found.items()]
    return sorted(folded, key=lambda f: f[1][0])


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
    some = sorted(names)
    return "{" + ",".join(some if len(some) <= 4 else [*some[:3], f"+{len(some) - 3}"]) + "}"


def fold_tensors(rows: Sequence[TensorRow]) -> list[tuple[str, list[TensorRow]]]:
    """Arguments or results of equal shape, type, layout and pin, by pattern."""
    keys = [(r.path, (r.shape, r.dtype, r.layout, r.pinned)) for r in rows]
    return [(common_pattern, [rows[n] for n in numbers]) for common_pattern, numbers in fold_paths(keys)]


def results_placed_like_arguments(plan: PlanRecord) -> tuple[list[tuple[str, str, int, int]], list[TensorRow]]:
    """Containers among the results that lie as an argument, and the rows of results that remain to be listed.

    Each is (result, argument, tensors, how many of them differ in layout); those that differ remain.
    """

    def roots(rows: Sequence[TensorRow]) -> dict[str, dict[str, TensorRow]]:
        out: dict[str, dict[str, TensorRow]] = {}
        for r in rows:
            root, _, rest = r.path.partition(".")
            out.setdefault(root, {})[rest] = r
        return out

    said, rest = [], []
    inputs = roots(plan.inputs)
    for name, rows in roots(plan.outputs).items():
        like = next(
            (a for a, theirs in inputs.items() if len(rows) > 2 and theirs.keys() == rows.keys()
             and all(rows[k].shape == theirs[k].shape for k in rows)),
            None,
        )  # fmt: skip
        if like is None:
            rest += rows.values()
            continue
        differ = [r for k, r in rows.items() if r.layout != inputs[like][k].layout]
        said.append((name, like, len(rows), len(differ)))
        rest += differ
    return said, rest


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """Alike collectives: how often in all, bytes received by a device and seconds, in all; `own` by the user."""

    kind: str
    axes: tuple[str, ...]
    local: str
    count: float
    bytes: float
    seconds: float
    ids: tuple[int, ...]
    own: bool = False


@dataclasses.dataclass(frozen=True)
class OperatorGroup:
    """Alike operators, or (without rows) collectives that belong to none: seconds in all, and what they move.

    `label` says for whom the collectives of a group without rows are.
    """

    label: str
    module: str
    rows: tuple[OperatorRow, ...]
    compute: float
    collectives: tuple[CollectiveGroup, ...]

    @property
    def seconds(self) -> float:
        """Compute and communication."""
        return self.compute + sum(m.seconds for m in self.collectives)


def operator_groups(plan: PlanRecord) -> list[OperatorGroup]:
    """Every operator and every collective of a plan, each in exactly one group, in program order."""
    rows = {c.id: c for c in plan.collectives}
    claimed = {i for r in plan.operators for i in r.collectives}
    found: dict[Any, list[OperatorRow | CollectiveRow]] = {}
    for e in events(plan):
        if isinstance(e, OperatorRow):
            moves = tuple((rows[i].kind, rows[i].axes, rows[i].local) for i in e.collectives)
            key: Any = (
                e.primitive,
                strip_numbers(e.module),
                e.source,
                e.strategy,
                e.results,
                e.shapes,
                moves,
            )
        elif e.id in claimed:
            continue
        else:
            key = (strip_numbers(e.tensor), strip_numbers(e.operator), e.kind, e.axes, e.local)
        found.setdefault(key, []).append(e)
    return [_group(same, rows) for same in found.values()]


def _group(same: Sequence[OperatorRow | CollectiveRow], rows: dict[int, CollectiveRow]) -> OperatorGroup:
    operators = tuple(r for r in same if isinstance(r, OperatorRow))
    alone = [c for c in same if isinstance(c, CollectiveRow)]
    moved = sum_collectives([rows[i] for r in operators for i in r.collectives] + alone)
    if not operators:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        shared = alone[0].operator.startswith("readers of")
        label = f"for readers of {alone[0].tensor}{more}" if shared else f"for {alone[0].operator}{more}"
        return OperatorGroup(label, "", (), 0.0, moved)
    module = pattern([r.module for r in operators])
    return OperatorGroup(operators[0].primitive, module, operators, sum(r.seconds for r in operators), moved)


def sum_collectives(same: Iterable[CollectiveRow]) -> tuple[CollectiveGroup, ...]:
    """Collectives of equal kind, axes and block, summed up."""
    by: dict[Any, list[CollectiveRow]] = {}
    for c in same:
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

    >>> generic("Net/blocks_12/attn"), generic("blocks.3/mlp")
    ('Net/blocks_#/attn', 'blocks.#/mlp')
    """
    return _NUMBER.sub("#", path)


def pattern(paths: Sequence[str]) -> str:
    """One name for paths that differ in their numbers only.

    >>> pattern(["blocks.0/mlp", "blocks.1/mlp"]), pattern(["a1/b2", "a1/b7"]), pattern(["x"])
    ('blocks.0-1/mlp', 'a1/b*', 'x')
    """
    numbers = [_NUMBER.findall(p) for p in dict.fromkeys(paths)]
    if len(set(map(len, numbers))) > 1:
        return paths[0]
    ranges = iter([_format_names(frozenset(column)) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(ranges), paths[0])
