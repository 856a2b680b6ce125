"""The most that padding some dimensions can gain, before it is tried.

Problem.  A training step reads `tokens[:, :-1]` and `tokens[:, 1:]`, so its batch has a length of 4,097 that no cut
divides. To plan the padded program as well takes as long as the program itself, for some bytes of token ids.

Idea.  Any plan of the padded program is one of the program as traced where all operators that touch the dimension run on
whole tensors, gathered before them: their results are then cut without communication. So padding gains at most the
seconds of those gathers and of those operators on one device, and at a peak the bytes of all tensors with the dimension
and of what one operator reads and writes.

>>> import jax, jax.numpy as jnp
>>> from jshard._core import hardware, topology
>>> from jshard._core.layout import MeshAxes
>>> from jshard._program.trace import build
>>> def f(t, w): return w[t[:, :-1]]
>>> shapes = jax.ShapeDtypeStruct((64, 4097), "int32"), jax.ShapeDtypeStruct((1024, 512), "float32")
>>> program = build(jax.jit(f).trace(*shapes).jaxpr, name="f", input_names=["t", "w"])
>>> v5e = topology.from_mesh(MeshAxes(("x", "y"), (4, 8)), hardware.get("v5e"))
>>> most = padding_gain(program, v5e, frozenset([4097]))
>>> f"{most.seconds * 1e6:.0f} us, {most.nbytes / 2**20:.1f} MiB"  # ids read and written
'30 us, 3.0 MiB'
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jshard._core.topology import Topology
from jshard._cost.collectives import collective
from jshard._cost.roofline import peak_flops
from jshard._program.graph import Program
from jshard._program.memory.least_traffic import product_flops


class PaddingGain(NamedTuple):
    """The most that padding can gain: seconds of a call, and bytes of its peak."""

    seconds: float
    nbytes: float


def padding_gain(program: Program, topology: Topology, lengths: Collection[int]) -> PaddingGain:
    """What the operators cost, on whole tensors, that touch a dimension of one of some lengths."""
    a = program.use_def
    has_length = np.zeros(len(a.aval_ids), dtype=bool)
    for (shape, _), k in a.aval_ids.items():
        has_length[k] = any(n in lengths for n in shape)
    tensor_has = has_length[a.aval_id]
    touches = np.zeros(len(program.operators), dtype=bool)
    touches[a.use_op[tensor_has[a.use_tensor]]] = True
    touches[a.def_op[tensor_has]] = True
    runs = touches & a.has_kind("eqn")
    operators = len(program.operators)
    read = np.bincount(a.use_op, a.nbytes[a.use_tensor], operators)
    written = np.bincount(a.def_op, a.nbytes, operators)
    seconds = float((a.repeat * (read + written))[runs].sum()) / topology.chip.hbm_bandwidth
    for i, work in product_flops(program).items():
        if runs[i]:
            op = program.operators[i]
            dtypes = [v.aval.dtype for v in op.equation.outvars]
            seconds += work / min(peak_flops(dtype, topology.chip) for dtype in dtypes)
    # What another of these operators makes is whole already.
    gathered, counts = np.unique(
        a.use_tensor[runs[a.use_op] & ~runs[a.def_op[a.use_tensor]]], return_counts=True
    )
    devices = topology.mesh.total
    for t, count in zip(gathered.tolist(), counts.tolist(), strict=True):
        own = float(a.nbytes[t]) / devices
        once = collective("all_gather", topology.mesh.names, own, topology).seconds
        seconds += count * float(a.result_repeat[t]) * once
    held = a.nbytes[tensor_has].sum() + (read + written)[touches].max(initial=0.0)
    return PaddingGain(seconds, float(held))
