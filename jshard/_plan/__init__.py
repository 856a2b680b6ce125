"""The planner: search by level and budget, and its answer as data."""
