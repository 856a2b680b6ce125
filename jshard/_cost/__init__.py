"""Seconds and bytes of collectives, reshardings and operators; no programs."""
