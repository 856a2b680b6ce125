"""The op sharding rule of an operator: its factors (loop indices) and the dimensions that carry them, as in Shardy.

`dot_general` on `x[m, k]` and `w[k, n]` is `m k, k n -> m n` with factors m, k, n; k is a reduction factor: sharding
it leaves a partial sum. All else follows from the rule by functions of this file: the candidates (an assignment of mesh
axes to factors), the layouts of operands and results, the work per device. Several factors of one dimension, major
first, express reshapes: `(64,) -> (8, 8)` is `(a b) -> a b`.

A candidate is one *axis code* per mesh axis: `f >= 0` if the axis shards factor `f`, `NONE` if the operator is
replicated along it, `partial_code(k)` if the operands of linear set `k`, and with them the results, are partial sums,
`joint_code(rule, k)` if the axis cuts each tensor as joint cut `k` says.

>>> r = Rule(operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), sizes=(32, 128, 10),
...          reduction=(1,), work=2.0)
>>> print(r)
a b, b c -> a c  (reduce b)
>>> mesh = MeshAxes(("x", "y"), (4, 2))
>>> c = Candidate((0, 1))          # x shards factor 0, y shards factor 1
>>> [str(l) for l in operand_layouts(r, c, mesh)], [str(l) for l in result_layouts(r, c, mesh)]
(['(x, y)', '(y, -)'], ['(x, -)+y'])
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Iterator

import numpy as np

from jshard._core.layout import CollectiveKind, Layout, MeshAxes
from jshard._rules.block_reads import BlockReads
from jshard._rules.sorting_network import rounds


NONE = -1
"""Axis code of a mesh axis along which the operator is replicated."""

_PARTIAL = -2

Dims = tuple[tuple[int, ...], ...]  # the factors of each dimension, major first


def partial_code(linear_set: int) -> int:
    """Axis code of a mesh axis along which the operands of a linear set are partial sums.

    >>> partial_code(0), partial_code(1)
    (-2, -3)
    """
    return _PARTIAL - linear_set


WHOLE = NONE
"""In a `JointCut`: the axis does not cut this tensor."""

PARTIAL = _PARTIAL
"""In a `JointCut`: this result is a partial sum along the axis."""


@dataclasses.dataclass(frozen=True)
class JointCut:
    """A way to run an operator along one mesh axis that is no cut of a single factor: what it means for each tensor.

    Ring attention cuts the queries by their positions and the keys by theirs, along one axis. Such a cut is right only
    with the exchange that the local implementation makes, which the rule states as `internal` collectives over the axes
    of this cut. The device's share of the work is that of any other cut.

    Arguments:

    - `name`: for reports.
    - `operands`, `results`: per tensor the factor by which the axis shards it, `WHOLE`, or (results) `PARTIAL`.
    - `major`: along a dimension, its axes must come before those of other cuts.
    - `alone`: no other cut of its factors is possible beside it.
    - `pieces`: each of its shards divides into so many equal pieces.
    - `least`: each of its shards has at least so many points.
    - `repeated`: (factor, points) a device computes so many points of a factor beside its share, at the edges of blocks.
    - `network`: each shard is worked on again in each round of a sorting network (`sorting_network.py`).
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    major: bool = False
    alone: bool = False
    pieces: int = 1
    least: int = 1
    repeated: tuple[int, int] | None = None
    network: bool = False

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors that it cuts."""
        return tuple(dict.fromkeys(f for f in self.operands + self.results if f >= 0))


@dataclasses.dataclass(frozen=True)
class InternalCollective:
    """A collective inside an operator's local implementation, of one shard of a result or operand.

    Arguments:

    - `itemsize`: bytes of an element as it is sent.
    - `result`: the result whose shard is sent, unless `operand` names an operand.
    - `all_axes`: whether it runs over all mesh axes instead of those that shard a reduction factor.
    - `over`: the axis code (a factor, or a joint cut) of the axes that it runs over, instead of those.
    - `fraction`: of the shard, as much is sent.
    - `ring`: a permute to the next device, once for each of the others in the group; the local implementation computes
        on what it holds meanwhile.
    - `reads`: the permutes that bring an operand's interval of dimension `dim` to each block (`block_reads.py`): one for
        each piece. Of an operand with several, the later ones send what the earlier ones brought, too.
    - `added`: where it is the only exchange of the operand, what its edges contribute to the result is computed apart and
        added; otherwise block and edges are copied together.
    - `rows`: of the shard's dimension `dim`, so many points are sent.
    - `network`: the shard is sent in each round of a sorting network (`sorting_network.py`).
    """

    kind: CollectiveKind
    itemsize: float
    result: int = 0
    all_axes: bool = False
    operand: int | None = None
    over: int | None = None
    fraction: float = 1.0
    ring: bool = False
    reads: BlockReads | None = None
    dim: int = 0
    added: bool = False
    rows: int | None = None
    network: bool = False


@dataclasses.dataclass(frozen=True)
class Workspace:
    """An array that a local implementation has in memory while it runs, beside its operands and results.

    Arguments:

    - `factors`: its dimensions, each of the local length of a factor.
    - `itemsize`: bytes of an element; of several equal arrays, of all.
    - `most`: per dimension the greatest length, 0 for none: loops over blocks have one block at a time.
    - `over`: axis codes of cuts, with any of which it exists; always, if there are none.
    - `more`: per dimension, points beside the local length: edges of neighbours.
    """

    factors: tuple[int, ...]
    itemsize: float
    most: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    more: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Factors of an operator.

    Arguments:

    - `operands`, `results`: per tensor and dimension its factors, major first; an empty tuple is a dimension that is
        never sharded (broadcast, size one).
    - `sizes`: length of each factor.
    - `reduction`: reduction factors. Sharding one makes every result that does not carry it a partial sum
        (`reducer="sum"`), or the local implementation finishes the reduction by a collective of its own (`"max"`,
        `"min"`, `"prod"`, `"and"`, `"or"`, `"xor"`).
    - `blocked`: factors that are never sharded, none of them a reduction (Shardy: `need_replication`; its
        `blocked_propagation` is something else).
    - `linear`: sets of operands in which the operator is jointly linear: if exactly those are partial sums along an
        axis that shards nothing else, the results are partial sums along it.
    - `work`: arithmetic operations per point of the iteration space (2: multiply-add, 0: data movement).
    - `note`: why factors are blocked, for reports.
    - `opaque`: the operator is unknown: it runs replicated, and reports name it.
    - `internal`: the collectives of the local implementation, in order; by default one all-reduce of each result if
        the reducer is not a sum. Costs, predicted collectives and verification are all derived from this field.
    - `joint`: cuts of several factors by one axis.
    - `triangular`: axis codes of cuts after which the last device has nearly twice its share of the work, since the
        iteration space is a triangle (a causal mask): `2 - 1/n` times of it on n devices.
    - `workspace`: what the local implementation has in memory while it runs.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduction: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()
    reducer: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    work: float = 1.0
    note: str = ""
    opaque: bool = False
    internal: tuple[InternalCollective, ...] = ()
    joint: tuple[JointCut, ...] = ()
    triangular: tuple[int, ...] = ()
    workspace: tuple[Workspace, ...] = ()

    def __str__(self) -> str:
        order = list(dict.fromkeys(f for t in self.operands + self.results for d in t for f in d))
        letters = {
            f: string.ascii_letters[i % 52] + (str(i // 52) if i >= 52 else "") for i, f in enumerate(order)
        }

        def dim(d: tuple[int, ...]) -> str:
            return letters[d[0]] if len(d) == 1 else "(" + " ".join(letters[f] for f in d) + ")"

        def tensor(dims: Dims) -> str:
            return " ".join(map(dim, dims))

        text = ", ".join(map(tensor, self.operands)) + " -> " + ", ".join(map(tensor, self.results))
        if self.reduction:
            text += "  (reduce " + ", ".join(letters[f] for f in self.reduction if f in letters) + ")"
        for cut in self.joint:
            text += f"  ({cut.name}: " + " ".join(letters[f] for f in cut.factors) + ")"
        return text


def joint_code(rule: Rule, cut: int) -> int:
    """Axis code of a mesh axis along which the tensors are cut as joint cut `cut` of the rule says."""
    return len(rule.sizes) + cut


def unmet_blocks(rule: Rule, factor: int, pieces: int) -> str:
    """Which joint cut of a factor allows no such number of pieces that divides it, and why; "" where one does or none is.

    >>> merge = JointCut("merge", (0,), (WHOLE,), least=5)
    >>> unmet_blocks(Rule((((0,),),), (((),),), (8,), joint=(merge,)), 0, 4)
    'merge: blocks of 2 are less than the 5 elements that each needs'
    """
    reasons = []
    for joint in rule.joint:
        if factor in joint.factors:
            size = rule.sizes[factor] // pieces
            if size % joint.pieces:
                reasons.append(f"{joint.name}: blocks of {size} have no {joint.pieces} equal parts")
            elif size < joint.least:
                reasons.append(
                    f"{joint.name}: blocks of {size} are less than the {joint.least} elements that each needs"
                )
            else:
                return ""
    return reasons[0] if reasons else ""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An axis code per mesh axis, as in the module's docstring."""

    axis_codes: tuple[int, ...]

    def cut(self, factor: int, mesh: MeshAxes) -> tuple[str, ...]:
        """Mesh axes with the code of a factor or joint cut, major first."""
        return tuple(n for n, f in zip(mesh.names, self.axis_codes, strict=True) if f == factor)


def candidates(rule: Rule, mesh: MeshAxes) -> Iterator[Candidate]:
    """All candidates of a rule on a mesh whose shards divide their factors and are contiguous in each dimension."""
    return map(Candidate, map(tuple, candidate_codes(rule, mesh).tolist()))


def candidate_codes(rule: Rule, mesh: MeshAxes) -> np.ndarray:
    """The axis codes of all candidates, `(candidates, mesh axes)`."""
    choices = [NONE] + [partial_code(k) for k in range(len(rule.linear))]
    choices += [f for f, s in enumerate(rule.sizes) if s > 1 and f not in rule.blocked]
    choices += [joint_code(rule, k) for k in range(len(rule.joint))]
    codes = np.array(choices, dtype=np.int64)[_all_choices(len(choices), len(mesh.sizes))]
    sizes, cuts = np.array(rule.sizes, dtype=np.int64), _cuts_of_factors(rule, codes)
    shards = np.where(cuts, np.array(mesh.sizes, dtype=np.int64), 1).prod(axis=2)
    valid = (sizes[:, None] % shards == 0).all(axis=0)
    # A minor factor of a dimension may be sharded only if the factors before it are sharded to single points.
    for f, majors in _major_factors(rule):
        for m in majors:
            valid &= (shards[f] == 1) | (shards[m] == rule.sizes[m])
    for k, joint in enumerate(rule.joint):
        own = codes == joint_code(rule, k)
        for f in joint.factors:
            used, other = own.any(axis=1), cuts[f] & ~own
            if joint.major:
                valid &= ~(own & np.maximum.accumulate(other, axis=1)).any(axis=1)
            if joint.alone:
                valid &= ~(used & other.any(axis=1))
            valid &= ~used | (sizes[f] % (shards[f] * joint.pieces) == 0) & (
                sizes[f] >= shards[f] * joint.least
            )
    return codes[valid]


def _cuts_of_factors(rule: Rule, codes: np.ndarray) -> np.ndarray:
    """(factors, candidates, mesh axes) whether the axis cuts the factor, by itself or in a joint cut."""
    cuts = codes == np.arange(len(rule.sizes))[:, None, None]
    for k, joint in enumerate(rule.joint):
        cuts[list(joint.factors)] |= codes == joint_code(rule, k)
    return cuts


@functools.lru_cache(maxsize=256)
def _all_choices(choices: int, axes: int) -> np.ndarray:
    """Every choice per mesh axis: `(choices ** axes, axes)`."""
    out = np.indices((choices,) * axes).reshape(axes, choices**axes).T
    out.flags.writeable = False
    return out


def _major_factors(rule: Rule) -> list[tuple[int, tuple[int, ...]]]:
    """(factor, the factors before it in its dimension) for every minor factor."""
    pairs = []
    for dims in rule.operands + rule.results:
        for d in dims:
            pairs += [(f, d[:i]) for i, f in enumerate(d) if i]
    return pairs


def operand_layouts(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[Layout, ...]:
    """The layout each operand must have under a candidate."""
    return tuple(
        a[0] for a, _ in layouts_of_candidates(rule, np.array([c.axis_codes], dtype=np.int64), mesh)[0]
    )


def result_layouts(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[Layout, ...]:
    """The layout each result has under a candidate, partial sums unresolved."""
    return tuple(
        a[0] for a, _ in layouts_of_candidates(rule, np.array([c.axis_codes], dtype=np.int64), mesh)[1]
    )


IndexedLayouts = tuple[
    tuple[Layout, ...], np.ndarray
]  # distinct layouts; (candidates,) the index of each one's


def layouts_of_candidates(
    rule: Rule, axis_codes: np.ndarray, mesh: MeshAxes
) -> tuple[tuple[IndexedLayouts, ...], tuple[IndexedLayouts, ...]]:
    """Layouts of each operand and each result under candidates, in order of first use.

    A tensor has few distinct layouts, since the factors that it does not carry make no difference.

    Arguments:

    - `axis_codes`: of the candidates, `(candidates, mesh axes)`.
    """
    cache: dict[tuple, IndexedLayouts] = {}  # tensors of an elementwise operator have equal dimensions

    def indexed(dims: Dims, partial: tuple[int, ...], joint: tuple[int, ...]) -> IndexedLayouts:
        if (dims, partial, joint) not in cache:
            cache[dims, partial, joint] = _indexed_layouts(rule, axis_codes, dims, partial, joint, mesh)
        return cache[dims, partial, joint]

    linear_sets = range(len(rule.linear))
    operands = tuple(
        indexed(
            dims,
            tuple(partial_code(k) for k in linear_sets if i in rule.linear[k]),
            tuple(cut.operands[i] for cut in rule.joint),
        )
        for i, dims in enumerate(rule.operands)
    )
    passed = tuple(map(partial_code, linear_sets))
    summed = rule.reduction if rule.reducer == "sum" else ()
    results = tuple(
        indexed(
            dims,
            (*passed, *(f for f in summed if not any(f in d for d in dims))),
            tuple(cut.results[i] for cut in rule.joint),
        )
        for i, dims in enumerate(rule.results)
    )
    return operands, results


def _indexed_layouts(
    rule: Rule,
    axis_codes: np.ndarray,
    dims: Dims,
    partial: tuple[int, ...],
    joint: tuple[int, ...],
    mesh: MeshAxes,
) -> IndexedLayouts:
    """Layouts of a tensor with these factors, to which the codes in `partial` give a partial sum.

    `joint` has what each joint cut of the rule does to the tensor.
    """
    lowest = partial_code(max(0, len(rule.linear) - 1))
    # By code - lowest: the code for this tensor.
    effect = np.full(joint_code(rule, len(joint)) - lowest, NONE, dtype=np.int64)
    for f in {f for d in dims for f in d}:
        effect[f - lowest] = f
    for code in partial:
        effect[code - lowest] = _PARTIAL
    for k, code in enumerate(joint):
        effect[joint_code(rule, k) - lowest] = code
    codes = effect[axis_codes - lowest]
    row_code = np.zeros(len(codes), dtype=np.int64)
    for k in range(codes.shape[1]):
        row_code = row_code * (len(rule.sizes) - _PARTIAL) + codes[:, k] - _PARTIAL
    layouts: dict[Layout, int] = {}
    by_row: dict[int, int] = {}
    index = []
    for at, key in enumerate(row_code.tolist()):
        number = by_row.get(key)
        if number is None:
            layout = _layout(dims, tuple(codes[at].tolist()), mesh.names)
            number = by_row[key] = layouts.setdefault(layout, len(layouts))
        index.append(number)
    return tuple(layouts), np.array(index, dtype=np.int64)


@functools.lru_cache(maxsize=65536)
def _layout(dims: Dims, axes: tuple[int, ...], names: tuple[str, ...]) -> Layout:
    cut = tuple(tuple(n for f in d for n, g in zip(names, axes, strict=True) if g == f) for d in dims)
    return _interned(cut, tuple(n for n, g in zip(names, axes, strict=True) if g == _PARTIAL))


@functools.lru_cache(maxsize=65536)
def _interned(dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> Layout:
    """One object per layout, so that comparisons end at once."""
    return Layout(dims, partial)


def reduced_axes(rule: Rule, c: Candidate, mesh: MeshAxes) -> tuple[str, ...]:
    """Mesh axes over which the local implementation finishes a reduction that is not a sum."""
    if rule.reducer == "sum":
        return ()
    return tuple(n for n, f in zip(mesh.names, c.axis_codes, strict=True) if f in rule.reduction)


def local_work(rule: Rule, axis_codes: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """(candidates,) arithmetic operations of one device under candidates given by their axis codes: an even share."""
    shards = np.where(axis_codes >= 0, np.array(mesh.sizes, dtype=np.int64), 1).prod(axis=1)
    return rule.work * math.prod(rule.sizes) / shards


def busiest_share(rule: Rule, axis_codes: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """(candidates,) the work of the busiest device over `local_work`.

    More than 1 where a triangle is cut, where devices repeat what is at the edges of blocks, and in each round of a network.
    """
    mesh_sizes = np.array(mesh.sizes, dtype=np.int64)
    triangular = np.isin(axis_codes, rule.triangular)
    n = np.where(triangular, mesh_sizes, 1).prod(axis=1)
    share = 2 - 1 / n
    for k, cut in enumerate(rule.joint):
        if cut.repeated is not None:
            factor, points = cut.repeated
            n = np.where(axis_codes == joint_code(rule, k), mesh_sizes, 1).prod(axis=1)
            share = share * np.where(n > 1, 1 + points * n / rule.sizes[factor], 1.0)
        if cut.network:
            n = np.where(axis_codes == joint_code(rule, k), mesh_sizes, 1).prod(axis=1)
            share = share * np.array([1.0 + len(rounds(size)) for size in n.tolist()])
    return share


def workspace_bytes(rule: Rule, axis_codes: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """(candidates,) bytes on a device of all `workspace` arrays under candidates given by their axis codes."""
    total = np.zeros(len(axis_codes))
    if not rule.workspace:
        return total
    mesh_sizes = np.array(mesh.sizes, dtype=np.int64)
    shards = np.where(_cuts_of_factors(rule, axis_codes), mesh_sizes, 1).prod(axis=2)
    length = np.array(rule.sizes, dtype=np.int64)[:, None] / shards
    for array in rule.workspace:
        nbytes = np.full(len(axis_codes), float(array.itemsize))
        none = (0,) * len(array.factors)
        for f, most, more in zip(array.factors, array.most or none, array.more or none, strict=True):
            nbytes *= (np.minimum(length[f], most) if most else length[f]) + more
        exists = (np.isin(axis_codes, array.over) & (mesh_sizes > 1)).any(axis=1) | (not array.over)
        total += np.where(exists, nbytes, 0.0)
    return total
