"""Exact reductions and bucket elimination: a cost network in, a smaller core and elimination records out."""
