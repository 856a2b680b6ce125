"""Subgradient ascent of the Lagrangian dual (Held and Karp 1971) with Polyak's step length (1969) and momentum.

The dual of a memory limit is concave in the prices of a byte at each key time; the bytes over the limit of a priced
answer are a subgradient. Polyak's step has the length that would reach the best known cost if the dual were linear.
"""

from __future__ import annotations

import numpy as np

from jshard._core.arrays import Floats


class DualAscent:
    """Prices that ascend the dual: Polyak steps with momentum, halved when they stop helping."""

    PATIENCE = 4  # steps without a better bound, after which steps are halved
    MOMENTUM = 0.7

    def __init__(self, times: int, unit: float) -> None:
        self.unit = unit  # bytes
        self.best = self.prices = np.zeros(times)  # per byte at each key time
        self.bound = -np.inf
        self.step_scale = 1.0
        self.direction = np.zeros(times)
        self._without_gain = 0

    def record(self, bound: float) -> None:
        """Take note of the bound that the present prices prove."""
        if bound > self.bound:
            self.bound, self.best, self._without_gain = bound, self.prices, 0
        else:
            self._without_gain += 1

    def step(self, bound: float, excess: Floats, goal: float) -> None:
        """A Polyak step.

        Arguments:

        - `bound`: what the present prices prove.
        - `excess`: bytes over the limit at each key time, in units: the subgradient.
        - `goal`: the best known cost.
        """
        if self._without_gain >= self.PATIENCE:
            self.restart()
        slope = np.where((self.prices <= 0) & (excess < 0), 0.0, excess)
        self.direction = slope + self.MOMENTUM * self.direction
        length = float(slope @ slope)
        if length > 0 and goal > bound:
            step = 0.5 * self.step_scale * (goal - bound) / length
            self.prices = np.maximum(0.0, self.prices + step * self.direction / self.unit)

    def restart(self) -> None:
        """Return to the best prices, with steps of half the length and no momentum."""
        self.step_scale, self._without_gain, self.prices = self.step_scale / 2, 0, self.best
        self.direction = np.zeros_like(self.direction)

    def escalate(self, bound: float, excess: Floats) -> None:
        """While no answer is known: four times the prices, and a first price where the limit is exceeded."""
        over = np.maximum(excess, 0.0)
        length = float(over @ over)
        first = (abs(bound) + 1.0) / length * over / self.unit if length > 0 else over
        self.prices = np.maximum(4.0 * self.prices, first)
