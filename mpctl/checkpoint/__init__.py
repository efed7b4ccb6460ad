"""Checkpoints: written by the ranks of a training together, read by any layout.

Without torch: the names that a save moves through (folder.py), the records of its files
(manifest.py), whether its bytes are those that were written (verify.py), which rank writes what
(replicas.py), what the command line shows (listing.py) and whether it is of its model
(saved_model.py). With torch: tensors in files (tensor_file.py), reading for any layout
(reader.py), writing while training goes on (snapshot.py, writer.py, saver.py) and rewriting for
another layout (reshard.py).
"""
