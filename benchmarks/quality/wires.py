"""Seconds that the collectives of a compiled program need on the links of a torus.

A collective uses the links of those torus axes along which its group extends, and no others: on a 4x8 slice a sum
over the rows of 8 leaves the links along the 4 idle. Formulas, with `r` the bytes that a device receives, `w` the
bandwidth of one link one way, `k` the number of torus axes that the group of N devices extends along, none of them
a ring (jax-ml/scaling-book `sharding.md`; slices of v5e below 16 have no ring):

- all-gather, reduce-scatter, all-reduce: r / (k w);
- all-to-all: r N longest / (4 (N - 1) w), for the middle cut of the longest axis;
- permute: the bytes on the busiest link / w, each going along the last axis first.

Latency is left out, and so is that groups which lie interleaved on an axis share its links. Both directions
 of a line are in use, but its end receives everything over one link.

>>> square = [(0, 0), (0, 1), (1, 0), (1, 1)]
>>> seconds("all_reduce", 1e9, [(0, 1), (2, 3)], square, 5e10), seconds("all_reduce", 1e9, [(0, 1, 2, 3)], square, 5e10)
(0.02, 0.01)
>>> line = [(0,), (1,), (2,), (3,)]
>>> round(seconds("all_to_all", 3e9, [(0, 1, 2, 3)], line, 5e10), 3), moved(1e9, [(0, 2), (1, 3)], line, 5e10)
(0.08, 0.04)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from jshard._verify.emitted import Emitted, EmittedProgram
from jshard._verify.replica_groups import read_groups, read_pairs


Coordinates = Sequence[Sequence[int]]


def seconds(
    kind: str, received: float, groups: Sequence[Collection[int]], at: Coordinates, bandwidth: float
) -> float:
    """Seconds of one collective that is no permute; `at` are the coordinates of the devices by number."""
    group = max(groups, key=len)
    extents = [n for n in (len({at[d][i] for d in group}) for i in range(len(at[0]))) if n > 1]
    if kind == "all_to_all":
        return received * len(group) * max(extents) / (4 * (len(group) - 1) * bandwidth)
    return received / (len(extents) * bandwidth)


def moved(held: float, pairs: Sequence[tuple[int, int]], at: Coordinates, bandwidth: float) -> float:
    """Seconds of a permute, by the busiest link of a torus without rings."""
    load: Counter[Any] = Counter()
    for a, b in pairs:
        here = list(at[a])
        for i in reversed(range(len(here))):
            while here[i] != at[b][i]:
                step = 1 if at[b][i] > here[i] else -1
                load[(*here, i, step)] += 1
                here[i] += step
    return held * max(load.values(), default=0) / bandwidth


def of_collective(e: Emitted, at: Coordinates, bandwidth: float) -> float:
    """Seconds of one collective of a compiled program, all its executions together."""
    if e.kind == "permute" or e.kind == "all_to_all" and e.written_kind == "permute":  # a part of one
        return moved(e.total, read_pairs(e.groups), at, bandwidth)
    groups = read_groups(e.groups, len(at))
    if max(map(len, groups)) != e.group_size:
        groups = _joined(groups)  # a ring of permutes that amounts to another collective
    return seconds(e.kind, e.total, groups, at, bandwidth)


def _joined(pairs: Sequence[Sequence[int]]) -> list[set[int]]:
    """Groups of devices that pairs join.

    >>> _joined([(0, 1), (1, 0), (2, 3), (3, 2)])
    [{0, 1}, {2, 3}]
    """
    groups: list[set[int]] = []
    for pair in pairs:
        near = [g for g in groups if g.intersection(pair)]
        groups = [g for g in groups if g not in near] + [set(pair).union(*near)]
    return groups


def of_program(program: EmittedProgram, devices: Any, bandwidth: float) -> float:
    """Seconds of all collectives of a program on `devices`, an array of JAX devices in the mesh's order."""
    at = [tuple(d.coords) for d in devices.flat]
    return sum(of_collective(e, at, bandwidth) for e in program.collectives)
