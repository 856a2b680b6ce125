"""A program, its pins, sharding rules and costs -> a network of unary and pairwise costs, with memory where needed."""
