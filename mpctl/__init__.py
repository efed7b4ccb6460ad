"""Plan a parallel layout of transformer training and launch it: what is planned is what runs."""

__version__ = "0.1.0"
