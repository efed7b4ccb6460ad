"""Kernels of one device: torch's operations and Triton kernels behind `KernelBackend`.

Nothing here knows of other ranks; the parallel layers that call it are in mpctl/train/layers.
"""
