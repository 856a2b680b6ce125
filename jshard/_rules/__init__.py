"""Operator sharding rules: which dimensions of each primitive may be sharded together."""
