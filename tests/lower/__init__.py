"""Tests of `jshard/_lower`: a plan as one `shard_map`."""
