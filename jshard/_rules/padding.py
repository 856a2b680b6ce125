"""What padding at the end of a dimension means for each operator.

A size that a cut does not divide is padded to one that divides. Elementwise work ignores what stands in the padding; a
reduction needs the neutral element there; an index must not reach it; a window reads it as it reads what lies outside.
`padded_factors` says so for each factor of a rule, and leaves out the factors that cannot be padded: the sizes in a
reshape that joins or splits the dimension, random bits, sorts that may exchange equal keys, and all operators whose
function is the user's.

>>> from jax import ShapeDtypeStruct as S
>>> from jshard._rules.lookup import rules_for
>>> op = OpView("reduce_max", {"axes": (1,)}, (S((4, 7), "float32"),), (S((4,), "float32"),))
>>> for factor, padding in padded_factors(op, rules_for(op)[0]).items():
...     print(op.ins[0].shape[factor], padding)
4 PaddedFactor(masks=(), index=None, most=None)
7 PaddedFactor(masks=((0, -inf),), index=None, most=None)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.lax import GatherScatterMode

from jshard._core.jax_types import Params
from jshard._program.pin_primitives import PIN_OPERAND
from jshard._program.tail_primitives import DIAGONAL, MASK_TAIL, Fill
from jshard._rules.attention.padded import attention_masks, attention_params
from jshard._rules.neutral_element import (
    greatest_key,
    least_element,
    neutral_element,
    window_identity,
)
from jshard._rules.primitives.reduce_window import window_of
from jshard._rules.registry import REGISTRY, OpView
from jshard._rules.rule import Dims, Rule


@dataclasses.dataclass(frozen=True)
class IndexLimit:
    """Indices that must stay below the true size of a dimension.

    - `operand`: of the indices; `column`: along their last dimension, None where they are one scalar.
    - `dropped`: what is out of range is dropped, or reads a fill value; else it stands for the last position.
    """

    operand: int
    column: int | None
    dropped: bool


@dataclasses.dataclass(frozen=True)
class PaddedFactor:
    """What padding of one factor needs.

    `masks`: (operand, value) pairs: the operand must have the value in the padding. `index`: the limit of an index.
    `most`: what counts elements is at most this.
    """

    masks: tuple[tuple[int, Fill], ...] = ()
    index: IndexLimit | None = None
    most: int | None = None


IGNORED = PaddedFactor()

# Dimensions with a factor of their own keep their place; blocked factors aside, the padding moves along.
_MOVES = frozenset(
    "broadcast_in_dim transpose squeeze expand_dims reshape rev tile stack unstack concatenate split pad iota slice "
    "dynamic_slice optimization_barrier pad_tail fft rounded_sum zero_unless add_to_round "
    "device_put bitcast_convert_type roll".split()
)
_REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod", "reduce_and": "and",
    "reduce_or": "or", "reduce_xor": "or", "argmax": "max", "argmin": "min",
}  # fmt: skip
_CUMULATIVE = {
    "cumsum": "sum",
    "cumprod": "prod",
    "cummax": "max",
    "cummin": "min",
    "cumlogsumexp": "max",
}
_SCATTERS = {
    "scatter-add": "sum", "scatter-sub": "sum", "scatter-mul": "prod", "scatter-max": "max", "scatter-min": "min",
    "scatter": "",
}  # fmt: skip
_WINDOWS = {
    "reduce_window_sum": 0,
    "reduce_window_max": 0,
    "reduce_window_min": 0,
    "select_and_scatter_add": 1,
    "select_and_gather_add": 1,
}  # the operand whose windows are reduced, or searched for their greatest
_MATRICES: Mapping[str, tuple[tuple[int, Fill], ...]] = {
    **dict.fromkeys(
        "cholesky eig eigh geqrf hessenberg lu qr schur svd triangular_solve tridiagonal".split(),
        ((0, DIAGONAL),),
    ),
    **dict.fromkeys("cholesky_update geqp3 householder_product ormqr symmetric_product".split(), ()),
    "lu_pivots_to_permutation": ((0, 0),),
    "tridiagonal_solve": ((1, 1),),
}  # of each operator of linear algebra, what the operands hold in the padding of a batch
LINEAR_SOLVE = "custom_linear_solve"
_ATTENTION = ("jshard_attention", "jshard_attention_backward")
_KEEPS_ZERO = frozenset(
    "neg copy copy_p convert_element_type transpose broadcast_in_dim reshape squeeze expand_dims real imag abs sign "
    "stop_gradient name reduce_precision slice add add_any sub mul concatenate tanh sin sqrt square max min pad_tail "
    "rounded_sum jshard_pin_result jshard_pin_operand jshard_own_result sharding_constraint jshard_module_output".split()
)


def padded_factors(op: OpView, rule: Rule) -> Mapping[int, PaddedFactor]:
    """For each factor that may be padded what this needs. A factor that shares a dimension with another is never padded."""
    if rule.opaque or any(jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) for a in (*op.ins, *op.outs)):
        return {}
    meaning = _meaning_of(op.primitive)
    if meaning is None:
        return {}
    alone = _alone(rule)
    found = {f: meaning(op, rule, f) for f in sorted(alone) if rule.sizes[f] > 1}
    return {f: m for f, m in found.items() if m is not None}


def has_meaning(primitive: str) -> bool:
    """Whether it is stated for a primitive what padding means.

    >>> has_meaning("reduce_max"), has_meaning("approx_top_k")
    (True, False)
    """
    return _meaning_of(primitive) is not None


def _alone(rule: Rule) -> set[int]:
    tensors: Sequence[Dims] = (*rule.operands, *rule.results)
    shared = {f for t in tensors for d in t if len(d) > 1 for f in d}
    return {f for t in tensors for d in t for f in d} - shared


def _meaning_of(name: str) -> Callable[[OpView, Rule, int], PaddedFactor | None] | None:
    entry = REGISTRY.get(name)
    if name in _MOVES or name in (PIN_OPERAND, MASK_TAIL):
        return _moved
    if name in _REDUCTIONS:
        return _reduced
    if name in _CUMULATIVE:
        return _accumulated
    if name in _SCATTERS:
        return _scattered
    own = {"dot_general": _contracted, "gather": _gathered, "dynamic_update_slice": _updated}
    own |= {"conv_general_dilated": _convolved, "searchsorted": _searched, "sort": _sorted, "top_k": _chosen}
    own |= dict.fromkeys(_WINDOWS, _windowed)
    own |= dict.fromkeys(_MATRICES, _batched)
    own |= dict.fromkeys(_ATTENTION, _attended) | {LINEAR_SOLVE: _solved}
    if name in own:
        return own[name]
    return _moved if entry is not None and entry.family in ("elementwise", "marks") else None


def _moved(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    grown = op.primitive == "pad" and not any(
        (f,) == d for d in rule.operands[0]
    )  # its length is a parameter
    return None if f in rule.blocked or grown else IGNORED


def _reduced(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    if any((f,) == d for t in rule.results for d in t):
        return IGNORED
    value = neutral_element(_REDUCTIONS[op.primitive], op.ins[0].dtype)
    return None if value is None else PaddedFactor(masks=((0, value),))


def _accumulated(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    if rule.operands[0][op.params["axis"]] != (f,) or not op.params["reverse"]:
        return IGNORED
    value = neutral_element(_CUMULATIVE[op.primitive], op.ins[0].dtype)
    return None if value is None else PaddedFactor(masks=((0, value),))


def _contracted(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    if any((f,) == d for d in rule.results[0]):
        return IGNORED
    return PaddedFactor(masks=((0, 0), (1, 0)))


def _convolved(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    n, p = op.params["dimension_numbers"], op.params
    if f in rule.blocked:  # positions, windows or places; the padding of the parameters makes up for it
        read = ((0, n.lhs_spec[2:]), (1, n.rhs_spec[2:]))
        masks = tuple((k, 0) for k, space in read if any((f,) == rule.operands[k][d] for d in space))
        return PaddedFactor(masks=masks)
    if p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    if (f,) in (rule.operands[0][n.lhs_spec[0]], rule.operands[1][n.rhs_spec[0]]):
        return IGNORED
    return PaddedFactor(masks=((0, 0), (1, 0))) if (f,) == rule.operands[0][n.lhs_spec[1]] else None


def _windowed(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    if f not in rule.blocked:
        return IGNORED
    read = _WINDOWS[op.primitive]
    outside = window_identity(op)
    neutral: dict[int, Fill] = {
        0: 0,
        read: 0 if outside is None else outside,
    }  # operand 0 is added, or read
    return PaddedFactor(masks=tuple((k, x) for k, x in neutral.items() if (f,) in rule.operands[k]))


def _attended(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    masks = attention_masks(op, rule, f)
    return None if masks is None else PaddedFactor(masks=masks)


def _gathered(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    dims = rule.operands[0]
    if f not in rule.reduction:
        return IGNORED
    d = dims.index((f,))
    column = op.params["dimension_numbers"].start_index_map.index(d)
    fills = op.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return PaddedFactor(index=IndexLimit(1, column, dropped=fills))


def _searched(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    """The array goes on with the greatest key. A query that is as great counts the padding too, if it counts equals."""
    if f not in rule.reduction:
        return IGNORED
    greatest = greatest_key(op.ins[0].dtype)
    most = op.ins[0].shape[0] if op.params["side"] == "right" else None
    return None if greatest is None else PaddedFactor(masks=((0, greatest),), most=most)


def _sorted(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    """Along the sorted dimension all keys are the greatest; equal ones before them stay there, or are the same."""
    keys = op.params["num_keys"]
    if f not in rule.blocked:
        return IGNORED
    if not op.params["is_stable"] and keys < len(op.ins):
        return None
    greatest = [greatest_key(a.dtype) for a in op.ins[:keys]]
    masks = tuple((k, x) for k, x in enumerate(greatest) if x is not None)
    return PaddedFactor(masks=masks) if len(masks) == keys else None


def _chosen(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    """Along the searched dimension stands what `top_k` takes last; of equals it takes the first."""
    if f not in rule.blocked:
        return IGNORED
    least = least_element(op.ins[0].dtype) if rule.joint else None
    return None if least is None else PaddedFactor(masks=((0, least),))


def _batched(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    """Further matrices of a batch, and right-hand sides; the columns of a product of a matrix with itself are zero."""
    if f in rule.blocked:
        return None
    if f in rule.reduction:
        return PaddedFactor(masks=((0, 0),))
    return PaddedFactor(masks=tuple((k, x) for k, x in _MATRICES[op.primitive] if (f,) in rule.operands[k]))


def _solved(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    """Further systems; a dimension of a matrix that only derivatives read is not one of systems."""
    return IGNORED if all((f,) in dims for dims in rule.results) else None


def _scattered(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    into, updates = rule.operands[0], rule.operands[2]
    if (f,) not in into:  # one of the updates' own dimensions: what is added must change nothing
        reducer = _SCATTERS[op.primitive]
        value = neutral_element(reducer, op.ins[2].dtype) if reducer else None
        return None if value is None else PaddedFactor(masks=((2, value),))
    if (f,) in updates:
        return IGNORED
    d = into.index((f,))
    column = op.params["dimension_numbers"].scatter_dims_to_operand_dims.index(d)
    return PaddedFactor(index=IndexLimit(1, column, dropped=op.params["mode"] != GatherScatterMode.CLIP))


def _updated(op: OpView, rule: Rule, f: int) -> PaddedFactor | None:
    if (f,) in rule.operands[1]:
        return IGNORED
    return PaddedFactor(index=IndexLimit(2 + rule.operands[0].index((f,)), None, dropped=False))


def keeps_zero(op: OpView, zero: Sequence[bool]) -> bool:
    """Whether the padding of a result is zero; `zero`: for each operand, whether its own is (scalars: never)."""
    if op.primitive not in _KEEPS_ZERO or not any(zero):
        return False
    if op.primitive == "mul":
        scalars = [x for x in op.literals if x is not None]
        return all(zero) or (len(scalars) == 1 and bool(np.isfinite(np.asarray(scalars[0], np.complex128))))
    return all(zero)


def padded_params(op: OpView, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]) -> Params:
    """The parameters of an operator whose operands and results have these shapes, after padding."""
    name, p = op.primitive, dict(op.params)
    if name in ("broadcast_in_dim", "iota"):
        p["shape"] = tuple(outs[0])
    elif name == "reshape":
        p["new_sizes"] = tuple(outs[0])
    elif name == "slice":
        limits = zip(p["limit_indices"], op.ins[0].shape, ins[0], strict=True)
        p["limit_indices"] = tuple(new if limit == old else limit for limit, old, new in limits)
    elif name == "dynamic_slice":
        p["slice_sizes"] = tuple(outs[0])
    elif name == "gather":
        sizes = zip(p["slice_sizes"], op.ins[0].shape, ins[0], strict=True)
        p["slice_sizes"] = tuple(new if size == old != 1 else size for size, old, new in sizes)
    elif name == "pad_tail":
        p["size"] = outs[0][p["dim"]]
    elif name == "conv_general_dilated" or name in _WINDOWS:
        p["padding"] = _window_padding(op, ins, outs)
    elif name in _ATTENTION:
        p = dict(attention_params(op, ins[1][-3]))
    return p


def _window_padding(
    op: OpView, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """The padding of windows: after the dimension what gives its padded size the padded number of places."""
    p = op.params
    is_convolution = op.primitive == "conv_general_dilated"
    before = _extents(op, [x.shape for x in op.ins], [x.shape for x in op.outs])
    after = _extents(op, ins, outs)
    out = []
    for d, (size, window, places) in enumerate(after):
        if is_convolution:
            stride, (low, high), base, dilation = (
                p[k][d] for k in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
            )
        else:
            _, stride, (low, high), base, dilation = window_of(op, d)
        length = (places - 1) * stride + (window - 1) * dilation + 1
        out.append((low, high if after[d] == before[d] else length - low - (size - 1) * base - 1))
    return tuple(out)


def _extents(
    op: OpView, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """For each dimension with windows its size, the size of a window, and the number of places."""
    if op.primitive == "conv_general_dilated":
        space = zip(*(d[2:] for d in op.params["dimension_numbers"]), strict=True)
        return [(ins[0][i], ins[1][k], outs[0][o]) for i, k, o in space]
    many, one = (ins[1], ins[0]) if op.primitive == "select_and_scatter_add" else (ins[-1], outs[0])
    return list(zip(many, op.params["window_dimensions"], one, strict=True))
