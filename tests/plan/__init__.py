"""Tests of `jshard/_plan`: the planner, from a program and its pins to a plan."""
