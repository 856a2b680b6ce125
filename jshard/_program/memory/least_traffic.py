"""Lower bounds on the work and the HBM traffic of a program, however it is compiled.

A roofline of each operator counts what passes through memory between operators, which a better compiler may keep on
chip. What no compiler avoids: arguments are in memory when a call begins, results when it ends. So an argument counts
once, as far as its elements are needed, and a result once, unless it may be in the buffer of a donated argument.

What is needed is followed backwards from results, products and reductions, through what is computed element by element.
Of a slice or a lookup nothing is counted, of an array that is updated what the updates leave; nor is anything that is
read only in the branch of a `cond`, or in a `while` loop that may have no iteration. Products count two operations for each
pair of elements that they multiply, convolutions without those that meet padding or dilation.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> def traced(f, *args):
...     return build(jax.make_jaxpr(f)(*args), name="f", input_names=[""] * len(args))
>>> w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
>>> layer = traced(lambda w, x: jnp.tanh(x @ w), w, x)
>>> min_hbm_bytes(layer) == (64 * 64 + 8 * 64 + 8 * 64) * 4, sum(product_flops(layer).values()) == 2 * 8 * 64 * 64
(True, True)
>>> write = traced(lambda w: w.at[0].set(0), w)
>>> min_hbm_bytes(write), min_hbm_bytes(write, donated=[0]), min_hbm_bytes(traced(lambda w, i: w[i] * 2, w, 3))
(32512.0, 16128.0, 256.0)
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np

from jshard._core.jax_types import JaxprEqn
from jshard._program.graph import Literal, Operator, Program, calls_of
from jshard._program.memory.in_place import is_update, update_operand
from jshard._program.memory.unfusible import ATTENTION


_FUSED = "jshard_fused"
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", _FUSED)) | ATTENTION
# Primitives whose products are not operators of the program.
_WITH_WORK_OF_THEIR_OWN = frozenset(
    ("custom_partitioning", "pallas_call", "ragged_dot", "ragged_dot_general", "shard_map")
)
# Boundary operators: their first result is their first operand in a body, for the first iteration or for all.
_FORWARDING = frozenset("scan_const scan_carry scan_sum scan_xs scan_ys".split())
_FIRST_OPERAND_ONLY = _FORWARDING | {"update"}  # only their first operand counts


def min_hbm_bytes(program: Program, donated: Collection[int] = ()) -> float:
    """Least bytes that all devices together read of arguments and captured arrays, and write of results.

    `donated` are flat indices of arguments whose buffers results may reuse.
    """
    needed = _needed_fractions(program)
    ops, total = program.operators, 0.0
    for i in program.inputs:
        t = ops[i].results[0]
        total += program.tensors[t].nbytes * needed[t]
    reusable = Counter(_shape_and_dtype(program, ops[program.inputs[k]].results[0]) for k in donated)
    written = set()
    for i in program.outputs:
        t = ops[i].operands[0]
        if isinstance(t, Literal) or t in written:
            continue
        written.add(t)
        kind = _shape_and_dtype(program, t)
        if reusable[kind]:
            reusable[kind] -= 1
        elif _def_kind(program, t) not in ("input", "const"):
            total += program.tensors[t].nbytes
    return total


def product_flops(program: Program) -> Mapping[int, float]:
    """FLOPs of each product, convolution and kernel that states them which every call runs, in all its runs together."""
    conditional = _conditional_operators(program)
    which = program.use_def.has_primitive(_PRODUCTS)
    ops = [program.operators[i] for i in np.flatnonzero(which).tolist() if i not in conditional]
    known: dict[int, float] = {}  # layers share their equations' avals, not the equations
    flops = {op.id: op.repeat * known.setdefault(id(op.eqn), _flops_of_product(op.equation)) for op in ops}
    return {i: f for i, f in flops.items() if f or program.operators[i].primitive != _FUSED}


def is_every_product_counted(program: Program) -> bool:
    """Whether `product_flops` has all products: none may be skipped by a call, or lies inside a kernel or `shard_map`."""
    which = program.use_def.has_primitive(_PRODUCTS)
    conditional = _conditional_operators(program)
    if any(i in conditional for i in np.flatnonzero(which).tolist()):
        return False
    return not program.use_def.has_primitive(_WITH_WORK_OF_THEIR_OWN).any()


def _flops_of_product(eqn: JaxprEqn) -> float:
    """Model FLOPs of a product; a multiply-add is two. Padding and dilation of a convolution do not count."""
    p = eqn.params
    if eqn.primitive.name == _FUSED:
        return p["fused"].flops([v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]) or 0.0
    lhs, rhs, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name in ATTENTION:
        # Twice the forward pass backward, as for any product: the logits that it computes again do not count.
        forward = p["spec"].flops(*(v.aval.shape for v in eqn.invars[:3]))
        return forward * (2 if eqn.primitive.name.endswith("backward") else 1)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = p["dimension_numbers"]
        return 2.0 * out.size * math.prod(lhs.shape[d] for d in contracted)
    spec = p["dimension_numbers"]
    work = 2.0 * rhs.shape[spec.rhs_spec[1]] * out.shape[spec.out_spec[0]] * out.shape[spec.out_spec[1]]
    for k in range(len(p["window_strides"])):
        size, window, outs = (
            shape[dims[2 + k]]
            for shape, dims in ((lhs.shape, spec.lhs_spec), (rhs.shape, spec.rhs_spec), (out.shape, spec.out_spec))
        )  # fmt: skip
        at = np.arange(outs)[:, None] * p["window_strides"][k] - p["padding"][k][0]
        at = at + np.arange(window) * p["rhs_dilation"][k]
        step = p["lhs_dilation"][k]
        work *= int(((at >= 0) & (at <= (size - 1) * step) & (at % step == 0)).sum())
    return work


def _needed_fractions(program: Program) -> list[float]:
    """(tensors,) least fraction of its elements that operators need which every call runs."""
    conditional, consumers = _conditional_operators(program), program.uses()
    needed = [0.0] * len(program.tensors)
    for op in reversed(program.operators):
        if op.id in conditional:
            continue
        wanted = max([needed[r] for r in op.results], default=0.0)
        how = _operand_need(op.primitive) if op.kind == "eqn" else op.kind
        if how == "all" and any(consumers[r] for r in op.results):
            wanted = 1.0
        elif how in _FORWARDING:
            wanted = needed[op.results[0]]
        elif how == "output":  # an argument that is handed back is not touched
            a = op.operands[0]
            wanted = float(isinstance(a, int) and _def_kind(program, a) not in ("input", "const"))
        elif not wanted or how not in ("each", "update"):
            continue
        for a in op.operands[:1] if how in _FIRST_OPERAND_ONLY else op.operands:
            if not isinstance(a, Literal) and needed[a] < wanted:
                needed[a] = max(
                    needed[a],
                    wanted
                    if wanted == 1.0 and how == "each"
                    else _needed_fraction(op, a, wanted, how, program),
                )
    return needed


def _needed_fraction(op: Operator, operand: int, wanted: float, how: str, program: Program) -> float:
    """The fraction of an operand that an operator needs, if the fraction `wanted` of its results is needed."""
    size = program.tensors[operand].size
    if how == "update":
        written = op.equation.invars[update_operand(op.primitive)].aval.size
        return max(0.0, wanted - written / size) if size else 0.0
    if how == "each" and all(program.tensors[r].size != size for r in op.results):
        return 0.0
    return wanted


@functools.cache
def _operand_need(primitive: str) -> str:
    """What an operator needs: "all" elements, "each" as far as its result is needed, all but the "update", or a "part"."""
    if primitive in ("slice", "dynamic_slice", "gather", "split"):
        return "part"
    if is_update(primitive):
        return "update"
    if primitive.startswith(("dot_general", "conv_general", "argm", "cum", "sort", "reduce_")):
        return "all" if primitive != "reduce_precision" else "each"
    return "each"


def _def_kind(program: Program, tensor: int) -> str:
    """The kind of the operator that makes a tensor."""
    return program.operators[program.defs()[tensor][0]].kind


def _conditional_operators(program: Program) -> frozenset[int]:
    """Operators that a call may skip: those in branches, and in loops of unknown trip count."""
    branches = [call for call in calls_of(program.body) if call.kind == "cond"]
    inside = [i for call in branches for ids in (call.inner_operators, *call.boundary.values()) for i in ids]
    return program.in_unbounded_loops.union(inside)


def _shape_and_dtype(program: Program, tensor: int) -> tuple[tuple[int, ...], str]:
    t = program.tensors[tensor]
    return tuple(t.shape), str(t.dtype)
