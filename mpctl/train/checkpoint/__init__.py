"""Checkpoints, written by the ranks of a training together, read by any layout.

Tensors in files (tensor_file.py), reading for any layout (reader.py), writing while training goes
on (snapshot.py, writer.py, saver.py) and rewriting for another layout (reshard.py).
"""
