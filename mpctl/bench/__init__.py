"""Which jobs to run, what to measure in them, and the report."""
