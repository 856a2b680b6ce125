"""Times of NCCL's collectives between the GPUs of one board, by size, from published tables.

NCCL changes its protocol with the size (LL, LL128, Simple), so that one latency and one bandwidth are up to four times
off. The points are eight GPUs' all-reduces, as Galvatron's profiles publish them: 79 us for 1 MiB, 294 us for 16 MiB,
2,358 us for 256 MiB, 8,141 us for 1 GiB (see `hardware.sources`); for nothing NCCL's own LL base of 6.6 us and 0.6 us a step
(autoparallel's port of its tuning.cc). A ring's all-gather and its reduce-scatter are each half of an all-reduce; what
each device sends in an all-to-all or a permute goes through the same port.

>>> curves = {c.kind: c for c in switch_curves()}
>>> [round(curves["all_reduce"].seconds(mb * 2**20) * 1e6) for mb in (1, 16, 256, 1024)]
[79, 294, 2358, 8141]
>>> f"{2 * curves['all_gather'].seconds(2**25) / curves['all_reduce'].seconds(2**28):.2f}"
'1.00'
"""

from __future__ import annotations

from jshard._core.collective_curves import CollectiveCurve


GROUP = 8
ALL_REDUCE = ((2.0**20, 79e-6), (2.0**24, 294e-6), (2.0**28, 2358e-6), (2.0**30, 8141e-6))
BASE, STEP = 6.6e-6, 0.6e-6
SMALL = 1024.0  # bytes up to which a collective takes no longer than an empty one


def switch_curves(bandwidth: float = 1.0) -> tuple[CollectiveCurve, ...]:
    """The curves of a chip whose links carry `bandwidth` times as much: the same times for so many times the bytes."""
    half = tuple((b * bandwidth, t / 2) for b, t in ALL_REDUCE)
    first, once = SMALL * bandwidth, BASE + (GROUP - 1) * STEP
    received = (GROUP - 1) / GROUP
    return (
        CollectiveCurve(
            "all_reduce",
            GROUP,
            ((first, BASE + 2 * (GROUP - 1) * STEP), *((b, 2 * t) for b, t in half)),
            "nvlink",
        ),
        CollectiveCurve("reduce_scatter", GROUP, ((first, once), *half), "nvlink"),
        CollectiveCurve(
            "all_gather", GROUP, tuple((b / GROUP, t) for b, t in ((first, once), *half)), "nvlink"
        ),
        CollectiveCurve("all_to_all", GROUP, ((first, once), *half), "nvlink"),
        CollectiveCurve(
            "permute", GROUP, tuple((b * received, t) for b, t in ((first, BASE + STEP), *half)), "nvlink"
        ),
    )
