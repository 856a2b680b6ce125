"""Vocabulary of all stages: errors, layouts, chips, topologies. No jaxprs; imports nothing of the other folders."""
