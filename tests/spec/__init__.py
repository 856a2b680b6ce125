"""Tests of `jshard/_spec`: strategies, meshes and shardings of arguments become pins."""
