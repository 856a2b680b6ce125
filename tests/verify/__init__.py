"""Tests of `jshard/_verify`: compiled HLO read back and compared with the plan."""
