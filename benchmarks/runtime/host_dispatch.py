"""Time that a decorated call adds to `jax.jit` of the same planned program, in two processes of four CPU devices.

    python benchmarks/runtime/host_dispatch.py [--pairs 8] [--rounds 400]

Both processes make the same calls in the same order. As in `dispatch.py`, a pair is a decorated function and two equal
`jax.jit` of its lowered program, all compiled anew and called alternately; a pair's figure is the median over its rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]


def work(index: int, address: str, pairs: int, rounds: int) -> None:
    """What one process does; the first prints."""
    import jax

    jax.distributed.initialize(address, 2, index)
    import jax.numpy as jnp
    import numpy as np

    import jshard
    from benchmarks.runtime.dispatch import _jitted, _rounds

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for leaves in (1, 100):
        plain, added, second = [], [], []
        for k in range(pairs):
            jax.clear_caches()
            f = jshard.shard(lambda t: [x + 1 for x in t], in_strategy=([(8,)] * leaves,), mesh=mesh)
            shapes = [jax.ShapeDtypeStruct((64,), jnp.float32)] * leaves
            plan = f.plan(shapes)
            t = [
                jax.make_array_from_callback((64,), s, lambda at: np.ones(64, np.float32)[at])
                for s in plan.in_shardings[0][0]
            ]
            functions = [f, _jitted(f, plan, t), _jitted(f, plan, t)]
            for i in range(3):
                functions[(i + k) % 3](t)
            ours, one, two = (statistics.median(x) for x in _rounds(functions, t, rounds))
            plain += [one, two]
            added.append(ours - (one + two) / 2)
            second.append(two - one)
        if index == 0:
            usual = statistics.median(plain)
            shown = [
                f"{statistics.median(v):+.2f} us ({100 * statistics.median(v) / usual:+.2f}%), "
                f"from {min(v):+.2f} to {max(v):+.2f}"
                for v in (added, second)
            ]
            print(
                f"{leaves:4} leaves, {pairs} pairs of {rounds} calls: jit {usual:.1f} us, decorated {shown[0]}; "
                f"a second jit {shown[1]}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def main() -> int:
    """Start both processes; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--port", type=int, default=12_877)
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    address = f"127.0.0.1:{args.port}"
    if args.index is not None:
        work(args.index, address, args.pairs, args.rounds)
        return 0
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--index"]
    running = [subprocess.Popen([*command, str(i)], env=environment) for i in range(2)]
    return max(abs(p.wait()) for p in running) and 1


if __name__ == "__main__":
    sys.exit(main())
