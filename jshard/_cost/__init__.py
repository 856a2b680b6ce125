"""Seconds and bytes of collectives, reshards and operators on a topology; lower bounds. Knows no program."""
