"""The search under a memory limit, and of the least peak."""
