"""2d, 2.5d and 3d tensor parallelism: layers split into blocks over a grid of ranks."""
