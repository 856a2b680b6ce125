"""The modules of the HTML page: scopes where the program has them, else the functions that called each other.

A path is that of a named scope (`blocks.3/mlp`), or of calls (`loss`, `block`, `attention`) where nothing was named; the
backward pass and what is computed again are modules beside those of the forward pass, so that edges lead downwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jshard._plan.rows import OperatorRow
from jshard._report.grouping import common_pattern, strip_numbers


STRUCTURE_SCOPES = frozenset(
    ("body", "branch", "checkpoint", "closed_call", "cond", "custom_jvp_call", "custom_vjp_call", "remat",
     "rematted_computation", "scan", "shard_map", "while")
)  # fmt: skip
"""Scopes that JAX opens for its own calls and loops."""

PASSES = ("", "recomputed", "backward")


@dataclasses.dataclass(frozen=True)
class PageModule:
    """A module: its name, the module around it (-1: none), and how many alike ones it stands for."""

    name: str
    parent: int
    count: int


def pass_of(r: OperatorRow) -> int:
    """Which pass an operator belongs to: an index into `PASSES`."""
    if "rematted_computation" in r.module:
        return 1
    return 2 if r.backward else 0


def path_of(r: OperatorRow, root: str) -> tuple[str, ...]:
    """Where an operator stands: scopes, else calls as `name:line`, but those of the planned function `root` itself.

    >>> row = OperatorRow("add.1", "add", "", "", (), (), (), (), (), "", (), 1.0, 0.0, calls=("step:0", "loss:9"))
    >>> import dataclasses
    >>> path_of(row, "step"), path_of(dataclasses.replace(row, module="while/body/blocks.3/mlp"), "step")
    (('loss:9',), ('blocks.3', 'mlp'))
    """
    scopes = tuple(
        p
        for p in r.module.split("/")
        if p and "->" not in p and p.rstrip("0123456789_") not in STRUCTURE_SCOPES
    )
    if scopes:
        return scopes
    calls = r.calls[1:] if r.calls and r.calls[0].partition(":")[0] == root else r.calls
    return tuple(c for c in calls if not c.startswith("<"))


def folded(path: Sequence[str]) -> tuple[str, ...]:
    """The key of a path: numbers of scopes are left out, lines of calls kept.

    >>> folded(("blocks.3", "mlp")), folded(("loss:9", "block:12"))
    (('blocks.#', 'mlp'), ('loss:9', 'block:12'))
    """
    return tuple(p if _is_call(p) else strip_numbers(p) for p in path)


def _is_call(part: str) -> bool:
    name, colon, line = part.rpartition(":")
    return bool(colon) and line.isdigit() and bool(name)


def _shown(parts: Sequence[str]) -> str:
    return parts[0].rpartition(":")[0] if _is_call(parts[0]) else common_pattern(parts)


def page_modules(groups: Sequence[tuple[OperatorRow, ...]], root: str) -> tuple[list[PageModule], list[int]]:
    """The modules of groups of operators that differ only in numbers, parents first, and the module of each group.

    A module that holds one module and nothing else is one with it: `logits/block`.
    """
    keys: list[tuple[tuple[str, ...], int]] = []
    parts: dict[tuple[tuple[str, ...], int], list[str]] = {}
    scopes: dict[tuple[tuple[str, ...], int], set[tuple[str, ...]]] = {}
    sizes: dict[tuple[tuple[str, ...], int], int] = {}
    for rows in groups:
        key = folded(path_of(rows[0], root)), pass_of(rows[0])
        keys.append(key)
        for depth in range(1, len(key[0]) + 1):
            module = key[0][:depth], key[1]
            sizes[module] = math.gcd(sizes.get(module, 0), len(rows))
            for r in rows:
                path = path_of(r, root)[:depth]
                if path not in scopes.setdefault(module, set()):
                    scopes[module].add(path)
                    parts.setdefault(module, []).append(path[-1])
    owners = set(keys)
    below: dict[tuple[tuple[str, ...], int], list[tuple[tuple[str, ...], int]]] = {}
    for path, turn in parts:
        below.setdefault((path[:-1], turn), []).append((path, turn))
    modules: list[PageModule] = []
    number: dict[tuple[tuple[str, ...], int], int] = {}

    def add(key: tuple[tuple[str, ...], int], parent: int, prefix: str) -> None:
        name = prefix + _shown(parts[key])
        inner = below.get(key, [])
        if len(inner) == 1 and key not in owners:
            add(inner[0], parent, f"{name}/")
            number[key] = number[inner[0]]
            return
        calls = _is_call(key[0][-1])
        count = sizes[key] if calls else len(scopes[key])
        if parent < 0 and key[1]:
            name += f" ({PASSES[key[1]]})"
        number[key] = len(modules)
        modules.append(PageModule(name, parent, count))
        for k in inner:
            add(k, number[key], "")

    for turn in range(len(PASSES)):
        for key in below.get(((), turn), []):
            add(key, -1, "")
    return modules, [number.get(k, -1) for k in keys]
