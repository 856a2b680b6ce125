"""Tests of `jshard/_program`: the traced function as operators and tensors."""
