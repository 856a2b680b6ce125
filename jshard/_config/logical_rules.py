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

from collections.abc import Iterable, Mapping, Sequence

from jshard._config.config_record import Entry
from jshard._core.errors import ShardError
from jshard._core.messages import describe_value


Pair = tuple[str, tuple[str, ...] | None]
Names = tuple[str | None, ...]


def pairs_of(rules: Iterable[object]) -> list[Pair]:
    """A list of rules as MaxText's YAML or Python have it; mesh axes are a name, a list, or nothing.

    >>> pairs_of([["batch", ["data", "fsdp"]], ["mlp", "tensor"], ["norm", []], ["heads", None]])
    [('batch', ('data', 'fsdp')), ('mlp', ('tensor',)), ('norm', ()), ('heads', None)]
    """
    out: list[Pair] = []
    for rule in rules:
        pair = tuple(rule) if isinstance(rule, tuple | list) else ()
        axes = pair[1] if len(pair) == 2 else None
        listed = isinstance(axes, tuple | list) and all(isinstance(a, str) for a in axes)
        if (
            len(pair) != 2
            or not isinstance(pair[0], str)
            or not (axes is None or isinstance(axes, str) or listed)
        ):
            raise ShardError(
                f"a rule is {describe_value(rule)}",
                where="logical axis rules",
                fix='a logical axis and its mesh axes: ["embed", ["fsdp", "tensor"]]',
            )
        out.append((pair[0], axes if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)))  # fmt: skip
    return out


def linen_entry(names: Names, rules: Sequence[object], known: Iterable[str] | None = None) -> Entry:
    """The mesh axes of a tensor with these logical axes, as linen reads the rules.

    `known`: the axes of the mesh; the others count as axes of size 1: they take part in the choice and cut nothing.
    """
    result: list[tuple[str, ...] | None] = [None] * len(names)
    for name, axes in pairs_of(rules):
        if name not in names:
            continue
        at = names.index(name)
        own = axes or ()
        used = {a for d in result for a in d or ()}
        if result[at] is None and not used & set(own):
            result[at] = own
    return tuple(_known(d, known) for d in result)


def nnx_entry(names: Names, rules: Sequence[object], known: Iterable[str] | None = None) -> Entry:
    """The mesh axes of a tensor with these logical axes, as nnx reads the rules."""
    last = {name: _known(axes, known) for name, axes in pairs_of(rules)}
    return tuple(() if n is None else last.get(n, (n,)) for n in names)


def _known(axes: tuple[str, ...] | None, known: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(a for a in axes or () if known is None or a in set(known))


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
        (n, axes)
        for n, counts in wanted.items()
        for axes in sorted(counts, key=lambda a: (-len(a), -counts[a]))
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
