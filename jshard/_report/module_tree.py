"""Operators by module, with the seconds of each module: the tree of the HTML page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._report.grouping import OperatorGroup, common_pattern, operator_groups, strip_numbers


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


@dataclasses.dataclass(frozen=True)
class Branch:
    """A module: its own groups and the modules inside it."""

    name: str
    groups: tuple[OperatorGroup, ...]
    branches: tuple[Branch, ...]

    @property
    def compute(self) -> float:
        """Seconds of compute, inner modules included."""
        return sum(g.compute for g in self.groups) + sum(b.compute for b in self.branches)

    @property
    def communication(self) -> float:
        """Seconds of collectives, inner modules included."""
        own = sum(m.seconds for g in self.groups for m in g.collectives)
        return own + sum(b.communication for b in self.branches)

    @property
    def operators(self) -> int:
        """Number of operators, inner modules included."""
        return sum(len(g.rows) for g in self.groups) + sum(b.operators for b in self.branches)


def module_tree(plan: PlanRecord) -> Branch:
    """All groups of a plan under their modules; operators without a module are under the function they were written in.

    Modules that differ only in numbers are one branch: `blocks.0-3`. The scopes that `einsum` opens are left out.
    """
    return _branch(plan.name, [(_paths(g), g) for g in operator_groups(plan)], 0)


def _paths(g: OperatorGroup) -> list[tuple[str, ...]]:
    """The module path of every operator of a group; they differ only in numbers."""
    if not g.rows:
        return [("between operators",)]
    parts = [tuple(p for p in r.module.split("/") if p and "->" not in p) for r in g.rows]
    return parts if parts[0] else [(source_function(g.rows[0].source) or "elsewhere",)]


def source_function(source: str) -> str:
    """The function of a source line.

    >>> source_function("/a/net.py:3:1 (big.<locals>.loss)"), source_function("net.py:3")
    ('loss (net.py)', 'net.py')
    """
    place, _, function = source.partition(" (")
    file = place.rsplit("/", 1)[-1].split(":")[0]
    return f"{function[:-1].rsplit('.', 1)[-1]} ({file})" if function else file


def _branch(name: str, items: list[tuple[list[tuple[str, ...]], OperatorGroup]], depth: int) -> Branch:
    own = tuple(g for paths, g in items if len(paths[0]) == depth)
    below: dict[str, list[tuple[list[tuple[str, ...]], OperatorGroup]]] = {}
    for paths, g in items:
        if len(paths[0]) > depth:
            below.setdefault(strip_numbers(paths[0][depth]), []).append((paths, g))
    return Branch(
        name, own,
        tuple(
            _branch(common_pattern([path[depth] for paths, _ in inner for path in paths]), inner, depth + 1)
            for inner in below.values()
        ),
    )  # fmt: skip
