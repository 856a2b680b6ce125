"""Specification. Input: strategies, parameter plan, mesh and options, as the user wrote them. Output: a `Pin` per
tensor, the mesh, checked options."""
