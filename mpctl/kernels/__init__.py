"""What computes on one device: torch's operations and Triton's kernels behind `KernelBackend`.

Nothing here knows of other ranks; the parallel layers that call it are in mpctl/layers.
"""
