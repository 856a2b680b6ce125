"""Seconds of a kernel on one device under each candidate: the roofline of its products, memory and vector unit.

What a kernel moves and computes is known of the program (`_program/memory/kernel_fusion.py`), as bytes and elements that are
divided as an operand or a result of the kernel's root is. A product runs at the rate of its operands' type, with two of
its sizes padded to the tiles of the matrix unit and the third to sublanes, whichever two are best; where the vector unit
does it sooner (an outer product), there.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009; tiles and rates in `compute_units.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.compute_units import REGISTER, ComputeUnits
from jshard._core.hardware import Chip
from jshard._core.layout import MeshAxes
from jshard._cost import roofline
from jshard._network.candidates import CandidateSet
from jshard._program.memory.kernel_parts import KernelPart, Parts, VectorWork
from jshard._program.operators import PRODUCTS
from jshard._rules.registry import OpView
from jshard._rules.rule import Rule


def product_rate(op: OpView, chip: Chip) -> float:
    """Operations/s of an operator's arithmetic: for products, of the slower operand at the precision that is asked for.

    >>> from jax import ShapeDtypeStruct as S
    >>> from jshard._core import hardware
    >>> x, w = S((8, 8), "int8"), S((8, 8), "bfloat16")
    >>> chip = hardware.get("v5e")
    >>> product_rate(OpView("dot_general", {}, (x, w), (w,)), chip) == chip.units.efficiency * chip.bf16_flops
    True
    """
    if op.primitive not in PRODUCTS:
        return roofline.peak_flops(op.outs[0].dtype if op.outs else np.dtype("float32"), chip)
    rate = min(roofline.peak_flops(a.dtype, chip) for a in op.ins[:2])
    if any(str(a.dtype) == "float32" for a in op.ins[:2]):
        rate /= _passes(op.params.get("precision"), chip.units)
    return rate * chip.units.efficiency


def _passes(precision: object, units: ComputeUnits) -> float:
    asked = precision if isinstance(precision, tuple) else (precision,)
    if jax.lax.Precision.HIGHEST in asked:
        return units.highest_passes
    return max(1.0, units.highest_passes / 2) if jax.lax.Precision.HIGH in asked else 1.0


def padding_of_product(
    op: OpView, rule: Rule, axis_codes: Ints, mesh: MeshAxes, units: ComputeUnits
) -> Floats:
    """(candidates,) the work of a device's product with its sizes padded to tiles, over its work without."""
    if op.primitive != "dot_general" or units.tile == 1:
        return np.ones(len(axis_codes))
    k, rows, columns = _block_sizes(op, rule, axis_codes, mesh)
    best = np.minimum(
        _padded(rows, units.sublanes) * _padded(columns, units.tile),
        _padded(rows, units.tile) * _padded(columns, units.sublanes),
    )
    return best * _padded(k, units.tile)


def _block_sizes(op: OpView, rule: Rule, axis_codes: Ints, mesh: MeshAxes) -> tuple[Floats, Floats, Floats]:
    """(candidates,) each: contracted length, rows and columns of a device's product."""
    (contracted, _), (batch, _) = op.params["dimension_numbers"]
    left, right = rule.operands[0], rule.operands[1]
    summed = [f for d in contracted for f in left[d]]
    shared = {*summed, *(f for d in batch for f in left[d])}
    rows, columns = ([f for d in dims for f in d if f not in shared] for dims in (left, right))
    k, m, n = (_local_size(factors, rule, axis_codes, mesh) for factors in (summed, rows, columns))
    return k, m, n


def _local_size(factors: Sequence[int], rule: Rule, axis_codes: Ints, mesh: MeshAxes) -> Floats:
    size = np.full(len(axis_codes), float(math.prod(rule.sizes[f] for f in factors)))
    for k, length in enumerate(mesh.sizes):
        size /= np.where(np.isin(axis_codes[:, k], factors), length, 1)
    return size


def _padded(size: Floats, tile: int) -> Floats:
    """Sizes rounded up to whole tiles, over the sizes."""
    whole = np.maximum(size, 1.0)
    return np.ceil(whole / tile) * tile / whole


def arithmetic_seconds(
    op: OpView, rule: Rule, work: Floats, axis_codes: Ints, mesh: MeshAxes, chip: Chip
) -> Floats:
    """(candidates,) seconds of `work` operations of one device on the unit that is sooner done."""
    seconds = work / product_rate(op, chip)
    units = chip.units
    if op.primitive != "dot_general" or units.vector is None:
        return seconds
    padded = seconds * padding_of_product(op, rule, axis_codes, mesh, units)
    cycles = units.vector.simple * work
    k, rows, columns = _block_sizes(op, rule, axis_codes, mesh)
    # A matrix times a vector is a kernel of the vector unit that sums over the matrix.
    summed = (np.minimum(rows, columns) <= 1) & (k > 1)
    seconds = np.where(summed, units.vector.least * work / 2, np.inf) / REGISTER / units.vector.clock
    return np.where(summed, seconds, np.minimum(padded, cycles / REGISTER / units.vector.clock))


def kernel_parts_seconds(
    parts: Parts, candidates: CandidateSet, mesh: MeshAxes, chip: Chip, primitive: str = ""
) -> Floats:
    """(candidates,) seconds of one device for what a kernel moves, or for its vector work if that is longer."""
    nbytes, work = np.zeros(len(candidates)), [np.zeros(len(candidates)) for _ in range(5)]
    for p in parts:
        shards = (candidates.results if p.is_result else candidates.operands)[p.index].num_shards(mesh)
        nbytes += _moved(p, chip) / shards
        for total, one in zip(work, _elements(p.work), strict=True):
            if one:
                total += one / shards
    return _longer(nbytes, work, chip, primitive)


def parts_seconds_in_all(parts: Parts, chip: Chip, primitive: str = "", devices: int = 1) -> float:
    """Seconds of an even share of a kernel's parts."""
    nbytes = sum(_moved(p, chip) for p in parts) / devices
    work = [np.array(sum(x) / devices) for x in zip(*(_elements(p.work) for p in parts), strict=True)]
    return float(_longer(np.array(nbytes), work, chip, primitive)) if parts else 0.0


def alone_seconds(part: KernelPart, launched: bool, shards: Ints, chip: Chip) -> Floats:
    """Seconds of one device for an epilogue as a kernel of its own, in so many shards; of the shape of `shards`."""
    work = [x / shards for x in _elements(part.work)]
    return _longer(_moved(part, chip) / shards, work, chip, "") + (chip.units.launch if launched else 0.0)


def _moved(p: KernelPart, chip: Chip) -> float:
    """Bytes of a part, those that are written as often as they count on the chip."""
    return p.nbytes + (chip.units.write_factor - 1) * p.written


def _elements(w: VectorWork) -> tuple[float, ...]:
    return (w.simple, w.transcendental, w.arrays, w.loop, w.reduced)


def _longer(nbytes: Floats, work: Sequence[Floats], chip: Chip, primitive: str) -> Floats:
    units = chip.units
    moved = nbytes / (chip.hbm_bandwidth * (units.streamed if primitive in PRODUCTS else 1.0))
    return moved if units.vector is None else np.maximum(moved, units.vector.seconds(*work))
