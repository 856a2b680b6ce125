"""Lowering: a schedule in, a JAX function that runs it as one `shard_map` out."""
