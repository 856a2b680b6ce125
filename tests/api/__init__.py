"""Tests of `jshard/_api`: what users call."""
