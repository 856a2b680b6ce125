"""`python -m benchmarks.correctness.pipeline_laws`: steps in pipelines on eight CPU devices beside the same steps without.

Residual MLP, GPT with dropout, grouped-query Llama, experts with an auxiliary loss and dropout, with and without
`jax.checkpoint` (`tests/helpers/pipeline_models.py`), in float64. An assertion fails unless loss, state and new weights of a
step with momentum agree to 1e-12, the stages' permutes are 2 (R M + S - 1), and emitted bytes are planned bytes; other
collectives that run more than once are listed. `--only NAME` runs those with this in their names, `--skip N` leaves out the
first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jshard  # noqa: E402
from tests.batch.test_microbatches import largest_error  # noqa: E402
from tests.helpers import pipeline_models as models  # noqa: E402


MODELS: dict[str, tuple[Callable[..., jax.Array], Callable[[int], tuple]]] = {
    "mlp": (models.mlp, models.mlp_arguments),
    "gpt": (models.gpt(False), models.gpt_arguments),
    "gpt, remat": (models.gpt(True), models.gpt_arguments),
    "llama": (models.llama(False), models.llama_arguments),
    "llama, remat": (models.llama(True), models.llama_arguments),
    "experts": (models.experts(0.7), models.experts_arguments),
}
SHAPES = [  # stages, data, model, microbatches, rounds, layers, uneven
    (2, 4, 1, 2, 1, 4, False),
    (2, 2, 2, 4, 1, 5, True),
    (4, 2, 1, 8, 1, 8, False),
    (8, 1, 1, 4, 1, 8, False),
    (2, 4, 1, 4, 2, 4, False),
    (4, 2, 1, 4, 2, 8, False),
    (2, 2, 2, 8, 3, 11, True),
]


def cases() -> Iterator[tuple[str, str, tuple]]:
    """Name, model and shape of every case."""
    for name, one in itertools.product(MODELS, SHAPES):
        stages, data, model, m, r, layers, _ = one
        yield (
            f"{name}: {layers} layers, stage {stages} x data {data} x model {model}, M {m}, R {r}",
            name,
            one,
        )


def check(name: str, one: tuple) -> tuple[float, float, bool]:
    """Largest relative error, bytes received; whether the plan is proved. Asserts the laws."""
    stages, data, model, m, r, layers, uneven = one
    loss, arguments = MODELS[name]
    w, x = arguments(layers)
    x, state, step = (
        jnp.concatenate([x] * 2)[:32],
        jax.tree.map(jnp.zeros_like, w),
        models.momentum_step(loss),
    )
    sizes = {"stage": stages, "data": data, "model": model}
    kept = {n: s for n, s in sizes.items() if s > 1}
    mesh = jax.make_mesh(
        tuple(kept.values()), tuple(kept), axis_types=(jax.sharding.AxisType.Auto,) * len(kept)
    )
    pipeline = {"axis": "stage", "microbatches": m, "rounds": r, "uneven": uneven}
    f = jshard.shard(step, mesh=mesh, level=2, config={"pipeline": pipeline})
    plan = f.plan(w, state, x, verify=True)
    assert plan.pipeline is not None and plan.verification is not None and plan.verification.ok, (
        plan.verification
    )
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    assert sum(c.count for c in shifts) == 2 * plan.pipeline.ticks == 2 * (r * m + stages - 1), shifts
    error = largest_error(f(w, state, x), jax.jit(step)(w, state, x))
    assert error < 1e-12, error
    repeated = [c for c in plan.collectives if c.count > 1 and c not in shifts]
    for c in repeated:
        print(f"    {c.operator} {c.kind} over {c.axes}: {c.count:.0f} times")
    return error, sum(plan.bytes_by_kind.values()), plan.cost.optimal


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", type=int, default=0)
    args = parser.parse_args()
    for k, (title, name, one) in enumerate(cases()):
        if k >= args.skip and args.only in title:
            begin = time.process_time()
            error, received, proved = check(name, one)
            seconds = time.process_time() - begin
            print(
                f"{title}: error {error:.1e}, {received:,.0f} B, {'proved' if proved else 'gap'}, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
