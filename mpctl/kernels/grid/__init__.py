"""Layers over a grid of tensor-parallel ranks: 2d, 2.5d and 3d (mpctl/tensor_grid.py has the law).

place.py      where a rank stands: its groups, its samples, its shard of each parameter
summa.py      products of 2d and 2.5d: blocks are broadcast, partial products are summed
cube.py       products of 3d: gather, multiply, scatter
norm.py       norms over hidden states of which each rank has a part
linear.py     linear layers and the table of words, by the product of their mode
layers.py     what makes these modules: `TensorParallel` for a grid
"""
