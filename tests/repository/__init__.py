"""Tests of the repository: import graph, README, notebooks, demo."""
