"""Program, rules and costs -> a network of unary and pairwise costs."""
