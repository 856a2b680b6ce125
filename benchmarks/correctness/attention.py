"""Attention: every candidate of its rule on 4 and 8 devices, and its plans from 8k to 128k tokens.

    python benchmarks/correctness/attention.py [--limit N] [--plans]

The first part compares each candidate of both passes with the unsharded operator in float64 (`tests/laws/
rules_validator.py`), for all kinds of masks. The second (`--plans` alone runs only that) plans a training step of
projections and causal attention for a v5e torus: bytes and seconds of the attention, and the peak of a device.
"""

from __future__ import annotations

import argparse
import os


os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()
)

import jax

import jshard
from tests.helpers.attention_cases import KINDS
from tests.laws import rules_validator
from tests.rules.test_attention import both_passes, layer


def check(limit: int) -> None:
    """Print how many candidates were tried of each kind, and every wrong one."""
    for kind in KINDS:
        for devices, kv_heads in ((4, 4), (8, 2), (88, 1)):
            with jax.enable_x64(True):
                cases = both_passes(kind, kv_heads=kv_heads)
                tried, wrong = rules_validator.check(cases, devices, limit=limit, seed=limit)
            print(
                f"{kind:<16}{devices:>3} devices, {kv_heads} key heads: {tried} candidates, {len(wrong)} wrong"
            )
            print(*wrong, sep="\n", end="\n" if wrong else "")


def plans() -> None:
    """Print a table of plans over lengths and devices; the sequence of the activations is cut."""
    print(
        f"{'tokens':>8}{'heads':>6}{'devices':>8}  {'q of the attention':<20}{'MB sent':>9}{'ms':>8}{'peak GB':>9}"
    )
    for heads, lengths in ((8, (8_192, 32_768, 131_072)), (64, (8_192, 32_768))):
        for length in lengths:
            for devices, grid in ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4")):
                mesh = jshard.topology(f"v5e:{grid}", {"x": devices}, compiles=False)
                fn, args = layer(1, length, heads, heads, 128)
                spec = (None, jax.P(None, "x"))
                plan = jshard.shard(fn, in_strategy=spec, mesh=mesh, level=2).plan(*args)
                ours = [o for o in plan.operators if o.primitive == "jshard_attention"]
                sent = sum(c.bytes * c.count for c in plan.collectives if "attention" in c.operator)
                print(
                    f"{length:>8}{heads:>6}{devices:>8}  {ours[0].operands[0]!s:<20}{sent / 1e6:>9.1f}"
                    f"{1e3 * (plan.cost.compute + plan.cost.communication):>8.2f}{plan.cost.peak_bytes / 1e9:>9.3f}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", type=int, default=1000, help="candidates of each case")
    parser.add_argument("--plans", action="store_true", help="only the table of plans")
    options = parser.parse_args()
    if not options.plans:
        check(options.limit)
    plans()
