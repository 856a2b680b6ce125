"""Cuts that fit and look like slips: matrices of one input cut in different ways, and torch's orientation.

Both rest on the traced products, not on names: the matrices that multiply one value (queries, keys and values; gate and
up) are usually cut alike, and an axis that does not cut the batch usually cuts the outputs of the matrix that widens
and the inputs of the one that narrows (Megatron; Shoeybi et al. 2019), so that one sum per pair is enough.

>>> from jshard._config.config_record import Rule
>>> from jshard._config.tensors import TensorName
>>> def row(name, shape, *dims, reads=1):
...     t = TensorName(name, shape, "float32", "p", contracted=(0,), product_with=reads)
...     return Row(t, dims, "rule", "parameters", Rule(name, dims, "f.yaml:2"))
>>> [p.kind for p in slips([row("p.q", (8, 8), ("x",), ()), row("p.k", (8, 4), (), ("x",))], [])]
['cut otherwise']
>>> pair = [row("p.up", (8, 16), ("x",), ()), row("p.down", (16, 8), (), ("x",), reads=2)]
>>> [p.kind for p in slips(pair, [])]
['orientation']
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jshard._config.config_record import entry_text
from jshard._config.fitting import Problem
from jshard._config.path_patterns import without_numbers
from jshard._config.resolution import Row


def slips(rows: Sequence[Row], inner: Sequence[Row]) -> list[Problem]:
    """The suspicious cuts among rows of arguments; `inner`: of module outputs, whose first dimension is the batch's."""
    matrices = [r for r in rows if _sides(r) is not None]
    batch = {
        a
        for r in (*inner, *(r for r in rows if r.section == "inputs"))
        if r.entry and not isinstance(r.entry, str) and isinstance(r.entry[0], tuple)
        for a in r.entry[0]
    }
    return [*_cut_otherwise(matrices), *_orientation(matrices, batch)]


def _sides(row: Row) -> tuple[int, int, frozenset[str], frozenset[str]] | None:
    """Of a matrix with an entry by axes: sizes in and out, and the axes that cut the inputs and the outputs."""
    t = row.tensor
    if row.rule is None or row.of or isinstance(row.entry, str) or row.entry is None or not t.contracted:
        return None
    outputs = [d for d in range(len(t.shape)) if d not in t.contracted and d != t.layer_axis]
    if not outputs:
        return None
    ins, outs = 1, t.shape[outputs[-1]]
    for d in t.contracted:
        ins *= t.shape[d]

    def axes(dims: Sequence[int]) -> frozenset[str]:
        own = (row.entry[d] for d in dims if row.entry is not None and not isinstance(row.entry, str))
        return frozenset(a for d in own if isinstance(d, tuple) for a in d)

    return ins, outs, axes(t.contracted), axes(outputs[-1:])


def _cut_otherwise(matrices: Sequence[Row]) -> list[Problem]:
    """Among the matrices that multiply one value, those whose inputs are cut by what cuts the outputs of others."""
    together: dict[int, list[Row]] = collections.defaultdict(list)
    for row in matrices:
        if row.tensor.product_with is not None:
            together[row.tensor.product_with].append(row)
    out: dict[tuple, Problem] = {}
    for rows in together.values():
        kinds = collections.Counter(_cuts(r) for r in rows)
        usual = max(kinds, key=lambda k: (kinds[k], k == _cuts(rows[-1])))
        for row in rows:
            ins, outs = _cuts(row)
            swapped = ins & usual[1] or outs & usual[0]
            if (ins, outs) == usual or not swapped or row.rule is None:
                continue
            other = next(r for r in rows if _cuts(r) == usual)
            key = (without_numbers(row.tensor.own), without_numbers(other.tensor.own))
            out.setdefault(
                key,
                Problem(
                    "cut otherwise",
                    row.tensor.path,
                    f"{row.tensor.path} and {other.tensor.path} multiply one value, and "
                    f"{' and '.join(sorted(swapped))} cuts the inputs of one and the outputs of the other",
                    row.rule.where,
                    f"{row.rule.key}: the cuts of {other.rule.key if other.rule else other.tensor.path}",
                    error=False,
                ),
            )
    return list(out.values())


def _cuts(row: Row) -> tuple[frozenset[str], frozenset[str]]:
    sides = _sides(row)
    assert sides is not None
    return sides[2], sides[3]


def _orientation(matrices: Sequence[Row], batch: set[str]) -> list[Problem]:
    """Axes that cut the inputs of every widening matrix and the outputs of every narrowing one, but not the batch.

    Where another such axis does the opposite, the two are as in Megatron with sharded parameters, and nothing is said.
    """
    seen: dict[str, list[tuple[bool, Row]]] = collections.defaultdict(list)
    pairs: dict[tuple, list[Row]] = collections.defaultdict(list)
    for row in matrices:
        sides = _sides(row)
        assert sides is not None
        if sides[0] != sides[1]:
            parent = without_numbers(row.tensor.own)[:-2]
            pairs[(parent, *sorted(sides[:2]))].append(row)
    for rows in pairs.values():
        directions = {_sides(r)[0] < _sides(r)[1] for r in rows}  # type: ignore[index]
        if len(directions) < 2:
            continue  # keys and values of fewer heads narrow without a matrix that widens again
        for row in rows:
            ins, outs, in_axes, out_axes = _sides(row)  # type: ignore[misc]
            wide, narrow = (in_axes, out_axes) if ins < outs else (out_axes, in_axes)
            for axis in (wide | narrow) - batch:
                seen[axis].append((axis in wide, row))
    out = []
    if any(not turned for found in seen.values() for turned, _ in found):
        return []
    for axis, found in seen.items():
        widening = {_sides(r)[0] < _sides(r)[1] for _, r in found}  # type: ignore[index]
        if len(widening) == 2:
            row = found[0][1]
            assert row.rule is not None and row.entry is not None
            out.append(
                Problem(
                    "orientation",
                    axis,
                    f"{axis} cuts the inputs of the matrices that widen and the outputs of those that narrow, "
                    f"{row.tensor.path} {entry_text(row.entry)} first: as if they were torch's [out, in]",
                    row.rule.where,
                    "the two dimensions the other way round; names of torch with [out, in] weights go under torch:",
                    error=False,
                )
            )
    return out
