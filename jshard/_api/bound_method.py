"""A sharded function as a method of an object.

>>> import jax.numpy as jnp, jshard
>>> class Layer:
...     scale = 3.0
...     @jshard.shard(static_argnums=0)
...     def apply(self, x):
...         return x * self.scale
>>> type(Layer().apply).__name__, float(Layer().apply(jnp.ones(2)).sum())
('BoundMethod', 6.0)
"""

from __future__ import annotations

import functools
from typing import Protocol, cast

import jax

from jshard._api.plan import Plan
from jshard._core.jax_types import PyTree


class PlannedFunction(Protocol):
    """What is used of `Sharded`."""

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """The plan for these arguments."""
        ...

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """The planned program for these arguments."""
        ...

    def clear_cache(self) -> None:
        """Drop all plans and compiled programs."""
        ...


class BoundMethod(functools.partial):
    """A `Sharded` bound to an object, with its `plan`, `lower` and `clear_cache`."""

    @property
    def _sharded(self) -> PlannedFunction:
        return cast(PlannedFunction, self.func)

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """The plan for these arguments."""
        return self._sharded.plan(*self.args, *args, **kwargs)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """The planned program for these arguments."""
        return self._sharded.lower(*self.args, *args, **kwargs)

    def clear_cache(self) -> None:
        """Drop all plans and compiled programs."""
        self._sharded.clear_cache()
