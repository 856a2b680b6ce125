"""The memory budget of a plan, as an option of the compiler for TPUs.

Problem.  A compiler schedules for the whole memory of its chip. Where a user plans within less, it sees memory in plenty:
the one for TPUs then delays what nobody waits for, and holds its operands meanwhile. A GPT step of four layers planned
with `remat="auto"` within 1.65 GB was compiled to 1.87 GB on chips of 16 GB.

Idea.  `xla_tpu_user_reserved_hbm_bytes` takes bytes from the memory that the compiler schedules for; it refuses no program
that needs more. From nine tenths of what is left on it computes values again, so the budget over 0.9 is left: of a GPT step
with `jax.checkpoint` the compiled operators take 10% longer where no more than the budget is left, for no byte less, and 2%
where 6% more is. With a default budget nothing is reserved: the compiler may use the whole chip.

>>> import jax, numpy as np
>>> mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
>>> print(compiler_options(10**9, mesh))       # compilers for CPUs have no such option
None
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jshard._api.plan import Plan
from jshard._core.jax_types import JaxMesh
from jshard._spec.default_budget import default_memory_budget


RESERVED = "xla_tpu_user_reserved_hbm_bytes"

# Part of the memory it has, from which on the compiler computes values again: by its compiled cycles with ever less memory
# (`benchmarks/compilers/peaks.md`).
RECOMPUTES_FROM = 0.9

# GiB that the compiler schedules for, by `device_kind`: of its errors "exceeds available HBM (15.75G)", libtpu 0.0.42.
# A TPU v4 is not among them: how much it has depends on whether its two cores are one device.
COMPILER_GIB = {"TPU v5 lite": 15.75, "TPU v5": 95.74, "TPU v6 lite": 31.25, "TPU7x": 94.75}


def explicit_budget(plan: Plan) -> float | None:
    """The memory budget of a plan in bytes a device, where it is not the default one of its chip."""
    return None if plan.memory_budget == default_memory_budget(plan.chip) else plan.memory_budget


def compiler_options(budget: float | None, mesh: JaxMesh) -> dict[str, int] | None:
    """Options of `jax.jit` for a program that was planned within `budget` bytes a device; None where there are none."""
    if budget is None or isinstance(mesh, AbstractMesh):
        return None
    kind = mesh.devices.flat[0].device_kind
    reserved = int(COMPILER_GIB.get(kind, 0) * 2**30 - budget / RECOMPUTES_FROM)
    return {RESERVED: reserved} if reserved > 0 and _is_known(RESERVED, mesh) else None


@functools.lru_cache(maxsize=8)
def _is_known(option: str, mesh: JaxMesh) -> bool:
    """Whether the compiler of a mesh knows an option of integers: it raises an error for one that it does not know.

    Asked on the whole mesh: it may be that of the context, and of several processes all are told the same.
    """
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options={option: 0}).lower(number).compile()
    except RuntimeError:  # that of the compiler
        return False
    return True
