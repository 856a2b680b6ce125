"""Union-find with path halving (Tarjan and van Leeuwen 1984): classes of what was united.

>>> classes = UnionFind[str]()
>>> classes.unite("a", "b")
>>> classes.unite("b", "c")
>>> classes.root("c") == classes.root("a"), "d" in classes, list(classes)
(True, False, ['a', 'b', 'c'])
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar


T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """Disjoint classes of hashable members, each a class of its own until it is united; iterates over those it has seen."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def __contains__(self, member: object) -> bool:
        return member in self._parent

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._parent))

    def root(self, member: T) -> T:
        """The member that stands for the class of a member, which may be new."""
        parent = self._parent
        parent.setdefault(member, member)
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    def unite(self, a: T, b: T) -> None:
        """Make one class of those of two members; its root is that of the first."""
        self._parent[self.root(b)] = self.root(a)
