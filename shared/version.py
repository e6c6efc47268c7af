"""Baton's version, as `pyproject.toml` has it; a test holds them together."""

VERSION = "0.1.0"
