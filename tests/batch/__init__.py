"""Tests of `jshard/_batch`."""
