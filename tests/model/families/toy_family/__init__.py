"""A family of models as a package of its own would hold it: it predicts the token after the next.

test_new_family.py copies this folder out of the repository and installs it there. Nothing in mpctl/
knows of it.
"""
