"""The split of a model into pipeline stages, and the order in which each stage computes."""
