"""The shape of a pipeline: stages, microbatches, rounds; which stage works on what at which tick.

Stage s works at tick t on position t - s, and position p is microbatch p mod M in round p // M. The layers are dealt to
rounds first and stages second, k consecutive ones at a time: layer (r S + s) k + j is the j-th of stage s in round r
(R = 1: GPipe, Huang et al. 2019; R > 1: the circular schedule of praxis and MaxText). Ticks R M + S - 1, of which S - 1 are
idle on each device. A loop from the last layer to the first runs through the same ticks from the last to the first.

>>> shape = PipelineShape(("stage",), stages=4, microbatches=8, rounds=2)
>>> shape.ticks, shape.bubble, shape.layers_each(24), shape.padded(22)
(19, 0.15789473684210525, 3, 24)
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PipelineShape:
    """A pipeline over the mesh axes `axes`, which cut the stages; `uneven`: whether S R need not divide the layers."""

    axes: tuple[str, ...]
    stages: int
    microbatches: int
    rounds: int = 1
    uneven: bool = False

    @property
    def positions(self) -> int:
        """Ticks in which a device works."""
        return self.rounds * self.microbatches

    @property
    def ticks(self) -> int:
        """Ticks of one loop over the layers."""
        return self.positions + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a device works on nothing of use."""
        return (self.stages - 1) / self.ticks

    def layers_each(self, layers: int) -> int:
        """Layers of a stage in one round."""
        return -(-layers // (self.stages * self.rounds))

    def padded(self, layers: int) -> int:
        """The number of layers with those that are added where it does not divide."""
        return self.layers_each(layers) * self.stages * self.rounds
