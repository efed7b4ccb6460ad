"""docs/reference.md, made of the models and the commands: `python -m tests.reference` (or `make
reference`) writes it, tests/cli/test_reference.py holds it against them."""
