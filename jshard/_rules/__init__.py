"""Operators -> op sharding rules, and how they run on one device's shards; families of primitives are in `primitives/`."""
