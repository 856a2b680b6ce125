"""Recipes: the layouts that experts know by name, resolved from the structure of a traced program."""
