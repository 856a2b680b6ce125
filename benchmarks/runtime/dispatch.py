"""What a decorated call costs over `jax.jit` of the same planned program: `make bench-dispatch`."""

from __future__ import annotations

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import statistics  # noqa: E402
import time  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jshard  # noqa: E402
from jshard._lower.spmd import spmd  # noqa: E402


class Gap(NamedTuple):
    """What one function costs over another, in microseconds a call: of pairs, and half of its 95% interval."""

    value: float
    half: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} us +- {self.half:.2f}"


def _rounds(functions: list[Any], t: Any, rounds: int) -> list[list[float]]:
    """Microseconds of each call; each function is first in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for g in functions:
        for _ in range(5):
            jax.block_until_ready(g(t))
    count = len(functions)
    for k in range(rounds):
        for i in range(count):
            g, mine = functions[(k + i) % count], times[(k + i) % count]
            start = time.perf_counter()
            out = g(t)
            mine.append((time.perf_counter() - start) * 1e6)
            jax.block_until_ready(out)  # calls that wait in the queue would be timed with the next one
    return times


def _jitted(f: Any, plan: Any, t: Any) -> Any:
    """`jax.jit` of the program that `f` has for `t`."""
    body = spmd(f._executable((t,), {}).prepared.schedule, plan.jax_mesh)
    return jax.jit(lambda t: body(*t), in_shardings=plan.in_shardings[0], out_shardings=plan.out_shardings)


def measure(leaves: int, pairs: int, rounds: int) -> tuple[float, Gap, Gap]:
    """Microseconds of a call of `jax.jit`; what decorating adds; what a second, equal `jax.jit` adds.

    Two compilations of one program differ by more than a decoration costs: where their buffers and threads happen
    to lie. So a *pair* is a decorated function and two `jax.jit` of its lowered program, all compiled anew, each
    compiled first in turn and called alternately. A pair's figure is the median over its rounds; the
    result is the mean over pairs, with the interval that their scatter gives.
    """
    plain, decorated, second = [], [], []
    for k in range(pairs):
        jax.clear_caches()
        f = jshard.shard(lambda t: [x + 1 for x in t])
        t = [jnp.ones(8) for _ in range(leaves)]
        plan = f.plan(t)
        t = jax.device_put(t, plan.in_shardings[0][0])
        functions = [f, _jitted(f, plan, t), _jitted(f, plan, t)]
        for i in range(3):  # which is compiled first matters
            functions[(i + k) % 3](t)
        ours, one, two = (statistics.median(x) for x in _rounds(functions, t, rounds))
        plain += [one, two]
        decorated.append(ours - (one + two) / 2)
        second.append(two - one)

    def gap(values: list[float]) -> Gap:
        return Gap(statistics.mean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5)

    return statistics.median(plain), gap(decorated), gap(second)


if __name__ == "__main__":
    print(f"JAX {jax.__version__}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for n, pairs, rounds in ((1, 30, 1000), (100, 12, 200), (1000, 8, 40)):
        plain, ours, second = measure(n, pairs, rounds)
        print(
            f"{n:5} leaves: jit {plain:9.1f} us, decorated {ours} ({ours.value / plain * 100:+.2f}%), "
            f"a second jit {second} ({second.value / plain * 100:+.2f}%)",
            flush=True,
        )
