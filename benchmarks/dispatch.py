"""What a decorated call costs over `jax.jit` of the same planned program: `make bench-dispatch`."""

from __future__ import annotations

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import statistics  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jshard  # noqa: E402
from jshard._lower.interpret import spmd  # noqa: E402


def measure(leaves: int, rounds: int) -> tuple[float, float, float, float]:
    """Microseconds a call: median of `jax.jit`, median gap of the decorated call, its 95% interval, gap of two jits.

    Three functions in one alternating run, each first in turn: the decorated one and two `jax.jit` of its lowered
    program. What two equal jits differ by is what this machine cannot tell.
    """
    f = jshard.shard(lambda t: [x + 1 for x in t])
    t = [jnp.ones(8) for _ in range(leaves)]
    plan = f.plan(t)
    t = jax.device_put(t, plan.in_shardings[0][0])
    schedule = f._program((t,), {}).prepared.schedule

    def jitted() -> Any:
        body = spmd(schedule, plan.jax_mesh)
        return jax.jit(
            lambda t: body(*t), in_shardings=plan.in_shardings[0], out_shardings=plan.out_shardings
        )

    functions = [f, jitted(), jitted()]
    times: list[list[float]] = [[], [], []]
    for g in functions:
        for _ in range(3):
            jax.block_until_ready(g(t))
    for k in range(rounds):
        for i in (k % 3, (k + 1) % 3, (k + 2) % 3):
            start = time.perf_counter()
            out = functions[i](t)
            times[i].append((time.perf_counter() - start) * 1e6)
            jax.block_until_ready(out)  # calls that wait in the queue would be timed with the next one
    ours, one, two = times
    gaps = sorted(a - b for a, b in zip(ours, one, strict=True))
    half = 0.98 * rounds**0.5  # ranks of the 95% interval of a median
    interval = (gaps[round(rounds / 2 + half)] - gaps[round(rounds / 2 - half)]) / 2
    null = statistics.median(b - c for b, c in zip(one, two, strict=True))
    return statistics.median(one + two), statistics.median(gaps), interval, null


if __name__ == "__main__":
    print(f"JAX {jax.__version__}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for n, rounds in ((1, 10000), (100, 2000), (1000, 300)):
        plain, gap, interval, null = measure(n, rounds)
        print(
            f"{n:5} leaves: jit {plain:9.1f} us, decorated {gap:+.2f} us +- {interval:.2f} ({gap / plain * 100:+.2f}%), "
            f"a second jit {null:+.2f} us ({null / plain * 100:+.2f}%)",
            flush=True,
        )
