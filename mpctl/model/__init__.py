"""A model as tables: matrix products, parameters, pipeline stages and their layout over ranks."""
