"""The files of a run directory, readable without torch: checkpoints, records, what each rank is
doing."""
