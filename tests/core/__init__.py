"""Tests of `jshard/_core`: layouts, chips, topologies, errors."""
