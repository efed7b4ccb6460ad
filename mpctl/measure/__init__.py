"""Measured beside planned: benchmarks, fits to runs, tuning by trials."""
