"""The attributes by which the package and Flax's classes find each other, all in one place.

`jshard/flax/` sets them; the core reads the first two and imports nothing of Flax.
"""

from __future__ import annotations

from typing import Protocol

from jax.sharding import PartitionSpec


SHARD_MODULE = "__jshard_shard__"
"""On `nnx.Module` and `linen.Module`: the function that shards a module, `(module, **options of shard) -> module`."""

PARTITION_SPEC = "__jshard_spec__"
"""On `nnx.Variable` and `linen.Partitioned`: the method of `HasPartitionSpec`."""

NNX_TOKEN = "_jshard"
"""On an nnx module on which `.shard` was called: its `ShardingToken`."""

SHARDABLE_CALL = "__jshard_original__"
"""On the wrapper of an nnx class's `__call__` that honours `NNX_TOKEN`: the method it wraps."""

SCOPED_CALL = "__jshard_named__"
"""On the wrapper of an nnx class's `__call__` that enters a name scope: the method it wraps."""

LINEN_TOKEN = "__jshard_token__"
"""On the subclass that `.shard` of a linen module makes: its `ShardingToken`."""

LINEN_SUBCLASSES = "__jshard_classes__"
"""On a linen class: its sharded subclasses, by token."""


class HasPartitionSpec(Protocol):
    """A Flax variable or box that carries partitioning metadata."""

    def __jshard_spec__(self) -> PartitionSpec | None:
        """The mesh axes of its array, None if it has no metadata."""
        ...
