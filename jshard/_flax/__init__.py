"""Sharding of Flax modules: nnx and linen."""
