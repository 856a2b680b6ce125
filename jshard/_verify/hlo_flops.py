"""FLOPs and cycles of single instructions.

Only matrix products and convolutions are counted: they dominate, and all compilers keep them recognizable. XLA's own
`cost_analysis` counts a loop's body once on TPU and nothing on GPU.

>>> from jshard._verify.hlo_parser import parse
>>> c = parse('''
... ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
...   %a = f32[4,8] parameter(0)
...   %b = f32[8,16] parameter(1)
...   ROOT %d = f32[4,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }''').computations["main"]
>>> flops(c.root, c)
1024.0
"""

from __future__ import annotations

import math
import re

import numpy as np

from jshard._verify.hlo_parser import Computation, Instruction, Shape


def cycles(inst: Instruction) -> float:
    """The TPU compiler's `estimated_cycles` of an instruction; 0 without the attribute."""
    m = re.search(r'"estimated_cycles":\s*"?(-?\d+)', inst.attrs)
    return max(0.0, float(m[1])) if m else 0.0


def flops(inst: Instruction, computation: Computation) -> float:
    """Multiplications and additions of a dot, a convolution, or a library call for one."""
    if inst.opcode == "dot":
        lhs = _shape(inst, computation, 0)
        return _dot(inst, lhs, _ints(inst.attr("lhs_contracting_dims")))
    if inst.opcode == "convolution":
        return _convolution(inst, inst.shapes[0], _shape(inst, computation, 0), _shape(inst, computation, 1))
    if inst.opcode == "custom-call":
        return _library_call(inst, computation)
    return 0.0


def _shape(inst: Instruction, computation: Computation, k: int) -> Shape | None:
    source = computation.by_name.get(inst.operands[k]) if k < len(inst.operands) else None
    return source.shapes[0] if source is not None and source.shapes else None


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text or "")]


def _dot(inst: Instruction, lhs: Shape | None, contracting: list[int]) -> float:
    if lhs is None or not inst.shapes or any(d >= len(lhs.dims) for d in contracting):
        return 0.0
    return 2.0 * inst.shapes[0].elements * math.prod(lhs.dims[d] for d in contracting)


def _library_call(inst: Instruction, computation: Computation) -> float:
    target = (inst.attr("custom_call_target") or "").strip('"')
    lhs = _shape(inst, computation, 0)
    if "cublas" in target or "matmul" in target:
        m = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', inst.attrs)
        return _dot(inst, lhs, _ints(m[1] if m else None)) if m else 0.0
    if target.startswith("__cudnn$conv"):
        rhs = _shape(inst, computation, 1)
        out = inst.shapes[0] if inst.shapes else None
        # dim_labels always describe the forward convolution; the gradients swap the roles of the arrays.
        if "BackwardInput" in target:
            out, lhs = lhs, out
        elif "BackwardFilter" in target:
            out, rhs = rhs, out
        return _convolution(inst, out, lhs, rhs)
    return 0.0


def _convolution(inst: Instruction, out: Shape | None, lhs: Shape | None, rhs: Shape | None) -> float:
    """2 x output features x input features x batch x pairs of (output, kernel) positions inside the input.

    The count of valid positions follows HloCostAnalysis::HandleConvolution of XLA: TPU writes batched
    products as convolutions with dilation, where most positions fall on holes and cost nothing.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", inst.attr("dim_labels") or "")
    if labels is None or out is None or lhs is None or rhs is None:
        return 0.0
    left, kernel, result = labels[1], labels[2], labels[3]
    if (len(left), len(kernel), len(result)) != (len(lhs.dims), len(rhs.dims), len(out.dims)):
        return 0.0
    window = _window(inst.attr("window"))
    feature_groups = int(inst.attr("feature_group_count") or 1)
    batch_groups = int(inst.attr("batch_group_count") or 1)
    pairs = 1
    for d in range(len(left) - 2):
        s = str(d)
        pairs *= _valid_positions(
            lhs.dims[left.index(s)],
            rhs.dims[kernel.index(s)],
            out.dims[result.index(s)],
            stride=_window_field(window, "stride", d, 1),
            low=_window_field(window, "pad", d, 0),
            base=_window_field(window, "lhs_dilate", d, 1),
            dilate=_window_field(window, "rhs_dilate", d, 1),
        )
    features = lhs.dims[left.index("f")] / feature_groups * out.dims[result.index("f")]
    return 2.0 * features * lhs.dims[left.index("b")] / batch_groups * pairs


def _window(text: str | None) -> dict[str, list[int]]:
    """Window fields per dimension; padding keeps its low side, which decides what is inside."""
    out = {}
    for key, value in re.findall(r"(\w+)=([\dx_\-]+)", text or ""):
        out[key] = [int(v.split("_")[0]) for v in value.split("x")]
    return out


def _window_field(window: dict[str, list[int]], key: str, d: int, default: int) -> int:
    values = window.get(key, [])
    return values[d] if d < len(values) else default


def _valid_positions(
    size: int, kernel: int, out: int, *, stride: int, low: int, base: int, dilate: int
) -> int:
    """Pairs of output and kernel position that read a real element of the input, along one dimension."""
    total = 0
    positions = np.arange(out, dtype=np.int64) * stride - low
    for k in range(kernel):
        at = positions + k * dilate
        total += int(np.count_nonzero((at >= 0) & (at % base == 0) & (at < size * base - base + 1)))
    return total
