"""Logical axis rules of Flax and MaxText: pairs of a logical axis and mesh axes, read in linen's way or in nnx's.

linen (`flax.linen.spmd.logical_to_mesh_axes`; MaxText calls it) goes through the pairs in order and takes one where the
logical axis has no mesh axes yet and the pair's are still free; a name without a pair is not cut. nnx
(`flax.core.spmd`) makes a dict of the pairs, so that the last one holds, does not ask whether axes are free, and hands
on a name without a pair as if it were a mesh axis. The same list can mean different layouts.

>>> rules = [("embed", ("fsdp", "tensor")), ("embed", ("fsdp",)), ("mlp", "tensor")]
>>> linen_entry(("embed", "mlp"), rules), nnx_entry(("embed", "mlp"), rules)
((('fsdp', 'tensor'), ()), (('fsdp',), ('tensor',)))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jshard._config.fewest_rules import fewest_rules
from jshard._config.record import ConfigRecord, Entry, MeshSection
from jshard._config.tensors import TensorName
from jshard._core.errors import ShardError
from jshard._core.messages import describe_value, suggest


Pair = tuple[str, tuple[str, ...] | None]
Names = tuple[str | None, ...]


def pairs_of(rules: Iterable[Any]) -> list[Pair]:
    """A list of rules as MaxText's YAML or Python have it; mesh axes are a name, a list, or nothing.

    >>> pairs_of([["batch", ["data", "fsdp"]], ["mlp", "tensor"], ["norm", []], ["heads", None]])
    [('batch', ('data', 'fsdp')), ('mlp', ('tensor',)), ('norm', ()), ('heads', None)]
    """
    out: list[Pair] = []
    for rule in rules:
        pair = tuple(rule) if isinstance(rule, tuple | list) else ()
        axes = pair[1] if len(pair) == 2 else None
        listed = isinstance(axes, tuple | list) and all(isinstance(a, str) for a in axes)
        if len(pair) != 2 or not isinstance(pair[0], str) or not (axes is None or isinstance(axes, str) or listed):
            raise ShardError(
                f"a rule is {describe_value(rule)}",
                where="logical axis rules",
                fix='a logical axis and its mesh axes: ["embed", ["fsdp", "tensor"]]',
            )
        out.append((pair[0], axes if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)))  # fmt: skip
    return out


def linen_entry(names: Names, rules: Sequence[Any], known: Iterable[str] | None = None) -> Entry:
    """The mesh axes of a tensor with these logical axes, as linen reads the rules.

    `known`: the axes of the mesh; MaxText drops the others from a rule.
    """
    result: list[tuple[str, ...] | None] = [None] * len(names)
    for name, axes in pairs_of(rules):
        if name not in names:
            continue
        at = names.index(name)
        own = _known(axes, known)
        used = {a for d in result for a in d or ()}
        if result[at] is None and not used & set(own):
            result[at] = own
    return tuple(d or () for d in result)


def nnx_entry(names: Names, rules: Sequence[Any], known: Iterable[str] | None = None) -> Entry:
    """The mesh axes of a tensor with these logical axes, as nnx reads the rules."""
    last = {name: _known(axes, known) for name, axes in pairs_of(rules)}
    return tuple(() if n is None else last.get(n, (n,)) for n in names)


def _known(axes: tuple[str, ...] | None, known: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(a for a in axes or () if known is None or a in set(known))


@dataclasses.dataclass(frozen=True)
class LogicalReport:
    """What reading a list of rules showed.

    - `unknown`: logical axes of tensors without a rule. `unused`: rules whose logical axis no tensor has, or that never
        take effect. `differs`: tensors for which nnx's reading gives another layout than linen's.
    """

    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def config_of_rules(
    rules: Sequence[Any],
    names: Mapping[str, Sequence[str | None]],
    mesh: Mapping[str, int] | None = None,
    reading: str = "linen",
) -> tuple[ConfigRecord, LogicalReport]:
    """The configuration that a list of rules is for tensors with these logical axes, by path.

    `reading`: "linen" or "nnx". Raises `ShardError` for another reading, or nnx's unknown names on a mesh.
    """
    if reading not in ("linen", "nnx"):
        raise ShardError(f"reading={reading!r} is not known", where="reading", fix=suggest(reading, ["linen", "nnx"]))  # fmt: skip
    pairs = pairs_of(rules)
    read = linen_entry if reading == "linen" else nnx_entry
    known = None if mesh is None else list(mesh)
    logical = {path: tuple(own) for path, own in names.items()}
    entries = {path: read(own, pairs, known) for path, own in logical.items()}
    tensors = [TensorName(path, (1,) * len(own), "float32") for path, own in logical.items()]
    found = fewest_rules(tensors, list(entries.values()))
    ruled = {n for n, _ in pairs}
    in_use = {n for own in logical.values() for n in own if n is not None}
    report = LogicalReport(
        tuple(sorted(in_use - ruled)),
        tuple(_unused(pairs, logical, read, known)),
        tuple(p for p, own in logical.items() if linen_entry(own, pairs, known) != nnx_entry(own, pairs, known)),
    )
    section = None if mesh is None else MeshSection(tuple(mesh.items()))
    return ConfigRecord(parameters=found, mesh=section, unlisted="replicated"), report


def _unused(pairs: Sequence[Pair], logical: Mapping[str, Names], read: Any, known: Any) -> list[str]:
    """The rules without which every tensor has the same layout."""
    distinct = set(logical.values())
    out = []
    for k, (name, axes) in enumerate(pairs):
        others = [*pairs[:k], *pairs[k + 1 :]]
        if all(read(own, others, known) == read(own, pairs, known) for own in distinct if name in own):
            out.append(f"{name} -> {', '.join(axes or ()) or 'not cut'}")
    return out


def rules_of_entries(
    entries: Mapping[str, Entry], names: Mapping[str, Sequence[str | None]], bytes_of: Mapping[str, int]
) -> tuple[list[Pair], list[str]]:
    """Pairs under which linen's reading gives as many bytes of tensors as possible their entry; and the other tensors.

    Every logical axis gets each tuple of mesh axes that cuts it somewhere, longer tuples first; pairs are then moved to
    the front or dropped as long as that gains bytes. A local search: a list that it does not find may exist.
    """
    wanted: dict[str, dict[tuple[str, ...], int]] = {}
    weights: dict[tuple[Names, Entry], int] = {}
    for path, entry in entries.items():
        if path not in names or isinstance(entry, str):
            continue
        own = tuple(names[path])
        weights[own, entry] = weights.get((own, entry), 0) + bytes_of.get(path, 1)
        for name, dim in zip(own, entry, strict=True):
            if name is not None and isinstance(dim, tuple) and dim:
                counts = wanted.setdefault(name, {})
                counts[dim] = counts.get(dim, 0) + bytes_of.get(path, 1)
    pairs: list[Pair] = [
        (n, axes) for n, counts in wanted.items() for axes in sorted(counts, key=lambda a: (-len(a), -counts[a]))
    ]

    def expressed(rules: Sequence[Pair]) -> int:
        return sum(w for (own, entry), w in weights.items() if linen_entry(own, rules) == entry)

    best, gained = expressed(pairs), True
    while gained and best < sum(weights.values()):
        gained = False
        for k in range(len(pairs)):
            rest = [*pairs[:k], *pairs[k + 1 :]]
            for moved in ([pairs[k], *rest], [*rest, pairs[k]], rest):
                if expressed(moved) > best:
                    pairs, best, gained = moved, expressed(moved), True
                    break
            if gained:
                break
    missing = [
        p
        for p, e in entries.items()
        if p not in names or isinstance(e, str) or linen_entry(tuple(names[p]), pairs) != e
    ]
    return pairs, missing

