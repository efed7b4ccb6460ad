"""A model without torch: matrix products, parameters and attention by named dimensions, and which
gradients of them backward computes. Families describe themselves with it; planner and worker read
it."""
