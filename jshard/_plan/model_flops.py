"""Model FLOPs of a program: its matrix products and convolutions, without those that `jax.checkpoint` runs again.

The definition is that of PaLM (Chowdhery et al. 2022, appendix B): model FLOPs utilization (MFU) is the observed rate of
model FLOPs over the peak rate of the devices, and what is rematerialized does not count. JAX names the scope of the
recomputed forward part `rematted_computation`, by which its products are found; what `remat="auto"` runs again, the
program says itself.
"""

from __future__ import annotations

from jshard._core.topology import Topology
from jshard._cost.roofline import peak_flops
from jshard._plan.rows import ModelFlops
from jshard._program.graph import Operator, Program
from jshard._program.memory.least_traffic import is_every_product_counted, product_flops


RECOMPUTED_SCOPE = "rematted_computation"


def model_flops(program: Program, topology: Topology) -> ModelFlops:
    """The model FLOPs of one call of a program, and their time at the devices' peak."""
    flops = recomputed = seconds = 0.0
    for i, work in product_flops(program).items():
        op = program.operators[i]
        if i in program.recomputed or RECOMPUTED_SCOPE in op.module.split("/"):
            recomputed += work
            continue
        flops += work
        seconds += work / highest_peak_flops(op, topology)
    complete = is_every_product_counted(program)
    return ModelFlops(flops, recomputed, seconds / topology.mesh.total, complete)


def highest_peak_flops(op: Operator, topology: Topology) -> float:
    """The highest FLOP/s of a product of these types: a compiler may use the units of any of them."""
    return max(peak_flops(v.aval.dtype, topology.chip) for v in (*op.equation.invars, *op.equation.outvars))
