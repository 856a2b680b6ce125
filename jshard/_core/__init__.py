"""The vocabulary: layouts, meshes, chips, topologies, errors; no programs."""
