"""Benches: which jobs to run, what to measure in their runs, and the report."""
