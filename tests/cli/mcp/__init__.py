"""Tests of mpctl mcp."""
