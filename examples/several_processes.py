"""Train the demo's GPT in several processes, each with its own rows of every batch.

    make demo-hosts                                             # two processes on this machine
    mpirun -n 2 python examples/several_processes.py            # Open MPI
    srun -n 2 python examples/several_processes.py              # Slurm
    python examples/several_processes.py HOST:PORT COUNT INDEX  # any launcher; without arguments what JAX finds: GKE, TPU

Nothing in it is about jshard but `shard` itself: JAX's own runtime joins the processes. `docs/several_processes.md` has
the rest: checkpoints, what is an error, what is compared.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402

import jshard  # noqa: E402
from demo import chargpt  # noqa: E402


STEPS = 30


def initialize(arguments: list[str]) -> None:
    """Join the processes: from HOST:PORT COUNT INDEX, or from what the launcher put in the environment."""
    if not arguments:
        jax.distributed.initialize()
        return
    address, count, index = arguments
    jax.distributed.initialize(address, int(count), int(index))


def train(config: chargpt.Config, steps: int) -> list[float]:
    """The losses of some steps of training in all processes; process 0 prints its plan, and the loss of every tenth step."""
    step = jshard.shard(
        chargpt.train_step(config),
        in_strategy={"batch": (jax.device_count(), 1)},
        config={"local_batch": ["batch"]},
    )
    here, first = jax.process_index(), jax.process_index() == 0
    rows = config.batch // jax.process_count()
    text = chargpt.standard_library_text()
    # Every process draws the same batches here and takes its rows; with a real loader it reads only these.
    data = (b[here * rows : (here + 1) * rows] for b in chargpt.batches(text, config, seed=0))
    params, state = chargpt.init(config, seed=0)
    if first:
        print(
            f"{jax.process_count()} processes, {jax.device_count()} devices, {rows} rows of a batch in each"
        )
        print(repr(step.plan(params, state, next(data))), flush=True)
    else:
        next(data)
    losses = []
    for i, batch in enumerate(itertools.islice(data, steps)):
        params, state, loss = step(params, state, batch)
        losses.append(loss)
        if first and (i % 10 == 9 or i == 0):
            print(f"step {i + 1:3}  loss {float(loss):.6f}", flush=True)
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    initialize(sys.argv[1:])
    train(chargpt.Config(), STEPS)
    jax.distributed.shutdown()
