"""A program and a `PlanRequest` -> a `PlanRecord` and its schedule: the search of a level under a budget."""
