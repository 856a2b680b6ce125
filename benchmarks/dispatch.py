"""What a decorated call costs over `jax.jit` of the same planned program: `make bench-dispatch`."""

from __future__ import annotations

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import statistics  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jshard  # noqa: E402
from jshard._lower.interpret import spmd  # noqa: E402


def measure(leaves: int, rounds: int) -> tuple[float, float, float]:
    """Microseconds a call, medians over alternating calls: decorated, `jax.jit` of the same program, median gap."""
    f = jshard.shard(lambda t: [x + 1 for x in t])
    t = [jnp.ones(8) for _ in range(leaves)]
    plan = f.plan(t)
    t = jax.device_put(t, plan.in_shardings[0][0])
    body = spmd(f._program((t,), {}).prepared.schedule, plan.jax_mesh)
    jitted = jax.jit(lambda t: body(*t), in_shardings=plan.in_shardings[0], out_shardings=plan.out_shardings)
    times: dict = {f: [], jitted: []}
    for g in times:
        for _ in range(3):
            jax.block_until_ready(g(t))
    for k in range(rounds):
        for g, took in list(times.items())[:: 1 if k % 2 else -1]:  # neither is always the first
            start = time.perf_counter()
            out = g(t)
            took.append((time.perf_counter() - start) * 1e6)
            jax.block_until_ready(out)  # calls that wait in the queue would be timed with the next one
    ours, plain = times.values()
    gap = statistics.median(a - b for a, b in zip(ours, plain, strict=True))
    return statistics.median(ours), statistics.median(plain), gap


if __name__ == "__main__":
    for n, rounds in ((1, 10000), (100, 2000), (1000, 200)):
        ours, plain, gap = measure(n, rounds)
        print(
            f"{n:5} leaves: decorated {ours:9.1f} us, jit {plain:9.1f} us, medians {ours - plain:+.2f} us "
            f"({(ours / plain - 1) * 100:+.2f}%), median gap of pairs {gap:+.2f} us ({gap / plain * 100:+.2f}%)",
            flush=True,
        )
