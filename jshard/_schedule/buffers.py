"""Buffers of values while a schedule is walked: how large each is, and when it may be overwritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jshard._core.layout import Layout
from jshard._program.memory.liveness import Liveness
from jshard._schedule.assignment import Assignment, Value


@dataclasses.dataclass(eq=False)
class Buffer:
    """Bytes of a value on a device; several values may share one, one after the other.

    A buffer that is `owned_by_caller` counts there: that of a loop's carry, or of an operand lent to a branch.
    """

    nbytes: float
    owned_by_caller: bool = False


class BufferSizes:
    """Bytes of values on a device; `share`: tensor -> the part of it that is kept, for those not kept whole."""

    def __init__(self, assignment: Assignment, liveness: Liveness, share: Mapping[int, float]):
        self.assignment, self.liveness, self.share = assignment, liveness, share
        self._tensors, self._mesh = assignment.program.tensors, assignment.topology.mesh
        self._num_shards: dict[Layout, int] = {}

    def nbytes(self, value: Value) -> float:
        """Bytes of a value that is materialized."""
        tensor, layout = value
        if layout not in self._num_shards:
            self._num_shards[layout] = layout.pieces(self._mesh)
        return self.share.get(tensor, 1.0) * self._tensors[tensor].nbytes / self._num_shards[layout]

    def result_nbytes(self, value: Value) -> float:
        """Bytes of a value as its operator makes it; none if it is recomputed where it is read."""
        return self.nbytes(value) if self.liveness.materialized[value[0]] else 0.0


@dataclasses.dataclass(eq=False)
class ActionScope:
    """A list of actions while it is walked.

    - `buffers`: the values that are in memory.
    - `outliving`: values that are live after the list.
    - `last_use`: index of the last action that needs each value.
    - `base`: bytes that callers hold; `live`: bytes of its own.
    - `next_iteration`: values that a loop's body hands to its next iteration -> the carry's buffer.
    - `action`: index of the action that runs; `dying`: the values whose last use it is.
    """

    buffers: dict[Value, Buffer]
    outliving: Collection[Value]
    last_use: dict[Value, int]
    base: float
    next_iteration: Mapping[Value, Buffer]
    live: float = 0.0
    action: int = -1
    dying: list[Value] = dataclasses.field(default_factory=list)

    def next_iteration_buffer(self, value: Value, *, over_dying: bool) -> Buffer | None:
        """The carry's buffer, if a new value is for the next iteration and may be written there.

        It may if no value in the buffer is needed any more; `over_dying`: values whose last use is the action that runs
        may be overwritten.
        """
        buffer = self.next_iteration.get(value)
        if buffer is None:
            return None
        until = self.action if over_dying else self.action - 1
        inside = [v for v, b in self.buffers.items() if b is buffer]
        free = all(v not in self.outliving and self.last_use.get(v, -1) <= until for v in inside)
        return buffer if free else None
