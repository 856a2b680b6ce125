"""Tests of `jshard/flax.py` and `jshard/_flax`."""
