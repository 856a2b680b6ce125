"""What calibration measures: seconds of products, of memory traffic and of collectives, in loops on the devices.

A measurement runs one operation n times in a loop of one program, n given when it runs: the difference between many
turns and one, over the number of turns, is one operation, without the start of the program. All devices work at once, as
they do in a planned step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._core.jax_types import Device
from jshard._core.layout import CollectiveKind


KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
TARGET_SECONDS = 0.015  # of all turns of one run
MAX_TURNS = 256
RUNS = 5
AXES = ("outer", "inner")


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to measure: `what` is "product", "memory" or a collective.

    - `dtype`: of the operands. `group`: devices of a group, and whether they are `strided`: not neighbours.
    - `size`: FLOPs, bytes of memory traffic, or bytes of a device's operand.
    - `elements`: per device: the side of square matrices, else the length of a vector.
    """

    what: str
    dtype: str
    size: float
    elements: int
    group: int = 1
    strided: bool = False


@dataclasses.dataclass(frozen=True)
class Measured:
    """The median seconds of one run of a task, and half of the distance of the quartiles over it."""

    task: Task
    seconds: float
    spread: float


def tasks(devices: int, largest: float) -> Iterator[Task]:
    """Everything to measure on so many devices; `largest` in bytes received by a device in one collective."""
    for dtype in ("float32", "bfloat16"):
        for side in (128, 256, 512):
            yield Task("product", dtype, 2.0 * side**3, side)
    for megabytes in (1, 2, 4, 8):
        elements = megabytes * 2**18
        yield Task("memory", "float32", 8.0 * elements, elements)
    for group in [n for n in range(2, devices + 1) if devices % n == 0]:
        for strided in (False, True) if group < devices else (False,):
            for kind in KINDS:
                for elements in operand_elements(kind, group, largest):
                    yield Task(kind, "float32", 4.0 * elements, elements, group, strided)


def operand_elements(kind: CollectiveKind, group: int, largest: float) -> list[int]:
    """Lengths of operands, in steps of a factor of four, from 4 KB to `largest` bytes received."""
    out = []
    received = 4096.0
    while received <= largest:
        volume = {"all_gather": group - 1.0, "permute": 1.0}.get(kind, (group - 1) / group)
        elements = max(group, round(received / 4 / volume / group) * group)
        out.append(elements)
        received *= 4
    return list(dict.fromkeys(out))


def measure(task: Task, devices: Sequence[Device], runs: int = RUNS) -> Measured:
    """Run a task until its turns take long enough to be measured, then so many times; the median counts."""
    program, x = _program(task, devices)

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(x, turns))
        return time.perf_counter() - begin

    seconds(1)  # compiles
    one, few = min(seconds(1) for _ in range(2)), seconds(4)
    each = max((few - one) / 3, 1e-7)
    turns = max(1, min(MAX_TURNS, math.ceil(TARGET_SECONDS / each)))
    short = sorted(seconds(1) for _ in range(runs))
    long = sorted(seconds(1 + turns) for _ in range(runs))
    middle = statistics.median(long) - statistics.median(short)
    if middle <= 0.1 * statistics.median(long):  # the start takes longer than all turns, or was disturbed
        middle = statistics.median(long) * turns / (1 + turns)
    quarter = runs // 4
    return Measured(task, middle / turns, (long[-1 - quarter] - long[quarter]) / 2 / middle)


def _program(task: Task, devices: Sequence[Device]) -> tuple[Callable[..., jax.Array], jax.Array]:
    """The looped program of a task, and its argument."""
    n = task.group
    shape = (n, len(devices) // n) if task.strided else (len(devices) // n, n)
    # Strided: the groups are the columns of the grid, so that its major axis is the one that communicates.
    mesh = Mesh(np.array(devices).reshape(shape), AXES)
    body = _body(task, AXES[0] if task.strided else AXES[1])
    spec = PartitionSpec(AXES)

    def run(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, y: body(y), x)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    local = (task.elements, task.elements) if task.what == "product" else (task.elements,)
    whole = (len(devices) * local[0], *local[1:])
    make = jax.jit(lambda: jnp.ones(whole, task.dtype), out_shardings=NamedSharding(mesh, spec))
    return jax.jit(mapped), make()


def _body(task: Task, axis: str) -> Callable[[jax.Array], jax.Array]:
    """One turn, from a vector (or matrix) to one of the same shape, so that no turn can be left out."""
    n = task.group
    if task.what == "product":
        return lambda x: x @ x * jnp.asarray(1 / task.elements, x.dtype)
    if task.what == "memory":
        return lambda x: x * 1.0001 + 0.5
    part = task.elements // n
    ring = [(i, (i + 1) % n) for i in range(n)]
    collectives: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all_gather": lambda x: lax.dynamic_slice_in_dim(
            lax.all_gather(x, axis, tiled=True), task.elements, task.elements
        ),
        "reduce_scatter": lambda x: lax.dynamic_update_slice_in_dim(
            x, lax.psum_scatter(x, axis, tiled=True)[:part], 0, 0
        ),
        "all_reduce": lambda x: lax.psum(x, axis),
        "all_to_all": lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, axis, ring),
    }
    return collectives[task.what]
