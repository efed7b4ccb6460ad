"""Files that a run leaves on disk: its run directory and its checkpoints. No torch."""
