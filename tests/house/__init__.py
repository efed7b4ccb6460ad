"""Measures of the code, for tests/test_architecture.py and `python -m tests.house`."""
