"""Tests of `jshard/_network`: the cost network that the search minimises."""
