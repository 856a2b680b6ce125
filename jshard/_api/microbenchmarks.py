"""What calibration measures: seconds of calls, products, elementwise work, memory traffic and collectives.

Most operations run n times in a loop of one program, n given when it runs: the difference between many turns and one,
over the number of turns, is one operation, without the start of the program. Devices that share the memory of one host
(CPU) get pages from the system for what a program writes, in every call, and turns of a loop write into the same pages:
there, products and what is larger than `PAGED` bytes are called, and the seconds of an empty call are subtracted. All
devices work at once, as they do in a planned step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
PAGED = 131072
"""Bytes from which the C library gets memory from the system for each allocation (mallopt(3), M_MMAP_THRESHOLD)."""
IN_CACHE = 65536
"""Elements of the vector on which elementwise arithmetic is measured: 256 KiB, without traffic to memory."""

ROW = 512
"""Elements of a row: the sum of rows reads a vector and writes next to nothing."""


class Sizes(NamedTuple):
    """Sides of square products, rows of a product and its gradient (of the largest side), and MiB of vectors."""

    sides: tuple[int, ...]
    rows: int
    megabytes: tuple[int, ...]


# Large enough that an accelerator is busy and its caches do not hold the vectors; small enough for a CPU.
HOST = Sizes((128, 256, 512), 128, (1, 2, 4, 8))
ACCELERATOR = Sizes((1024, 2048, 4096), 1024, (64, 128, 256, 512))


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to measure: `what` is "call", "product", "simple", "transcendental", "read", "memory" or a collective.

    - `dtype`: of the operands. `group`: devices of a group, and whether they are `strided`: not neighbours.
    - `size`: FLOPs, elementwise operations, bytes of memory traffic, or bytes of a device's operand; 1 for a call.
    - `elements`: per device: the side of square matrices, else the length of a vector.
    - `rows`: of a matrix that is multiplied by its transpose and by the result, as a gradient and a step are; 0: square.
    - `looped`: whether turns of a loop are measured, or calls.
    """

    what: str
    dtype: str
    size: float
    elements: int
    group: int = 1
    strided: bool = False
    rows: int = 0
    looped: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    """The median seconds of one run of a task, and half of the distance of the quartiles over it."""

    task: Task
    seconds: float
    spread: float


def tasks(devices: int, largest: float, host: bool = True) -> Iterator[Task]:
    """Everything to measure on so many devices, an empty call first.

    - `largest`: bytes that a device receives in one collective.
    - `host`: whether the devices share the memory of a host.
    """
    sizes = HOST if host else ACCELERATOR
    yield Task("call", "float32", 1.0, 8, looped=False)
    for dtype in ("float32", "bfloat16"):
        for side in sizes.sides:
            yield Task("product", dtype, 2.0 * side**3, side, looped=not host)
        side = sizes.sides[-1]
        yield Task("product", dtype, 4.0 * sizes.rows * side**2, side, rows=sizes.rows, looped=not host)
    if host:
        yield Task("simple", "float32", 2.0 * IN_CACHE, IN_CACHE)
        yield Task("transcendental", "float32", 1.0 * IN_CACHE, IN_CACHE)
    for megabytes in sizes.megabytes if host else ():
        yield Task("read", "float32", megabytes * 2.0**20, megabytes * 2**18, looped=False)
    for megabytes in sizes.megabytes:
        elements = megabytes * 2**18
        if host:  # two arrays are read and one is written: fresh pages cost more than reading
            yield Task("memory", "float32", 12.0 * elements, 2 * elements, looped=False)
        else:
            yield Task("memory", "float32", 8.0 * elements, elements)
    for group in [n for n in range(2, devices + 1) if devices % n == 0]:
        for strided in (False, True) if group < devices else (False,):
            for kind in KINDS:
                for elements in operand_elements(kind, group, largest):
                    looped = not host or 4.0 * elements * (group if kind == "all_gather" else 1) < PAGED
                    yield Task(kind, "float32", 4.0 * elements, elements, group, strided, looped=looped)


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


def measure(task: Task, devices: Sequence[Device], runs: int = RUNS, start: float = 0.0) -> Measured:
    """Run a task until its turns or calls take long enough to be measured, then so many times; the median counts.

    - `start`: seconds of an empty call, which are subtracted where calls are measured.
    """
    program, x = _program(task, devices)

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(x, turns))
        return time.perf_counter() - begin

    seconds(1)  # compiles
    if not task.looped:
        return _measured_calls(task, lambda: seconds(1), runs, start)
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


def _measured_calls(task: Task, call: Callable[[], float], runs: int, start: float) -> Measured:
    """The median of calls that take as long together as `runs` measurements of turns, after half as many."""
    budget = runs * TARGET_SECONDS
    warm, found = 0.0, []
    while warm < budget / 2:
        warm += call()
    while len(found) < runs or (sum(found) < budget and len(found) < MAX_TURNS):
        found.append(call())
    found.sort()
    middle, quarter = statistics.median(found), len(found) // 4
    # An operation that takes no longer than a tenth of its call cannot be told from the call.
    seconds = max(middle - start, 0.1 * middle)
    return Measured(task, seconds, (found[-1 - quarter] - found[quarter]) / 2 / middle)


def _program(task: Task, devices: Sequence[Device]) -> tuple[Callable[..., jax.Array], jax.Array]:
    """The looped program of a task, and its argument."""
    n = task.group
    shape = (n, len(devices) // n) if task.strided else (len(devices) // n, n)
    # Strided: the groups are the columns of the grid, so that its major axis is the one that communicates.
    mesh = Mesh(np.array(devices).reshape(shape), AXES)
    body = _body(task, AXES[0] if task.strided else AXES[1])
    spec = PartitionSpec(AXES)

    def run(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, y: body(y), x) if task.looped else body(x)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    matrix = (task.rows or task.elements, task.elements)
    local = matrix if task.what == "product" else (task.elements,)
    whole = (len(devices) * local[0], *local[1:])
    make = jax.jit(lambda: jnp.ones(whole, task.dtype), out_shardings=NamedSharding(mesh, spec))
    return jax.jit(mapped), make()


def _body(task: Task, axis: str) -> Callable[[jax.Array], jax.Array]:
    """One turn, from a vector (or matrix) to one of the same shape, so that no turn can be left out; or one call."""
    n = task.group
    scale = 1 / (task.rows or task.elements)
    if task.rows:
        return lambda x: x @ (x.T @ x) * jnp.asarray(scale / task.elements, x.dtype)
    if task.what == "product":
        return lambda x: x @ x * jnp.asarray(scale, x.dtype)
    part = task.elements // n
    ring = [(i, (i + 1) % n) for i in range(n)]
    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        "call": lambda x: x + 1.0,
        "simple": lambda x: x * 0.999 + 0.5,
        "transcendental": jnp.tanh,
        "read": lambda x: x.reshape(-1, ROW).sum(0),
        "memory": lambda x: x * 0.999 + 0.5,
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
    if not task.looped:
        half = task.elements // 2
        bodies["memory"] = lambda x: x[:half] * 0.999 + x[half:]
        bodies["all_gather"] = lambda x: lax.all_gather(x, axis, tiled=True)
        bodies["reduce_scatter"] = lambda x: lax.psum_scatter(x, axis, tiled=True)
    return bodies[task.what]
