"""Tests of mpctl ui."""
