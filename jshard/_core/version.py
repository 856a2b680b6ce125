"""The version of jshard, as in `pyproject.toml`."""

VERSION = "0.1.0"
