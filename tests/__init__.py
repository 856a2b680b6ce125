"""Tests, grouped as the package is: a folder for each stage, laws, and what they share."""
