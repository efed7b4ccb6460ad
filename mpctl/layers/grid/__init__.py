"""2d, 2.5d and 3d tensor parallelism: layers whose blocks lie on a grid of ranks."""
