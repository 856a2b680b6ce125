"""Tests of `jshard/_search`: the solver of cost networks."""
