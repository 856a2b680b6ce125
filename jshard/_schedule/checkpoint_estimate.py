"""What `jax.checkpoint` around the repeated module would leave of a schedule's peak, with the schedule's own layouts.

Problem.  The traced program has the derivative in it: it cannot be traced again with a checkpoint. But where every
value is made, and needed for the last time, is known.

Idea.  Under a checkpoint a layer's backward pass begins by computing the layer again. So a value of the layer that only
the backward pass needs is not in memory between its last use in the forward pass and the first time that the backward
pass needs a value of that layer. A value that a later layer reads is saved, as before.

    layer k, forward        layers after it, forward and backward      layer k, backward
    made  last use |                  not in memory                    | computed again ... freed

In a loop the stack of such a value is not there at all: one slice is, while an iteration of the backward loop runs.
What is added are stacks of the carries, from which the body is computed again.

The figures are an estimate: another plan may be the best with the checkpoint, and what is live for a moment while a
layer is computed again is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from jshard._program.memory.liveness import Liveness
from jshard._program.repeated_modules import (
    RepeatedModules,
    ResidualStacks,
    is_forward,
    repeated_modules,
    residual_stacks,
)
from jshard._program.use_def import Floats
from jshard._schedule.peak_reference import peak_reference
from jshard._schedule.peak_vectorized import last_uses_of_values, live_ranges, tensor_of
from jshard._schedule.schedule import Schedule
from jshard._schedule.vectorized import ScheduleArrays


@dataclasses.dataclass(frozen=True)
class CheckpointEstimate:
    """A checkpoint that could be added: around which function or module, how often it is run, the peak that is left.

    `in_loop`: it is the body of a loop. `repeated`: the operators that would run a second time.
    """

    name: str
    count: int
    peak: float
    in_loop: bool
    repeated: tuple[int, ...]


def checkpoint_estimate(
    schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()
) -> CheckpointEstimate | None:
    """The peak of a schedule if its layers were checkpointed; None where it has none, or they are already.

    `donated` are the flat indices of the donated arguments.
    """
    program, arrays = schedule.assignment.program, schedule.arrays
    if arrays is None or len(arrays.held_value):
        loops = residual_stacks(program)
        return _of_loops(schedule, liveness, donated, loops) if loops else None
    layers = repeated_modules(program)
    return None if layers is None else _of_layers(arrays, liveness, frozenset(donated), layers)


def _of_layers(
    arrays: ScheduleArrays, liveness: Liveness, donated: frozenset[int], layers: RepeatedModules
) -> CheckpointEstimate | None:
    program, a = arrays.assignment.program, arrays.assignment.program.use_def
    ranges = live_ranges(arrays, liveness, donated)
    forward = np.array([is_forward(op) for op in program.operators], dtype=bool)
    instance = np.array(layers.instance, dtype=np.int64)
    last_forward = last_uses_of_values(arrays, liveness, forward)

    # The layer that makes a value: of a copy, the one that it is made for.
    tensors = tensor_of(arrays)
    n = len(a.def_op)
    layer = instance[a.def_op[tensors]]
    first_reader = np.full(len(tensors), len(instance))
    np.minimum.at(first_reader, arrays.read_value, a.use_op)
    np.minimum.at(
        first_reader, arrays.source_value, np.where(arrays.reader >= 0, arrays.reader, len(instance))
    )
    layer[n:] = np.append(instance, -1)[first_reader[n:]]
    ends = np.full(layers.count, -1)
    inside = instance >= 0
    np.maximum.at(ends, instance[inside], arrays.run_at[inside])
    dropped = (layer >= 0) & (ranges.size > 0) & (ranges.made_at >= 0)
    dropped &= (last_forward <= ends[layer]) & (ranges.freed_at < arrays.num_actions)
    last_forward = np.maximum(last_forward, ranges.made_at)

    # The first time that the backward pass needs a value of each layer.
    begins = np.full(layers.count, arrays.num_actions)
    later = ~forward[a.use_op] & (arrays.run_at[a.use_op] >= 0) & dropped[arrays.read_value]
    np.minimum.at(begins, layer[arrays.read_value[later]], arrays.run_at[a.use_op[later]])
    absent = np.flatnonzero(dropped)
    absent = absent[last_forward[absent] + 1 < begins[layer[absent]]]
    absent = absent[ranges.freed_at[absent] >= begins[layer[absent]]]
    if not len(absent):
        return None
    # Freed at the latest when the backward pass begins the next layer.
    order = np.append(np.unique(begins), arrays.num_actions)
    ends_backward = order[np.searchsorted(order, begins[layer[absent]], side="right")]
    size, freed_at = ranges.size[absent], ranges.freed_at[absent] + 1
    over_time = ranges.over_time - _held_between(
        np.concatenate([last_forward[absent] + 1, np.minimum(ends_backward, freed_at)]),
        np.concatenate([begins[layer[absent]], freed_at]),
        np.concatenate([size, size]),
        arrays.num_actions,
    )
    repeated = tuple(np.flatnonzero(inside).tolist())
    return CheckpointEstimate(layers.name, layers.count, float(over_time.max()), False, repeated)


def _held_between(start: np.ndarray, end: np.ndarray, size: Floats, num_actions: int) -> Floats:
    """(actions + 1,) bytes of values from one action to before another; entry 0 is before the first action."""
    changes = np.zeros(num_actions + 2)
    np.add.at(changes, start + 1, size)
    np.add.at(changes, end + 1, -size)
    return np.cumsum(changes)[: num_actions + 1]


def _of_loops(
    schedule: Schedule, liveness: Liveness, donated: Collection[int], loops: list[ResidualStacks]
) -> CheckpointEstimate | None:
    assignment = schedule.assignment
    program, mesh = assignment.program, assignment.topology.mesh
    tensors, operators = program.tensors, program.operators
    loop = max(loops, key=lambda found: sum(tensors[t].nbytes for t in found.dropped))
    stacked = {t: operators[program.defs()[t][0]].operands[0] for t in loop.dropped}
    # What is stacked is in memory; else compilers fuse it where they can, now and when it is computed again.
    fused = [
        t for t in stacked.values() if isinstance(t, int) and liveness.traits.duplicable[program.defs()[t][0]]
    ]
    profile = peak_reference(schedule, liveness, donated, dict.fromkeys((*loop.dropped, *fused), 0.0))

    def block_bytes(tensor: int) -> float:
        return tensors[tensor].nbytes / assignment.result_layout(tensor).pieces(mesh)

    again = sum(block_bytes(t) / loop.iterations for t, inner in stacked.items() if inner not in fused)
    backward = max((profile.curve.get(op, 0.0) for op in loop.backward), default=0.0)
    carries = loop.iterations * sum(map(block_bytes, loop.unsaved_carries))
    peak = max(profile.peak, backward + again) + carries
    return CheckpointEstimate(loop.name, loop.iterations, peak, True, loop.forward)
