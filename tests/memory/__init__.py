"""Tests of `jshard/_memory`: liveness, aliasing, the order of operators."""
