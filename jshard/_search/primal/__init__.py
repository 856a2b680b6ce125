"""Local search and repair of assignments."""
