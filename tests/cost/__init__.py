"""Tests of `jshard/_cost`: collectives, resharding, roofline, bounds."""
