"""Checkpoints of training: written by every rank together, read by any other layout."""
