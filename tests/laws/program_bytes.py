"""Planned against emitted bytes of a random program that is planned and compiled.

`judged(seed)` gives None where there was nothing to compare (contradictory pins, a program that JAX refuses), an empty
text where the compiled program moves what was planned, and else what differs.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import jax

import jshard
from jshard._core import hardware as hardware
from jshard._core.errors import SearchError, StrategyError
from tests.laws.fuzz_judge import _loss, mesh_of
from tests.laws.fuzz_programs import program


def without_latency() -> str:
    """A chip on which moving data takes no start: plans move much, so that much is compared."""
    chip = dataclasses.replace(hardware.get("cpu"), name="cpu-tiny", alpha=0.0, nic_alpha=0.0, f32_flops=1e9)
    return hardware.register(chip).name


def judged(seed: int, high: int = 16) -> str | None:
    """What differs between plan and compiled program of one random program."""
    p = program(random.Random(seed), high=high)
    chip = without_latency() if seed % 3 else "cpu"
    moving = [i for i, v in enumerate(p.inputs) if v.real]

    def split(some: Any) -> tuple[list[Any], list[Any]]:
        return [x for i, x in enumerate(some) if i in moving], [
            x for i, x in enumerate(some) if i not in moving
        ]

    with jax.enable_x64(p.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(p.mesh)
        f = p.function(plain=False, mesh=mesh)
        how: Any = dict(mesh=mesh, level=p.level, search=p.search, hardware=chip)
        args: Any = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in p.inputs]
        try:
            if p.mode == "inside":
                wishes = [
                    p.parameter_plan.get(v.name, s) for v, s in zip(p.inputs, p.in_strategy, strict=True)
                ]
                outs = ((None, p.out_strategy), [None] * len(moving)) if p.out_strategy else None
                step, args = jshard.shard(_loss(f, moving), split(wishes), outs, **how), split(args)
            else:
                plan = p.parameter_plan or None
                step = jshard.shard(f, p.in_strategy, p.out_strategy, parameter_plan=plan, **how)
            made = step.plan(*args)
            found = made.verify(step.lower(*args).compile())
        except (SearchError, StrategyError, TypeError, ValueError, NotImplementedError):
            return None
    return "" if found.ok else f"{found.summary} on {p.mesh}, level {p.level}, {p.search}, {p.mode}"
