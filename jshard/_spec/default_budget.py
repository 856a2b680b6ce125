"""The memory budget of a plan where the user gives none.

>>> default_memory_budget("tpu-v5e") / 1e9, default_memory_budget("cpu")
(14.4, None)
"""

from __future__ import annotations

from jshard._core import hardware
from jshard._spec.options import HBM_FRACTION


def default_memory_budget(chip: hardware.Chip | str) -> float | None:
    """Bytes of a device, on a chip or that of a name; None for no limit, and for a name that is not registered."""
    if isinstance(chip, str):
        try:
            chip = hardware.get(chip)
        except ValueError:
            return None
    return None if chip.hbm_bytes is None else HBM_FRACTION * chip.hbm_bytes
