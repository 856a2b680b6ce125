"""A schedule -> one `shard_map` with explicit collectives."""
