"""Exact reductions and variable elimination."""
