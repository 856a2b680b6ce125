"""Tests of `jshard/_schedule`: an assignment as an ordered list of kernels and collectives."""
