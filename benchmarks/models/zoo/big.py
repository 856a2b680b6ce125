"""`python -m benchmarks.models.zoo.big [llama gemma]`: networks of 7 and 8 billion parameters planned from shapes alone.

Llama and Gemma of transformers at their default sizes, the whole training step (value_and_grad, AdamW), a batch of
16 x 2,048 tokens cut in 16, on the description of 16 TPU v5p chips: no array is made and no chip is needed. Every
network is planned in a process of its own, so that the memory printed is its own.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

import jshard
from benchmarks.models.zoo.kinds import Model, cross_entropy, train_step


BATCH, LENGTH, DEVICES = 16, 2048, 16


def model(kind: str, config: Any) -> Model:
    """A causal language model whose parameters are shapes."""
    import transformers as hf

    module = getattr(hf, f"Flax{kind}ForCausalLM")(config, _do_init=False, input_shape=(1, 8))
    params = jax.eval_shape(lambda key: module.init_weights(key, (1, 8)), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        return module(batch["input_ids"], params=params, train=train).logits, state

    return Model(params, {"input_ids": tokens, "labels": tokens}, apply, cross_entropy)


def llama() -> Model:
    """The 7B of the first Llama: 32 layers of 4,096."""
    import transformers as hf

    return model("Llama", hf.LlamaConfig())


def gemma() -> Model:
    """The 7B of the first Gemma: 28 layers of 3,072, a vocabulary of 256,000."""
    import transformers as hf

    return model("Gemma", hf.GemmaConfig())


NETWORKS = {"llama": llama, "gemma": gemma}


def planned(name: str) -> dict[str, Any]:
    """Plan a network's training step; what the plan says of it."""
    network = NETWORKS[name]()
    step, args = train_step(network)
    batch = {k: (DEVICES, None) for k in network.batch}
    mesh = jshard.topology("v5p:2x2x4", {"data": 4, "model": 4}, compiles=False)
    sharded = jshard.shard(step, in_strategy=(None, None, None, batch), mesh=mesh)
    assert not any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(args))
    start = time.perf_counter()
    plan = sharded.plan(*args)
    seconds = time.perf_counter() - start
    matmuls = [r for r in plan.operators if r.primitive == "dot_general"]
    return {
        "network": name,
        "parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(network.params)),
        "operators": len(plan.operators),
        "matmuls": len(matmuls),
        "whole": sum(all(n == 1 for s in r.strategy for n in s) for r in matmuls),
        "unknown": sorted(set(plan.unknown)),
        "gap": plan.cost.gap,
        "plan_s": round(seconds, 1),
        "peak_gib_a_device": round(plan.cost.peak_bytes / 2**30, 1),
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }


def main(names: list[str]) -> None:
    """One line of JSON for each network, from a process each."""
    if len(names) == 1:
        print("BIG " + json.dumps(planned(names[0])), flush=True)
        return
    for name in names or NETWORKS:
        subprocess.run([sys.executable, "-m", "benchmarks.models.zoo.big", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
