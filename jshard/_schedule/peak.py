"""Bytes that a device holds while a schedule runs: the peak, the curve over the program, and what the peak consists of."""

from __future__ import annotations

from collections.abc import Collection

from jshard._program.memory.liveness import Liveness
from jshard._schedule.peak_profile import HeldValue as HeldValue, PeakProfile as PeakProfile
from jshard._schedule.peak_reference import peak_reference as peak_reference
from jshard._schedule.peak_vectorized import peak_of_arrays
from jshard._schedule.schedule import Schedule


def peak_bytes(schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()) -> float:
    """The largest sum of live bytes over the schedule; `donated` are the flat indices of the donated arguments."""
    return peak_profile(schedule, liveness, donated).peak


def peak_profile(schedule: Schedule, liveness: Liveness, donated: Collection[int] = ()) -> PeakProfile:
    """Peak, curve, and the peak by class: of arrays where the program is a straight line, else action by action."""
    if schedule.arrays is None:
        return peak_reference(schedule, liveness, donated)
    return peak_of_arrays(schedule.arrays, liveness, frozenset(donated))
