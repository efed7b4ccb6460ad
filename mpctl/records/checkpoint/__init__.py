"""Checkpoints as files, without torch.

The names that a save moves through (folder.py), the records of its files (manifest.py), whether
its bytes are those that were written (verify.py), which rank writes what (replicas.py), what the
command line shows (listing.py) and whether it is of its model (saved_model.py).
"""
