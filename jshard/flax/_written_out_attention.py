"""Attention that a function writes out, softmax(scale q k^T + bias) v, found in its jaxpr and computed as one operator.

Problem.  Most libraries write attention as a product, a softmax and a product (`linen.dot_product_attention_weights` and an
`einsum`, `jax.nn.dot_product_attention`, an author's own), inside of modules that cannot be exchanged from outside.

Idea.  From each product back to a softmax of one of its operands, and from there back to a product of two activations, by
way of what is added, masked and scaled. Dimensions are followed by labels through transpositions. What is found becomes
`jshard.ops.attention` on the same queries, keys, values and biases; probabilities that are dropped out or used elsewhere
are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jshard._api import ops
from jshard._core.jax_types import PyTree
from jshard.flax._equation_graph import Graph, Made, Replacement, Value, constant


_LOWEST = -1e3
"""A score at or below it has probability zero beside any that is not masked: exp(-1000) is zero in every float type."""


@dataclasses.dataclass(frozen=True)
class _Scores:
    """What a softmax is of: `scale` x (left product right), plus addends, with masked pairs at `floor`.

    `axes`: labels of the product's dimensions. `added`: (value, factor, its labels, whether it stands under the mask).
    """

    product: Made
    axes: tuple[int, ...]
    scale: float
    added: tuple[tuple[Value, float, tuple[int, ...], bool], ...]
    masks: tuple[tuple[Value, bool, tuple[int, ...]], ...]
    floor: float


def find_attention(graph: Graph) -> dict[Value, Replacement]:
    """By the result of each attention that is written out, the values it is computed from, and how."""
    found: dict[Value, Replacement] = {}
    for made in graph.made:
        if made.eqn.primitive.name == "dot_general" and not made.eqn.effects:
            for side in (0, 1):
                if (new := _attention(graph, made, side)) is not None:
                    found[made.outputs[0]] = new
                    break
    return found


def _attention(graph: Graph, outer: Made, side: int) -> Replacement | None:
    """The product `outer` as attention whose probabilities are its operand `side`."""
    traced = _probabilities(graph, outer.inputs[side])
    if traced is None:
        return None
    softmax_of, axes, factors = traced
    rank = len(axes)
    key = rank - 1
    contracting, batches = outer.eqn.params["dimension_numbers"]
    if [axes[i] for i in contracting[side]] != [key]:
        return None
    batch = [axes[i] for i in batches[side]]
    free = [a for a in axes if a != key and a not in batch]
    values = outer.inputs[1 - side]
    rest = [i for i in range(values.aval.ndim) if i not in (*contracting[1 - side], *batches[1 - side])]
    scores = _scores(softmax_of, tuple(range(rank)))
    if not 1 <= len(free) <= 2 or len(rest) != 1 or scores is None:
        return None
    # Of two dimensions of queries, the outer one is that of the heads that share a head of keys.
    order, rows = sorted(batch), sorted(free)
    operands = _operands(scores, rows, key, order)
    if operands is None:
        return None
    dims = {**dict(zip(batch, batches[1 - side], strict=True)), key: contracting[1 - side][0], -1: rest[0]}
    of_values = [dims[a] for a in (*order, key, -1)]
    (q, of_q), (k, of_k) = operands
    given = (
        q,
        k,
        values,
        *(v for v, *_ in scores.added),
        *(v for v, *_ in scores.masks),
        *(v for v, _ in factors),
    )
    labels = (*order, *rows, key)
    features = (*free, key) if side == 0 else (key, *free)  # the values' features stand where the keys did
    out = [labels.index(a) for a in (*batch, *features)]
    run = functools.partial(_run, scores, (of_q, of_k, of_values), labels, len(order))
    aval, of_factors = outer.outputs[0].aval, [dims for _, dims in factors]

    def scaled(*given: PyTree) -> jax.Array:
        count = len(given) - len(factors)
        y = run(*given[:count])
        for x, dims in zip(given[count:], of_factors, strict=True):
            x = jnp.transpose(x, sorted(range(len(dims)), key=lambda i: labels.index(dims[i])))
            y = y * jnp.expand_dims(x, [i for i, a in enumerate((*labels[:-1], -1)) if a not in dims])
        return jnp.transpose(y, out).astype(aval.dtype)

    return given, scaled


def _probabilities(
    graph: Graph, value: Value
) -> tuple[Value, tuple[int, ...], list[tuple[Value, list[int]]]] | None:
    """What a value is the softmax of, over its last dimension, and which of its dimensions each of the value's is.

    The third result are factors of the probabilities, such as a mask of heads, with the dimensions that they have.
    """
    axes, factors = list(range(value.aval.ndim)), list[tuple[Value, list[int]]]()
    while (made := value.made_by) is not None and graph.uses[value] == 1:
        name, k = made.eqn.primitive.name, 0
        order: list[int] = list(range(value.aval.ndim))
        if name == "transpose":
            order = list(made.eqn.params["permutation"])
        elif name == "dot_general":
            contracting, batches = made.eqn.params["dimension_numbers"]
            k = int(made.inputs[1].aval.ndim == value.aval.ndim)
            if (
                contracting[0]
                or made.inputs[1 - k].aval.ndim != len(batches[0])
                or made.inputs[k].aval.ndim != len(order)
            ):
                return None
            order = [*batches[k], *(i for i in order if i not in batches[k])]
            of_factor = [i for _, i in sorted(zip(batches[1 - k], batches[k], strict=True))]
            factors = [(v, [order[d] for d in dims]) for v, dims in factors] + [
                (made.inputs[1 - k], of_factor)
            ]
            axes, value = [order[a] for a in axes], made.inputs[k]
            continue
        elif name == "div":
            top = _softmax(made)
            used = any(value.aval.ndim - 1 in dims for _, dims in factors)
            return None if top is None or used else (top, tuple(axes), factors)
        elif name != "convert_element_type":
            return None
        axes, value = [order[a] for a in axes], made.inputs[0]
        factors = [(v, [order[d] for d in dims]) for v, dims in factors]
    return None


def _softmax(division: Made) -> Value | None:
    """The scores x of exp(x - max x) / sum exp(x - max x), both over the last dimension."""
    exp, total = division.inputs[0].made_by, _made_through(division.inputs[1], _SAME)
    if exp is None or exp.eqn.primitive.name != "exp" or not _over_last(total, "reduce_sum", exp.outputs[0]):
        return None
    difference = exp.inputs[0].made_by
    if difference is None or difference.eqn.primitive.name != "sub":
        return None
    scores, shift = difference.inputs
    largest = _made_through(shift, (*_SAME, "stop_gradient", "max"))
    return scores if _over_last(largest, "reduce_max", scores) else None


_SAME = ("broadcast_in_dim", "reshape", "convert_element_type", "copy")


def _made_through(value: Value, names: Sequence[str]) -> Made | None:
    """What made a value, before operators of these names; of a maximum with a constant, the other operand."""
    while (made := value.made_by) is not None and made.eqn.primitive.name in names:
        operands = [v for v in made.inputs if constant(v) is None]
        if len(operands) != 1:
            return None
        value = operands[0]
    return value.made_by


def _over_last(made: Made | None, name: str, of: Value) -> bool:
    """Whether an equation reduces a value over its last dimension."""
    if made is None or made.eqn.primitive.name != name:
        return False
    value = made.inputs[0]
    while value is not of and value.made_by is not None:
        if value.made_by.eqn.primitive.name != "convert_element_type":
            return False
        value = value.made_by.inputs[0]
    return value is of and tuple(made.eqn.params["axes"]) == (of.aval.ndim - 1,)


def _scores(value: Value, axes: tuple[int, ...]) -> _Scores | None:
    """The product that scores come from, with what was done to it; `axes`: labels of the value's dimensions."""
    made = value.made_by
    if made is None:
        return None
    name = made.eqn.primitive.name
    if name == "dot_general":
        return _Scores(made, axes, 1.0, (), (), 0.0)
    if name == "transpose":
        inner = [0] * len(axes)
        for label, a in zip(axes, made.eqn.params["permutation"], strict=True):
            inner[a] = label
        return _scores(made.inputs[0], tuple(inner))
    if name == "convert_element_type":
        wide = jnp.issubdtype(made.inputs[0].aval.dtype, jnp.floating)
        return _scores(made.inputs[0], axes) if wide else None
    if name in ("mul", "div"):
        return _scaled(made, axes)
    if name == "select_n" and len(made.inputs) == 3:
        return _masked(made, axes)
    if name in ("add", "sub"):
        for k in (0, 1)[: 1 if name == "sub" else 2]:
            inner = made.inputs[k]
            if inner.aval.shape == value.aval.shape and (found := _scores(inner, axes)) is not None:
                other = (made.inputs[1 - k], -1.0 if name == "sub" else 1.0, axes, False)
                return dataclasses.replace(found, added=(*found.added, other))
    return None


def _scaled(made: Made, axes: tuple[int, ...]) -> _Scores | None:
    for k in (0, 1)[: 1 if made.eqn.primitive.name == "div" else 2]:
        number = constant(made.inputs[1 - k])
        if number is not None and number > 0 and (found := _scores(made.inputs[k], axes)) is not None:
            by = 1 / number if made.eqn.primitive.name == "div" else number
            added = tuple((v, f * by, a, under) for v, f, a, under in found.added)
            return dataclasses.replace(found, scale=found.scale * by, added=added, floor=found.floor * by)
    return None


def _masked(made: Made, axes: tuple[int, ...]) -> _Scores | None:
    """`jnp.where(mask, scores, low)`, or with the cases exchanged."""
    which, *cases = made.inputs
    for k in (0, 1):
        low, found = constant(cases[1 - k]), _scores(cases[k], axes)
        if low is None or found is None:
            continue
        if (
            not low <= _LOWEST
            or which.aval.dtype != np.dtype(bool)
            or which.aval.shape != cases[k].aval.shape
        ):
            return None
        under = tuple((v, f, a, True) for v, f, a, _ in found.added)
        floor = min(found.floor, low)
        return dataclasses.replace(
            found, added=under, masks=(*found.masks, (which, k == 1, axes)), floor=floor
        )
    return None


_Operand = tuple[Value, list[int]]


def _operands(
    scores: _Scores, rows: list[int], key: int, order: list[int]
) -> tuple[_Operand, _Operand] | None:
    """Queries and keys of a product, each with its dimensions in the order: batch, sequence, features."""
    contracting, batches = scores.product.eqn.params["dimension_numbers"]
    count = len(batches[0])
    labels, found = list(scores.axes[:count]), dict[tuple[int, ...], _Operand]()
    if sorted(labels) != order or any(len(c) != 1 for c in contracting):
        return None
    at = count
    for side in (0, 1):
        value = scores.product.inputs[side]
        free = [i for i in range(value.aval.ndim) if i not in (*contracting[side], *batches[side])]
        of_free = sorted(zip(scores.axes[at : at + len(free)], free, strict=True))
        dims = dict(zip(labels, batches[side], strict=True))
        in_order = [*(dims[a] for a in order), *(i for _, i in of_free), contracting[side][0]]
        found[tuple(a for a, _ in of_free)] = value, in_order
        at += len(free)
    return (found[tuple(rows)], found[(key,)]) if set(found) == {tuple(rows), (key,)} else None


def _run(
    scores: _Scores,
    orders: tuple[list[int], ...],
    labels: tuple[int, ...],
    batch: int,
    *given: PyTree,
) -> jax.Array:
    """The attention of a graph, as one operator.

    Arguments:

    - `orders`: of the dimensions of q, k, v: batch, heads that share keys, sequence, features.
    - `labels`: those of the scores in this order, of which `batch` are batch.

    The result has the order of the labels, with the features of the values in place of keys.
    """
    q, k, v = (jnp.transpose(x, order) for x, order in zip(given[:3], orders, strict=True))
    rest = list(given[3:])
    wide = jnp.promote_types(scores.product.outputs[0].aval.dtype, jnp.float32)
    added = [_pairs(rest.pop(0), axes, labels).astype(wide) * f for _, f, axes, _ in scores.added]
    masks = [_pairs(rest.pop(0), axes, labels) == true for _, true, axes in scores.masks]
    under = [x for x, a in zip(added, scores.added, strict=True) if a[3]]
    above = [x for x, a in zip(added, scores.added, strict=True) if not a[3]]
    bias = functools.reduce(jnp.add, under) if under else None
    none = None
    if masks:
        allowed = functools.reduce(jnp.logical_and, masks)
        low = max(scores.floor, float(jnp.finfo(wide).min))
        bias = jnp.where(allowed, 0.0 if bias is None else bias, jnp.asarray(low, wide))
        none = ~allowed.any(-1, keepdims=True)
    if above:
        bias = functools.reduce(jnp.add, above if bias is None else [bias, *above])
    if bias is not None:
        bias = bias.reshape((1,) * (len(labels) - bias.ndim) + bias.shape)
    if none is not None:
        # Where all pairs are masked, scores are not asked: probabilities are equal, and depend on no query.
        q = jnp.where(none, jnp.zeros((), q.dtype), q)
    if batch == 0:
        q, k, v = q[None], k[None], v[None]
        bias = None if bias is None else bias[None]
    split = q.shape[:-2]
    if grouped := q.ndim > k.ndim:
        q = q.reshape(*split[:-2], -1, *q.shape[-2:])
        bias = None if bias is None else _heads_together(bias, split[-2:])
    y = ops.attention(*(jnp.swapaxes(x, -2, -3) for x in (q, k, v)), scale=scores.scale, bias=bias)
    y = jnp.swapaxes(y, -2, -3)
    y = y.reshape(*split, *y.shape[-2:]) if grouped else y
    return y[0] if batch == 0 else y


def _heads_together(bias: jax.Array, heads: tuple[int, ...]) -> jax.Array:
    """A bias whose two dimensions of heads are one, of length one if both are."""
    lead, both, pairs = bias.shape[:-4], bias.shape[-4:-2], bias.shape[-2:]
    if both != (1, 1):
        bias = jnp.broadcast_to(bias, (*lead, *heads, *pairs))
    return bias.reshape(*lead, -1, *pairs)


def _pairs(x: jax.Array, axes: tuple[int, ...], labels: tuple[int, ...]) -> jax.Array:
    """An addend or mask in the order of batch, queries and keys."""
    x = jnp.asarray(x)
    return x if x.ndim == 0 else jnp.transpose(x, [axes.index(a) for a in labels])
