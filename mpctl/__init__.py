"""Parallel topology planning and launching of transformer training: what is planned is what runs."""

__version__ = "0.1.0"
