"""Measurements and long checks; `benchmarks/README.md` is their index."""
