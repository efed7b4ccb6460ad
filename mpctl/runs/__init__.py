"""Run directories as their owner reads them afterwards: which there are, and what each holds."""
