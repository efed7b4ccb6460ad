"""What a run leaves on disk: its run directory and the files of its checkpoints. No torch."""
