"""Stepscope: a laboratory for one thing, a transformer training step."""

__version__ = "0.1.0"
