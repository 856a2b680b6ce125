"""Replica groups, the devices of each group of a collective, in all notations that XLA prints.

Lists `{{0,1},{2,3}}`, iota `[2,4]<=[4,2]T(1,0)` (a transposed iota, split into rows), mesh
`mesh['x'=2,'y'=4] {'y'}` (axes of a named mesh, the notation of the newest XLA), and empty for all.

>>> read_groups("[4,2]<=[2,4]T(1,0)", 8)
((0, 4), (1, 5), (2, 6), (3, 7))
>>> read_groups("mesh['x'=2,'y'=4] {'x'}", 8)
((0, 4), (1, 5), (2, 6), (3, 7))
>>> read_groups("{}", 4)
((0, 1, 2, 3),)
"""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np

from jshard._core.union_find import UnionFind


Groups = tuple[tuple[int, ...], ...]


def read_groups(text: str | None, devices: int) -> Groups:
    """One tuple of device numbers for each group.

    Arguments:

    - `text`: the attribute's value; None or `{}` is one group of all devices.
    - `devices`: number of devices of the program.

    Raises `ValueError` if the notation is not one of those above.
    """
    text = (text or "{}").strip()
    if text in ("{}", "{{}}"):
        return (tuple(range(devices)),)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        ids = np.arange(math.prod(_ints(iota[2]))).reshape(_ints(iota[2]))
        if iota[3]:
            ids = ids.transpose(_ints(iota[3]))
        rows = ids.reshape(_ints(iota[1])).reshape(-1, _ints(iota[1])[-1])
        return tuple(tuple(int(v) for v in row) for row in rows)
    if re.fullmatch(r"\{[\d,{}\s]*\}", text):
        return tuple(_ints(g) for g in re.findall(r"\{([\d,\s]*)\}", text[1:-1]))
    raise ValueError(f"replica groups in a notation not known: {text[:80]}")


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(v) for v in text.split(",") if v.strip())


def _mesh_groups(text: str) -> Groups:
    """Axes of a mesh, full (`'x'`) or split (`'x':(2)4`: the sub-axis of size 4 after major ones of product 2).

    A device order other than 0, 1, ... is written as `mesh['x'=4], device_ids=([4,2]<=..)`: see XLA's
    `MeshAxesReplicaGroupList::ToString` and Shardy's sub-axis notation.
    """
    m = re.fullmatch(r"mesh\[([^\]]*)\]\s*(?:,?\s*device_ids=\((.*?)\)\s*)?,?\s*\{(.*)\}", text)
    if m is None:
        raise ValueError(f"replica groups in a notation not known: {text[:80]}")
    names = re.findall(r"'([^']*)'=(\d+)", m[1])
    sizes = [int(s) for _, s in names]
    ids = np.arange(math.prod(sizes))
    if m[2]:
        ids = np.asarray([v for g in read_groups(_expand_device_order(m[2]), ids.size) for v in g])
    # Split every axis where a sub-axis begins or ends, so that each sub-axis is an array dimension.
    wanted = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", m[3])
    dims: list[tuple[str, int, int]] = []
    for name, size in zip((n for n, _ in names), sizes, strict=True):
        ends = {1, size}
        for n, pre, piece in wanted:
            if n == name and pre:
                ends |= {int(pre), int(pre) * int(piece)}
        marks = sorted(ends)
        dims += [(name, a, b // a) for a, b in zip(marks, marks[1:], strict=False)] or [(name, 1, size)]
    grid = ids.reshape([s for _, _, s in dims])
    chosen = [
        d
        for n, pre, piece in wanted
        for d, (name, before, size) in enumerate(dims)
        if name == n and (not pre or int(pre) <= before and before * size <= int(pre) * int(piece))
    ]
    rest = [d for d in range(len(dims)) if d not in chosen]
    rows = grid.transpose(rest + chosen).reshape(-1, math.prod(dims[d][2] for d in chosen))
    return tuple(tuple(int(v) for v in row) for row in rows)


def _expand_device_order(text: str) -> str:
    """The long form of a device order: `[2,4]T(1,0)` is short for `[8]<=[2,4]T(1,0)`."""
    if "<=" in text or text.startswith("{"):
        return text
    if text.startswith("["):
        return f"[{math.prod(_ints(text[1 : text.index(']')]))}]<={text}"
    return "{{" + text + "}}"


def read_pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    """Source and target of each pair of a collective-permute.

    >>> read_pairs("{{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text or ""))


def largest_component(pairs: tuple[tuple[int, int], ...]) -> int:
    """Devices in the largest connected component of the pairs: the longest ring or chain.

    >>> largest_component(((0, 1), (1, 0), (2, 3), (3, 2)))
    2
    """
    united = UnionFind[int]()
    for a, b in pairs:
        united.unite(a, b)
    return max(Counter(map(united.root, united)).values(), default=1)
