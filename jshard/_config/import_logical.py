"""Logical axis rules of MaxText and Flax as a configuration, with what reading them showed.

>>> record = config_of_logical_rules([["embed", "x"], ["embed", "y"], ["old", "x"]], {"w": ("embed", "mpl")}, None, "linen")
>>> [(r.name, r.text) for r in record.parameters]
[('w', '[x, null]')]
>>> print(*record.notes, sep="\\n")
logical axes without a rule, not cut: mpl
rules without effect: embed -> y, old -> x
nnx would read the rules otherwise for w
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jshard._config.config_record import ConfigRecord
from jshard._config.foreign_rules import from_names, logical_names
from jshard._config.logical_rules import Names, Pair, linen_entry, nnx_entry, pairs_of
from jshard._config.yaml_reader import Located, read_yaml
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import abbreviate, suggest


READINGS = {"linen": linen_entry, "nnx": nnx_entry}


def config_of_logical_rules(
    rules: str | Mapping[str, object] | Iterable[object],
    names: PyTree,
    mesh: Mapping[str, int] | None,
    reading: str,
) -> ConfigRecord:
    """The configuration of `Config.from_logical_rules`."""
    if reading not in READINGS:
        raise ShardError(
            f"reading={reading!r} is not known",
            where="Config.from_logical_rules",
            fix=suggest(reading, list(READINGS)),
        )
    if isinstance(rules, str | Mapping):
        rules, mesh = _maxtext(rules, mesh)
    pairs, read = pairs_of(rules), READINGS[reading]
    logical: dict[str, Names] = logical_names(names)
    known = None if mesh is None else tuple(mesh)
    entries = {path: read(own, pairs, known) for path, own in logical.items()}
    notes = _notes(pairs, logical, reading, known)
    return dataclasses.replace(from_names(entries, mesh, "logical axis rules"), notes=tuple(notes))


def _notes(
    pairs: Sequence[Pair], logical: Mapping[str, Names], reading: str, known: Sequence[str] | None
) -> list[str]:
    read = READINGS[reading]
    in_use = {n for own in logical.values() for n in own if n is not None}
    unknown = sorted(in_use - {n for n, _ in pairs})
    unused = []
    distinct = set(logical.values())
    for k, (name, axes) in enumerate(pairs):
        others = [*pairs[:k], *pairs[k + 1 :]]
        if all(read(own, others, known) == read(own, pairs, known) for own in distinct if name in own):
            unused.append(f"{name} -> {', '.join(axes or ()) or 'not cut'}")
    other = "nnx" if reading == "linen" else "linen"
    differs = [
        p for p, own in logical.items() if read(own, pairs, known) != READINGS[other](own, pairs, known)
    ]
    how = "not cut" if reading == "linen" else "taken for mesh axes"
    notes = [f"logical axes without a rule, {how}: {abbreviate(unknown)}"] if unknown else []
    notes += [f"rules without effect: {abbreviate(unused)}"] if unused else []
    return notes + (
        [f"{other} would read the rules otherwise for {abbreviate(differs, 4)}"] if differs else []
    )


def _maxtext(
    value: str | Mapping[Any, Any], mesh: Mapping[str, int] | None
) -> tuple[Iterable[object], Mapping[str, int] | None]:
    """The rules of a MaxText configuration, and its mesh where all sizes are given."""
    data = _plain(read_yaml(value, "MaxText")) if isinstance(value, str) else dict(value)
    if not isinstance(data, Mapping) or "logical_axis_rules" not in data:
        raise ShardError(
            "there is no logical_axis_rules",
            where="Config.from_logical_rules",
            fix="the text of a MaxText base.yml",
        )
    axes = data.get("mesh_axes")
    if mesh is None and axes:
        sizes = {}
        for axis in axes:
            name = "pipeline" if axis == "stage" else axis
            ici, dcn = (data.get(f"{kind}_{name}_parallelism", 1) for kind in ("ici", "dcn"))
            sizes[axis] = -1 if min(ici, dcn) < 0 else ici * dcn
        mesh = sizes if min(sizes.values()) > 0 else None
    return data["logical_axis_rules"], mesh


def _plain(node: Located) -> Any:
    if isinstance(node.value, Mapping):
        return {k: _plain(v) for k, v in node.value.items()}
    return [_plain(v) for v in node.value] if isinstance(node.value, list) else node.value
