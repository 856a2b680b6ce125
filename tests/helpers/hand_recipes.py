"""The hand annotations of `benchmarks/quality/quality.py` and the recipes that say the same."""

from __future__ import annotations

import dataclasses

import jax

from benchmarks import workloads
from benchmarks.quality.quality import HAND, Hand
from jshard._config.recipes.structure import Structure
from jshard._program.trace import build
from jshard._spec.tree_paths import argument_names, input_leaves


RECIPE_OF = {
    "data": "data",
    "fsdp": "fsdp",
    "megatron": "megatron",
    "megatron-all": "megatron(x,y)",
    "fsdp-megatron": "fsdp+megatron",
    "sequence": "megatron+sequence",
    "vocab": "fsdp+vocab",
    "experts": "fsdp+expert",
    "experts-all": "fsdp+expert(x,y)",
}
"""By name of a hand annotation: the recipe."""

PAIRS = [(w, h) for w, hands in HAND.items() for h in hands]
SIZES = {"x": 2, "y": 4}


@dataclasses.dataclass(frozen=True)
class Marked:
    """What a hand annotation says: the spec of each leaf of the state by path, and of activations by kind and shape."""

    state: dict[str, tuple]
    activations: dict[tuple[str, tuple[int, ...]], tuple]


def by_hand(workload: str, hand: str) -> Marked:
    """The specs of a hand annotation, each dimension as a tuple of axes."""
    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    annotation = Hand(hand, mesh, workload)
    marked: dict[tuple[str, tuple[int, ...]], tuple] = {}

    def mark(x, kind):
        marked[kind, x.shape] = _dims(annotation, x, kind)
        return x

    w = workloads.get(workload, devices=8, mark=mark)
    jax.make_jaxpr(w.step)(*w.args)
    leaves = input_leaves(w.args[:1], {}, argument_names(w.step, len(w.args))[:1])
    specs = jax.tree_util.tree_map_with_path(annotation.parameter, w.state)
    state = {
        leaf.path: as_axes(s.spec, len(leaf.shape))
        for leaf, s in zip(leaves, jax.tree.leaves(specs), strict=True)
    }
    return Marked(state, marked)


def _dims(annotation: Hand, x: jax.Array, kind: str) -> tuple:
    """The spec that `Hand.mark` constrains a value to."""
    found: list[tuple] = []
    real = jax.lax.with_sharding_constraint
    try:
        jax.lax.with_sharding_constraint = lambda v, s: found.append(as_axes(s.spec, v.ndim)) or v
        annotation.mark(x, kind)
    finally:
        jax.lax.with_sharding_constraint = real
    return found[0]


def as_axes(spec, rank: int) -> tuple:
    """A spec with a tuple of axes for every dimension."""
    dims = [() if d is None else d if isinstance(d, tuple) else (d,) for d in spec]
    return tuple(dims + [()] * (rank - len(dims)))


def structure(workload: str) -> Structure:
    """The structure of a workload at its real size."""
    w = workloads.get(workload, devices=8)
    names = argument_names(w.step, len(w.args))
    leaves = input_leaves(w.args, {}, names)
    closed = jax.jit(w.step).trace(*w.args).jaxpr
    return Structure(build(closed, name=workload, input_names=[leaf.path for leaf in leaves]))
