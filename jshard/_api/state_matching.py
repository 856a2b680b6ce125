"""Results that are the new values of arguments; both get one layout, so that state is passed on without moves.

A result of the structure, shapes and dtypes of an argument is one (`match_state`), and so is a tensor whose path
is that of the argument: `bn.mean` of a result is `bn.mean` of the state, whatever its container is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import jax

from jshard._core.jax_types import PyTreeDef
from jshard._plan.rows import TensorRow
from jshard._program.graph import Program
from jshard._spec.entry import Pin


class _Array(Protocol):
    """An abstract value of JAX, or a row of a plan, whose dtype is a name."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


def find_state_ties(
    program: Program, in_leaves: Sequence[_Array], in_tree: PyTreeDef, out_leaves: Sequence[_Array],
    out_tree: PyTreeDef, donated: tuple[int, ...], out_pins: Sequence[Pin | None],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """(output operator, input operator) pairs that share a layout.

    - `in_leaves`, `in_tree`: the traced arguments as the user sees them, with shapes and dtypes.
    - `out_leaves`: all results; those past `out_tree`, the user's result, are changed state with the paths of arguments.
    - `donated`: numbers of donated arguments. `out_pins`: pins of results; a pinned result is not tied.
    """
    pinned = {i for i, p in enumerate(out_pins) if p is not None}
    pairs = _structure_pairs(in_leaves, in_tree, out_leaves, out_tree, donated, pinned)
    names = [[program.operators[op].name for op in side] for side in (program.inputs, program.outputs)]
    pairs += _match_paths(names[0], names[1], in_leaves, out_leaves, out_tree.num_leaves, pairs, pinned)
    return tuple((program.outputs[o], program.inputs[i]) for o, i in pairs)


def tied_rows(
    inputs: Sequence[TensorRow], outputs: Sequence[TensorRow], in_tree: PyTreeDef | None,
    out_tree: PyTreeDef | None, pinned: Collection[int],
) -> dict[int, int]:  # fmt: skip
    """The same of the rows of a plan: {number of the result: of the argument}.

    Without the trees, which a file of a plan does not have, by paths alone. `pinned`: numbers of results.
    """
    pairs: list[tuple[int, int]] = []
    if in_tree is not None and out_tree is not None:
        pairs = _structure_pairs(inputs, in_tree, outputs, out_tree, (), pinned)
    names = [[row.path for row in side] for side in (inputs, outputs)]
    results = out_tree.num_leaves if out_tree is not None else len(outputs)
    return dict([*pairs, *_match_paths(names[0], names[1], inputs, outputs, results, pairs, pinned)])


def _structure_pairs(
    in_leaves: Sequence[_Array], in_tree: PyTreeDef, out_leaves: Sequence[_Array], out_tree: PyTreeDef,
    donated: Collection[int], pinned: Collection[int],
) -> list[tuple[int, int]]:  # fmt: skip
    """(result leaf, argument leaf) pairs of the parts of equal structure; see `match_state`."""
    args_tree, kwargs_tree = in_tree.children()
    arguments = _leaf_offsets([*args_tree.children(), *kwargs_tree.children()])
    outer = out_tree.node_data()
    several = outer is not None and outer[0] in (tuple, list)
    if any(tree == out_tree for _, tree in arguments):
        several = False  # a list of parameters in and one of new parameters out is one result
    parts = out_tree.children() if several else [out_tree]
    return match_state(in_leaves, out_leaves, arguments, _leaf_offsets(parts), donated, pinned)


def _match_paths(
    in_names: Sequence[str],
    out_names: Sequence[str],
    in_leaves: Sequence[_Array],
    out_leaves: Sequence[_Array],
    num_user_results: int,
    pairs: Sequence[tuple[int, int]],
    pinned: Collection[int],
) -> list[tuple[int, int]]:
    """More (result leaf, argument leaf) pairs: with equal paths, or equal paths below the argument's name."""
    tied_in, tied_out = {i for _, i in pairs}, {o for o, _ in pairs} | set(pinned)
    by_path: dict[str, list[int]] = {}
    for i, name in enumerate(in_names[: len(in_leaves)]):
        by_path.setdefault(name, []).append(i)
        by_path.setdefault("." + name.partition(".")[2], []).append(i)
    more: list[tuple[int, int]] = []
    for o, name in enumerate(out_names):
        path = name.partition(".")[2]
        is_state = o >= num_user_results
        if o in tied_out or not is_state and (not path or path.isdigit()):
            continue
        candidates = [i for i in by_path.get(name, by_path.get("." + path, ())) if i not in tied_in]
        if len(candidates) != 1:
            continue
        [i] = candidates
        if (out_leaves[o].shape, out_leaves[o].dtype) == (in_leaves[i].shape, in_leaves[i].dtype):
            more.append((o, i))
            tied_in.add(i)
    return more


def _leaf_offsets(trees: Sequence[PyTreeDef]) -> list[tuple[int, PyTreeDef]]:
    out, at = [], 0
    for t in trees:
        out.append((at, t))
        at += t.num_leaves
    return out


def match_state(
    in_leaves: Sequence[_Array],
    out_leaves: Sequence[_Array],
    arguments: Sequence[tuple[int, PyTreeDef]],
    results: Sequence[tuple[int, PyTreeDef]],
    donated: Collection[int],
    pinned: Collection[int],
) -> list[tuple[int, int]]:
    """(result leaf, argument leaf) pairs that share a layout, so that state can be passed from call to call.

    An argument that is a container, or donated, is tied to the first result of the same structure, shapes and
    dtypes. `arguments` and `results` are (first leaf, tree structure) in order; `pinned` are result leaves that
    the user pinned, which stay free to differ.
    """
    ties, used = [], set()
    for start, tree in arguments:
        n = tree.num_leaves
        if n == 0 or (jax.tree_util.treedef_is_leaf(tree) and start not in donated):
            continue
        avals = [(a.shape, a.dtype) for a in in_leaves[start : start + n]]
        for k, (first, out_tree) in enumerate(results):
            if k in used or out_tree != tree:
                continue
            if [(a.shape, a.dtype) for a in out_leaves[first : first + n]] == avals:
                used.add(k)
                ties += [(first + i, start + i) for i in range(n) if first + i not in pinned]
                break
    return ties
