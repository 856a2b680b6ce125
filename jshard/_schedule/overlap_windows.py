"""Which products each collective of a schedule may run beside: those between its operand's producer and its reader.

Compilers keep the order of products and move light operators beside those that they serve: a conversion of weights runs
as early as its argument is there, an update of weights as late as the end. So only products have a place in the order. An
operand is ready after the last product that it depends on; a result is needed by the first product that depends on it. The
products between the two depend on neither. A collective whose operand another one makes waits for the same products as
that one.

A loop or a branch is a place beside which nothing hides, and what is inside of them hides nowhere: the schedules of the
TPU compiler have none that does, and XLA's for GPUs hide there what they can only because they unroll loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jshard._program.graph import Literal, Program
from jshard._program.memory.unfusible import ALL_PRODUCTS
from jshard._schedule.assignment import Assignment
from jshard._schedule.schedule import Schedule, communicating_reshards, reshard_object
from jshard._schedule.vectorized import ScheduleArrays
from jshard._schedule.writer import Action, Reshard, RunCall, RunOperator


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A reshard that communicates, and the places, `begin` to `end - 1`, that it may run beside."""

    reshard: Reshard
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """The products outside of loops and branches in order, -1 for a loop or a branch, and the moves between them.

    `segments`: for each place the operators that run from the place before it on, the product itself last.
    """

    products: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]


class _Item(NamedTuple):
    """An action: the operator that it runs (-1 for another), what it reads and writes, the reshard that it is."""

    op: int
    reads: Sequence[Hashable]
    writes: Sequence[Hashable]
    reshard: Reshard | None = None
    is_call: bool = False


def overlap_windows(made: Schedule) -> Windows:
    """The places of a schedule, and between which of them each move may run."""
    if made.arrays is not None:
        items = list(_items_of_arrays(made.arrays))
    else:
        items = [_item(a, made.assignment) for a in _inlined(made.actions)]
    return _windows(made.assignment.program, items)


def _item(a: Action, assignment: Assignment) -> _Item:
    if isinstance(a, Reshard):
        communicates = any(n >= 0 for n in a.collective_ids)
        return _Item(-1, [(a.tensor, a.source)], [(a.tensor, a.target)], a if communicates else None)
    reads = [v for v in a.reads if not isinstance(v, Literal)]
    if isinstance(a, RunOperator):
        results = assignment.program.operators[a.op].results
        return _Item(a.op, reads, [assignment.values[t] for t in results])
    return _Item(-1, reads, [assignment.values[t] for t in a.call.results], None, True)


def _inlined(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions with those of calls that are no loops or branches in their place."""
    for a in actions:
        if isinstance(a, RunCall) and a.call.kind not in ("scan", "while", "cond"):
            for body in a.bodies:
                yield from _inlined(body)
        else:
            yield a


def _items_of_arrays(arrays: ScheduleArrays) -> Iterator[_Item]:
    """The actions of a program without loops and branches; values are the numbers of `vectorized.py`."""
    use_def = arrays.assignment.program.use_def
    begin, result_begin = use_def.use_begin.tolist(), use_def.result_begin.tolist()
    result, read, tensors = use_def.result.tolist(), arrays.read_value.tolist(), len(arrays.result_layout)
    at: list[int | None] = [None] * arrays.num_actions  # the operator at each position, -1 - m for reshard m
    for op, place in enumerate(arrays.run_at.tolist()):
        if place >= 0:
            at[place] = op
    for m, place in enumerate(arrays.reshard_at.tolist()):
        at[place] = -1 - m
    communicating, sources = set(communicating_reshards(arrays)), arrays.source_value.tolist()
    awaited = _awaited_results(arrays)
    for k in at:
        if k is None:  # a call ends
            continue
        if k >= 0:
            yield _Item(k, read[begin[k] : begin[k + 1]], result[result_begin[k] : result_begin[k + 1]])
        else:
            m = -1 - k
            reshard = reshard_object(arrays, m) if m in communicating else None
            yield _Item(-1, (sources[m], *awaited.get(m, ())), (tensors + m,), reshard)


def _awaited_results(arrays: ScheduleArrays) -> dict[int, tuple[int]]:
    """By reshard, the value of the product's result that it is made after (`Assignment.regather_after`)."""
    found: dict[int, tuple[int]] = {}
    for tensor, reader, awaited in arrays.assignment.regather_after:
        for m in np.flatnonzero((arrays.tensor == tensor) & (arrays.reader == reader)).tolist():
            moved = (arrays.tensor == awaited) & (arrays.reshard_at < arrays.reshard_at[m])
            last = np.flatnonzero(moved)
            found[m] = (len(arrays.result_layout) + int(last[-1]) if len(last) else awaited,)
    return found


def _windows(program: Program, items: Sequence[_Item]) -> Windows:
    """The windows of the moves among some actions."""
    operators = program.operators
    ready: dict[Hashable, int] = {}  # value -> the place before which it is made
    begins: list[int] = []
    products: list[int] = []
    segments: list[tuple[int, ...]] = []
    segment: list[int] = []
    places: list[int] = []  # of each item, -1 for one that has none
    for item in items:
        begin = max([ready.get(v, 0) for v in item.reads], default=0)
        if item.op >= 0:
            segment.append(item.op)
        has_place = item.is_call or (item.op >= 0 and operators[item.op].primitive in ALL_PRODUCTS)
        places.append(len(products) if has_place else -1)
        begins.append(begin)
        if has_place:
            products.append(item.op)
            segments.append(tuple(segment))
            segment, begin = [], len(products)
        for v in item.writes:
            ready[v] = begin
    needed: dict[Hashable, int] = {}  # value -> the first place that depends on it
    moves: list[Move] = []
    for item, place, begin in zip(reversed(items), reversed(places), reversed(begins), strict=True):
        end = min([needed.pop(v, len(products)) for v in item.writes], default=len(products))
        if item.reshard is not None:
            moves.append(Move(item.reshard, begin, end))
        for v in item.reads:
            needed[v] = min(needed.get(v, len(products)), place if place >= 0 else end)
    return Windows(tuple(products), tuple(segments), tuple(reversed(moves)))
