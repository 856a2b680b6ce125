"""The entry of a rule for one tensor: torch's orientation, stacked layers and the rank taken into account; and checked.

>>> t = TensorName("w", (8, 4, 16), "float32", layer_axis=0)
>>> fit(Claim("parameters", Rule("layers.*.w", (("x",), ())), "layers.*.w", stacked=True), t)
((), ('x',), ())
>>> fit(Claim("torch", Rule("w.weight", (("x",), ())), "w.weight", transposed=True), TensorName("w", (4, 8), "float32"))
((), ('x',))
>>> problems_of((("x",), ()), TensorName("w", (6, 8), "float32"), {"x": 4}, "here")[0].what
'w, of size 6 in dimension 0, is not divided by 4, the size of x'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jshard._config.config_record import DERIVED, WHOLE, WORDS, Dimension, Entry, Rule, entry_text
from jshard._config.matching import Claim
from jshard._config.tensors import TensorName
from jshard._core.messages import count_of, suggest
from jshard._spec.entry import Pin, parse_entry


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that a configuration and a function do not agree on.

    - `kind`: "unmatched", "shadowed", "tie", "rank", "divides", "axis", "unused axis", "missing layer", "catch-all",
        "without rule", "unlisted", "orientation", "cut otherwise", "element", "note".
    - `name`: of the rule, the tensor or the axis. `error`: whether it refuses the call where `strict` holds.
    - `refuses`: whether no call can be planned with it, strict or not.
    - `padded`: the end of the advice, the option that would pad a dimension; "" where there is none.
    - `cut`: of a cut that does not divide, where its pin says it is written, and the dimension.
    """

    kind: str
    name: str
    what: str
    where: str = ""
    fix: str = ""
    error: bool = True
    refuses: bool = False
    padded: str = ""
    cut: tuple[str, int] = ("", 0)

    @property
    def advice(self) -> str:
        """What to write instead, padding included."""
        return f"{self.fix}{self.padded}"


def fit(claim: Claim, tensor: TensorName) -> Entry | Problem:
    """The entry of a claim as one for this tensor, or why there is none."""
    rule, entry, rank = claim.rule, claim.rule.entry, len(tensor.shape)
    if entry == WHOLE:
        return ((),) * rank
    if isinstance(entry, str):
        return entry
    if claim.section == "regexes":
        if math.prod(tensor.shape) == 1:
            return ((),) * rank
        if len(entry) <= rank:
            return (*entry, *((),) * (rank - len(entry)))
        return _wrong_rank(rule, entry, tensor)
    if claim.section == "inputs" and len(entry) > rank == 0:
        return ()
    inner = rank - claim.stacked
    if claim.transposed:
        turned = _transposed(entry, tensor, inner)
        if turned is None:
            return _wrong_rank(rule, entry, tensor)
        entry = turned
    if len(entry) != inner:
        return _wrong_rank(rule, entry, tensor)
    if claim.stacked:
        axis = tensor.layer_axis or 0
        uncut: Dimension = 1 if any(isinstance(d, int) for d in entry) else ()
        entry = (*entry[:axis], uncut, *entry[axis:])
    return entry


def _transposed(entry: tuple, tensor: TensorName, rank: int) -> tuple | None:
    """An entry for torch's [out, in] as one for a Flax kernel, whose contracted dimensions are the inputs."""
    if len(entry) < 2:
        return entry
    shift = len(tensor.shape) - rank
    contracted = None
    if tensor.contracted is not None:
        axis = tensor.layer_axis if shift else None
        contracted = [d - (axis is not None and d > axis) for d in tensor.contracted]
    *batch, out, into = entry
    if len(entry) == rank:
        if contracted and contracted != [rank - 2]:
            return tuple(entry)  # stored as [out, in] here too
        return (*batch, into, out)
    if len(entry) != 2 or contracted is None or len(contracted) == rank or not contracted:
        return None
    # One matrix in torch, several dimensions in Flax: heads and their width. The major one has the cut.
    dims: list[Dimension] = [()] * rank
    dims[contracted[0]] = into
    dims[min(d for d in range(rank) if d not in contracted)] = out
    return tuple(dims)


def _wrong_rank(rule: Rule, entry: tuple, tensor: TensorName) -> Problem:
    rank = len(tensor.shape)
    right = (*entry[:rank], *((),) * (rank - len(entry)))
    if tensor.layer_axis is not None and len(entry) == rank - 1:  # the entry of one layer of a stack
        right = (*entry[: tensor.layer_axis], (), *entry[tensor.layer_axis :])
    return Problem(
        "rank",
        rule.key,
        f"{entry_text(entry)} has {count_of(len(entry), 'dimension')}, {tensor.key} has "
        f"{rank}: {tensor.shape}",
        rule.where,
        f"{rule.key}: {entry_text(right)}, one item for each dimension",
        refuses=True,
    )


def problems_of(
    entry: Entry,
    tensor: TensorName,
    sizes: Mapping[str, int] | None,
    where: str,
    name: str = "",
    pads: object = False,
    pinned: str = "",
) -> list[Problem]:
    """Axes that the mesh lacks, and cuts that do not divide; `sizes` of the mesh axes, None where none is known.

    `pads`: the option `pad`, under which such a cut is no problem. `pinned`: where the entry's pin says it is written.
    """
    out: list[Problem] = []
    if isinstance(entry, str):
        return out
    for d, dim in enumerate(entry):
        pieces = dim if isinstance(dim, int) else 1
        for axis in dim if isinstance(dim, tuple) else ():
            if sizes is not None and axis not in sizes:
                out.append(
                    Problem(
                        "axis",
                        name or tensor.key,
                        f"the mesh has no axis {axis!r}",
                        where,
                        f"{suggest(axis, list(sizes))} (axes of the mesh: {', '.join(sizes)})",
                        refuses=True,
                    )
                )
            pieces *= (sizes or {}).get(axis, 1)
        if tensor.shape[d] % pieces and not pads:
            axes = " and ".join(dim) if isinstance(dim, tuple) else "the number of pieces"
            out.append(
                Problem(
                    "divides",
                    name or tensor.key,
                    f"{tensor.key}, of size {tensor.shape[d]} in dimension {d}, is not divided by {pieces}, the size of "
                    f"{axes}",
                    where,
                    'null, "?" or other axes there',
                    refuses=True,
                    padded=", or pad: true to pad it" if pieces <= tensor.shape[d] else "",
                    cut=(pinned, d),
                )
            )
    return out


def pin_of(entry: Entry, tensor: TensorName, where: str) -> Pin | None:
    """The pin of a fitted entry; None for one that is derived. Raises `StrategyError` where it does not fit.

    >>> str(pin_of((("data",), None), TensorName("x", (4, 4), "float32"), "here"))
    "P('data', UNCONSTRAINED)"
    """
    if entry == DERIVED or isinstance(entry, str):
        return None
    if any(isinstance(d, int) for d in entry):
        strategy = tuple(d if isinstance(d, int) else None for d in entry)
        return parse_entry(strategy, tensor.shape, where)
    spec = PartitionSpec(*(_spec_item(d) for d in entry))
    pin = parse_entry(spec, tensor.shape, where)
    return None if pin is None or pin.free else pin


def _spec_item(dim: Dimension) -> object:
    if dim is None:
        return PartitionSpec.UNCONSTRAINED
    return dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim or None


def is_word(entry: Entry) -> bool:
    """Whether an entry is "full_batch" or "data_parallel"."""
    return isinstance(entry, str) and entry in WORDS
