"""What users call: shard, op, plan, sweep, pareto."""
