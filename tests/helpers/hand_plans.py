"""Hand-written shardings of `training_steps`: parameters, optimizer state, gradients and activations.

A `HandPlan` gives the layout of everything that a person would pin on a mesh `data` x `model`; the rest (layer norms,
casts, reductions) is completed by the search. No plan of the search may cost more.
Sources: ZeRO 1-3 are Rajbhandari et al. 2020, Megatron Shoeybi et al. 2019, its sequence parallelism Korthikanti
et al. 2022, experts Lepikhin et al. 2020.

>>> [h.name for h in PLANS if h.workload == "embedding"]
['data parallel', 'ZeRO-1', 'ZeRO-2', 'ZeRO-3', 'vocabulary parallel']
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

import jshard
from jshard._spec.tree_paths import path_name
from tests.helpers import training_steps


D, M = "data", "model"
BOTH = (D, M)
Specs = Mapping[str, P]


def everywhere(leaf: Any, sizes: Mapping[str, int], taken: P, axes: tuple[str, ...]) -> P:
    """The leaf cut by `axes` on the first free dimension they divide; as it is where there is none."""
    count, entries = math.prod(sizes[a] for a in axes), list(taken) + [None] * (len(leaf.shape) - len(taken))
    for i, size in enumerate(leaf.shape):
        if entries[i] is None and size % count == 0:
            return P(*entries[:i], axes, *entries[i + 1 :])
    return P(*taken)


@dataclasses.dataclass(frozen=True, eq=False)
class HandPlan:
    """`parameters` by the last part of their path (others are whole); `spread`: which of parameters, gradients and
    optimizer state are cut further, by `over`, on the first dimension that is free."""

    name: str
    workload: str
    batch: tuple[str, ...]
    parameters: Specs = dataclasses.field(default_factory=dict)
    activations: Specs = dataclasses.field(default_factory=dict)
    spread: str = ""  # of "pgo"
    over: tuple[str, ...] = BOTH

    def __str__(self) -> str:
        return f"{self.workload} {self.name}"

    def spec(self, kind: str, path: str, leaf: Any, sizes: Mapping[str, int]) -> P:
        """How a parameter ("p"), its gradient ("g") or its moments ("o") lie."""
        parts = path.split(".")
        own = self.parameters.get(parts[-1]) or self.parameters.get(".".join(parts[-2:])) or P()
        return everywhere(leaf, sizes, own, self.over) if kind in self.spread else own


def sharded(h: HandPlan, w: training_steps.Workload, mesh: Any, **options: Any) -> jshard.Sharded:
    """The step of a workload with everything that the hand plan says pinned."""
    auto, sizes = mesh.jax_mesh, mesh.axes

    def pin(name: str, x: Any) -> Any:
        spec = h.activations.get(name)
        return x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(auto, spec))

    def gradients(tree: Any) -> Any:
        def one(path: Any, g: Any) -> Any:
            spec = h.spec("g", path_name(path), g, sizes)
            return jax.lax.with_sharding_constraint(g, NamedSharding(auto, spec))

        return jax.tree_util.tree_map_with_path(one, tree)

    def whole(path: Any, leaf: Any) -> P:
        name = path_name(path)
        kind = "o" if name.partition(".")[2].startswith(("mu.", "nu.")) else "p"
        return h.spec(kind, name, leaf, sizes) if leaf.shape else P()

    params, opt_state, batch = w.arguments()
    strategy = {
        "params": jax.tree_util.tree_map_with_path(whole, params),
        "opt_state": jax.tree_util.tree_map_with_path(whole, opt_state),
        "batch": jax.tree.map(lambda s: P(h.batch), batch),
    }
    return jshard.shard(training_steps.step(w, pin, gradients), in_strategy=strategy, mesh=mesh, **options)


def free(w: training_steps.Workload, mesh: Any, **options: Any) -> jshard.Sharded:
    """The step with nothing pinned."""
    return jshard.shard(training_steps.step(w), mesh=mesh, **options)


def _data_parallel(workload: str, activations: Specs) -> list[HandPlan]:
    """Data parallel and its three ZeRO stages: the batch over every device."""
    stages = {"data parallel": "", "ZeRO-1": "o", "ZeRO-2": "go", "ZeRO-3": "pgo"}
    return [HandPlan(n, workload, BOTH, {}, activations, s) for n, s in stages.items()]


def _transformer(workload: str, heads: Specs, hidden: Specs, heads_at: P) -> list[HandPlan]:
    tensor = {**heads, **hidden}
    vocab = {"embed": P(M, None), "head": P(None, M)}
    cut = {"heads": heads_at, "hidden": P(D, None, M)}
    rows, whole = P(BOTH, None, None), P(D, None, None)
    return [
        *_data_parallel(workload, {"residual": rows, "hidden": rows, "logits": rows}),
        HandPlan("Megatron", workload, (D,), tensor, {**cut, "residual": whole}),
        HandPlan("Megatron, sequence parallel", workload, (D,), tensor, {**cut, "residual": P(D, M, None)}),
        HandPlan("FSDP x TP", workload, (D,), {**tensor, **vocab}, {**cut, "residual": whole}, "pgo", (D,)),
        HandPlan("vocabulary parallel", workload, (D,), {**tensor, **vocab},
                 {**cut, "residual": whole, "logits": P(D, None, M)}),
    ]  # fmt: skip


COLUMN, ROW = P(None, None, None, M), P(None, None, M, None)
CONV_TENSOR = {"convs.0": COLUMN, "convs.1": ROW, "convs.2": COLUMN, "convs.3": ROW}
CONV_CUT = {"even": P(D, None, None, M), "odd": P(D)}
PLANS: tuple[HandPlan, ...] = (
    *_transformer(
        "gpt",
        {"query": P(None, M), "key": P(None, M), "value": P(None, M), "out": P(M)},
        {"up": P(None, M), "up_bias": P(M), "down": P(M)},
        P(D, None, M),
    ),
    *_transformer(
        "llama",
        {"query": P(None, M), "key": P(None, M), "value": P(None, M), "out": P(M)},
        {"gate": P(None, M), "up": P(None, M), "down": P(M)},
        P(D, None, M),
    ),
    *_data_parallel("convnet", {"even": P(BOTH), "odd": P(BOTH)}),
    HandPlan("column and row", "convnet", (D,), CONV_TENSOR, CONV_CUT),
    HandPlan("FSDP x TP", "convnet", (D,), CONV_TENSOR, CONV_CUT, "pgo", (D,)),
    *_data_parallel("embedding", {"rows": P(BOTH), "logits": P(BOTH)}),
    HandPlan("vocabulary parallel", "embedding", (D,), {"embed": P(M), "head": P(None, M)},
             {"rows": P(D), "logits": P(D, M)}),
    *_data_parallel("moe", {"sent": P(None, BOTH), "back": P(None, BOTH)}),
    HandPlan("experts over one axis", "moe", BOTH, {"up": P(M), "down": P(M)},
             {"sent": P(M, D), "back": P(M, D), "combined": P(BOTH)}),
    HandPlan("experts over both axes", "moe", BOTH, {"up": P(BOTH), "down": P(BOTH)},
             {"sent": P(BOTH), "back": P(BOTH), "combined": P(BOTH)}),
)  # fmt: skip

WORKLOADS: Mapping[str, Callable[..., training_steps.Workload]] = {
    "gpt": training_steps.gpt,
    "llama": training_steps.llama,
    "convnet": training_steps.convnet,
    "embedding": training_steps.embedding,
    "moe": training_steps.moe,
}
