"""How a pipeline cuts a model into stages, and in which order each stage computes."""
