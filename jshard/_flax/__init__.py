"""Flax. Input: nnx and linen modules, strategies. Output: sharded modules, their plans, and state in planned
shardings."""
