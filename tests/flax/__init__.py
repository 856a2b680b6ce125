"""Tests of `jshard/flax`."""
