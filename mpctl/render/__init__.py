"""Everything that people look at; rich is imported here and nowhere else."""
