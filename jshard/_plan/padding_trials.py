"""What a search learned of padding, for `Plan.why`: what each dimension's padding would cost, or why it was not tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard._core.layout import MeshAxes


@dataclasses.dataclass(frozen=True)
class PaddingTrials:
    """What is known of padding the dimensions of a program.

    `tried`: by true size, the padded size and the cost of the whole plan, as text. `skipped`: why none was tried, "" if any
    was. `small_too`: whether small tensors were tried, with whatever waste. `unproved`: of some padded program no bound is
    known. `interrupted`: a padded program was not planned, or not to the end.

    >>> trials, mesh = PaddingTrials({197: "to 200: the whole plan costs 1.2 ms"}), MeshAxes(("x",), (8,))
    >>> trials.note(197, 1 << 21, mesh), trials.note(9, 1 << 21, mesh)
    ('to 200: the whole plan costs 1.2 ms', 'not tried: it would add more than 12.5%')
    """

    tried: Mapping[int, str] = dataclasses.field(default_factory=dict)
    skipped: str = ""
    small_too: bool = False
    unproved: bool = False
    interrupted: bool = False

    def note(self, size: int, nbytes: int, mesh: MeshAxes) -> str:
        """What padding a size would cost, or why it was not tried; `nbytes` of the largest tensor that has it."""
        from jshard._plan.padding_search import LEAST_BYTES, MOST_WASTE, padded_size  # it imports the rules

        if size in self.tried:
            return self.tried[size]
        if self.skipped:
            return f"not tried: {self.skipped}"
        if not self.small_too and padded_size(size, mesh) is None:
            return f"not tried: it would add more than {MOST_WASTE:.1%}"
        if not self.small_too and nbytes < LEAST_BYTES:
            return 'not tried: its tensors are small; config={"pad": True} tries them too'
        return "not tried: no operator computes with it padded"
