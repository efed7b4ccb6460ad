"""Parallel layers: torch modules that take their group as an argument.

Activations are batch first, [b, s, h]. Nothing here reads the environment, holds module state or
knows the command line; a group of one rank gives the plain, unsharded layer by the same code.
"""
