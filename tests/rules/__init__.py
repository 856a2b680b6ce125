"""Tests of `jshard/_rules`: how each primitive may be sharded."""
